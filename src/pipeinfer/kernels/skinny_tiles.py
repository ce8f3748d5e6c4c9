"""Which tiles a product of a few rows is cut into, and where a library's product is the faster.

Read off measurements on an H200 (tests/gpu/time_skinny.py), for models of 0.6 to 32 billion
parameters. Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["product", "gated", "split", "narrow"]
EightBitKind = Literal["product", "split"]

# By the rows of a tile: up to how many rows it is taken, and the smaller side of the largest
# matrix for which it is. Beyond, arithmetic counts, and libraries' kernels are better at it.
CLASSES = ((16, 16, 1 << 30), (32, 32, 4096), (64, 64, 4096), (64, 128, 1024))
NARROW = 512  # rows and columns of products that are `narrow`, at most
MULTIPROCESSORS = 132
IN_FLIGHT = 12  # steps of depth that each multiprocessor should have asked for
FEWEST_PROGRAMS = 16
EIGHT_BIT_ROWS = 16  # with more of them in FP8, libraries' kernels are as good
SIDE = 128  # of the depth at a time, which may share a scale


@dataclass(frozen=True)
class Tile:
    """Of one program: rows, columns, and `step` of the depth at a time; `splits` programs share the
    depth of a tile.
    """

    rows: int
    columns: int
    step: int
    splits: int
    warps: int
    stages: int

    def fits(self, width: int, depth: int) -> bool:
        """Whether it divides the shape, and leaves enough programs."""
        programs = width // self.columns * self.splits
        divides = width % self.columns == 0 and depth % (self.splits * self.step) == 0
        return divides and programs >= FEWEST_PROGRAMS


@lru_cache(maxsize=1024)
def tile(kind: Kind, rows: int, width: int, depth: int) -> Tile | None:
    """For x [rows, depth] times a matrix of that width, of two if `gated`; None: not here.

    `split`: the depth may be shared, by a power of two; `narrow`: as well, of a matrix for which
    rows and columns alone are too few programs, however many rows of a decode step there are.
    """
    if kind == "narrow":
        found = _narrow(rows, depth)
        return found if 0 < rows <= NARROW >= width and found.fits(width, depth) else None
    for height, most, side in CLASSES:
        if 0 < rows <= most and min(width, depth) <= side:
            cut = {"product": _product, "gated": _gated, "split": _split}[kind]
            found = cut(height, rows, width, depth)
            return found if found.fits(width, depth) else None
    return None


def _product(height: int, rows: int, width: int, depth: int) -> Tile:
    columns = 64 if width >= 6144 or rows > 64 else 32
    return Tile(height, columns, 128, 1, 4, 6 if rows <= 64 else 4)


def _gated(height: int, rows: int, width: int, depth: int) -> Tile:
    if rows > 64:
        return Tile(height, 64, 128, 1, 4, 3)
    if rows > 32 and width > 4096:
        return Tile(height, 64, 64, 1, 8, 4)
    return Tile(height, 32, 64, 1, 4, _stages(width // 32))


def _split(height: int, rows: int, width: int, depth: int) -> Tile:
    if rows > 64:
        return Tile(height, 64, 128, _splits(4, depth, 128), 4, 4)
    if rows > 32:
        if width <= 1024:
            return Tile(height, 32, 64, _splits(4, depth, 64), 4, 6)
        return Tile(height, 64, 128, _splits(2 if width >= 4096 else 4, depth, 128), 8, 4)
    splits = _splits(8 if width <= 2560 else 4, depth, 64)
    return Tile(height, 64, 64, splits, 4, _stages(width // 64 * splits))


def _narrow(rows: int, depth: int) -> Tile:
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return Tile(height, 32, 128, _splits(8, depth, 128), 4, 4)


def _splits(most: int, depth: int, step: int) -> int:
    """The largest power of two up to `most` that shares the depth evenly."""
    while most > 1 and depth % (most * step):
        most //= 2
    return most


def _stages(programs: int) -> int:
    """So that all of them together keep the memory busy, and find room."""
    return min(max(round(IN_FLIGHT * MULTIPROCESSORS / max(programs, 1)), 3), 6)


def eight_bit_tile(
    kind: EightBitKind, rows: int, width: int, depth: int, blocks: bool
) -> Tile | None:
    """As `tile`, where both sides are in FP8; blocks: with scales by block."""
    if not 0 < rows <= EIGHT_BIT_ROWS:
        return None
    if kind == "split":
        found = Tile(EIGHT_BIT_ROWS, 64, SIDE, _splits(4, depth, SIDE), 4, 4)
    elif blocks or depth % (2 * SIDE):
        found = Tile(EIGHT_BIT_ROWS, 64, SIDE, 1, 4, 8)
    else:
        found = Tile(EIGHT_BIT_ROWS, 64, 2 * SIDE, 1, 4, 5)
    return found if found.fits(width, depth) else None
