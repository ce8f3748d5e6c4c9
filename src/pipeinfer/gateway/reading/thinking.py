"""Thoughts between a model's tags, before the answer; the rest is for the next reader.

Knows no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece, Reader
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reasoning_tokens import ReasoningTokens
from pipeinfer.text.thoughts import ThoughtTags


class Thinking:
    """`begun`: the prompt has opened the thoughts already. `shown`: they are told, without white
    space at either end. `padded`: white space before the answer is not part of it."""

    def __init__(
        self,
        behind: Reader,
        tags: ThoughtTags,
        begun: bool,
        shown: bool = True,
        padded: bool = False,
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        """`reasoning`: is told where the thoughts lie."""
        self._reasoning = reasoning or ReasoningTokens()
        self._reasoning.read = 0
        self._letters = 0  # of all text so far
        self._behind = behind
        self._tags = tags
        self._begun = begun
        self._shown = shown
        self._padded = padded
        self._state: Literal["begin", "thoughts", "space", "answer"] = "begin"
        self._text: str = ""
        self._before: list[str] = []  # white space before anything else
        self._held: list[str] = []  # white space after thoughts
        self._said = False

    @property
    def _at(self) -> int:
        """The place in the whole text of the first letter that waits."""
        return self._letters - len(self._text)

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        self._letters += len(text)
        pieces: list[Piece] = []
        steps = {
            "begin": self._begin,
            "thoughts": self._thoughts,
            "space": self._space,
            "answer": self._answer,
        }
        while self._text and steps[self._state](pieces):
            pass
        if self._state != "begin":
            self._reasoning.read = self._at
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        if self._state == "begin" and self._begun:
            self._state = "thoughts"
            self._reasoning.begin(0)
        if self._state == "thoughts":
            self._think(self._text, pieces)
        elif self._state == "begin":
            pieces += self._behind.read(self._whole(self._text))
        self._text = ""
        self._reasoning.read = inf
        return (*pieces, *self._behind.end())

    def _begin(self, _pieces: list[Piece]) -> bool:
        bare, opening = self._text.lstrip(SPACE), self._tags.opening
        self._before.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        if bare.startswith(opening):
            self._text, self._state = bare[len(opening) :], "thoughts"
            self._reasoning.begin(self._at)
        elif opening.startswith(bare):
            return False
        elif self._begun:
            self._state = "thoughts"
            self._reasoning.begin(0)
        else:
            self._text, self._state = self._whole(bare), "answer"
        return True

    def _whole(self, bare: str) -> str:
        """An answer without thoughts, which begins with `bare` text."""
        return bare if self._padded else "".join((*self._before, bare))

    def _thoughts(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (self._tags.closing,))
        self._think(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        self._reasoning.end(self._at - len(found.marker))
        self._state = "space"
        return True

    def _think(self, text: str, pieces: list[Piece]) -> None:
        if not self._said:
            text = text.lstrip(SPACE)
        bare = text.rstrip(SPACE)
        if bare:
            if self._shown:
                pieces.append(Piece("reasoning", "".join((*self._held, bare))))
            self._held, self._said = [text[len(bare) :]], True
        elif text:
            self._held.append(text)

    def _space(self, _pieces: list[Piece]) -> bool:
        self._text = self._text.lstrip(SPACE)
        if self._text:
            self._state = "answer"
        return bool(self._text)

    def _answer(self, pieces: list[Piece]) -> bool:
        pieces += self._behind.read(self._text)
        self._text = ""
        return False
