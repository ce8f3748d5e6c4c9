"""How long kernels take in a CUDA graph: what the tools that time them share."""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch

from pipeinfer.attention import triton_backend
from pipeinfer.kernels.formats import E4M3

DIM = 128  # of heads


class Asked(NamedTuple):
    """What is timed: query heads, KV heads, pages of which dtype, and numbers of rows, if not all
    that a tool has."""

    heads: int
    kv_heads: int
    pages: torch.dtype
    rows: tuple[int, ...] = ()

    def among(self, shapes):
        """Those of `shapes`, which begin with numbers of rows, that are asked for."""
        return [shape for shape in shapes if not self.rows or shape[0] in self.rows]

    def random(self, size):
        """Keys and values of that size."""
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16).to(self.pages) for _ in "kv"]

    def cut(self, rows):
        """How so many are cut."""
        return triton_backend.tile_config(rows, self.kv_heads, DIM, self.pages == E4M3)

    def floor_us(self, tokens):
        """What an H200 takes to read so many."""
        return tokens * self.kv_heads * DIM * 2 * self.pages.itemsize / 4.3e12 * 1e6


def asked(warm, reads):
    """(what is asked for, whether only cuts that are taken are timed) of the command line of a tool
    that times decode attention. Else warm((Asked, read)) compiles for each of the ways to read, all
    at once, each in a process of its own.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--chosen", action="store_true", help="only with the cuts that are taken")
    parser.add_argument("--fp8", action="store_true", help="keys and values in e4m3")
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="of what shapes; all")
    options = parser.parse_args()
    pages = E4M3 if options.fp8 else torch.bfloat16
    what = Asked(options.heads, options.kv_heads, pages, tuple(options.rows))
    if not options.chosen:
        with ProcessPoolExecutor(len(reads), get_context("spawn")) as pool:
            list(pool.map(warm, [(what, read) for read in reads]))
    return what, options.chosen


def each_us(call, operands, times):
    """Microseconds of one call(operand): the median of seven replays, each of `times` rounds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for operand in operands[:2]:
            call(operand)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(times):
                for operand in operands:
                    call(operand)
        found = []
        for _ in range(7):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(stream)
            graph.replay()
            ended.record(stream)
            ended.synchronize()
            found.append(began.elapsed_time(ended))
    return sorted(found)[3] * 1e3 / (times * len(operands))
