"""From the deltas of a request to the bytes of its answer in OpenAI's form, whole or in chunks.

An outlet makes one answer; dialects have outlets of their own. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeinfer.gateway.best_of import Best
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Delta, Started
from pipeinfer.gateway.gathered import Gathered, kept
from pipeinfer.gateway.pieces import Piece
from pipeinfer.gateway.shapes import DONE, NULL, Answer, Choice, Chunks, Usage, body


class Outlet(Protocol):
    """Makes one answer of what comes of a request; `index` is the choice."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        ...

    def started(self, index: int, started: Started) -> None:
        """Comes before the first delta."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes:
        """What goes out now; of a whole answer all of it, when it has ended."""
        ...

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        ...


class WholeBody:
    """Collects all choices. `best` chooses those that are shown."""

    def __init__(self, answer: Answer, choices: int, best: Best | None = None) -> None:
        self._answer = answer
        self._best = best
        self._gathered = [Gathered(answer) for _ in range(choices)]
        self._choices: list[Choice | None] = [None] * choices
        self._open = choices
        self._usage = Usage()

    @property
    def ended(self) -> bool:
        return self._open == 0

    def started(self, index: int, started: Started) -> None:
        self._gathered[index].started(started)

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._best is not None:
            delta = self._best.take(index, delta)
        delta, gathered = kept(self._answer, delta), self._gathered[index]
        gathered.delta(delta)
        if delta.finish is None:
            return b""
        self._choices[index] = gathered.whole(delta.finish, delta.stop_reason)
        self._usage.add(delta, gathered.reasoning)
        self._open -= 1
        return b"" if self._open else self._body()

    def _body(self) -> bytes:
        order = range(len(self._choices)) if self._best is None else self._best.chosen()
        choices = [choice for n in order if (choice := self._choices[n]) is not None]
        return body(self._answer, choices, self._usage)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class ChunkStream:
    """Chunks of text, or of pieces where a reader finds them."""

    def __init__(
        self, answer: Answer, choices: int, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        """continuous_usage: each chunk says how much there was so far."""
        self._answer = answer
        self._chunks = Chunks(answer, choices, include_usage, continuous_usage)
        self._gathered = [Gathered(answer) for _ in range(choices)]
        self._include_usage = include_usage
        self._opened = [False] * choices
        self._open = choices
        self._usage = Usage()
        # Whether all chunks between the first and the last are text, and nothing else.
        self._plain = not (answer.shown.beside_text or answer.reader or continuous_usage)

    @property
    def ended(self) -> bool:
        return self._open == 0

    def started(self, index: int, started: Started) -> None:
        self._gathered[index].started(started)
        self._chunks.started(index, started)

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._plain and delta.finish is None and self._opened[index]:
            # The hot path: every token of nearly every stream.
            return self._chunks.text(index, delta.text) if delta.text else b""
        chunks, shown = self._chunks, self._answer.shown
        pieces = self._gathered[index].pieces(delta)
        chunks.count(index, delta, self._gathered[index].reasoning)
        opening, logprobs = b"", NULL
        if shown.beside_text:
            delta = kept(self._answer, delta)
            if delta.prompt is not None:
                self._gathered[index].scores(delta)
        beside = delta.logprobs is not None or (shown.token_ids and bool(delta.ids))
        if delta.finish is None and not delta.text and not beside:
            return b""
        first = not self._opened[index]
        if first:
            self._opened[index] = True
            opening = self._opening(index)
        if delta.logprobs is not None:  # also where the text of its tokens comes later
            self._gathered[index].scores(delta)
            logprobs = self._gathered[index].logprobs()
        if shown.token_ids:
            of_prompt = first and not self._answer.chat
            logprobs = self._gathered[index].with_ids(logprobs, delta, of_prompt)
        if self._answer.reader is not None:
            data = opening + self._read(index, delta, pieces, logprobs)
        elif delta.finish is not None:
            choice = Choice(delta.text, delta.finish, delta.stop_reason, logprobs)
            data = opening + chunks.last(index, choice)
        elif beside:
            data = opening + chunks.scored(index, delta.text, logprobs)
        else:
            data = opening + chunks.text(index, delta.text)
        if delta.finish is not None:
            data += self._finish(index, delta)
        return data

    def error(self, error: ApiError) -> bytes:
        return self._chunks.error(error)

    def _opening(self, index: int) -> bytes:
        """What comes before a choice's first text."""
        gathered = self._gathered[index]
        data = self._chunks.opening(index, gathered.prompt_ids)
        if self._answer.shown.echo:
            data += self._chunks.scored(index, gathered.prompt_text, gathered.logprobs())
        return data

    def _read(self, index: int, delta: Delta, pieces: Sequence[Piece], logprobs: bytes) -> bytes:
        """The chunks of a choice that is read: one for each piece; log-probs go with the first."""
        chunks, gathered = self._chunks, self._gathered[index]
        made: list[bytes] = []
        for piece in pieces:
            made.append(chunks.piece(index, piece, logprobs))
            logprobs = NULL
        if delta.finish is not None:
            made.append(chunks.read(index, gathered.end(delta, logprobs)))
        elif logprobs != NULL:
            made.append(chunks.unread(index, logprobs))
        return b"".join(made)

    def _finish(self, index: int, delta: Delta) -> bytes:
        """What follows the last chunk of a choice."""
        self._usage.add(delta, self._gathered[index].reasoning)
        self._open -= 1
        if self._open:
            return b""
        return (self._chunks.usage(self._usage) if self._include_usage else b"") + DONE
