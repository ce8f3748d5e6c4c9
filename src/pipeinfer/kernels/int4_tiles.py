"""How a product of few rows with weights of four bits is cut, and where decoding is the faster.

Read off measurements on an H200 (tests/gpu/time_formats.py). Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pipeinfer.kernels.int4_layout import RUN

FEW = 128  # rows; with more of them arithmetic counts
COLUMNS = 64  # of a tile: what one instruction of a tensor core has
ENOUGH = 400  # programs, three for each multiprocessor
WIDE = 256  # tiles of 128 columns: two for each multiprocessor


@dataclass(frozen=True)
class Int4Tiles:
    """Of one program: rows, columns of the result, `runs` of the depth at a time; `splits` programs
    share a tile's depth."""

    rows: int
    columns: int
    runs: int
    splits: int
    warps: int = 4
    stages: int = 3


@lru_cache(maxsize=1024)
def cut(rows: int, width: int, depth: int) -> Int4Tiles | None:
    """For x [rows, depth] and weights [width, depth], of whole tiles and runs; None: not here."""
    runs, tiles = depth // RUN, width // COLUMNS
    if rows <= 8 and width // 128 >= WIDE and width % 128 == 0 and runs % 4 == 0:
        return Int4Tiles(8, 128, 1, 4)
    if rows <= 16:
        splits = _splits(runs, tiles, ENOUGH)
        return Int4Tiles(16, COLUMNS, 2 if runs // splits % 2 == 0 else 1, splits)
    if rows <= 32:
        splits = _splits(runs, tiles, ENOUGH)
        if splits == 1 and runs % 2 == 0:
            return Int4Tiles(32, COLUMNS, 2, 1)
        return Int4Tiles(32, COLUMNS, 1, splits, stages=4)
    if rows <= 64:
        return (
            Int4Tiles(64, COLUMNS, 2, 2)
            if runs % 4 == 0
            else Int4Tiles(64, COLUMNS, 1, 1, stages=4)
        )
    if rows <= FEW:
        return Int4Tiles(FEW, COLUMNS, 1, _splits(runs, tiles, ENOUGH // 4), stages=4)
    return None


def _splits(runs: int, tiles: int, programs: int) -> int:
    """The fewest equal shares of a depth that make so many programs, else the most."""
    shares = [n for n in (1, 2, 4, 5, 8) if runs % n == 0]
    return next((n for n in shares if tiles * n >= programs), shares[-1])
