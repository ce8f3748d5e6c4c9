"""Reads log-probs as the detokenizer sends them: of each token its text, its place and its numbers.

For whoever shows them, by HTTP or to a program. Knows no answer and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec

from pipeinfer.logprobs import OWN_WORDS, WORD, scores
from pipeinfer.messages import LogprobTexts
from pipeinfer.packing import unpack_few

ID_BYTES = OFFSET_BYTES = 4


class Likely(NamedTuple):
    """A token that could stand somewhere; rank: 1 is the likeliest."""

    id: int
    text: bytes
    logprob: float
    rank: int


class TokenScore(NamedTuple):
    """offset: letters of text before the token. others: the likeliest ones, it itself may be among
    them. A token that nothing comes before has rank 0, and no others."""

    own: Likely
    offset: int
    others: list[Likely]


def without_first(texts: LogprobTexts, tokens: int) -> LogprobTexts:
    """Without the first `tokens` tokens."""
    many = max(len(texts.offsets) // OFFSET_BYTES, 1)
    return msgspec.structs.replace(
        texts,
        scores=texts.scores[tokens * len(texts.scores) // many :],
        texts=texts.texts[tokens * len(texts.texts) // many :],
        offsets=texts.offsets[tokens * OFFSET_BYTES :],
        ids=texts.ids[tokens * ID_BYTES :],
    )


def num_alternatives(texts: LogprobTexts, tokens: int) -> int:
    """How many others each of so many tokens has."""
    return (len(texts.scores) // (WORD * tokens) - OWN_WORDS) // 2 if tokens else 0


def token_scores(parts: Iterable[tuple[LogprobTexts, bytes]]) -> Iterator[TokenScore]:
    """Token after token of several parts, each with its tokens' ids (int32 bytes)."""
    return chain.from_iterable(_of(texts, ids) for texts, ids in parts)


def prompt_scores(parts: Iterable[LogprobTexts]) -> Iterator[TokenScore]:
    """The same of a prompt's tokens."""
    return token_scores((texts, texts.ids) for texts in parts)


def _of(texts: LogprobTexts, raw_ids: bytes) -> Iterator[TokenScore]:
    ids, offsets = unpack_few(raw_ids), unpack_few(texts.offsets)
    most = num_alternatives(texts, len(ids))
    found = scores(texts.scores, most)
    for n, (token, offset, score) in enumerate(zip(ids, offsets, found, strict=True)):
        at = n * (1 + most)
        own = Likely(token, texts.texts[at], score.logprob, score.rank)
        others = [
            Likely(other, texts.texts[at + rank], logprob, rank)
            for rank, (other, logprob) in enumerate(
                zip(score.ids, score.logprobs, strict=True), start=1
            )
        ]
        yield TokenScore(own, offset, others)
