"""Thoughts between a model's tags, before the answer; the rest is for the next reader.

Knows no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from pipeinfer.gateway.pieces import WHITESPACE, OutputParser, ParsedDelta
from pipeinfer.gateway.reading.held import find_marker
from pipeinfer.gateway.reasoning_tokens import ReasoningTokenCounter
from pipeinfer.text.thoughts import Tags


class ReasoningParser:
    """`begun`: the prompt has opened the thoughts already. `shown`: they are told, without white
    space at either end. `padded`: white space before the answer is not part of it."""

    def __init__(
        self,
        next_parser: OutputParser,
        tags: Tags,
        opened_by_prompt: bool,
        include_reasoning: bool = True,
        strip_answer: bool = False,
        counter: ReasoningTokenCounter | None = None,
    ) -> None:
        """`reasoning`: is told where the thoughts lie."""
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
        """The place in the whole text of the first letter that waits."""
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
        """An answer without thoughts, which begins with `bare` text."""
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
