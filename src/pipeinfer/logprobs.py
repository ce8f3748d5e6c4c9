"""Log-probs as the bytes that messages carry: a score of one size for each token of a request.

How many alternatives a score has, its request says; whoever cuts scores needs to know nothing
else. Knows no message and no text.

    | log-prob float32 | rank int32 | ids int32 [most] | their log-probs float32 [most] |
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from struct import Struct
from typing import NamedTuple

import numpy as np

NO_ID = -1  # in place of an id: the vocabulary has no more
AT_ONCE = 256  # of a prompt, that a message has: nobody is to be held up by one for long
WORD = 4  # bytes
OWN_WORDS = 2  # of the token itself
# vLLM's; JSON has no infinite numbers.
LEAST = -9999.0


class Score(NamedTuple):
    """rank: 1 is the likeliest; of equal ones the lowest id comes first. 0: the token has no
    log-prob, because nothing comes before it. ids, logprobs: of the likeliest, in that order."""

    logprob: float
    rank: int
    ids: list[int]
    logprobs: list[float]


def size(most: int | None) -> int:
    """Bytes of a score with `most` alternatives; 0 where no log-probs are asked for (None)."""
    return 0 if most is None else WORD * (OWN_WORDS + 2 * most)


def unscored(most: int) -> bytes:
    """The score of a token that nothing comes before."""
    return bytes(size(most))


def narrowed(table: np.ndarray, most: int) -> np.ndarray:
    """int32 [n, words] with `most` alternatives, out of `table` with as many or more."""
    wide = (table.shape[1] - OWN_WORDS) // 2
    if wide == most:
        return table
    values = OWN_WORDS + wide
    parts = table[:, : OWN_WORDS + most], table[:, values : values + most]
    return np.concatenate(parts, axis=1)


@cache
def layout(most: int) -> Struct:
    """Of one score: log-prob, rank, `most` ids and their log-probs. To read few scores it takes a
    tenth of what an array does."""
    return Struct(f"<fi{most}i{most}f")


def scores(raw: bytes, most: int) -> Iterator[Score]:
    """What `raw` says, token after token. Alternatives that do not exist are left out."""
    end = OWN_WORDS + most
    for words in layout(most).iter_unpack(raw):
        ids, theirs = list(words[OWN_WORDS:end]), list(words[end:])
        if not words[1] or NO_ID in ids:
            there = ids.index(NO_ID) if words[1] else 0
            ids, theirs = ids[:there], theirs[:there]
        yield Score(words[0], words[1], ids, theirs)


def finite(logprob: float) -> float:
    """The same as a number that JSON can say."""
    return logprob if logprob > LEAST else LEAST
