"""Log-probs of tokens as answers show them, from the packed scores that text rows carry.

Knows messages and the packing of scores; no request and no dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec

from pipeinfer.messages import LogprobTexts
from pipeinfer.wire import SCORE_WORDS, WORD, unpack_few, unpack_scores

ID_BYTES = OFFSET_BYTES = 4


class RankedToken(NamedTuple):
    """A token that is likely at a place. text: its bytes. rank: 1 for the likeliest."""

    id: int
    text: bytes
    logprob: float
    rank: int


class TokenScore(NamedTuple):
    """Log-probs at one place of a text.

    sampled: the token that stands there, with rank 0 if nothing comes before it.
    offset: letters of text before it. top: the likeliest tokens, perhaps `sampled` among them.
    """

    sampled: RankedToken
    offset: int
    top: list[RankedToken]


def without_first(texts: LogprobTexts, tokens: int) -> LogprobTexts:
    """The same log-probs without those of the first `tokens` tokens."""
    many = max(len(texts.offsets) // OFFSET_BYTES, 1)
    return msgspec.structs.replace(
        texts,
        scores=texts.scores[tokens * len(texts.scores) // many :],
        texts=texts.texts[tokens * len(texts.texts) // many :],
        offsets=texts.offsets[tokens * OFFSET_BYTES :],
        ids=texts.ids[tokens * ID_BYTES :],
    )


def num_alternatives(texts: LogprobTexts, tokens: int) -> int:
    """How many likely tokens are given for each of `tokens` tokens."""
    return (len(texts.scores) // (WORD * tokens) - SCORE_WORDS) // 2 if tokens else 0


def token_scores(parts: Iterable[tuple[LogprobTexts, bytes]]) -> Iterator[TokenScore]:
    """The scores of all tokens in `parts`, each with its tokens' ids (int32 bytes)."""
    return chain.from_iterable(_of(texts, ids) for texts, ids in parts)


def prompt_scores(parts: Iterable[LogprobTexts]) -> Iterator[TokenScore]:
    """The scores of a prompt's tokens."""
    return token_scores((texts, texts.ids) for texts in parts)


def _of(texts: LogprobTexts, raw_ids: bytes) -> Iterator[TokenScore]:
    ids, offsets = unpack_few(raw_ids), unpack_few(texts.offsets)
    alternatives = num_alternatives(texts, len(ids))
    found = unpack_scores(texts.scores, alternatives)
    for n, (token, offset, score) in enumerate(zip(ids, offsets, found, strict=True)):
        at = n * (1 + alternatives)
        sampled = RankedToken(token, texts.texts[at], score.logprob, score.rank)
        top = [
            RankedToken(id, texts.texts[at + rank], logprob, rank)
            for rank, (id, logprob) in enumerate(
                zip(score.ids, score.logprobs, strict=True), start=1
            )
        ]
        yield TokenScore(sampled, offset, top)
