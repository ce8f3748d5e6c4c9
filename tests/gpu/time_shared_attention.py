"""Microseconds of decode attention of one layer where rows begin alike, and where they do not; a
tool, not a test.

Launches of six layers in a CUDA graph, pages of 64 in any order. Each line: a load, and for every
way to read what rows take that share nothing, and with what they have in common read once.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from graph_timing import DIM, asked, each_us

from pipeinfer.kernels.decode_attention import (
    DecodePrefixes,
    DecodeRows,
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    empty_prefix_merges,
    empty_splits,
    max_total_splits,
    split_rows,
)
from pipeinfer.kernels.tile_configs import DecodeConfig, LoadConfig
from pipeinfer.wire import PREFIX_UPPER

LAYERS, PAGES, PAGE, TIMES = 6, 7000, 64, 3


# How what rows have in common is read: for so many queries at a time, by the launch of all others
# or by one of its own, and in how many parts.
def prefixes(queries, splits, load=None):
    return {"prefix_queries": queries, "extra_prefix_splits": splits, "prefix_load": load}


READS = (
    {}, prefixes(32, 64), prefixes(32, 128),
    *(prefixes(64, splits, LoadConfig(32, 4, 3)) for splits in (8, 16, 32)),
    *(prefixes(64, splits, LoadConfig(64, 4, 2)) for splits in (16, 32)),
    *(prefixes(64, splits, LoadConfig(64, 4, 3)) for splits in (16, 32)),
    *(prefixes(128, splits, LoadConfig(32, 8, 3)) for splits in (8, 16)),
    *(prefixes(128, 16, LoadConfig(64, 8, stages)) for stages in (2, 3)),
)  # fmt: skip
# (rows, groups, tokens in common, tokens of its own from .. to)
LOADS = ((256, 0, 0, 300, 1400), (256, 16, 3968, 80, 400), (256, 1, 8000, 100, 400),
         (256, 1, 256, 100, 400), (128, 0, 0, 300, 1400), (64, 0, 0, 300, 1400),
         (64, 4, 1984, 80, 400), (32, 0, 0, 300, 1400), (32, 1, 1984, 80, 400),
         (256, 32, 512, 300, 1000), (16, 0, 0, 300, 1400), (16, 1, 3968, 80, 400),
         (8, 0, 0, 300, 1400), (8, 1, 3968, 80, 400), (4, 0, 0, 300, 1400),
         (4, 1, 3968, 80, 400), (1, 0, 0, 1000, 2000))  # fmt: skip


class Bench:
    """KV pages of six layers."""

    def __init__(self, what, pages=PAGES):
        self.heads = what.heads, what.kv_heads, DIM
        self.k, self.v = what.random((LAYERS, pages, PAGE, what.kv_heads, DIM))
        self.pages = pages
        self.wanted = {}

    def rows(self, load):
        """Lengths, pages by row, and (lines, seats) of the load."""
        count, groups, common, low, high = load
        source = random.Random(count)
        torch.manual_seed(count)
        own = [source.randint(low, high) for _ in range(count)]
        lengths = [common + tokens for tokens in own]
        free = torch.randperm(self.pages).tolist()
        shared = [[free.pop() for _ in range(common // PAGE)] for _ in range(groups)]
        lines, seats, table = [], [], []
        for row, length in enumerate(lengths):
            first = shared[row % groups] if groups else []
            need = -(-length // PAGE) - len(first)
            table.append(first + [free.pop() for _ in range(need)])
            rank, many = (row // groups, -(-(count - row % groups) // groups)) if groups else (0, 0)
            lines.append((row % groups) * PREFIX_UPPER + len(first) if groups else 0)
            seats.append(rank * PREFIX_UPPER + many)
        return lengths, table, lines, seats

    def time(self, load, cut, shares, check):
        """Microseconds of one launch."""
        lengths, table, lines, seats = self.rows(load)
        many, group = len(lengths), self.heads[0] // self.heads[1]
        sizes = torch.tensor([0, *map(len, table)]).cumsum(0).int().cuda()
        indices = torch.tensor([page for row in table for page in row], dtype=torch.int32).cuda()
        lengths = torch.tensor(lengths, dtype=torch.int32).cuda()
        # With a tile, but nothing in common: what everybody pays.
        words = [torch.tensor(x if shares else [0] * many, dtype=torch.int32).cuda()
                 for x in (lines, seats)]  # fmt: skip
        runs = (
            DecodePrefixes(*words, *empty_prefix_merges(many, torch.device("cuda")))
            if cut.prefix_queries
            else None
        )
        in_tile = cut.rows_per_prefix_tile(group)
        most = max_total_splits(many, cut, in_tile)
        pieces = empty_splits(most, torch.device("cuda"))
        rows = DecodeRows(lengths, sizes, indices, pieces, runs)
        scratch = DecodeWorkspace(
            many, most, self.heads, torch.device("cuda"), most, cut.prefix_queries
        )
        split_rows(lengths, pieces, cut, None, runs, in_tile, PAGE)
        q = torch.randn(many, self.heads[0], DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)

        def attend(layer):
            decode_attention(q, self.k[layer], self.v[layer], rows, DIM**-0.5, out, scratch, cut)

        found = each_us(attend, range(LAYERS), TIMES)
        if check:
            if load not in self.wanted:
                found_by = q, self.k[-1], self.v[-1], rows, DIM**-0.5
                self.wanted[load] = decode_attention_reference(*found_by).float()
            want = self.wanted[load]
            error = float((out.float() - want).norm() / want.norm())
            assert error < 6e-3, (cut, error)
        return found

    def cutting(self, load, cut):
        """Microseconds of cutting the rows, once a step."""
        lengths, _, lines, seats = self.rows(load)
        many, in_tile = len(lengths), cut.rows_per_prefix_tile(self.heads[0] // self.heads[1])
        words = [torch.tensor(x, dtype=torch.int32).cuda() for x in (lines, seats)]
        runs = (
            DecodePrefixes(*words, *empty_prefix_merges(many, torch.device("cuda")))
            if cut.prefix_queries
            else None
        )
        lengths = torch.tensor(lengths, dtype=torch.int32).cuda()
        pieces = empty_splits(max_total_splits(many, cut, in_tile), torch.device("cuda"))
        return each_us(lambda _: split_rows(lengths, pieces, cut, None, runs, in_tile, PAGE),
                       range(LAYERS), TIMES)  # fmt: skip


def warm(job):
    """Compiles, in a process of its own."""
    what, read = job
    cut = replace(DecodeConfig(128, 32, 1024, LoadConfig(32, 2, 3)), **read)
    Bench(what, 1200).time((64, 1, 512, 80, 100), cut, True, False)


def floor_us(load, what, shares):
    count, groups, common, low, high = load
    tokens = count * (low + high) / 2 + common * (groups if shares else count if groups else 0)
    return what.floor_us(tokens)


def main():
    what, chosen = asked(warm, READS)
    bench = Bench(what)
    for load in what.among(LOADS):
        now = what.cut(load[0])
        ways = [now] if chosen else [
            replace(now, **{"prefix_queries": 0, "prefix_load": None, **read}) for read in READS
        ]  # fmt: skip
        print(f"heads {what.heads} {load}: floor {floor_us(load, what, False):.0f}, shared "
              f"{floor_us(load, what, True):.0f}; now {bench.time(load, now, False, True):.1f}",
              flush=True)  # fmt: skip
        for cut in ways:
            apart = bench.time(load, cut, False, False)
            once = (
                f"{bench.time(load, cut, True, True):.1f}"
                if load[1] and cut.prefix_queries
                else "-"
            )
            name = cut.prefix_queries, tuple(cut.prefix_load or ()), cut.extra_prefix_splits
            print(f"  {name}: {apart:.1f}, shared {once}, cut {bench.cutting(load, cut):.1f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
