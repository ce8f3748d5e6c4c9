"""Collects a conversation, message by message, from dialects that cut one into smaller parts.

What one assistant's turn says (thoughts, text, calls) becomes one message, as templates want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.gateway.schema import ChatMessage, ContentPart, Role
from pipeinfer.json_values import JsonObject


@dataclass
class _AssistantTurn:
    """Of the assistant."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])
    calls: list[JsonObject] = field(default_factory=list[JsonObject])
    phase: str | None = None


class ConversationBuilder:
    """Messages in order; `take` them at the end."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: _AssistantTurn | None = None

    def add_message(self, role: Role, texts: Sequence[str], phase: str | None = None) -> None:
        """A message, of one or several parts. One of the system behind another belongs to that:
        most templates know one. `phase`: of the assistant's, for templates that ask."""
        if role == "assistant":
            turn = self._current_turn()
            if turn.content or turn.calls:
                self._end_turn()
            turn = self._current_turn()
            turn.content += texts or [""]
            turn.phase = phase
            return
        self._end_turn()
        role = "system" if role == "developer" else role
        last = self._messages[-1] if self._messages else None
        if role == "system" and last is not None and last.role == "system":
            self._messages[-1] = ChatMessage(role, "\n\n".join((_joined_text(last), *texts)))
        else:
            self._messages.append(ChatMessage(role, _content(texts)))

    def add_reasoning(self, text: str) -> None:
        """Thoughts of the assistant, before what it says."""
        if self._turn is not None and (self._turn.content or self._turn.calls):
            self._end_turn()
        self._current_turn().reasoning.append(text)

    def add_tool_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of the assistant; `arguments` are JSON."""
        function: JsonObject = {"name": name, "arguments": arguments}
        call: JsonObject = {"id": call_id, "type": "function", "function": function}
        self._current_turn().calls.append(call)

    def add_custom_call(self, call_id: str, name: str, text: str) -> None:
        """A call of a custom tool."""
        custom: JsonObject = {"name": name, "input": text}
        self._current_turn().calls.append({"id": call_id, "type": "custom", "custom": custom})

    def add_tool_result(self, call_id: str, texts: Sequence[str]) -> None:
        """What a call gave."""
        self._end_turn()
        self._messages.append(ChatMessage("tool", _content(texts), tool_call_id=call_id))

    def messages(self) -> list[ChatMessage]:
        """All of it."""
        self._end_turn()
        return self._messages

    def _current_turn(self) -> _AssistantTurn:
        if self._turn is None:
            self._turn = _AssistantTurn()
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        message = ChatMessage(
            "assistant",
            _content(turn.content) if turn.content or not turn.calls else None,
            tool_calls=turn.calls or None,
            reasoning_content="".join(turn.reasoning) or None,
            phase=turn.phase,
        )
        self._messages.append(message)


def _content(texts: Sequence[str]) -> str | list[ContentPart]:
    """One text as it is; of several, the template decides how they stand together."""
    if len(texts) == 1:
        return texts[0]
    return [ContentPart("text", text) for text in texts] if texts else ""


def _joined_text(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "\n\n".join(part.text or "" for part in message.content)
    return message.content or ""
