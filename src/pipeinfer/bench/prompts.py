"""What is asked for: prompts that are drawn, as token ids or words, or those of a file.

Request number `index` follows from a seed and its number alone, so that any process can make it.
Knows no server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from pipeinfer.bench import words
from pipeinfer.bench.span import TokenRange
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.settings import ConfigurationError

ITSELF, PREFIX = 0, 1  # what is drawn: a request, or what several share


class SampleRequest(msgspec.Struct, frozen=True):
    """A prompt, in one of three forms, and how many tokens of output are asked for."""

    output_len: int
    prompt_ids: list[int] = []
    text: str = ""
    messages: list[JsonObject] = []


class Source(Protocol):
    """Makes requests."""

    def request(self, index: int) -> SampleRequest:
        """The request of that number, from 0; the same one whenever asked."""
        ...

    def warming(self, index: int, other: int) -> SampleRequest:
        """One for before the measurement."""
        ...


class RandomDataset(msgspec.Struct, frozen=True, tag=True):
    """Prompts that are drawn. Lengths are tokens, evenly from spans, or request by request from
    `lengths`, pairs of prompt and output.

    highest_id: of token ids, all equally likely; None for words. tokens_per_word, tokens_around:
    what the server makes of words, and adds to them. With `prefixes`, each prompt begins with one
    of so many, all equally likely, of `prefix_tokens` each; its own length comes on top.
    """

    prompt_len: TokenRange
    output_len: TokenRange
    seed: int
    highest_id: int | None = None
    lengths: list[tuple[int, int]] = []
    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    num_prefixes: int = 0
    prefix_len: int = 0

    def sample(self, index: int) -> SampleRequest:
        """Number `index`."""
        source = self._drawing(ITSELF, index)
        if self.lengths:
            prompt, output = self.lengths[index % len(self.lengths)]
        else:
            prompt, output = (
                self.prompt_len.sample_numpy(source),
                self.output_len.sample_numpy(source),
            )
        shared = int(source.integers(self.num_prefixes)) if self.num_prefixes else None
        if self.highest_id is not None:
            head = [] if shared is None else self._ids(self._prefix(shared), self.prefix_len)
            return SampleRequest(output, prompt_ids=[*head, *self._ids(source, prompt)])
        own = words.random_words(source, self._words(prompt - self.template_tokens))
        if shared is None:
            return SampleRequest(output, text=own)
        head = words.random_words(self._prefix(shared), self._words(self.prefix_len))
        return SampleRequest(output, text=f"{head} {own}")

    def warmup_sample(self, index: int, other: int) -> SampleRequest:
        """One like it that shares nothing with those that are measured: of another seed."""
        return msgspec.structs.replace(self, seed=self.seed + other).sample(index)

    def _drawing(self, *what: int) -> np.random.Generator:
        return np.random.default_rng((abs(self.seed), int(self.seed < 0), *what))

    def _prefix(self, which: int) -> np.random.Generator:
        return self._drawing(PREFIX, which)

    def _ids(self, source: np.random.Generator, count: int) -> list[int]:
        assert self.highest_id is not None
        return source.integers(0, self.highest_id + 1, count).tolist()

    def _words(self, tokens: float) -> int:
        return max(round(tokens / self.tokens_per_word), 1)


class CustomDataset(msgspec.Struct, frozen=True, tag=True):
    """The requests of a list, from its beginning again when it is through."""

    requests: list[SampleRequest]

    def sample(self, index: int) -> SampleRequest:
        """Number `index`."""
        return self.requests[index % len(self.requests)]

    def warmup_sample(self, index: int, other: int) -> SampleRequest:
        """Drawn words: a prompt of the list would be in the server's cache."""
        return RandomDataset(TokenRange(16, 64), TokenRange(16, 16), other).sample(index)


def load_custom_dataset(path: Path, output: TokenRange, seed: int, chat: bool) -> CustomDataset:
    """The prompts of JSON lines: a text, or an object with `prompt` (a text or token ids) or
    `messages`, and `max_tokens` if it is not to be drawn from `output`.

    Raises ConfigurationError that names the line.
    """
    try:
        lines = [line for line in enumerate(path.read_text().splitlines(), 1) if line[1].strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    if not lines:
        raise ConfigurationError(f"{path} has no prompts")
    source = np.random.default_rng(seed)
    drawn = [output.sample_numpy(source) for _ in lines]
    found: list[SampleRequest] = []
    for (number, line), tokens in zip(lines, drawn, strict=True):
        try:
            found.append(_request(msgspec.json.decode(line), tokens, chat))
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
            raise ConfigurationError(f"{path} line {number}: {error}") from None
    return CustomDataset(found)


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[JsonObject] = []
    max_tokens: int | None = None


def _request(value: JsonValue, tokens: int, chat: bool) -> SampleRequest:
    line = msgspec.convert({"prompt": value} if isinstance(value, str) else value, _Line)
    tokens = tokens if line.max_tokens is None else line.max_tokens
    if tokens < 1:
        raise ValueError("max_tokens must be 1 or more")
    if line.messages:
        if not chat:
            raise ValueError("messages go to the chat endpoint alone")
        return SampleRequest(tokens, messages=line.messages)
    if isinstance(line.prompt, str) and line.prompt:
        return SampleRequest(tokens, text=line.prompt)
    if line.prompt and not isinstance(line.prompt, str):
        if chat:
            raise ValueError("token ids go to the completions endpoint alone")
        return SampleRequest(tokens, prompt_ids=line.prompt)
    raise ValueError("neither a prompt nor messages")
