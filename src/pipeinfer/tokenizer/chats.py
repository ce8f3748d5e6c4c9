"""Chats as texts: by the checkpoint's templates or by one that the request brings, whole or with a
last message that the model goes on with.

Takes out of a template's arguments what is not for the template. Knows no ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import ThoughtState
from pipeinfer.text.thoughts import SPACE, Tags, left, spoken
from pipeinfer.tokenizer.call_arguments import argument_forms
from pipeinfer.tokenizer.client_strings import (
    StringKind,
    client_strings,
    map_client_strings,
    text_weight,
)
from pipeinfer.tokenizer.control_texts import ControlTokenEscaping, EscapedPrompt, RenderedPrompt
from pipeinfer.tokenizer.templates import ChatTemplates, TemplateFailed

MAX_TEMPLATE_LETTERS = 65_536  # of a request's template: several times the longest one known
COMPILE_WEIGHT = 64 * 1024  # bytes of text that take as long to encode as a template to compile
T = TypeVar("T")
MAX_REQUEST_TEMPLATES = 4  # templates of requests that came last
# Ends what goes on, so that it is found again in what the template makes of it: a character of the
# last private plane, which is in no chat.
CONTINUATION_ENDS = range(0x10FFFD, 0x10FF00, -1)


class ChatRenderer:
    """Renders chats so that control tokens come from a template alone; see ControlTexts."""

    def __init__(
        self, texts: Iterable[str], templates: ChatTemplates, always_escaped: bool = False
    ) -> None:
        self._texts = tuple(texts)
        self._templates = templates
        self._always_escaped = always_escaped
        self._own = ControlTokenEscaping(self._texts, templates, always_escaped)
        self._request_escapings: dict[str, ControlTokenEscaping] = {}

    def weigh(self, chat: list[JsonObject], arguments: JsonObject) -> int:
        """About how many bytes there are. Raises TemplateFailed for a template that is refused."""
        brought = self._request_template(arguments) is not None
        return text_weight(chat, arguments) + COMPILE_WEIGHT * brought

    def render(self, chat: list[JsonObject], arguments: JsonObject) -> RenderedPrompt:
        """The prompt. Raises TemplateFailed, and NoMarks."""
        source, arguments = self._request_template(arguments), arguments.copy()
        arguments.pop("chat_template", None)
        goes_on = arguments.pop("continue_final_message", None)
        chosen = self._own if source is None else self._request_escaping(source)
        if goes_on and arguments.get("add_generation_prompt", True) is not False:
            message = "continue_final_message is only allowed with add_generation_prompt: false"
            raise TemplateFailed(message, "continue_final_message")
        return _with_argument_forms(
            partial(_render_continuation, chosen) if goes_on else chosen.render, chat, arguments
        )

    def thought_state(
        self, chat: list[JsonObject], arguments: JsonObject, prompt: str, tags: Tags
    ) -> ThoughtState:
        """Where the `prompt` that `render` made of them leaves the thoughts of its answer. Tags
        that a client spells do not count, but for those in an answer that goes on. Raises
        TemplateFailed."""
        if arguments.get("continue_final_message"):
            said = spoken(chat[-1].get("content"))
            return "open" if left(said, tags) == "open" else "over"  # the answer has begun
        state = left(prompt, tags)
        if state == "before":
            return state
        source, arguments = self._request_template(arguments), arguments.copy()
        arguments.pop("chat_template", None)
        templates = self._templates if source is None else self._templates.with_template(source)
        if any(tag in text for text, _ in client_strings(chat, arguments) for tag in tags.pair):
            chat, arguments = map_client_strings(chat, arguments, partial(_without_tags, tags=tags))
            prompt = _with_argument_forms(templates.render, chat, arguments)
            state = left(prompt, tags)
        if state == "open" and prompt.rpartition(tags.opening)[2].strip(SPACE):
            # It may stand in what the template tells the model of its form.
            asked = _with_argument_forms(
                templates.render, chat, {**arguments, "add_generation_prompt": False}
            )
            if asked != prompt and prompt.startswith(asked):
                state = left(prompt[len(asked) :], tags)
        return state

    def _request_template(self, arguments: JsonObject) -> str | None:
        """Of the request's own template."""
        source = arguments.get("chat_template")
        if source is None:
            return None
        if not self._templates.allow_request_templates:
            message = (
                "chat_template is taken only by a server with --trust-request-chat-template: a "
                "template is a program"
            )
            raise TemplateFailed(message, "chat_template")
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_LETTERS:
            message = f"chat_template must be a text of at most {MAX_TEMPLATE_LETTERS} letters"
            raise TemplateFailed(message, "chat_template")
        return source

    def _request_escaping(self, source: str) -> ControlTokenEscaping:
        found = self._request_escapings.pop(source, None)
        if found is None:
            found = ControlTokenEscaping(
                self._texts, self._templates.with_template(source), self._always_escaped
            )
        while len(self._request_escapings) >= MAX_REQUEST_TEMPLATES:
            del self._request_escapings[next(iter(self._request_escapings))]
        self._request_escapings[source] = found
        return found


def _with_argument_forms(
    render: Callable[[list[JsonObject], JsonObject], T],
    chat: list[JsonObject],
    arguments: JsonObject,
) -> T:
    """What `render` makes of the chat, with the arguments of its calls in the form that the
    template takes. Raises TemplateFailed, and what else `render` raises."""
    form, *others = argument_forms(chat)
    try:
        return render(form, arguments)
    except TemplateFailed:
        for other in others:
            with suppress(TemplateFailed):  # what is wrong with the usual form is more telling
                return render(other, arguments)
        raise


def _without_tags(text: str, _kind: StringKind, tags: Tags) -> str:
    """Without the tags, but as long and as full as it was."""
    for tag in tags.pair:
        text = text.replace(tag, f"{tag[:1]}\ue000{tag[1:]}")
    return text


def _render_continuation(
    chosen: ControlTokenEscaping, chat: list[JsonObject], arguments: JsonObject
) -> RenderedPrompt:
    """Up to the end of the last message's content, as the template shows it. White space at its end
    is left out if the template trims contents."""
    last: JsonObject = chat[-1] if chat else {}
    said = {character for text, _ in client_strings(chat, arguments) for character in text}
    end = next(chr(code) for code in CONTINUATION_ENDS if chr(code) not in said)
    content = _append_to_content(last.get("content"), end + " ")
    if last.get("role") != "assistant" or content is None:
        message = "continue_final_message needs a last message of the assistant, with content"
        raise TemplateFailed(message, "continue_final_message")
    rendered = chosen.render([*chat[:-1], {**last, "content": content}], arguments)
    text, _, behind = rendered.text.partition(end)
    if rendered.text.count(end) != 1:
        message = "the chat template does not show the last message's content once, as it is"
        raise TemplateFailed(message, "continue_final_message")
    trims = not behind.startswith(" ")
    marked = rendered.escaped
    if marked is not None:
        before = marked.text.partition(end)[0]
        if trims:
            before = _trim_end(before, "" if marked.escapes is None else marked.escapes.separator)
        marked = EscapedPrompt(before, marked.escapes)
    return RenderedPrompt(text.rstrip() if trims else text, marked)


def _append_to_content(content: JsonValue, end: str) -> JsonValue:
    """`content` with `end` behind its last text; None if there is no text to go on from."""
    if isinstance(content, str):
        return content + end if content else None
    parts = content if isinstance(content, list) else []
    for at in reversed(range(len(parts))):
        part = parts[at]
        if isinstance(part, dict) and isinstance(text := part.get("text"), str) and text:
            return [*parts[:at], {**part, "text": text + end}, *parts[at + 1 :]]
    return None


def _trim_end(text: str, mark: str) -> str:
    """Without white space at its end, and without marks that stand among it."""
    while (shorter := text.rstrip().rstrip(mark or None)) != text:
        text = shorter
    return text
