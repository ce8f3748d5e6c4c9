"""Microseconds of decode attention of one layer, for ways to cut rows; a tool, not a test.

Launches of six layers in a CUDA graph, pages of 64 in any order. The first line of a shape is of
what is taken, the second of ways to read, with rows cut hardly at all; the third of ways to cut,
with the best of those. `--heads 10 --kv-heads 2` is what each of four ranks has of Qwen3-14B.
"""

from __future__ import annotations

import itertools
import random

import torch
from graph_timing import DIM, asked, each_us

from pipeinfer.kernels.decode_attention import (
    DecodeRows,
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    empty_splits,
    split_rows,
)
from pipeinfer.kernels.tile_configs import DecodeConfig, LoadConfig

LAYERS, PAGES, PAGE, TIMES = 6, 7000, 64, 3
READS = ((64, 4, 2), (64, 4, 3), (64, 2, 3), (64, 8, 3), (32, 4, 3), (32, 4, 4), (32, 2, 3),
         (32, 2, 4), (32, 1, 4), (32, 1, 5), (16, 1, 5), (128, 4, 2), (128, 8, 2))  # fmt: skip
CUTS = tuple(itertools.product((32, 64, 128, 256, 512), (128, 256, 512, 1024)))
SHAPES = ((1, 128, 640), (1, 1000, 2000), (4, 300, 1400), (8, 300, 1400), (16, 300, 1400),
          (32, 300, 1400), (64, 250, 250), (64, 500, 500), (64, 300, 1400), (64, 1000, 2000),
          (96, 300, 1400), (128, 300, 1400), (192, 300, 1400), (256, 300, 1400), (256, 600, 600),
          (41, 0, 0))  # fmt: skip


def lengths_of(count, low, high):
    source = random.Random(count)
    if not low:
        return [16000] + [500] * (count - 1)
    return [source.randint(low, high) for _ in range(count)]


class Bench:
    """KV pages of six layers, and queries."""

    def __init__(self, what):
        self.heads, self.kv_heads = what.heads, what.kv_heads
        self.k, self.v = what.random((LAYERS, PAGES, PAGE, self.kv_heads, DIM))
        size = self.heads, self.kv_heads, DIM
        self.scratch = DecodeWorkspace(256, 256 + 512, size, torch.device("cuda"))

    def rows(self, lengths):
        pages = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(PAGES)[: sum(pages)].int()
        indptr = torch.tensor([0, *pages]).cumsum(0).int()
        pieces = empty_splits(len(lengths) + 512, torch.device("cuda"))
        keys = torch.tensor(lengths, dtype=torch.int32)
        return DecodeRows(keys.cuda(), indptr.cuda(), order.cuda(), pieces)

    def time(self, rows, cut, check=True):
        """Microseconds of one launch."""
        q = torch.randn(len(rows.lengths), self.heads, DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        rows.pieces.fill_(-1)
        split_rows(rows.lengths, rows.pieces, cut)
        torch.cuda.synchronize()

        def attend(layer):
            decode_attention(q, self.k[layer], self.v[layer], rows, DIM**-0.5, out, self.scratch,
                             cut)  # fmt: skip

        found = each_us(attend, range(LAYERS), TIMES)
        if check:
            want = decode_attention_reference(q, self.k[-1], self.v[-1], rows, DIM**-0.5).float()
            error = float((out.float() - want).norm() / want.norm())
            assert error < 6e-3, (cut, error)
        return found


def warm(job):
    """Compiles, in a process of its own."""
    global PAGES
    what, read = job
    PAGES = 256
    bench = Bench(what)
    bench.time(bench.rows([100] * 64), DecodeConfig(64, 16, 128, LoadConfig(*read)), check=False)


def compare(bench, lengths, what):
    """Ways to read, and then ways to cut with the best of those."""
    rows, few = bench.rows(lengths), len(lengths) * bench.kv_heads < 512
    found = []
    for read in READS:
        cut = DecodeConfig(64, 16, 256 if few else 512, LoadConfig(*read))
        found.append((round(bench.time(rows, cut, check=not found), 1), read))
    found.sort()
    print(f"READ {what}; {found}", flush=True)
    cuts = []
    for (extra, least), (_, read) in itertools.product(CUTS, found[:3]):
        cut = DecodeConfig(extra, 16, least, LoadConfig(*read))
        cuts.append((round(bench.time(rows, cut, check=False), 1), extra, least, read))
    cuts.sort()
    print(f"CUT  {what}; {cuts[:7]}; worst {cuts[-1]}", flush=True)


def main():
    asks, chosen = asked(warm, READS)
    bench = Bench(asks)
    for count, low, high in asks.among(SHAPES):
        lengths = lengths_of(count, low, high)
        floor = asks.floor_us(sum(lengths))
        what = f"heads {asks.heads} rows {count} of {low}-{high}: floor {floor:.1f}"
        cut = asks.cut(count)
        print(f"OWN  {what} own {bench.time(bench.rows(lengths), cut):.1f}", flush=True)
        if not chosen:
            compare(bench, lengths, what)


if __name__ == "__main__":
    main()
