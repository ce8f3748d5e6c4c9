"""How long kernels take in a CUDA graph: what the tools that time them share."""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch


def asked(warm, reads):
    """(query heads, KV heads, whether only cuts that are taken are timed) of the command line of a
    tool that times decode attention. Else warm((heads, kv_heads, read)) compiles for each of the
    ways to read, all at once, each in a process of its own.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--chosen", action="store_true", help="only with the cuts that are taken")
    options = parser.parse_args()
    heads, kv_heads = options.heads, options.kv_heads
    if not options.chosen:
        with ProcessPoolExecutor(len(reads), get_context("spawn")) as pool:
            list(pool.map(warm, [(heads, kv_heads, read) for read in reads]))
    return heads, kv_heads, options.chosen


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
