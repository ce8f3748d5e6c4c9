"""Chat templates: a conversation to the prompt's text, as transformers' `apply_chat_template` does.

- ChatTemplates: a checkpoint's templates, compiled.
- TemplateProbes: in which form a template takes contents, found by rendering small conversations:
  templates read a message's content as a text, as a list of parts or as either.
- argument_forms: arguments of tool calls as objects and as texts. Clients send texts, which most
  templates want as objects.
- make_environment: Jinja's sandbox. Templates come with checkpoints and are not trusted: they
  see plain data, cannot change it and cannot reach Python.

Knows no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NoReturn, cast

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeinfer.params import JsonObject, JsonValue
from pipeinfer.settings import ConfigurationError
from pipeinfer.text import special_tokens, template_sources

# Fields of a message that may hold its reasoning; most templates read the first, some the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateFailed(ValueError):
    """A conversation that cannot be rendered; the text is for the client.

    param: the parameter at fault.
    """

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class ChatTemplates:
    """The named templates of one checkpoint: "tool_use" for chats with tools if there is one, else
    "default".

    Attributes:
    - sources: Jinja text by name
    - variables: bos_token and the like, as text
    - strftime_now: today's date in the format that a template asks for
    - allow_request_templates: requests may bring templates of their own
    - source: all texts that may be part of a prompt
    - syntax_errors: by name; such a template fails the chats that need it, not the checkpoint
    """

    def __init__(
        self,
        sources: dict[str, str],
        variables: dict[str, str],
        strftime_now: Strftime,
        allow_request_templates: bool = False,
    ) -> None:
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
        """A copy with the template `source` in place of all. Raises TemplateFailed if it does not
        compile."""
        made = ChatTemplates({"default": source}, self._variables, self._strftime_now)
        for problem in made.syntax_errors.values():
            raise TemplateFailed(f"chat_template, {problem}", "chat_template")
        return made

    def render(self, messages: list[JsonObject], arguments: JsonObject) -> str:
        """The prompt's text, special tokens included. Raises TemplateFailed.

        `arguments` are further variables of the template (`enable_thinking`, `tools` ...);
        `add_generation_prompt` is true unless they say otherwise.
        """
        template = self._select_template(bool(arguments.get("tools")))
        if not messages:
            raise TemplateFailed("the conversation has no messages")
        try:
            plain = [_adapt_message(message, template.probes) for message in messages]
            return template.render(plain, arguments)
        except Exception as error:  # a template can fail in as many ways as any program
            raise TemplateFailed(f"the chat template refused the messages: {error}") from None

    def _select_template(self, tools: bool) -> _CompiledTemplate:
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
    """A compiled template with its variables. probes: the forms of messages that the template
    takes."""

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
    """A message as the template takes it: without nulls except as the content, contents in the form
    that the template reads, reasoning under both names."""
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
    """The text of a text part; None for a part of another kind."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


Render = Callable[[list[JsonObject], JsonObject], str]
# either: as it is. text: parts are joined. parts: a text becomes a list of one part.
ContentForm = Literal["either", "text", "parts"]

# Words that no template has, and that no template changes.
FIRST_PROBE, SECOND_PROBE, PROBE_TOOL = "qzxja", "qzxjb", "qzxjc"
PROBE_CALL_ID = "abcdefghi"  # nine letters, as Mistral's templates demand
PROBE_TOOL_DEFINITION: JsonObject = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
# A part that the template printed as JSON or in Python's notation, instead of reading its text.
_CONTENT_PART = re.compile(r"""["']type["']:\s*["']text["']""")
_NULL = re.compile("None|null")


class TemplateProbes:
    """The forms that a template takes. Each is found once, when it is first needed.

    render: (messages, arguments) -> text; raises whatever the template raises.
    content_form: of messages of a role; text if the template shows neither form.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self.content_form = cache(self._probe_content_form)  # by role

    @cached_property
    def takes_null_content(self) -> bool:
        """Whether a message that calls tools may have null as its content: the template shows the
        calls, and not the null."""
        forms: tuple[JsonValue, ...] = ({FIRST_PROBE: 1}, f'{{"{FIRST_PROBE}": 1}}')
        gave = self._message("tool", self._content_of("tool", "b"))
        for arguments in forms:
            shown = self._first_rendering([*self._tool_call_chat(None, arguments), gave])
            if PROBE_TOOL in shown:
                empty = self._first_rendering([*self._tool_call_chat("", arguments), gave])
                return len(_NULL.findall(shown)) <= len(_NULL.findall(empty))
        return False

    def _probe_content_form(self, role: str) -> ContentForm:
        """Renders both forms in every conversation that may hold a message of `role`."""
        for before, after in self._contexts(role):
            messages = [
                self._message(role, f"{FIRST_PROBE} {SECOND_PROBE}"),
                self._message(role, _PROBE_PARTS),
            ]
            of_text, of_parts = (self._first_rendering([*before, one, *after]) for one in messages)
            num_parts = len(_CONTENT_PART.findall(of_text))
            if _has_both_probes(of_parts) and len(_CONTENT_PART.findall(of_parts)) <= num_parts:
                return "either" if _has_both_probes(of_text) else "parts"
            if _has_both_probes(of_text):
                return "text"
        return "text"

    def _contexts(self, role: str) -> Iterator[tuple[list[JsonObject], list[JsonObject]]]:
        """(messages before, messages behind) a message of `role`, most usual first."""
        if role != "user":
            user: JsonObject = {"role": "user", "content": self._content_of("user", "a")}
            if role == "system":
                yield [], [user]
            elif role == "tool":
                yield self._tool_call_chat(self._content_of("assistant", ""), {}), []
            else:
                yield [user], [user]
                yield [user], []
        yield [], []

    def _message(self, role: str, content: JsonValue) -> JsonObject:
        message: JsonObject = {"role": role, "content": content}
        return (
            {**message, "tool_call_id": PROBE_CALL_ID, "name": PROBE_TOOL}
            if role == "tool"
            else message
        )

    def _tool_call_chat(self, content: JsonValue, arguments: JsonValue) -> list[JsonObject]:
        """A conversation that ends with a call of a tool."""
        function: JsonObject = {"name": PROBE_TOOL, "arguments": arguments}
        calls: list[JsonValue] = [{"id": PROBE_CALL_ID, "type": "function", "function": function}]
        return [
            {"role": "user", "content": self._content_of("user", "a")},
            {"role": "assistant", "content": content, "tool_calls": calls},
        ]

    def _content_of(self, role: str, text: str) -> JsonValue:
        return [text_part(text)] if self.content_form(role) == "parts" else text

    def _first_rendering(self, chat: list[JsonObject]) -> str:
        """The text of `chat`, without tools or else with one; empty if both fail."""
        return next(self._renderings(chat), "")

    def _renderings(self, chat: list[JsonObject]) -> Iterator[str]:
        for arguments in (JsonObject(), JsonObject(tools=[PROBE_TOOL_DEFINITION])):
            try:
                text = self._render(chat, arguments)
            except Exception:  # a template can fail in as many ways as any program
                continue
            yield text


def text_part(text: str) -> JsonObject:
    """A part of a message's content."""
    return {"type": "text", "text": text}


_PROBE_PARTS: list[JsonValue] = [text_part(FIRST_PROBE), text_part(SECOND_PROBE)]


def _has_both_probes(text: str) -> bool:
    return FIRST_PROBE in text and SECOND_PROBE in text


# Levels of nesting in arguments. No tool's schema is as deep, and templates recurse over them.
MAX_ARGUMENT_DEPTH = 64


def argument_forms(chat: list[JsonObject]) -> list[list[JsonObject]]:
    """The conversation with objects as arguments, and then with texts, if the two differ. A text
    that is no object stays a text in both; empty arguments are an empty object."""
    if not any(message.get("tool_calls") for message in chat):
        return [chat]
    objects = [_with_arguments(message, _as_object) for message in chat]
    texts = [_with_arguments(message, _as_text) for message in chat]
    return [objects] if objects == texts else [objects, texts]


def _with_arguments(message: JsonObject, write: Callable[[JsonValue], JsonValue]) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, write) for call in calls]}


def _call_with_arguments(call: JsonValue, write: Callable[[JsonValue], JsonValue]) -> JsonValue:
    """`call`, which OpenAI nests in its `function`, with other arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_arguments(call["function"], write)}
    return {**call, "arguments": write(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: JsonValue) -> JsonValue:
    if not isinstance(arguments, str):
        return arguments
    raw = arguments.strip().encode("utf-8", "surrogatepass") or b"{}"
    try:
        found = msgspec.json.decode(raw, type=JsonObject)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    return found if _is_shallow(found) else arguments


def _as_text(arguments: JsonValue) -> JsonValue:
    if not isinstance(arguments, dict):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _is_shallow(value: JsonValue) -> bool:
    level: list[JsonValue] = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return True
    return False


def _children(value: JsonValue) -> list[JsonValue]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


Strftime = Callable[[str], str]  # a strftime format -> the formatted local time


def make_environment(strftime_now: Strftime) -> ImmutableSandboxedEnvironment:
    """An environment with `raise_exception`, `strftime_now`, a plain `tojson`, `{% break %}` and
    `{% generation %}`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's types do not say which values these two have.
    filters = cast(dict[str, object], environment.filters)  # pyright: ignore[reportUnknownMemberType]
    variables = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"] = _tojson
    variables["raise_exception"] = _raise_exception
    variables["strftime_now"] = strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; in serving it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have not been trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
