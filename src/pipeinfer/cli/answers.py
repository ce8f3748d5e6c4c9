"""What `generate` and `chat` ask of a model, and what they get, whoever answers.

Knows no model and no server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# A text to be completed, or the messages of a chat, whose answer is next.
Question = str | Sequence[Mapping[str, str]]


@dataclass(slots=True)
class Piece:
    """New text of an answer, with its tokens where they are known.

    thought: whether the model thinks it, and says it to nobody. finish_reason: of the last piece.
    """

    text: str
    token_ids: Sequence[int] = field(default_factory=list[int])
    thought: bool = False
    finish_reason: str | None = None


class Unanswered(Exception):
    """Of a question that is refused, or whose answer broke off; the text says why."""


class Model(Protocol):
    """What answers questions, on the loop of a thread of its own."""

    name: str

    async def start(self) -> None:
        """Returns when questions are answered. ConfigurationError or Unanswered."""
        ...

    def waits_for(self) -> str:
        """What start() waits for, in words."""
        ...

    def answer(self, question: Question) -> AsyncGenerator[Piece, None]:
        """The answer as it comes; who leaves it early aborts it. Unanswered."""
        ...

    async def close(self) -> None:
        """Gives back all that start() took. May be called again."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What a command wants of answers. max_tokens: of each, if no flag says so. batch: whether only
    the time of all of them counts. token_ids: whether pieces need theirs."""

    max_tokens: int | None = None
    batch: bool = False
    token_ids: bool = False
