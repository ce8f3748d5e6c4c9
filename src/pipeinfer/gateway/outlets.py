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
        self._collectors = [ChoiceCollector(answer) for _ in range(choices)]
        self._choices: list[FinishedChoice | None] = [None] * choices
        self._unfinished = choices
        self._usage = TokenUsage()

    @property
    def ended(self) -> bool:
        return self._unfinished == 0

    def started(self, index: int, started: Started) -> None:
        self._collectors[index].started(started)

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._best is not None:
            delta = self._best.add(index, delta)
        delta, collector = requested_part(self._answer, delta), self._collectors[index]
        collector.add(delta)
        if delta.finish is None:
            return b""
        self._choices[index] = collector.full_choice(delta.finish, delta.stop_reason)
        self._usage.add(delta, collector.reasoning_tokens)
        self._unfinished -= 1
        return b"" if self._unfinished else self._encoded_body()

    def _encoded_body(self) -> bytes:
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
        self._collectors = [ChoiceCollector(answer) for _ in range(choices)]
        self._include_usage = include_usage
        self._choice_started = [False] * choices
        self._unfinished = choices
        self._usage = TokenUsage()
        # Whether all chunks between the first and the last are text, and nothing else.
        self._text_only = not (
            answer.output_options.more_than_text or answer.parser_factory or continuous_usage
        )

    @property
    def ended(self) -> bool:
        return self._unfinished == 0

    def started(self, index: int, started: Started) -> None:
        self._collectors[index].started(started)
        self._chunks.started(index, started)

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._text_only and delta.finish is None and self._choice_started[index]:
            # The hot path: every token of nearly every stream.
            return self._chunks.text_chunk(index, delta.text) if delta.text else b""
        chunks, shown = self._chunks, self._answer.output_options
        parsed = self._collectors[index].parse(delta)
        chunks.count(index, delta, self._collectors[index].reasoning_tokens)
        opening, logprobs = b"", NULL
        if shown.more_than_text:
            delta = requested_part(self._answer, delta)
            if delta.prompt is not None:
                self._collectors[index].add_logprobs(delta)
        has_extras = delta.logprobs is not None or (shown.token_ids and bool(delta.ids))
        if delta.finish is None and not delta.text and not has_extras:
            return b""
        first = not self._choice_started[index]
        if first:
            self._choice_started[index] = True
            opening = self._first_chunks(index)
        if delta.logprobs is not None:  # also where the text of its tokens comes later
            self._collectors[index].add_logprobs(delta)
            logprobs = self._collectors[index].take_logprobs()
        if shown.token_ids:
            with_prompt_ids = first and not self._answer.chat
            logprobs = self._collectors[index].with_token_ids(logprobs, delta, with_prompt_ids)
        if self._answer.parser_factory is not None:
            data = opening + self._parsed_chunks(index, delta, parsed, logprobs)
        elif delta.finish is not None:
            choice = FinishedChoice(delta.text, delta.finish, delta.stop_reason, logprobs)
            data = opening + chunks.last_text_chunk(index, choice)
        elif has_extras:
            data = opening + chunks.text_chunk_with_logprobs(index, delta.text, logprobs)
        else:
            data = opening + chunks.text_chunk(index, delta.text)
        if delta.finish is not None:
            data += self._finish(index, delta)
        return data

    def error(self, error: ApiError) -> bytes:
        return self._chunks.error_chunk(error)

    def _first_chunks(self, index: int) -> bytes:
        """What comes before a choice's first text."""
        collector = self._collectors[index]
        data = self._chunks.role_chunk(index, collector.prompt_ids)
        if self._answer.output_options.echo:
            data += self._chunks.text_chunk_with_logprobs(
                index, collector.prompt_text, collector.take_logprobs()
            )
        return data

    def _parsed_chunks(
        self, index: int, delta: Delta, parsed: Sequence[ParsedDelta], logprobs: bytes
    ) -> bytes:
        """The chunks of a choice that is read: one for each piece; log-probs go with the first."""
        chunks, collector = self._chunks, self._collectors[index]
        made: list[bytes] = []
        for parsed_delta in parsed:
            made.append(chunks.parsed_chunk(index, parsed_delta, logprobs))
            logprobs = NULL
        if delta.finish is not None:
            made.append(chunks.finish_chunk(index, collector.finished_choice(delta, logprobs)))
        elif logprobs != NULL:
            made.append(chunks.logprobs_chunk(index, logprobs))
        return b"".join(made)

    def _finish(self, index: int, delta: Delta) -> bytes:
        """What follows the last chunk of a choice."""
        self._usage.add(delta, self._collectors[index].reasoning_tokens)
        self._unfinished -= 1
        if self._unfinished:
            return b""
        return (self._chunks.usage_chunk(self._usage) if self._include_usage else b"") + DONE
