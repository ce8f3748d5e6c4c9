"""Which tiles a product of a few rows is cut into, and where a library's product is the faster.

Read off measurements on an H200 (tests/gpu/time_skinny.py), for models of 0.6 to 32 billion
parameters. Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pipeinfer.kernels.formats import INT4_TILE_K

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


INT4_MAX_ROWS = 128  # rows; with more of them arithmetic counts
INT4_BLOCK_N = 64  # of a tile: what one instruction of a tensor core has
INT4_MIN_PROGRAMS = 400  # programs, three for each multiprocessor
INT4_MIN_WIDE_TILES = 256  # tiles of 128 columns: two for each multiprocessor


@dataclass(frozen=True)
class Int4GemmConfig:
    """Of one program: rows, columns of the result, `runs` of the depth at a time; `splits` programs
    share a tile's depth."""

    block_m: int
    block_n: int
    k_tiles: int
    split_k: int
    num_warps: int = 4
    num_stages: int = 3


@lru_cache(maxsize=1024)
def int4_gemm_config(rows: int, width: int, depth: int) -> Int4GemmConfig | None:
    """For x [rows, depth] and weights [width, depth], of whole tiles and runs; None: not here."""
    runs, tiles = depth // INT4_TILE_K, width // INT4_BLOCK_N
    if rows <= 8 and width // 128 >= INT4_MIN_WIDE_TILES and width % 128 == 0 and runs % 4 == 0:
        return Int4GemmConfig(8, 128, 1, 4)
    if rows <= 16:
        splits = _int4_split_k(runs, tiles, INT4_MIN_PROGRAMS)
        return Int4GemmConfig(16, INT4_BLOCK_N, 2 if runs // splits % 2 == 0 else 1, splits)
    if rows <= 32:
        splits = _int4_split_k(runs, tiles, INT4_MIN_PROGRAMS)
        if splits == 1 and runs % 2 == 0:
            return Int4GemmConfig(32, INT4_BLOCK_N, 2, 1)
        return Int4GemmConfig(32, INT4_BLOCK_N, 1, splits, num_stages=4)
    if rows <= 64:
        return (
            Int4GemmConfig(64, INT4_BLOCK_N, 2, 2)
            if runs % 4 == 0
            else Int4GemmConfig(64, INT4_BLOCK_N, 1, 1, num_stages=4)
        )
    if rows <= INT4_MAX_ROWS:
        return Int4GemmConfig(
            INT4_MAX_ROWS,
            INT4_BLOCK_N,
            1,
            _int4_split_k(runs, tiles, INT4_MIN_PROGRAMS // 4),
            num_stages=4,
        )
    return None


def _int4_split_k(runs: int, tiles: int, programs: int) -> int:
    """The fewest equal shares of a depth that make so many programs, else the most."""
    shares = [n for n in (1, 2, 4, 5, 8) if runs % n == 0]
    return next((n for n in shares if tiles * n >= programs), shares[-1])


@dataclass(frozen=True)
class MoeGemmConfig:
    """Of one product: columns, and `depth` at a time.

    turned: weights are the first operand, of which tensor cores take 64 rows or more at their full
    speed, and which may be in registers.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """Of both products: rows (pairs) of a tile; `group` tiles of rows share columns in L2."""

    block_m: int
    gate_up: MoeGemmConfig
    down: MoeGemmConfig
    group_m: int = 8


MANY = float("inf")
# Up to which mean number of pairs an expert gets, which tiles. Weights bound small steps,
# arithmetic large ones.
MOE_CONFIGS_W16: tuple[tuple[float, MoeConfig], ...] = (
    (
        0.06,
        MoeConfig(16, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(128, 128, 4, 4, swap_ab=True)),
    ),
    (0.25, MoeConfig(16, MoeGemmConfig(32, 256, 4, 3), MoeGemmConfig(256, 64, 4, 3, swap_ab=True))),
    (8, MoeConfig(16, MoeGemmConfig(32, 256, 4, 3), MoeGemmConfig(64, 128, 4, 3, swap_ab=True))),
    (24, MoeConfig(32, MoeGemmConfig(128, 128, 8, 2), MoeGemmConfig(128, 64, 4, 5))),
    (48, MoeConfig(64, MoeGemmConfig(64, 64, 4, 3, swap_ab=True), MoeGemmConfig(128, 64, 4, 2))),
    (128, MoeConfig(128, MoeGemmConfig(64, 64, 4, 3, swap_ab=True), MoeGemmConfig(128, 64, 8, 3))),
    (MANY, MoeConfig(128, MoeGemmConfig(128, 64, 8, 3), MoeGemmConfig(128, 64, 8, 3))),
)
# Of weights in MXFP4, not measured yet; depth divides 128, the columns of a word of exponents. The
# compiler itself turns these, and loads ahead what it does not load ahead where they are turned.
MOE_CONFIGS_MXFP4: tuple[tuple[float, MoeConfig], ...] = (
    (16, MoeConfig(16, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(64, 128, 4, 4))),
    (32, MoeConfig(32, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(64, 128, 4, 4))),
    (128, MoeConfig(64, MoeGemmConfig(128, 128, 8, 3), MoeGemmConfig(128, 128, 8, 3))),
    (MANY, MoeConfig(128, MoeGemmConfig(128, 64, 8, 3), MoeGemmConfig(128, 128, 8, 3))),
)
# Of weights in e4m3; depth and columns divide 128, the side of a block that shares a scale.
MOE_CONFIGS_W8A16: tuple[tuple[float, MoeConfig], ...] = (
    (0.06, MoeConfig(16, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(128, 128, 4, 4))),
    (0.5, MoeConfig(16, MoeGemmConfig(64, 128, 8, 3), MoeGemmConfig(128, 128, 4, 4))),
    (16, MoeConfig(16, MoeGemmConfig(128, 128, 4, 3), MoeGemmConfig(128, 128, 4, 4))),
    (
        32,
        MoeConfig(
            32,
            MoeGemmConfig(64, 128, 4, 3, swap_ab=True),
            MoeGemmConfig(64, 128, 4, 3, swap_ab=True),
        ),
    ),
    (128, MoeConfig(64, MoeGemmConfig(64, 64, 4, 3, swap_ab=True), MoeGemmConfig(128, 64, 8, 4))),
    (MANY, MoeConfig(128, MoeGemmConfig(64, 64, 4, 3), MoeGemmConfig(64, 64, 4, 4, swap_ab=True))),
)
# Of weights and rows in e4m3; a depth is of what shares a scale in a row.
MOE_CONFIGS_W8A8: tuple[tuple[float, MoeConfig], ...] = (
    (
        8,
        MoeConfig(
            16,
            MoeGemmConfig(64, 128, 4, 5, swap_ab=True),
            MoeGemmConfig(64, 64, 4, 6, swap_ab=True),
        ),
    ),
    (
        16,
        MoeConfig(
            32,
            MoeGemmConfig(64, 128, 4, 5, swap_ab=True),
            MoeGemmConfig(64, 64, 4, 5, swap_ab=True),
        ),
    ),
    (32, MoeConfig(64, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(64, 64, 4, 5))),
    (64, MoeConfig(64, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(128, 64, 4, 5))),
    (128, MoeConfig(64, MoeGemmConfig(64, 128, 4, 4), MoeGemmConfig(128, 64, 4, 4))),
    (MANY, MoeConfig(128, MoeGemmConfig(64, 128, 8, 5), MoeGemmConfig(64, 64, 8, 4))),
)

MOE_CONFIGS_BY_WEIGHT_BITS = {16: MOE_CONFIGS_W16, 8: MOE_CONFIGS_W8A16, 4: MOE_CONFIGS_MXFP4}


def moe_config(pairs: int, num_experts: int, bits: int = 16) -> MoeConfig:
    """For so many pairs of all experts together; bits: of a weight, 16 for more."""
    return _first_that_covers(MOE_CONFIGS_BY_WEIGHT_BITS[bits], pairs / num_experts)


def moe_w8a8_config(pairs: int, num_experts: int) -> MoeConfig:
    """The same, where rows are e4m3 like weights."""
    return _first_that_covers(MOE_CONFIGS_W8A8, pairs / num_experts)


def _first_that_covers(table: tuple[tuple[float, MoeConfig], ...], mean: float) -> MoeConfig:
    return next(found for most, found in table if mean <= most)
