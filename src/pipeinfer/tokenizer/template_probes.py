"""What a chat template takes, found by rendering small conversations with it.

Templates differ in whether they read a message's content as a text, as a list of parts or as
either, and in what they make of a message that only calls tools. Knows no client's conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Literal

from pipeinfer.json_values import JsonObject, JsonValue

Render = Callable[[list[JsonObject], JsonObject], str]
# either: as it is. text: parts are joined. parts: a text becomes a list of one part.
ContentForm = Literal["either", "text", "parts"]

# Words that no template has, and that none spells otherwise.
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
# A part that was written whole, as JSON or in Python's notation: nobody looked into it.
_WHOLE_PART = re.compile(r"""["']type["']:\s*["']text["']""")
_NULL = re.compile("None|null")


class TemplateProbes:
    """What the template behind `render` takes. `render` gives the text of (messages, arguments) as
    they are, and raises whatever the template raises. Each question is asked once, when its answer
    is first needed."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.content_form = cache(self._probe_content_form)  # by role

    @cached_property
    def takes_null_content(self) -> bool:
        """Whether a message that calls tools may have null as its content: its calls are shown, and
        the null is not."""
        forms: tuple[JsonValue, ...] = ({FIRST_PROBE: 1}, f'{{"{FIRST_PROBE}": 1}}')
        gave = self._message("tool", self._content_of("tool", "b"))
        for arguments in forms:
            shown = self._first_rendering([*self._tool_call_chat(None, arguments), gave])
            if PROBE_TOOL in shown:
                empty = self._first_rendering([*self._tool_call_chat("", arguments), gave])
                return len(_NULL.findall(shown)) <= len(_NULL.findall(empty))
        return False

    def _probe_content_form(self, role: str) -> ContentForm:
        """How messages of `role` are to be given. Text, where neither form is shown."""
        for before, behind in self._contexts(role):
            messages = [
                self._message(role, f"{FIRST_PROBE} {SECOND_PROBE}"),
                self._message(role, _PROBE_PARTS),
            ]
            of_text, of_parts = (self._first_rendering([*before, one, *behind]) for one in messages)
            wholes = len(_WHOLE_PART.findall(of_text))
            if _has_both_probes(of_parts) and len(_WHOLE_PART.findall(of_parts)) <= wholes:
                return "either" if _has_both_probes(of_text) else "parts"
            if _has_both_probes(of_text):
                return "text"
        return "text"

    def _contexts(self, role: str) -> Iterator[tuple[list[JsonObject], list[JsonObject]]]:
        """What may stand before and behind a message of `role`, most usual first."""
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
        """What the template makes of it, without tools or with one; nothing if it cannot."""
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
