"""How a product of few rows with weights of four bits is cut, and where decoding is the faster.

Read off measurements on an H200 (tests/gpu/time_formats.py). Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pipeinfer.kernels.int4_layout import RUN

FEW = 64  # rows; with more of them arithmetic counts
COLUMNS = 64  # of a tile: what one instruction of a tensor core has
PROGRAMS = 528  # four for each multiprocessor
MOST = 8  # splits


@dataclass(frozen=True)
class Cut:
    """Of one program: rows, columns of the result, `runs` of the depth at a time; `splits` programs
    share a tile's depth."""

    rows: int
    columns: int
    runs: int
    splits: int
    warps: int = 4
    stages: int = 3


@lru_cache(maxsize=1024)
def cut(rows: int, width: int, depth: int) -> Cut | None:
    """For x [rows, depth] and weights [width, depth], of whole tiles and runs; None: not here."""
    if rows > FEW:
        return None
    height = next(most for most in (16, 32, FEW) if rows <= most)
    runs, tiles = depth // RUN, width // COLUMNS
    splits = next(
        (n for n in range(1, MOST + 1) if runs % n == 0 and tiles * n >= PROGRAMS), None
    ) or next(n for n in range(MOST, 0, -1) if runs % n == 0)
    return Cut(height, COLUMNS, 2 if runs // splits % 2 == 0 else 1, splits)
