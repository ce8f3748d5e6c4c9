"""Token ids and their log-probs as the bytes that messages carry, and back.

Ids are little-endian int32. Packing goes by an array or, for a handful, without: for one id, the
usual case, an array costs more than its use.

A log-prob record is the log-prob of one token of a request with those of the likeliest
alternatives. All records of a request have one size, which follows from the number of
alternatives it asks for:

    | log-prob float32 | rank int32 | ids int32 [most] | their log-probs float32 [most] |

Knows no message and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import numpy as np

# Factor of the upper one of the two numbers that Step.shared_prefixes packs into a word.
PREFIX_UPPER = 1 << 16
# Most prefixes that decodes of a step share: kernels have room for this many.
MAX_SHARED_PREFIXES = 32
# In Step.tokens: take the slot's next draft token.
DRAFT_TOKEN = -2
# Number of tokens that a row of logits gave, if it follows a draft token that was rejected.
REJECTED = -1
# In Plan.drafts and Step.drafts: the row has no drafts, and its start is known on the host.
NO_DRAFTS = -1

EMPTY_INT32 = np.empty(0, dtype=np.int32)
EMPTY_INT64 = np.empty(0, dtype=np.int64)
ONE_INT32 = np.ones((), dtype=np.int32)  # made once: making a scalar takes as long as an addition


def pack(ids: Sequence[int] | np.ndarray) -> bytes:
    """Integers as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack(raw: bytes) -> np.ndarray:
    """An int32 view [n] of bytes made by `pack`; read-only."""
    return np.frombuffer(raw, dtype="<i4")


def pack_few(ids: Iterable[int]) -> bytes:
    """Packs a handful of integers as `pack` does, without an array."""
    return b"".join([token.to_bytes(4, "little", signed=True) for token in ids])


def unpack_few(raw: bytes) -> list[int]:
    """Unpacks bytes of `pack` into Python's integers; more than one go through an array."""
    if len(raw) == 4:
        return [int.from_bytes(raw, "little", signed=True)]
    return unpack(raw).tolist()


COUNT_OF_ONE = pack([1])  # a count of 1: of a decode's tokens, or of the ids that a row samples
NO_ID = -1  # in place of an alternative's id: the vocabulary has fewer tokens
# Log-probs of a prompt's tokens in one message: a long message would hold up others
LOGPROBS_PER_MESSAGE = 256
WORD = 4  # bytes
LOGPROB_WORDS = 2  # words of a log-prob record before its alternatives: log-prob and rank
# The log-prob that stands for negative infinity in JSON, which has no infinite numbers; vLLM's.
MIN_LOGPROB = -9999.0


class PositionLogprobs(NamedTuple):
    """The log-prob of one token, with those of the likeliest alternatives.

    Attributes:
    - logprob: of the token
    - rank: 1 is the likeliest; of equal ones the lowest id comes first. 0: the token has no
      log-prob, because nothing comes before it
    - ids, logprobs: of the likeliest tokens, in that order
    """

    logprob: float
    rank: int
    ids: list[int]
    logprobs: list[float]


def logprob_bytes(num_alternatives: int | None, vector_size: int = 0) -> int:
    """Bytes of a log-prob record; 0 if no log-probs are asked for (None). If a request asks for a
    pooled output, the bytes of its `vector_size` float32 numbers, which take the place of a
    log-prob record."""
    if vector_size:
        return WORD * vector_size
    return 0 if num_alternatives is None else WORD * (LOGPROB_WORDS + 2 * num_alternatives)


def no_logprob(num_alternatives: int) -> bytes:
    """The log-prob record of a prompt's first token, which nothing comes before: zeros."""
    return bytes(logprob_bytes(num_alternatives))


def narrow_logprobs(table: np.ndarray, num_alternatives: int) -> np.ndarray:
    """Log-probs int32 [n, words] with `num_alternatives` alternatives, made from a `table` int32
    [n, words] with as many or more."""
    num_given = (table.shape[1] - LOGPROB_WORDS) // 2
    if num_given == num_alternatives:
        return table
    values = LOGPROB_WORDS + num_given
    ids = table[:, : LOGPROB_WORDS + num_alternatives]  # and the words before them
    return np.concatenate((ids, table[:, values : values + num_alternatives]), axis=1)


@cache
def logprob_layout(num_alternatives: int) -> Struct:
    """The layout of the bytes of one log-prob record: log-prob, rank, `num_alternatives` ids and
    their log-probs. Reading few log-probs by it takes a tenth of the time that an array takes."""
    return Struct(f"<fi{num_alternatives}i{num_alternatives}f")


def unpack_logprobs(raw: bytes, num_alternatives: int) -> Iterator[PositionLogprobs]:
    """The log-prob records in `raw`, token after token. Alternatives that do not exist are left
    out."""
    end = LOGPROB_WORDS + num_alternatives
    for words in logprob_layout(num_alternatives).iter_unpack(raw):
        ids, logprobs = list(words[LOGPROB_WORDS:end]), list(words[end:])
        if not words[1] or NO_ID in ids:
            num_known = ids.index(NO_ID) if words[1] else 0
            ids, logprobs = ids[:num_known], logprobs[:num_known]
        yield PositionLogprobs(words[0], words[1], ids, logprobs)


def json_logprob(logprob: float) -> float:
    """`logprob`, or the least number that stands for negative infinity in JSON."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
