"""Datasets: prompts that are drawn at random, as token ids or words, or read from a file.

The request of an index follows from a seed and that index alone, so that any process can make it.
Also the defaults and argument types of `pipeinfer bench` that its help text needs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeinfer.params import JsonObject, JsonValue
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    import numpy as np

# Parts of the seed of what is drawn.
REQUEST_STREAM = 0
PREFIX_STREAM = 1


class SampleRequest(msgspec.Struct, frozen=True):
    """One request. Its prompt has one of three forms.

    output_len: output tokens that are asked for.
    prompt_ids: token ids.
    text: words.
    messages: a conversation, as in the chat API.
    """

    output_len: int
    prompt_ids: list[int] = []
    text: str = ""
    messages: list[JsonObject] = []


class RandomDataset(msgspec.Struct, frozen=True, tag=True):
    """Requests that are drawn at random.

    prompt_len, output_len: ranges from which lengths are drawn evenly, in tokens.
    seed: of everything that is drawn.
    highest_id: prompts are token ids from 0 to this, drawn evenly; None: they are words.
    lengths: pairs (prompt, output) of a trace, in the place of both ranges.
    tokens_per_word: of the server's tokenizer.
    template_tokens: that the server adds to a prompt of words.
    num_prefixes: prompts begin with one of so many shared prefixes; 0: with none.
    prefix_len: tokens of each prefix, which come on top of `prompt_len`.
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
        """The request of that index, counted from 0."""
        rng = self._rng(REQUEST_STREAM, index)
        if self.lengths:
            prompt, output = self.lengths[index % len(self.lengths)]
        else:
            prompt, output = (
                self.prompt_len.sample_numpy(rng),
                self.output_len.sample_numpy(rng),
            )
        shared = int(rng.integers(self.num_prefixes)) if self.num_prefixes else None
        if self.highest_id is not None:
            head = [] if shared is None else self._ids(self._prefix(shared), self.prefix_len)
            return SampleRequest(output, prompt_ids=[*head, *self._ids(rng, prompt)])
        own = random_words(rng, self._words(prompt - self.template_tokens))
        if shared is None:
            return SampleRequest(output, text=own)
        head = random_words(self._prefix(shared), self._words(self.prefix_len))
        return SampleRequest(output, text=f"{head} {own}")

    def warmup_sample(self, index: int, seed_offset: int) -> SampleRequest:
        """A request like the measured ones, drawn from another seed: it shares no prefix."""
        return msgspec.structs.replace(self, seed=self.seed + seed_offset).sample(index)

    def _rng(self, *stream: int) -> np.random.Generator:
        import numpy as np  # only here: the command line's help needs this module

        return np.random.default_rng((abs(self.seed), int(self.seed < 0), *stream))

    def _prefix(self, which: int) -> np.random.Generator:
        return self._rng(PREFIX_STREAM, which)

    def _ids(self, rng: np.random.Generator, count: int) -> list[int]:
        assert self.highest_id is not None
        return rng.integers(0, self.highest_id + 1, count).tolist()

    def _words(self, tokens: float) -> int:
        return max(round(tokens / self.tokens_per_word), 1)


class CustomDataset(msgspec.Struct, frozen=True, tag=True):
    """The requests of a file, again from its beginning after the last."""

    requests: list[SampleRequest]

    def sample(self, index: int) -> SampleRequest:
        """The request of that index, counted from 0."""
        return self.requests[index % len(self.requests)]

    def warmup_sample(self, index: int, seed_offset: int) -> SampleRequest:
        """Random words: a prompt of the file would be in the server's cache when it is measured."""
        return RandomDataset(TokenRange(16, 64), TokenRange(16, 16), seed_offset).sample(index)


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
    import numpy as np

    rng = np.random.default_rng(seed)
    drawn = [output.sample_numpy(rng) for _ in lines]
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


COMMON = """
about above across after again against air all almost alone along also always among animal
another answer any area around ask away back base bear beauty because become bed before began
begin behind best better between big bird black blue board boat body book both bottom box boy
bring brought build built business busy but call came can car care carry cause center certain
change check children city class clear close cold color come common complete contain cook cool
correct could country course cover cross cry cut dark day decide deep develop did differ direct
do dog done door down draw drive dry during each early earth ease east eat end enough even ever
every example eye face fact fall family far farm fast father feel feet few field figure fill
final find fine fire first fish five floor fly follow food foot force form found four free
friend from front full game gave general girl give glass go gold good got govern great green
ground group grow half hand happen hard have head hear heart heat help here high hold home horse
hot hour house how hundred hunt idea inch interest island just keep kind king knew know land
language large last late laugh lead learn leave left less let letter life light like line list
listen little live long look love low machine main make man many map mark may mean measure men
might mile mind minute miss money moon more morning most mother mountain move much music must
name near need never new next night north note nothing notice noun now number object ocean off
often old once one only open order other our out over own page paper part pass pattern people
"""
WORDS = tuple(COMMON.split())


def random_words(rng: np.random.Generator, words: int) -> str:
    """That many words with a space between."""
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), words).tolist())


DEFAULT_CONCURRENCY = 8  # streams of the closed loop that is measured if no load is given
MIN_REQUESTS = 64  # of a load, if neither requests nor seconds are given
MIN_REQUESTS_PER_STREAM = 4  # of a closed loop, in the same case


@dataclass(frozen=True)
class TokenRange:
    """A range of lengths in tokens with both ends; written `16:256`, or `16` for one length."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> TokenRange:
        """The range that `text` says. Raises argparse.ArgumentTypeError."""
        low, _, high = text.partition(":")
        try:
            lengths = TokenRange(int(low), int(high or low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no range such as 16:256") from None
        if not 1 <= lengths.low <= lengths.high:
            raise argparse.ArgumentTypeError(f"{text!r} is empty")
        return lengths

    def sample(self, rng: random.Random) -> int:
        """A length, drawn evenly."""
        return rng.randint(self.low, self.high)

    def sample_numpy(self, rng: np.random.Generator) -> int:
        """A length, drawn evenly from a generator of NumPy."""
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return f"{self.low}:{self.high}" if self.low < self.high else f"{self.low}"
