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
FIRST, SECOND, CALLED = "qzxja", "qzxjb", "qzxjc"
CALL_ID = "abcdefghi"  # nine letters, as Mistral's templates demand
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
# A part that was written whole, as JSON or in Python's notation: nobody looked into it.
_WHOLE_PART = re.compile(r"""["']type["']:\s*["']text["']""")
_NOTHING = re.compile("None|null")


class TemplateProbes:
    """What the template behind `render` takes. `render` gives the text of (messages, arguments) as
    they are, and raises whatever the template raises. Each question is asked once, when its answer
    is first needed."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.content = cache(self._content)  # by role

    @cached_property
    def null_content(self) -> bool:
        """Whether a message that calls tools may have null as its content: its calls are shown, and
        the null is not."""
        forms: tuple[JsonValue, ...] = ({FIRST: 1}, f'{{"{FIRST}": 1}}')
        gave = self._said("tool", self._read("tool", "b"))
        for arguments in forms:
            shown = self._shown([*self._calling(None, arguments), gave])
            if CALLED in shown:
                empty = self._shown([*self._calling("", arguments), gave])
                return len(_NOTHING.findall(shown)) <= len(_NOTHING.findall(empty))
        return False

    def _content(self, role: str) -> ContentForm:
        """How messages of `role` are to be given. Text, where neither form is shown."""
        for before, behind in self._around(role):
            messages = [self._said(role, f"{FIRST} {SECOND}"), self._said(role, _PARTS)]
            of_text, of_parts = (self._shown([*before, one, *behind]) for one in messages)
            wholes = len(_WHOLE_PART.findall(of_text))
            if _both(of_parts) and len(_WHOLE_PART.findall(of_parts)) <= wholes:
                return "either" if _both(of_text) else "parts"
            if _both(of_text):
                return "text"
        return "text"

    def _around(self, role: str) -> Iterator[tuple[list[JsonObject], list[JsonObject]]]:
        """What may stand before and behind a message of `role`, most usual first."""
        if role != "user":
            user: JsonObject = {"role": "user", "content": self._read("user", "a")}
            if role == "system":
                yield [], [user]
            elif role == "tool":
                yield self._calling(self._read("assistant", ""), {}), []
            else:
                yield [user], [user]
                yield [user], []
        yield [], []

    def _said(self, role: str, content: JsonValue) -> JsonObject:
        message: JsonObject = {"role": role, "content": content}
        return {**message, "tool_call_id": CALL_ID, "name": CALLED} if role == "tool" else message

    def _calling(self, content: JsonValue, arguments: JsonValue) -> list[JsonObject]:
        """A conversation that ends with a call of a tool."""
        function: JsonObject = {"name": CALLED, "arguments": arguments}
        calls: list[JsonValue] = [{"id": CALL_ID, "type": "function", "function": function}]
        return [
            {"role": "user", "content": self._read("user", "a")},
            {"role": "assistant", "content": content, "tool_calls": calls},
        ]

    def _read(self, role: str, text: str) -> JsonValue:
        return [text_part(text)] if self.content(role) == "parts" else text

    def _shown(self, chat: list[JsonObject]) -> str:
        """What the template makes of it, without tools or with one; nothing if it cannot."""
        return next(self._tried(chat), "")

    def _tried(self, chat: list[JsonObject]) -> Iterator[str]:
        for arguments in (JsonObject(), JsonObject(tools=[TOOL])):
            try:
                text = self._render(chat, arguments)
            except Exception:  # a template can fail in as many ways as any program
                continue
            yield text


def text_part(text: str) -> JsonObject:
    """A part of a message's content."""
    return {"type": "text", "text": text}


_PARTS: list[JsonValue] = [text_part(FIRST), text_part(SECOND)]


def _both(text: str) -> bool:
    return FIRST in text and SECOND in text
