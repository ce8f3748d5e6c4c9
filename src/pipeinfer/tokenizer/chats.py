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
from pipeinfer.tokenizer.client_strings import Kind, rewritten, strings, weight
from pipeinfer.tokenizer.control_texts import ControlTexts, Marked, Rendered
from pipeinfer.tokenizer.templates import ChatTemplates, TemplateFailed

MOST_TEMPLATE_LETTERS = 65_536  # of a request's template: several times the longest one known
COMPILING = 64 * 1024  # bytes of text that take as long to encode as a template to compile
T = TypeVar("T")
KEPT = 4  # templates of requests that came last
# Ends what goes on, so that it is found again in what the template makes of it: a character of the
# last private plane, which is in no chat.
ENDS = range(0x10FFFD, 0x10FF00, -1)


class Chats:
    """Renders chats so that control tokens come from a template alone; see ControlTexts."""

    def __init__(
        self, texts: Iterable[str], templates: ChatTemplates, always: bool = False
    ) -> None:
        self._texts = tuple(texts)
        self._templates = templates
        self._always = always
        self._own = ControlTexts(self._texts, templates, always)
        self._others: dict[str, ControlTexts] = {}

    def weigh(self, chat: list[JsonObject], arguments: JsonObject) -> int:
        """About how many bytes there are. Raises TemplateFailed for a template that is refused."""
        brought = self._source(arguments) is not None
        return weight(chat, arguments) + COMPILING * brought

    def render(self, chat: list[JsonObject], arguments: JsonObject) -> Rendered:
        """The prompt. Raises TemplateFailed, and NoMarks."""
        source, arguments = self._source(arguments), arguments.copy()
        arguments.pop("chat_template", None)
        goes_on = arguments.pop("continue_final_message", None)
        chosen = self._own if source is None else self._other(source)
        if goes_on and arguments.get("add_generation_prompt", True) is not False:
            message = "continue_final_message is only allowed with add_generation_prompt: false"
            raise TemplateFailed(message, "continue_final_message")
        return _tried(partial(_continued, chosen) if goes_on else chosen.render, chat, arguments)

    def left(
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
        source, arguments = self._source(arguments), arguments.copy()
        arguments.pop("chat_template", None)
        templates = self._templates if source is None else self._templates.other(source)
        if any(tag in text for text, _ in strings(chat, arguments) for tag in tags.pair):
            chat, arguments = rewritten(chat, arguments, partial(_untagged, tags=tags))
            prompt = _tried(templates.render, chat, arguments)
            state = left(prompt, tags)
        if state == "open" and prompt.rpartition(tags.opening)[2].strip(SPACE):
            # It may stand in what the template tells the model of its form.
            asked = _tried(templates.render, chat, {**arguments, "add_generation_prompt": False})
            if asked != prompt and prompt.startswith(asked):
                state = left(prompt[len(asked) :], tags)
        return state

    def _source(self, arguments: JsonObject) -> str | None:
        """Of the request's own template."""
        source = arguments.get("chat_template")
        if source is None:
            return None
        if not self._templates.takes_others:
            message = (
                "chat_template is taken only by a server with --trust-request-chat-template: a "
                "template is a program"
            )
            raise TemplateFailed(message, "chat_template")
        if not isinstance(source, str) or len(source) > MOST_TEMPLATE_LETTERS:
            message = f"chat_template must be a text of at most {MOST_TEMPLATE_LETTERS} letters"
            raise TemplateFailed(message, "chat_template")
        return source

    def _other(self, source: str) -> ControlTexts:
        found = self._others.pop(source, None)
        if found is None:
            found = ControlTexts(self._texts, self._templates.other(source), self._always)
        while len(self._others) >= KEPT:
            del self._others[next(iter(self._others))]
        self._others[source] = found
        return found


def _tried(
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


def _untagged(text: str, _kind: Kind, tags: Tags) -> str:
    """Without the tags, but as long and as full as it was."""
    for tag in tags.pair:
        text = text.replace(tag, f"{tag[:1]}\ue000{tag[1:]}")
    return text


def _continued(chosen: ControlTexts, chat: list[JsonObject], arguments: JsonObject) -> Rendered:
    """Up to the end of the last message's content, as the template shows it. White space at its end
    is left out if the template trims contents."""
    last: JsonObject = chat[-1] if chat else {}
    said = {character for text, _ in strings(chat, arguments) for character in text}
    end = next(chr(code) for code in ENDS if chr(code) not in said)
    content = _ending(last.get("content"), end + " ")
    if last.get("role") != "assistant" or content is None:
        message = "continue_final_message needs a last message of the assistant, with content"
        raise TemplateFailed(message, "continue_final_message")
    rendered = chosen.render([*chat[:-1], {**last, "content": content}], arguments)
    text, _, behind = rendered.text.partition(end)
    if rendered.text.count(end) != 1:
        message = "the chat template does not show the last message's content once, as it is"
        raise TemplateFailed(message, "continue_final_message")
    trims = not behind.startswith(" ")
    marked = rendered.marked
    if marked is not None:
        before = marked.text.partition(end)[0]
        if trims:
            before = _trimmed(before, "" if marked.marks is None else marked.marks.breaker)
        marked = Marked(before, marked.marks)
    return Rendered(text.rstrip() if trims else text, marked)


def _ending(content: JsonValue, end: str) -> JsonValue:
    """`content` with `end` behind its last text; None if there is no text to go on from."""
    if isinstance(content, str):
        return content + end if content else None
    parts = content if isinstance(content, list) else []
    for at in reversed(range(len(parts))):
        part = parts[at]
        if isinstance(part, dict) and isinstance(text := part.get("text"), str) and text:
            return [*parts[:at], {**part, "text": text + end}, *parts[at + 1 :]]
    return None


def _trimmed(text: str, mark: str) -> str:
    """Without white space at its end, and without marks that stand among it."""
    while (shorter := text.rstrip().rstrip(mark or None)) != text:
        text = shorter
    return text
