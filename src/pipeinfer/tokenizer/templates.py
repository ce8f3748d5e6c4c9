"""Chat templates: finds a checkpoint's, and renders a conversation to the prompt's text.

Gives the text that transformers' `apply_chat_template` gives. Knows no token ids.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Template, TemplateSyntaxError

from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.loading import special_tokens
from pipeinfer.text.template_sources import template_sources
from pipeinfer.tokenizer.sandbox import Strftime, make_environment
from pipeinfer.tokenizer.template_probes import TemplateProbes, text_part

# Names that a message's reasoning travels under; templates read the first, some the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateFailed(ValueError):
    """The conversation cannot be rendered; the text is for the client, `param` the field."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class ChatTemplates:
    """The named templates of one checkpoint; "default" unless "tool_use" is there and asked for."""

    def __init__(
        self,
        sources: dict[str, str],
        variables: dict[str, str],
        strftime_now: Strftime,
        allow_request_templates: bool = False,
    ) -> None:
        """`sources`: Jinja text by name; `variables`: bos_token and the like, as text.
        `takes_others`: requests may bring templates of their own.

        A template that does not compile fails the chats that need it, not the checkpoint.
        """
        environment = make_environment(strftime_now)
        self.source = "\n".join((*sources.values(), *variables.values()))
        self._variables = variables
        self._strftime_now = strftime_now
        self.allow_request_templates = allow_request_templates
        self._templates: dict[str, _CompiledTemplate] = {}
        self.syntax_errors: dict[str, str] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = _CompiledTemplate(
                    environment.from_string(source), variables
                )
            except TemplateSyntaxError as error:
                self.syntax_errors[name] = f"line {error.lineno}: {error.message}"

    def with_template(self, source: str) -> ChatTemplates:
        """With that template in place of all, which does the same as the others may. Raises
        TemplateFailed if it does not compile."""
        made = ChatTemplates({"default": source}, self._variables, self._strftime_now)
        for problem in made.syntax_errors.values():
            raise TemplateFailed(f"chat_template, {problem}", "chat_template")
        return made

    def render(self, messages: list[JsonObject], arguments: JsonObject) -> str:
        """The prompt's text, special tokens included. Raises TemplateFailed.

        `arguments` are further variables of the template (`enable_thinking`, `tools` ...);
        `add_generation_prompt` is true unless they say otherwise.
        """
        template = self._choose(bool(arguments.get("tools")))
        if not messages:
            raise TemplateFailed("the conversation has no messages")
        try:
            plain = [_adapt_message(message, template.probes) for message in messages]
            return template.render(plain, arguments)
        except Exception as error:  # a template can fail in as many ways as any program
            raise TemplateFailed(f"the chat template refused the messages: {error}") from None

    def _choose(self, tools: bool) -> _CompiledTemplate:
        name = "tool_use" if tools and self._has("tool_use") else "default"
        if name in self.syntax_errors:
            raise TemplateFailed(f"the model's chat template is broken, {self.syntax_errors[name]}")
        if name in self._templates:
            return self._templates[name]
        if self._templates or self.syntax_errors:
            names = ", ".join(sorted({*self._templates, *self.syntax_errors}))
            raise TemplateFailed(f"the model has no default chat template, only: {names}")
        raise TemplateFailed("the model has no chat template; use completions, or --chat-template")

    def _has(self, name: str) -> bool:
        return name in self._templates or name in self.syntax_errors


def load_templates(
    folder: Path,
    config: JsonObject,
    override: str,
    strftime_now: Strftime,
    allow_request_templates: bool = False,
) -> ChatTemplates:
    """The templates of the checkpoint in `folder`, or the one in file `override` if not empty.

    `config`: the tokenizer's configuration. A file chat_template.jinja goes before the
    configuration's text. Raises ConfigurationError for an `override` that cannot be used.
    """
    variables = special_tokens(config)
    sources = template_sources(folder, config, override)
    templates = ChatTemplates(sources, variables, strftime_now, allow_request_templates)
    for problem in templates.syntax_errors.values() if override else ():
        raise ConfigurationError(f"--chat-template: {override}, {problem}")
    return templates


class _CompiledTemplate:
    """One template, and what it takes. `variables`: that all its renderings have."""

    def __init__(self, template: Template, variables: dict[str, str]) -> None:
        self._template = template
        self._variables = variables
        self.probes = TemplateProbes(self.render)

    def render(self, messages: list[JsonObject], arguments: JsonObject) -> str:
        """The text of `messages` as they are. Raises whatever the template raises."""
        return self._template.render(
            {
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                **self._variables,
                **arguments,
                "messages": messages,
            }
        )


def _adapt_message(message: JsonObject, takes: TemplateProbes) -> JsonObject:
    """One message as the template takes it: without nulls other than its content's, text parts and
    texts in the form that it reads, reasoning by its names."""
    plain: JsonObject = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _adapt_content(plain["content"], str(plain.get("role")), takes)
    elif "content" in message or "tool_calls" in plain:
        plain["content"] = None if takes.takes_null_content else ""
    for field in REASONING_FIELDS:
        if field in plain:
            return {"thinking": plain[field], **plain, "reasoning_content": plain[field]}
    return plain


def _adapt_content(content: JsonValue, role: str, takes: TemplateProbes) -> JsonValue:
    if isinstance(content, str):
        return [text_part(content)] if takes.content_form(role) == "parts" else content
    if not isinstance(content, list):
        return content
    texts = [text for text in map(_text_of_part, content) if text is not None]
    if len(texts) < len(content) or takes.content_form(role) != "text":
        return content
    return "\n".join(texts)  # lines keep the parts apart


def _text_of_part(part: JsonValue) -> str | None:
    """Of a part of a message's content; None if it is of another kind."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None
