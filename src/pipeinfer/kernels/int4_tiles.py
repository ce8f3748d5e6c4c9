"""How a product of few rows with weights of four bits is cut, and where decoding is the faster.

Read off measurements on an H200 (tests/gpu/time_formats.py). Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pipeinfer.kernels.int4_layout import INT4_TILE_K

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
