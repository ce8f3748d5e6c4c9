"""Which tiles the products of a mixture are cut into, by how many pairs an expert gets.

Read off measurements of the Qwen3-30B-A3B shape on an H200 (tests/gpu/time_moe.py). Knows numbers
of pairs only.
"""

from __future__ import annotations

from dataclasses import dataclass


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
