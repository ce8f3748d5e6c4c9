"""What the text of an answer consists of: content, thoughts, calls of tools.

A reader tells them apart while the text comes; which one depends on the model. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from pipeinfer.gateway.reasoning_tokens import ReasoningTokenCounter
from pipeinfer.params import ThoughtState

WHITESPACE = " \t\r\n"  # what sets pieces apart

# Of calls: ours, nine letters and digits, or the function's name and the call's number.
CallIdStyle = Literal["", "short", "numbered"]
DeltaKind = Literal["content", "reasoning", "call", "arguments", "custom", "input"]
INPUT_PARAMETER = "input"  # the parameter that a custom tool's text is to the model
MESSAGE_BREAK = -2  # in place of a call's number: content or thoughts begin anew here


class ParsedDelta(NamedTuple):
    """A piece of an answer. `text`: of content or thoughts; a call begins with the name of its
    tool, pieces of its arguments (JSON) follow. The call of a custom tool begins as "custom", and
    pieces of its input follow. `call`: the number of the call, from 0; or NEXT, where `text` is
    what sets the next message apart from one of the same kind before it."""

    kind: DeltaKind
    text: str
    call_index: int = -1


class OutputParser(Protocol):
    """Of one choice of an answer. Pieces of all text are the same however it is cut."""

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        """What is certain after `text`, the next of it."""
        ...

    def finish(self) -> Sequence[ParsedDelta]:
        """What was held back; nothing more comes."""
        ...


class ChoiceParser(OutputParser, Protocol):
    """Of a whole choice. `reasoning`: counts its tokens of thoughts; it is given the tokens of a
    text before the text is read."""

    @property
    def reasoning(self) -> ReasoningTokenCounter: ...


# Makes one, of an answer whose prompt leaves the thoughts so.
ParserFactory = Callable[[ThoughtState], ChoiceParser]


class PlainTextParser:
    """Reads all of it as content."""

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        return (ParsedDelta("content", text),) if text else ()

    def finish(self) -> Sequence[ParsedDelta]:
        return ()
