"""From the deltas of a request to the bytes of its answer in OpenAI's form, whole or in chunks.

An outlet makes one answer; dialects have outlets of their own. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeinfer.gateway.best_of import BestOf
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Delta, Started
from pipeinfer.gateway.gathered import ChoiceCollector, requested_part
from pipeinfer.gateway.pieces import ParsedDelta
from pipeinfer.gateway.shapes import (
    DONE,
    NULL,
    ChunkEncoder,
    FinishedChoice,
    ResponseMetadata,
    TokenUsage,
    encode_response,
)


class ResponseEncoder(Protocol):
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


class FullResponseEncoder:
    """Collects all choices. `best` chooses those that are shown."""

    def __init__(self, answer: ResponseMetadata, choices: int, best: BestOf | None = None) -> None:
        self._answer = answer
        self._best = best
        self._gathered = [ChoiceCollector(answer) for _ in range(choices)]
        self._choices: list[FinishedChoice | None] = [None] * choices
        self._open = choices
        self._usage = TokenUsage()

    @property
    def ended(self) -> bool:
        return self._open == 0

    def started(self, index: int, started: Started) -> None:
        self._gathered[index].started(started)

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._best is not None:
            delta = self._best.add(index, delta)
        delta, gathered = requested_part(self._answer, delta), self._gathered[index]
        gathered.add(delta)
        if delta.finish is None:
            return b""
        self._choices[index] = gathered.full_choice(delta.finish, delta.stop_reason)
        self._usage.add(delta, gathered.reasoning_tokens)
        self._open -= 1
        return b"" if self._open else self._body()

    def _body(self) -> bytes:
        order = range(len(self._choices)) if self._best is None else self._best.best_choices()
        choices = [choice for n in order if (choice := self._choices[n]) is not None]
        return encode_response(self._answer, choices, self._usage)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class StreamEncoder:
    """Chunks of text, or of pieces where a reader finds them."""

    def __init__(
        self,
        answer: ResponseMetadata,
        choices: int,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        """continuous_usage: each chunk says how much there was so far."""
        self._answer = answer
        self._chunks = ChunkEncoder(answer, choices, include_usage, continuous_usage)
        self._gathered = [ChoiceCollector(answer) for _ in range(choices)]
        self._include_usage = include_usage
        self._opened = [False] * choices
        self._open = choices
        self._usage = TokenUsage()
        # Whether all chunks between the first and the last are text, and nothing else.
        self._plain = not (
            answer.output_options.more_than_text or answer.parser_factory or continuous_usage
        )

    @property
    def ended(self) -> bool:
        return self._open == 0

    def started(self, index: int, started: Started) -> None:
        self._gathered[index].started(started)
        self._chunks.started(index, started)

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._plain and delta.finish is None and self._opened[index]:
            # The hot path: every token of nearly every stream.
            return self._chunks.text_chunk(index, delta.text) if delta.text else b""
        chunks, shown = self._chunks, self._answer.output_options
        pieces = self._gathered[index].parse(delta)
        chunks.count(index, delta, self._gathered[index].reasoning_tokens)
        opening, logprobs = b"", NULL
        if shown.more_than_text:
            delta = requested_part(self._answer, delta)
            if delta.prompt is not None:
                self._gathered[index].add_logprobs(delta)
        beside = delta.logprobs is not None or (shown.token_ids and bool(delta.ids))
        if delta.finish is None and not delta.text and not beside:
            return b""
        first = not self._opened[index]
        if first:
            self._opened[index] = True
            opening = self._opening(index)
        if delta.logprobs is not None:  # also where the text of its tokens comes later
            self._gathered[index].add_logprobs(delta)
            logprobs = self._gathered[index].take_logprobs()
        if shown.token_ids:
            of_prompt = first and not self._answer.chat
            logprobs = self._gathered[index].with_token_ids(logprobs, delta, of_prompt)
        if self._answer.parser_factory is not None:
            data = opening + self._read(index, delta, pieces, logprobs)
        elif delta.finish is not None:
            choice = FinishedChoice(delta.text, delta.finish, delta.stop_reason, logprobs)
            data = opening + chunks.last_text_chunk(index, choice)
        elif beside:
            data = opening + chunks.text_chunk_with_logprobs(index, delta.text, logprobs)
        else:
            data = opening + chunks.text_chunk(index, delta.text)
        if delta.finish is not None:
            data += self._finish(index, delta)
        return data

    def error(self, error: ApiError) -> bytes:
        return self._chunks.error_chunk(error)

    def _opening(self, index: int) -> bytes:
        """What comes before a choice's first text."""
        gathered = self._gathered[index]
        data = self._chunks.role_chunk(index, gathered.prompt_ids)
        if self._answer.output_options.echo:
            data += self._chunks.text_chunk_with_logprobs(
                index, gathered.prompt_text, gathered.take_logprobs()
            )
        return data

    def _read(
        self, index: int, delta: Delta, pieces: Sequence[ParsedDelta], logprobs: bytes
    ) -> bytes:
        """The chunks of a choice that is read: one for each piece; log-probs go with the first."""
        chunks, gathered = self._chunks, self._gathered[index]
        made: list[bytes] = []
        for piece in pieces:
            made.append(chunks.parsed_chunk(index, piece, logprobs))
            logprobs = NULL
        if delta.finish is not None:
            made.append(chunks.finish_chunk(index, gathered.finished_choice(delta, logprobs)))
        elif logprobs != NULL:
            made.append(chunks.logprobs_chunk(index, logprobs))
        return b"".join(made)

    def _finish(self, index: int, delta: Delta) -> bytes:
        """What follows the last chunk of a choice."""
        self._usage.add(delta, self._gathered[index].reasoning_tokens)
        self._open -= 1
        if self._open:
            return b""
        return (self._chunks.usage_chunk(self._usage) if self._include_usage else b"") + DONE
