"""Which tiles a product of a few rows is cut into, and where a library's product is the faster.

Read off measurements on an H200 (tests/gpu/time_skinny.py), for models of 0.6 to 32 billion
parameters. Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

GemmKind = Literal["product", "gated", "split", "narrow"]
Fp8GemmKind = Literal["product", "split"]

# By the rows of a tile: up to how many rows it is taken, and the smaller side of the largest
# matrix for which it is. Beyond, arithmetic counts, and libraries' kernels are better at it.
CLASSES = ((16, 16, 1 << 30), (32, 32, 4096), (64, 64, 4096), (64, 128, 1024))
NARROW_MAX_SIZE = 512  # rows and columns of products that are `narrow`, at most
NUM_SMS = 132
STAGES_PER_SM = 12  # steps of depth that each multiprocessor should have asked for
MIN_PROGRAMS = 16
FP8_MAX_ROWS = 16  # with more of them in FP8, libraries' kernels are as good
SIDE = 128  # of the depth at a time, which may share a scale


@dataclass(frozen=True)
class GemmConfig:
    """Of one program: rows, columns, and `step` of the depth at a time; `splits` programs share the
    depth of a tile.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    def fits(self, width: int, depth: int) -> bool:
        """Whether it divides the shape, and leaves enough programs."""
        programs = width // self.block_n * self.split_k
        divides = width % self.block_n == 0 and depth % (self.split_k * self.block_k) == 0
        return divides and programs >= MIN_PROGRAMS


@lru_cache(maxsize=1024)
def small_m_gemm_config(kind: GemmKind, rows: int, width: int, depth: int) -> GemmConfig | None:
    """For x [rows, depth] times a matrix of that width, of two if `gated`; None: not here.

    `split`: the depth may be shared, by a power of two; `narrow`: as well, of a matrix for which
    rows and columns alone are too few programs, however many rows of a decode step there are.
    """
    if kind == "narrow":
        found = _narrow_config(rows, depth)
        return found if 0 < rows <= NARROW_MAX_SIZE >= width and found.fits(width, depth) else None
    for height, most, side in CLASSES:
        if 0 < rows <= most and min(width, depth) <= side:
            cut = {"product": _plain_config, "gated": _swiglu_config, "split": _split_k_config}[
                kind
            ]
            found = cut(height, rows, width, depth)
            return found if found.fits(width, depth) else None
    return None


def _plain_config(height: int, rows: int, width: int, depth: int) -> GemmConfig:
    columns = 64 if width >= 6144 or rows > 64 else 32
    return GemmConfig(height, columns, 128, 1, 4, 6 if rows <= 64 else 4)


def _swiglu_config(height: int, rows: int, width: int, depth: int) -> GemmConfig:
    if rows > 64:
        return GemmConfig(height, 64, 128, 1, 4, 3)
    if rows > 32 and width > 4096:
        return GemmConfig(height, 64, 64, 1, 8, 4)
    return GemmConfig(height, 32, 64, 1, 4, _num_stages(width // 32))


def _split_k_config(height: int, rows: int, width: int, depth: int) -> GemmConfig:
    if rows > 64:
        return GemmConfig(height, 64, 128, _split_k(4, depth, 128), 4, 4)
    if rows > 32:
        if width <= 1024:
            return GemmConfig(height, 32, 64, _split_k(4, depth, 64), 4, 6)
        return GemmConfig(height, 64, 128, _split_k(2 if width >= 4096 else 4, depth, 128), 8, 4)
    splits = _split_k(8 if width <= 2560 else 4, depth, 64)
    return GemmConfig(height, 64, 64, splits, 4, _num_stages(width // 64 * splits))


def _narrow_config(rows: int, depth: int) -> GemmConfig:
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return GemmConfig(height, 32, 128, _split_k(8, depth, 128), 4, 4)


def _split_k(most: int, depth: int, step: int) -> int:
    """The largest power of two up to `most` that shares the depth evenly."""
    while most > 1 and depth % (most * step):
        most //= 2
    return most


def _num_stages(programs: int) -> int:
    """So that all of them together keep the memory busy, and find room."""
    return min(max(round(STAGES_PER_SM * NUM_SMS / max(programs, 1)), 3), 6)


def fp8_gemm_config(
    kind: Fp8GemmKind, rows: int, width: int, depth: int, blocks: bool
) -> GemmConfig | None:
    """As `tile`, where both sides are in FP8; blocks: with scales by block."""
    if not 0 < rows <= FP8_MAX_ROWS:
        return None
    if kind == "split":
        found = GemmConfig(FP8_MAX_ROWS, 64, SIDE, _split_k(4, depth, SIDE), 4, 4)
    elif blocks or depth % (2 * SIDE):
        found = GemmConfig(FP8_MAX_ROWS, 64, SIDE, 1, 4, 8)
    else:
        found = GemmConfig(FP8_MAX_ROWS, 64, 2 * SIDE, 1, 4, 5)
    return found if found.fits(width, depth) else None
