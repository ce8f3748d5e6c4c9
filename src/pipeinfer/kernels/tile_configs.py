"""Tile configurations of kernels by shape, and where a library's GEMM is the faster.

For GEMMs of small M in 16 bits, FP8 and 4 bits (gemm.py), for those of a mixture of experts
(moe.py, moe_fp8.py), and for decode attention (decode_attention.py). Read off measurements on an
H200: those of tests/gpu/time_skinny.py for models of 0.6 to 32 billion parameters, of
tests/gpu/time_formats.py, and of tests/gpu/time_moe.py for the shape of Qwen3-30B-A3B. Knows shapes
only. Needs no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from pipeinfer.kernels.formats import INT4_TILE_K, SCALE_BLOCK

GemmKind = Literal["product", "gated", "split", "narrow"]
Fp8GemmKind = Literal["product", "split"]

NARROW_MAX_SIZE = 512  # rows and columns of a `narrow` GEMM at most
NUM_SMS = 132  # multiprocessors of an H100 or H200
STAGES_PER_SM = 12  # steps of K whose loads should be in flight on each multiprocessor
MIN_PROGRAMS = 16  # fewer leave too much of the GPU idle
FP8_MAX_ROWS = 16  # with more rows in FP8, libraries' kernels are as good


class SmallMClass(NamedTuple):
    """The rows for which a tile height is used.

    Attributes:
    - block_m: rows of a tile
    - max_rows: rows of the product at most
    - max_side: the smaller side of the weight matrix at most. Beyond, arithmetic bounds the
      product, and libraries' kernels are better
    """

    block_m: int
    max_rows: int
    max_side: int


SMALL_M_CLASSES = (
    SmallMClass(16, 16, 1 << 30),
    SmallMClass(32, 32, 4096),
    SmallMClass(64, 64, 4096),
    SmallMClass(64, 128, 1024),
)


@dataclass(frozen=True)
class GemmConfig:
    """The tile of one program, in elements.

    Attributes:
    - block_m, block_n: rows and columns of the result
    - block_k: depth of a step
    - split_k: programs that share the depth of a tile
    - num_warps, num_stages: Triton's
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    def fits(self, width: int, depth: int) -> bool:
        """Whether the tile divides the shape, and the grid has enough programs."""
        programs = width // self.block_n * self.split_k
        divides = width % self.block_n == 0 and depth % (self.split_k * self.block_k) == 0
        return divides and programs >= MIN_PROGRAMS


@lru_cache(maxsize=1024)
def small_m_gemm_config(kind: GemmKind, rows: int, width: int, depth: int) -> GemmConfig | None:
    """Returns the tile for x [rows, depth] @ weight [width, depth].T; None: a library's GEMM is
    faster.

    - kind: "product": the plain GEMM. "gated": with SwiGLU of two matrices [width, depth]. "split":
      with split-K, by a power of two. "narrow": with split-K for a matrix of few rows, such as a
      router's, which has too few tiles otherwise at any number of decode rows
    """
    if kind == "narrow":
        found = _narrow_config(rows, depth)
        return found if 0 < rows <= NARROW_MAX_SIZE >= width and found.fits(width, depth) else None
    config_of = {"product": _plain_config, "gated": _swiglu_config, "split": _split_k_config}[kind]
    for block_m, max_rows, max_side in SMALL_M_CLASSES:
        if 0 < rows <= max_rows and min(width, depth) <= max_side:
            found = config_of(block_m, rows, width, depth)
            return found if found.fits(width, depth) else None
    return None


def _plain_config(block_m: int, rows: int, width: int, depth: int) -> GemmConfig:
    block_n = 64 if width >= 6144 or rows > 64 else 32
    return GemmConfig(block_m, block_n, 128, 1, 4, 6 if rows <= 64 else 4)


def _swiglu_config(block_m: int, rows: int, width: int, depth: int) -> GemmConfig:
    if rows > 64:
        return GemmConfig(block_m, 64, 128, 1, 4, 3)
    if rows > 32 and width > 4096:
        return GemmConfig(block_m, 64, 64, 1, 8, 4)
    return GemmConfig(block_m, 32, 64, 1, 4, _num_stages(width // 32))


def _split_k_config(block_m: int, rows: int, width: int, depth: int) -> GemmConfig:
    if rows > 64:
        return GemmConfig(block_m, 64, 128, _split_k(4, depth, 128), 4, 4)
    if rows > 32:
        if width <= 1024:
            return GemmConfig(block_m, 32, 64, _split_k(4, depth, 64), 4, 6)
        return GemmConfig(block_m, 64, 128, _split_k(2 if width >= 4096 else 4, depth, 128), 8, 4)
    splits = _split_k(8 if width <= 2560 else 4, depth, 64)
    return GemmConfig(block_m, 64, 64, splits, 4, _num_stages(width // 64 * splits))


def _narrow_config(rows: int, depth: int) -> GemmConfig:
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return GemmConfig(block_m, 32, 128, _split_k(8, depth, 128), 4, 4)


def _split_k(limit: int, depth: int, block_k: int) -> int:
    """The largest power of two up to `limit` that divides the depth into whole steps."""
    while limit > 1 and depth % (limit * block_k):
        limit //= 2
    return limit


def _num_stages(programs: int) -> int:
    """3 to 6, so that all programs together keep the memory busy and fit into shared memory."""
    return min(max(round(STAGES_PER_SM * NUM_SMS / max(programs, 1)), 3), 6)


def fp8_gemm_config(
    kind: Fp8GemmKind, rows: int, width: int, depth: int, blocks: bool
) -> GemmConfig | None:
    """Returns the tile as `small_m_gemm_config` does, for x and weight in e4m3. blocks: weights
    have a scale for each block.
    """
    if not 0 < rows <= FP8_MAX_ROWS:
        return None
    if kind == "split":
        found = GemmConfig(FP8_MAX_ROWS, 64, SCALE_BLOCK, _split_k(4, depth, SCALE_BLOCK), 4, 4)
    elif blocks or depth % (2 * SCALE_BLOCK):
        found = GemmConfig(FP8_MAX_ROWS, 64, SCALE_BLOCK, 1, 4, 8)
    else:
        found = GemmConfig(FP8_MAX_ROWS, 64, 2 * SCALE_BLOCK, 1, 4, 5)
    return found if found.fits(width, depth) else None


# With more rows arithmetic bounds the product, and dequantizing first is faster.
INT4_MAX_ROWS = 128
INT4_BLOCK_N = 64  # columns of a tile: as in one tensor core instruction
INT4_MIN_PROGRAMS = 400  # programs to aim at: three for each multiprocessor
INT4_MIN_WIDE_TILES = 256  # tiles of 128 columns that suffice: two a multiprocessor


@dataclass(frozen=True)
class Int4GemmConfig:
    """The tile of one program.

    Attributes:
    - block_m, block_n: rows and columns of the result
    - k_tiles: tiles of INT4_TILE_K of the depth in a step
    - split_k: programs that share the depth of a tile
    - num_warps, num_stages: Triton's
    """

    block_m: int
    block_n: int
    k_tiles: int
    split_k: int
    num_warps: int = 4
    num_stages: int = 3


@lru_cache(maxsize=1024)
def int4_gemm_config(rows: int, width: int, depth: int) -> Int4GemmConfig | None:
    """Returns the tile for x [rows, depth] and weights [width, depth], width and depth in whole
    tiles; None: the weights are dequantized first, and a library multiplies.
    """
    k_tiles, n_tiles = depth // INT4_TILE_K, width // INT4_BLOCK_N
    if rows <= 8 and width // 128 >= INT4_MIN_WIDE_TILES and width % 128 == 0 and k_tiles % 4 == 0:
        return Int4GemmConfig(8, 128, 1, 4)
    if rows <= 16:
        split_k = _int4_split_k(k_tiles, n_tiles, INT4_MIN_PROGRAMS)
        return Int4GemmConfig(16, INT4_BLOCK_N, 2 if k_tiles // split_k % 2 == 0 else 1, split_k)
    if rows <= 32:
        split_k = _int4_split_k(k_tiles, n_tiles, INT4_MIN_PROGRAMS)
        if split_k == 1 and k_tiles % 2 == 0:
            return Int4GemmConfig(32, INT4_BLOCK_N, 2, 1)
        return Int4GemmConfig(32, INT4_BLOCK_N, 1, split_k, num_stages=4)
    if rows <= 64:
        if k_tiles % 4 == 0:
            return Int4GemmConfig(64, INT4_BLOCK_N, 2, 2)
        return Int4GemmConfig(64, INT4_BLOCK_N, 1, 1, num_stages=4)
    if rows <= INT4_MAX_ROWS:
        split_k = _int4_split_k(k_tiles, n_tiles, INT4_MIN_PROGRAMS // 4)
        return Int4GemmConfig(INT4_MAX_ROWS, INT4_BLOCK_N, 1, split_k, num_stages=4)
    return None


def _int4_split_k(k_tiles: int, n_tiles: int, programs: int) -> int:
    """The fewest equal parts of a depth that make so many programs, else the most."""
    divisors = [n for n in (1, 2, 4, 5, 8) if k_tiles % n == 0]
    return next((n for n in divisors if n_tiles * n >= programs), divisors[-1])


@dataclass(frozen=True)
class MoeGemmConfig:
    """The tile of one of the two GEMMs of a mixture, in elements.

    Attributes:
    - block_n: columns of the result
    - block_k: depth of a step
    - num_warps, num_stages: Triton's
    - swap_ab: weights are the first operand, of which tensor cores take 64 rows or more at full
      speed, and which may lie in registers
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """The tiles of both GEMMs.

    Attributes:
    - block_m: rows of a tile, pairs of a token and an expert
    - gate_up, down: the rest of the tiles
    - group_m: row blocks that share columns of the weights in the L2 cache
    """

    block_m: int
    gate_up: MoeGemmConfig
    down: MoeGemmConfig
    group_m: int = 8


def _plain(block_n: int, block_k: int, num_warps: int, num_stages: int) -> MoeGemmConfig:
    return MoeGemmConfig(block_n, block_k, num_warps, num_stages)


def _swapped(block_n: int, block_k: int, num_warps: int, num_stages: int) -> MoeGemmConfig:
    return MoeGemmConfig(block_n, block_k, num_warps, num_stages, swap_ab=True)


MANY = float("inf")
# Each line: the mean number of pairs an expert has at most, and the tiles. Weights bound small
# steps, arithmetic large ones.
MoeConfigs = tuple[tuple[float, MoeConfig], ...]
# Weights and activations of 16 bits.
MOE_CONFIGS_W16: MoeConfigs = (
    (0.06, MoeConfig(16, _plain(64, 128, 4, 4), _swapped(128, 128, 4, 4))),
    (0.25, MoeConfig(16, _plain(32, 256, 4, 3), _swapped(256, 64, 4, 3))),
    (8, MoeConfig(16, _plain(32, 256, 4, 3), _swapped(64, 128, 4, 3))),
    (24, MoeConfig(32, _plain(128, 128, 8, 2), _plain(128, 64, 4, 5))),
    (48, MoeConfig(64, _swapped(64, 64, 4, 3), _plain(128, 64, 4, 2))),
    (128, MoeConfig(128, _swapped(64, 64, 4, 3), _plain(128, 64, 8, 3))),
    (MANY, MoeConfig(128, _plain(128, 64, 8, 3), _plain(128, 64, 8, 3))),
)
# Weights in MXFP4, not measured yet; block_k divides 128, the columns of a word of exponents. The
# compiler swaps the operands itself, and pipelines loads that it does not pipeline with swap_ab.
MOE_CONFIGS_MXFP4: MoeConfigs = (
    (16, MoeConfig(16, _plain(64, 128, 4, 4), _plain(64, 128, 4, 4))),
    (32, MoeConfig(32, _plain(64, 128, 4, 4), _plain(64, 128, 4, 4))),
    (128, MoeConfig(64, _plain(128, 128, 8, 3), _plain(128, 128, 8, 3))),
    (MANY, MoeConfig(128, _plain(128, 64, 8, 3), _plain(128, 128, 8, 3))),
)
# Weights in e4m3; block_k and block_n divide 128, the side of a block that shares a scale.
MOE_CONFIGS_W8A16: MoeConfigs = (
    (0.06, MoeConfig(16, _plain(64, 128, 4, 4), _plain(128, 128, 4, 4))),
    (0.5, MoeConfig(16, _plain(64, 128, 8, 3), _plain(128, 128, 4, 4))),
    (16, MoeConfig(16, _plain(128, 128, 4, 3), _plain(128, 128, 4, 4))),
    (32, MoeConfig(32, _swapped(64, 128, 4, 3), _swapped(64, 128, 4, 3))),
    (128, MoeConfig(64, _swapped(64, 64, 4, 3), _plain(128, 64, 8, 4))),
    (MANY, MoeConfig(128, _plain(64, 64, 4, 3), _swapped(64, 64, 4, 4))),
)
# Weights and activations in e4m3; block_k is the number of values of a row that share a scale.
MOE_CONFIGS_W8A8: MoeConfigs = (
    (8, MoeConfig(16, _swapped(64, 128, 4, 5), _swapped(64, 64, 4, 6))),
    (16, MoeConfig(32, _swapped(64, 128, 4, 5), _swapped(64, 64, 4, 5))),
    (32, MoeConfig(64, _plain(64, 128, 4, 4), _plain(64, 64, 4, 5))),
    (64, MoeConfig(64, _plain(64, 128, 4, 4), _plain(128, 64, 4, 5))),
    (128, MoeConfig(64, _plain(64, 128, 4, 4), _plain(128, 64, 4, 4))),
    (MANY, MoeConfig(128, _plain(64, 128, 8, 5), _plain(64, 64, 8, 4))),
)

MOE_CONFIGS_BY_WEIGHT_BITS = {16: MOE_CONFIGS_W16, 8: MOE_CONFIGS_W8A16, 4: MOE_CONFIGS_MXFP4}


def moe_config(pairs: int, num_experts: int, bits: int = 16) -> MoeConfig:
    """Returns the tiles for `pairs` pairs of all experts together.

    - bits: of a weight; 16 for more
    """
    return _first_that_covers(MOE_CONFIGS_BY_WEIGHT_BITS[bits], pairs / num_experts)


def moe_w8a8_config(pairs: int, num_experts: int) -> MoeConfig:
    """Returns the tiles for activations and weights in e4m3."""
    return _first_that_covers(MOE_CONFIGS_W8A8, pairs / num_experts)


def _first_that_covers(table: MoeConfigs, mean: float) -> MoeConfig:
    return next(config for limit, config in table if mean <= limit)


class LoadConfig(NamedTuple):
    """How a program reads the keys and values of a split.

    Attributes:
    - block_n: tokens of a step
    - num_warps, num_stages: as of Triton; num_stages steps are in flight
    """

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeConfig:
    """How rows are split for decode attention.

    Attributes:
    - extra_splits: splits at most, beside one of each row
    - max_splits: splits of a row at most, a power of two
    - min_tokens: tokens of a split at least
    - load: how splits are read
    - prefix_queries: queries, of several rows, that a split of a shared prefix serves; 0: each row
      reads its prefix itself
    - extra_prefix_splits: splits of prefixes at most, beside one of each tile of prefix_queries
    - min_prefix_tokens: tokens of a split of a prefix at least
    - prefix_load: how splits of prefixes are read, in a launch of their own; None: as splits of
      rows, in the same launch
    """

    extra_splits: int
    max_splits: int
    min_tokens: int
    load: LoadConfig
    prefix_queries: int = 0
    extra_prefix_splits: int = 64
    min_prefix_tokens: int = 128
    prefix_load: LoadConfig | None = None

    def rows_per_prefix_tile(self, queries_per_kv_head: int) -> int:
        """Rows that a split of a prefix serves, with so many query heads to a KV head; 0: none."""
        return self.prefix_queries // queries_per_kv_head


@dataclass(frozen=True)
class ExactGemmConfig:
    """The tile of one program of a GEMM whose bits do not depend on the tile.

    Attributes:
    - block_m, block_n: rows and columns of the result
    - block_k: depth of a step
    - num_warps, num_stages: Triton's
    - swap_ab: weights are the first operand
    - group_m: row blocks that share columns of the weight in the L2 cache
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False
    group_m: int = 8


@lru_cache(maxsize=1024)
def exact_gemm_config(rows: int, width: int, depth: int) -> ExactGemmConfig:
    """Returns the tile for x [rows, depth] @ weight [width, depth].T, each sum one chain: the depth
    is not split.
    """
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        if width <= 2048:
            return ExactGemmConfig(block_m, 16, 256, 2, 5, swap_ab=True)
        return ExactGemmConfig(block_m, 64 if width >= 6144 else 32, 128, 4, 6, swap_ab=True)
    if rows <= 64:
        return ExactGemmConfig(64, 32 if width <= 4096 else 64, 128, 4, 4)
    return ExactGemmConfig(128, 64 if width <= 8192 else 128, 64, 8, 4)
