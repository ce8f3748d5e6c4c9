"""Which tiles the products of a mixture are cut into, by how many pairs an expert gets.

Read off measurements of the Qwen3-30B-A3B shape on an H200 (tests/gpu/time_moe.py). Knows numbers
of pairs only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeTiles:
    """Of one product: columns, and `depth` at a time.

    turned: weights are the first operand, of which tensor cores take 64 rows or more at their full
    speed, and which may be in registers.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    turned: bool = False


@dataclass(frozen=True)
class Tiles:
    """Of both products: rows (pairs) of a tile; `group` tiles of rows share columns in L2."""

    rows: int
    gate_up: MoeTiles
    down: MoeTiles
    group: int = 8


MANY = float("inf")
# Up to which mean number of pairs an expert gets, which tiles. Weights bound small steps,
# arithmetic large ones.
PLAIN: tuple[tuple[float, Tiles], ...] = (
    (0.06, Tiles(16, MoeTiles(64, 128, 4, 4), MoeTiles(128, 128, 4, 4, turned=True))),
    (0.25, Tiles(16, MoeTiles(32, 256, 4, 3), MoeTiles(256, 64, 4, 3, turned=True))),
    (8, Tiles(16, MoeTiles(32, 256, 4, 3), MoeTiles(64, 128, 4, 3, turned=True))),
    (24, Tiles(32, MoeTiles(128, 128, 8, 2), MoeTiles(128, 64, 4, 5))),
    (48, Tiles(64, MoeTiles(64, 64, 4, 3, turned=True), MoeTiles(128, 64, 4, 2))),
    (128, Tiles(128, MoeTiles(64, 64, 4, 3, turned=True), MoeTiles(128, 64, 8, 3))),
    (MANY, Tiles(128, MoeTiles(128, 64, 8, 3), MoeTiles(128, 64, 8, 3))),
)
# Of weights in MXFP4, not measured yet; depth divides 128, the columns of a word of exponents. The
# compiler itself turns these, and loads ahead what it does not load ahead where they are turned.
FOUR_BITS: tuple[tuple[float, Tiles], ...] = (
    (16, Tiles(16, MoeTiles(64, 128, 4, 4), MoeTiles(64, 128, 4, 4))),
    (32, Tiles(32, MoeTiles(64, 128, 4, 4), MoeTiles(64, 128, 4, 4))),
    (128, Tiles(64, MoeTiles(128, 128, 8, 3), MoeTiles(128, 128, 8, 3))),
    (MANY, Tiles(128, MoeTiles(128, 64, 8, 3), MoeTiles(128, 128, 8, 3))),
)
# Of weights in e4m3; depth and columns divide 128, the side of a block that shares a scale.
EIGHT_BITS: tuple[tuple[float, Tiles], ...] = (
    (0.06, Tiles(16, MoeTiles(64, 128, 4, 4), MoeTiles(128, 128, 4, 4))),
    (0.5, Tiles(16, MoeTiles(64, 128, 8, 3), MoeTiles(128, 128, 4, 4))),
    (16, Tiles(16, MoeTiles(128, 128, 4, 3), MoeTiles(128, 128, 4, 4))),
    (32, Tiles(32, MoeTiles(64, 128, 4, 3, turned=True), MoeTiles(64, 128, 4, 3, turned=True))),
    (128, Tiles(64, MoeTiles(64, 64, 4, 3, turned=True), MoeTiles(128, 64, 8, 4))),
    (MANY, Tiles(128, MoeTiles(64, 64, 4, 3), MoeTiles(64, 64, 4, 4, turned=True))),
)
# Of weights and rows in e4m3; a depth is of what shares a scale in a row.
ROUNDED: tuple[tuple[float, Tiles], ...] = (
    (8, Tiles(16, MoeTiles(64, 128, 4, 5, turned=True), MoeTiles(64, 64, 4, 6, turned=True))),
    (16, Tiles(32, MoeTiles(64, 128, 4, 5, turned=True), MoeTiles(64, 64, 4, 5, turned=True))),
    (32, Tiles(64, MoeTiles(64, 128, 4, 4), MoeTiles(64, 64, 4, 5))),
    (64, Tiles(64, MoeTiles(64, 128, 4, 4), MoeTiles(128, 64, 4, 5))),
    (128, Tiles(64, MoeTiles(64, 128, 4, 4), MoeTiles(128, 64, 4, 4))),
    (MANY, Tiles(128, MoeTiles(64, 128, 8, 5), MoeTiles(64, 64, 8, 4))),
)

BY_BITS = {16: PLAIN, 8: EIGHT_BITS, 4: FOUR_BITS}


def tiles(pairs: int, num_experts: int, bits: int = 16) -> Tiles:
    """For so many pairs of all experts together; bits: of a weight, 16 for more."""
    return _chosen(BY_BITS[bits], pairs / num_experts)


def rounded_tiles(pairs: int, num_experts: int) -> Tiles:
    """The same, where rows are e4m3 like weights."""
    return _chosen(ROUNDED, pairs / num_experts)


def _chosen(table: tuple[tuple[float, Tiles], ...], mean: float) -> Tiles:
    return next(found for most, found in table if mean <= most)
