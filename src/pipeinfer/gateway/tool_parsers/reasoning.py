"""Parsers of the text around tool calls: reasoning between tags, and answers that have own tags.

Both hand the rest of the output to the next parser of the chain. Knows no tool call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from pipeinfer.gateway.tool_parsers.base import (
    WHITESPACE,
    OutputParser,
    ParsedDelta,
    ReasoningTokenCounter,
    find_marker,
)
from pipeinfer.text import ThoughtTags


class ReasoningParser:
    """Reasoning between a model's tags, at the begin of the output."""

    def __init__(
        self,
        next_parser: OutputParser,
        tags: ThoughtTags,
        opened_by_prompt: bool,
        include_reasoning: bool = True,
        strip_answer: bool = False,
        counter: ReasoningTokenCounter | None = None,
    ) -> None:
        """Arguments:
        - next_parser: parses what follows the reasoning
        - tags: opening and closing tag
        - opened_by_prompt: the prompt ends behind the opening tag
        - include_reasoning: reasoning is returned, without white space at either end; else dropped
        - strip_answer: white space before the answer is not part of it
        - counter: is told where reasoning lies
        """
        self._counter = counter or ReasoningTokenCounter()
        self._counter.parsed_chars = 0
        self._total_chars = 0  # of all text so far
        self._next_parser = next_parser
        self._tags = tags
        self._opened_by_prompt = opened_by_prompt
        self._include_reasoning = include_reasoning
        self._strip_answer = strip_answer
        self._state: Literal["begin", "reasoning", "space", "answer"] = "begin"
        self._buffer: str = ""
        self._leading_space: list[str] = []  # white space before anything else
        self._pending_space: list[str] = []  # white space after thoughts
        self._emitted = False

    @property
    def _buffer_start(self) -> int:
        """Where in the whole output the buffered text begins, in characters."""
        return self._total_chars - len(self._buffer)

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        self._total_chars += len(text)
        deltas: list[ParsedDelta] = []
        steps = {
            "begin": self._find_opening,
            "reasoning": self._find_closing,
            "space": self._skip_space,
            "answer": self._feed_answer,
        }
        while self._buffer and steps[self._state](deltas):
            pass
        if self._state != "begin":
            self._counter.parsed_chars = self._buffer_start
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        if self._state == "begin" and self._opened_by_prompt:
            self._state = "reasoning"
            self._counter.open_span(0)
        if self._state == "reasoning":
            self._emit_reasoning(self._buffer, deltas)
        elif self._state == "begin":
            deltas += self._next_parser.feed(self._answer_text(self._buffer))
        self._buffer = ""
        self._counter.parsed_chars = inf
        return (*deltas, *self._next_parser.finish())

    def _find_opening(self, _deltas: list[ParsedDelta]) -> bool:
        bare, opening = self._buffer.lstrip(WHITESPACE), self._tags.opening
        self._leading_space.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare
        if bare.startswith(opening):
            self._buffer, self._state = bare[len(opening) :], "reasoning"
            self._counter.open_span(self._buffer_start)
        elif opening.startswith(bare):
            return False
        elif self._opened_by_prompt:
            self._state = "reasoning"
            self._counter.open_span(0)
        else:
            self._buffer, self._state = self._answer_text(bare), "answer"
        return True

    def _answer_text(self, bare: str) -> str:
        """An answer without reasoning that begins with `bare`, with the white space before it."""
        return bare if self._strip_answer else "".join((*self._leading_space, bare))

    def _find_closing(self, deltas: list[ParsedDelta]) -> bool:
        found = find_marker(self._buffer, (self._tags.closing,))
        self._emit_reasoning(found.before, deltas)
        self._buffer = found.tail
        if found.marker is None:
            return False
        self._counter.close_span(self._buffer_start - len(found.marker))
        self._state = "space"
        return True

    def _emit_reasoning(self, text: str, deltas: list[ParsedDelta]) -> None:
        if not self._emitted:
            text = text.lstrip(WHITESPACE)
        bare = text.rstrip(WHITESPACE)
        if bare:
            if self._include_reasoning:
                deltas.append(ParsedDelta("reasoning", "".join((*self._pending_space, bare))))
            self._pending_space, self._emitted = [text[len(bare) :]], True
        elif text:
            self._pending_space.append(text)

    def _skip_space(self, _deltas: list[ParsedDelta]) -> bool:
        self._buffer = self._buffer.lstrip(WHITESPACE)
        if self._buffer:
            self._state = "answer"
        return bool(self._buffer)

    def _feed_answer(self, deltas: list[ParsedDelta]) -> bool:
        deltas += self._next_parser.feed(self._buffer)
        self._buffer = ""
        return False


class AnswerTagParser:
    """An answer between tags of its own, which are removed; what is between them goes to the next
    parser.

    Output that does not begin with the `opening` tag is passed on as it is.
    """

    def __init__(self, next_parser: OutputParser, opening: str, closing: str) -> None:
        self._next_parser = next_parser
        self._opening = opening
        self._closing = closing
        self._state: Literal["begin", "space", "inside", "over", "bare"] = "begin"
        self._buffer = ""
        self._pending_space: list[str] = []  # that may stand before the closing tag

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        if self._state == "begin":
            self._find_opening()
        if self._state == "space":
            self._buffer = self._buffer.lstrip(WHITESPACE)
            self._state = "inside" if self._buffer else "space"
        if self._state == "inside":
            return self._feed_inside()
        return self._feed_tail() if self._state in ("over", "bare") else ()

    def finish(self) -> Sequence[ParsedDelta]:
        if self._state == "begin":
            self._state = "bare"
        inside = "".join((*self._pending_space, self._buffer)) if self._state == "inside" else ""
        deltas_after = self._next_parser.feed(inside) if inside else self._feed_tail()
        return (*deltas_after, *self._next_parser.finish())

    def _find_opening(self) -> None:
        bare = self._buffer.lstrip(WHITESPACE)
        if bare.startswith(self._opening):
            self._buffer, self._state = bare[len(self._opening) :], "space"
        elif not self._opening.startswith(bare):
            self._state = "bare"

    def _feed_inside(self) -> Sequence[ParsedDelta]:
        found = find_marker(self._buffer, (self._closing,))
        self._buffer, bare = found.tail, found.before.rstrip(WHITESPACE)
        deltas: list[ParsedDelta] = []
        if bare:
            deltas += self._next_parser.feed("".join((*self._pending_space, bare)))
            self._pending_space = []
        self._pending_space.append(found.before[len(bare) :])
        if found.marker is not None:
            self._pending_space, self._state = [], "over"
            deltas += self._feed_tail()
        return deltas

    def _feed_tail(self) -> Sequence[ParsedDelta]:
        """Text behind the closing tag without the white space before it; or all of an untagged
        answer.
        """
        text, self._buffer = self._buffer, ""
        if self._state == "over":
            text = text.lstrip(WHITESPACE)
            self._state = "bare" if text else "over"
        return self._next_parser.feed(text) if text else ()
