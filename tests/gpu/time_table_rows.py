"""Decodes that read a page table by slot, beside flat page indices that the host packs; a tool.

    python tests/gpu/time_table_rows.py [--heads 16 --kv-heads 8] [--host-only]

For each number of rows: microseconds of the host to make and queue a step (the same rows one token
further, and other rows than before), and of the device for what a graph does with it before the
first layer, and for attention of all layers. One line of JSON each.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from graph_timing import each_us

from pipeinfer.attention.triton_decode import cut
from pipeinfer.engine.cuda.artificial import deep_decodes
from pipeinfer.engine.cuda.buffers import StepBuffers
from pipeinfer.engine.cuda.decode_packing import DecodePacker
from pipeinfer.engine.cuda.layout import Layout, Sizes
from pipeinfer.kernels.decode_attention import DecodeRows, Scratch, decode_attention
from pipeinfer.kernels.decode_pieces import cut_rows, most_pieces, room_for
from pipeinfer.steps.step import Growth, Step

LAYERS, PAGE, LONGEST, DIM, POOL = 28, 64, 256, 128, 8192
ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
FIELDS = 5  # of a request's sampling: 32 bits each
STEPS, HELD = 200, 26


@triton.jit
def _rows(
    rows, table, state, last_token, tokens, positions, places, lengths, begins, fields, count,
    width, PAGE: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What kernels index with, of `count` decode rows: rows holds | slots | starts |."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    slot = tl.load(rows + row, mask=inside, other=0)
    start = tl.load(rows + count + row, mask=inside, other=0)
    page = tl.load(table + slot * width + start // PAGE, mask=inside, other=0)
    tl.store(tokens + row, tl.load(last_token + slot, mask=inside, other=0), mask=inside)
    tl.store(positions + row, start, mask=inside)
    tl.store(places + row, page * PAGE + start % PAGE, mask=inside)
    tl.store(lengths + row, start + 1, mask=inside)
    tl.store(begins + row, slot * width, mask=inside)
    for field in tl.static_range(FIELDS):
        value = tl.load(state + field * (count + 1) + slot, mask=inside, other=0)
        tl.store(fields + field * count + row, value, mask=inside)


def steps_of(count: int) -> tuple[Step, list[Step]]:
    """A decode step of random lengths, and those that follow it."""
    source = random.Random(count)
    first = deep_decodes(count, 1, PAGE, 0)
    starts = np.array([source.randint(300, 1400) for _ in range(count)], dtype=np.int32)
    pages = np.random.default_rng(0).permutation(POOL - 1)[: count * HELD].reshape(count, HELD) + 1
    first = replace(
        first, slots=np.arange(count, dtype=np.int32), starts=starts, pages=pages.astype(np.int32)
    )
    following = []
    for number in range(1, STEPS):
        now = starts + number
        growing = np.flatnonzero(now % PAGE == 0)
        grown = Growth(growing, first.pages[growing, now[growing] // PAGE])
        following.append(replace(first, number=number, starts=now.astype(np.int32), growth=grown))
    return first, following


def host_us(make, steps: list) -> float:
    """Microseconds of one call, in the middle."""
    times = []
    for step in steps:
        began = time.perf_counter()
        make(step)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def packed_on_host(count: int, layout: Layout, buffer: np.ndarray, upload) -> dict[str, float]:
    """As engines do it: flat indices of all pages, kept and changed while rows stay the same."""
    packer = DecodePacker({count: layout}, PAGE, count, False)
    first, following = steps_of(count)

    def make(step: Step) -> None:
        upload(packer.pack(step, count, buffer).words)

    others = [replace(step, growth=None) for step in following]
    make(first)
    return {"same_rows": host_us(make, following), "other_rows": host_us(make, others)}


def rows_on_host(count: int, buffer: np.ndarray, upload) -> dict[str, float]:
    """Slots, starts and new pages: the same for all steps."""
    _, following = steps_of(count)

    def make(step: Step) -> None:
        assert step.growth is not None
        rows, used = step.growth.rows, 2 * count
        buffer[:count] = step.slots
        buffer[count:used] = step.starts
        for part in (step.slots[rows], step.starts[rows] // PAGE, step.growth.pages):
            buffer[used : used + len(part)] = part
            used += len(part)
        upload(used)

    return {"any_rows": host_us(make, following)}


class Bench:
    """Keys and values of all layers, and where the rows of one step lie in either form."""

    def __init__(self, heads: int, kv_heads: int, count: int) -> None:
        def zeros(*size: int, dtype=torch.int32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device="cuda")

        step, _ = steps_of(count)
        size = (LAYERS, POOL, PAGE, kv_heads, DIM)
        self.kv = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        self.q = torch.randn(count, heads, DIM, device="cuda", dtype=torch.bfloat16)
        self.out, self.count, self.how = torch.empty_like(self.q), count, cut(count, kv_heads, DIM)
        most = most_pieces(count, self.how)
        self.scratch = Scratch(count, most, heads, kv_heads, DIM, torch.device("cuda"))
        held = step.starts // PAGE + 1
        self.table = zeros(count + 1, LONGEST)
        self.table[:count, :HELD] = torch.from_numpy(step.pages).cuda()
        # The longest first, as engines have them in flat indices; by slot they stand as they come.
        order = np.argsort(step.starts)[::-1]
        self.flat = self._rows(most, step.starts[order])
        self.flat.indptr[1:] = torch.from_numpy(np.cumsum(held[order])).cuda()
        pages = [step.pages[row, : held[row]] for row in order]
        self.flat.indices[: held.sum()] = torch.from_numpy(np.concatenate(pages)).cuda()
        self.by_slot = replace(self._rows(most, step.starts), indices=self.table.view(-1))
        self.rows = torch.from_numpy(np.concatenate((step.slots, step.starts))).cuda()
        self.last_token = zeros(count + 1, dtype=torch.int64)
        self.tokens, self.known = zeros(count, dtype=torch.int64), zeros(count) - 1
        self.slots = self.rows[:count].clone()
        self.made = [zeros(count) for _ in range(2)]
        self.state, self.fields = zeros(FIELDS, count + 1), zeros(FIELDS, count)

    def _rows(self, most: int, starts: np.ndarray) -> DecodeRows:
        lengths = torch.from_numpy(starts + 1).cuda()
        indptr = torch.zeros(self.count + 1, dtype=torch.int32, device="cuda")
        indices = torch.zeros(self.count * LONGEST, dtype=torch.int32, device="cuda")
        return DecodeRows(lengths, indptr, indices, room_for(most, torch.device("cuda")))

    def before_packed(self) -> None:
        """What a graph does with a packed step: the ids of the step before."""
        pending = self.last_token.index_select(0, self.slots)
        torch.where(self.known < 0, pending, self.known.long())

    def before_rows(self) -> None:
        """What it does with slots and starts."""
        _rows[(triton.cdiv(self.count, 64),)](
            self.rows, self.table, self.state, self.last_token, self.tokens, *self.made,
            self.by_slot.lengths, self.by_slot.indptr, self.fields, self.count, LONGEST,
            PAGE=PAGE, FIELDS=FIELDS, BLOCK=64, num_warps=2,
        )  # fmt: skip

    def attend(self, rows: DecodeRows) -> None:
        cut_rows(rows.lengths, rows.pieces, self.how)
        for layer in range(LAYERS):
            decode_attention(
                self.q, self.kv[0][layer], self.kv[1][layer], rows, DIM**-0.5, self.out,
                self.scratch, self.how, early=layer > 0,
            )  # fmt: skip


def device_us(body) -> float:
    """Microseconds of a graph of it."""
    return each_us(lambda _: body(), (None,), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--host-only", action="store_true")
    options = parser.parse_args()
    for count in ROWS:
        layout = Layout(Sizes(count, count, count, 0, count * LONGEST))
        buffer, upload = room(layout.words, count, options.host_only)
        found: dict = {
            "rows": count,
            "host_packed_us": packed_on_host(count, layout, buffer, upload),
            "host_rows_us": rows_on_host(count, buffer, upload),
        }
        if not options.host_only:
            bench = Bench(options.heads, options.kv_heads, count)
            found["before_us"] = [device_us(bench.before_packed), device_us(bench.before_rows)]
            bench.before_rows()
            attending = [
                device_us(partial(bench.attend, rows)) for rows in (bench.flat, bench.by_slot) * 2
            ]
            found["attention_us_packed_and_rows_twice"] = attending
        print(json.dumps(found, default=lambda value: round(value, 1)), flush=True)


def room(words: int, count: int, host_only: bool):
    """Where steps are packed, and upload(words), which queues a copy of the first ones as engines
    do; on the host alone it does nothing."""
    if host_only:
        return np.zeros(words, dtype=np.int32), lambda words: None
    buffers = StepBuffers(words, count, torch.device("cuda"))
    return buffers.host, partial(buffers.copy_to, buffers.mirror)


if __name__ == "__main__":
    main()
