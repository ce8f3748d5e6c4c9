"""How a product of few rows with weights of four bits is cut, and where decoding is the faster.

Read off measurements on an H200 (tests/gpu/time_formats.py). Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pipeinfer.kernels.int4_layout import EACH

Kind = Literal["product", "split"]

ALONE = 2  # rows, up to which each is multiplied by itself, without tensor cores
FEW = 64  # rows; with more of them arithmetic counts
COLUMNS = 64  # of a tile with several rows
PROGRAMS = 264  # two for each multiprocessor


@dataclass(frozen=True)
class Cut:
    """Of one program: rows (1: one row, without tensor cores), columns of the result, `words` of
    the depth at a time; `splits` programs share a tile's depth."""

    rows: int
    columns: int
    words: int
    splits: int
    warps: int
    stages: int = 3


@lru_cache(maxsize=1024)
def cut(kind: Kind, rows: int, width: int, depth: int) -> Cut | None:
    """For x [rows, depth] and weights [width, depth], of whole tiles and runs; None: not here.

    `split`: the depth may be shared, by a power of two.
    """
    words = depth // EACH
    if rows <= ALONE:
        return Cut(1, 4, _step(words, 128), 1, 1)  # one warp: its threads share no rows
    if rows > FEW:
        return None
    height = next(most for most in (16, 32, FEW) if rows <= most)
    splits = 1
    while kind == "split" and splits < 8 and width // COLUMNS * splits < PROGRAMS:
        if words % (2 * splits * 16):
            break
        splits *= 2
    return Cut(height, COLUMNS, _step(words // splits, 64), splits, 4)


def _step(words: int, most: int) -> int:
    """The largest power of two up to `most` that divides so many words."""
    while words % most:
        most //= 2
    return most
