"""Times the products of a mixture with every tile that could be good; a tool.

`python tests/gpu/time_moe.py [SECONDS [FORM ...]]` prints, for each form and number of tokens, the
best tiles in microseconds of both products at the shape of Qwen3-30B-A3B, and what a whole layer of
experts takes with them and with those of kernels/tile_configs.py. One graph holds several
routings, so that little is in the L2 cache. $OUT/moe.jsonl has every time.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from graph_timing import each_us

from pipeinfer.kernels import moe_fp8
from pipeinfer.kernels.elementwise import quantize_groups
from pipeinfer.kernels.moe import (
    down_gemm,
    fused_experts,
    gate_up_gemm,
    moe_align_block_size,
    moe_sum,
)
from pipeinfer.kernels.moe_fp8 import INTERMEDIATE_GROUP, fused_experts_w8a8_by_pair
from pipeinfer.kernels.tile_configs import (
    MOE_CONFIGS_W8A8,
    MOE_CONFIGS_W8A16,
    MOE_CONFIGS_W16,
    MoeConfig,
    MoeGemmConfig,
    moe_config,
    moe_w8a8_config,
)

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
GATE_UP, DOWN = "gate_up", "down"
BF16, BLOCKS, ROWS = "bf16", "fp8 blocks", "fp8 rows"  # the last: what they multiply is rounded
FORMS = BF16, BLOCKS, ROWS
TABLES = {BF16: MOE_CONFIGS_W16, BLOCKS: MOE_CONFIGS_W8A16, ROWS: MOE_CONFIGS_W8A8}
ERRORS = {BF16: 0.006, BLOCKS: 0.006, ROWS: 0.05}
# The most telling first, for a limit that is too short.
TOKENS = (256, 64, 1024, 16, 8192, 1, 128, 512, 32, 4, 2048, 2, 8, 4096)
BYTES_PER_US = 4.3e6
FLOP_PER_US = 790e6
EACH = 22
SIDE = 128
FEW_EXPERTS = 16  # where candidates are checked


def heights(tokens):
    """Rows of a tile that may be good."""
    mean = tokens * TOP_K / EXPERTS
    found = [rows for rows in (16, 32, 64, 128) if rows / 4 <= mean <= 2 * rows]
    return found[-3:] if found else [16 if mean < 16 else 128]


def cuts(kind, form, rows):
    """Those in use, and a fixed choice of what has room and uses tensor cores well."""
    used = [getattr(shape, kind) for _, shape in TABLES[form] if shape.block_m == rows]
    both, nbytes = 2 if kind == GATE_UP else 1, 2 if form == BF16 else 1
    found = []
    for columns, depth, warps, stages, turned in itertools.product(
        (32, 64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4, 5), (False, True)
    ):
        shared = stages * depth * ((1 if form == ROWS else 2) * rows + both * nbytes * columns)
        sums = both * rows * columns / (32 * warps)  # registers of a thread
        first = 2 * columns if form == ROWS and both == 2 else columns
        full = first if turned else rows  # what tensor cores divide among groups of four warps
        if turned and full < 16 * warps:
            continue
        if not turned and rows >= 64 and full < 16 * warps and columns < 128:
            continue
        if form == BLOCKS and (columns > SIDE or depth > SIDE):
            continue
        if form == ROWS and (
            columns not in (64, 128) or depth != (SIDE if both == 2 else INTERMEDIATE_GROUP)
        ):
            continue
        if form == ROWS and not turned and rows < 64:  # no tensor cores for e4m3 are so narrow
            continue
        if (12_000 if form == ROWS else 30_000) <= shared <= 200_000 and 4 <= sums <= 128:
            found.append(MoeGemmConfig(columns, depth, warps, stages, turned))
    random.Random(f"{kind}{form}{rows}").shuffle(found)
    return list(dict.fromkeys(used + found))[:EACH]


def in_form(form, weight):
    """(weight as stored, scales or None)"""
    if form == BF16:
        return weight, None
    if form == ROWS:
        scale = weight.abs().amax(2, keepdim=True).float() / 448
        return (weight / scale).to(torch.float8_e4m3fn), scale
    blocks = weight.unflatten(2, (-1, SIDE)).unflatten(1, (-1, SIDE)).float()
    scale = blocks.abs().amax((2, 4)) / 448
    rounded = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return rounded.flatten(3, 4).flatten(1, 2), scale.contiguous()


def decoded(weight, scale):
    if scale is None:
        return weight.float()
    if scale.shape[1] < weight.shape[1]:
        scale = scale.repeat_interleave(SIDE, 1).repeat_interleave(SIDE, 2)
    return weight.float() * scale


def randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def stacks(form, experts):
    """By kind: weights and scales, made a few experts at a time."""
    made = {}
    for kind, rows, depth in ((GATE_UP, 2 * INTER, HIDDEN), (DOWN, HIDDEN, INTER)):
        parts = [in_form(form, randn(16, rows, depth) / depth**0.5) for _ in range(experts // 16)]
        weights, scales = zip(*parts, strict=True)
        made[kind] = torch.cat(weights), None if scales[0] is None else torch.cat(scales)
    return made


def routed(tokens, experts):
    weights, chosen = torch.rand(tokens, experts, device="cuda").topk(TOP_K)
    return weights.bfloat16(), chosen.int()


def shape(rows, gate_up=None, down=None):
    return MoeConfig(rows, gate_up or down, down or gate_up)


def run(kind, stack, rows, cut, operand):
    x, middle, weights, plans = operand
    tile = shape(rows, cut)
    if isinstance(x, tuple):
        if kind == GATE_UP:
            return moe_fp8.gate_up_gemm_w8a8(x, stack[kind], plans[rows], TOP_K, tile)
        return moe_fp8.down_gemm_w8a8(middle, stack[kind], weights, plans[rows], tile)
    if kind == GATE_UP:
        return gate_up_gemm(x, *stack[kind], plans[rows], TOP_K, tile)
    return down_gemm(middle, *stack[kind], weights, plans[rows], tile)


def operand(form, tokens, experts, rows):
    """Tokens, what is between the products, weights, and the order for each number of rows."""
    weights, chosen = routed(tokens, experts)
    plans = {height: moe_align_block_size(chosen, experts, height) for height in rows}
    x, middle = randn(tokens, HIDDEN), randn(tokens * TOP_K, INTER)
    if form == ROWS:
        x, middle = quantize_groups(x, SIDE), quantize_groups(middle, INTERMEDIATE_GROUP)
    return (x, middle, weights, plans), chosen


def plain(rows):
    """As bfloat16."""
    if not isinstance(rows, tuple):
        return rows
    values, scale = rows
    part = values.shape[1] // scale.shape[1]
    return (values.float() * scale.repeat_interleave(part, 1)).bfloat16()


def wanted(kind, stack, given, chosen):
    x, middle, weights, _ = given
    x, middle, values = plain(x), plain(middle), decoded(*stack[kind])
    by_pair = (x.repeat_interleave(TOP_K, 0) if kind == GATE_UP else middle).float()
    flat = chosen.flatten()
    out = torch.empty(len(flat), values.shape[1], device="cuda")
    for expert in range(len(values)):
        mine = flat == expert
        out[mine] = by_pair[mine] @ values[expert].T
    if kind == DOWN:
        return out * weights.flatten()[:, None].float()
    gate, up = out.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def check(job):
    """Compiles; the relative error, or what went wrong."""
    kind, form, rows, cut = job
    try:
        torch.manual_seed(0)
        stack = stacks(form, FEW_EXPERTS)
        given, chosen = operand(form, 2 * rows + 10, FEW_EXPERTS, [rows])
        got = plain(run(kind, stack, rows, cut, given)).float()
        want = wanted(kind, stack, given, chosen)
        return job, float((got - want).norm() / want.norm())
    except Exception as error:
        return job, repr(error)[:100]


def checked(forms):
    """The candidates that compute what they should."""
    begin = time.monotonic()
    rows = sorted({height for tokens in TOKENS for height in heights(tokens)})
    jobs = [
        (kind, form, height, cut)
        for height in rows
        for form in forms
        for kind in (GATE_UP, DOWN)
        for cut in cuts(kind, form, height)
    ]
    workers = min(15, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(check, jobs, chunksize=2))
    good = {job for job, error in found if isinstance(error, float) and error < ERRORS[job[1]]}
    took = time.monotonic() - begin
    print(f"{len(good)} of {len(jobs)} tiles are right, {took:.0f} s", flush=True)
    for job, error in found:
        if job not in good:
            print("WRONG", job, error, flush=True)
    return good


def floors(tokens, form, operands, kind):
    """The least that one product can take, by bytes and by operations."""
    matrices = 2 if kind == GATE_UP else 1
    experts = sum(len(chosen.unique()) for _, chosen in operands) / len(operands)
    nbytes = experts * matrices * INTER * HIDDEN * (2 if form == BF16 else 1)
    flop = tokens * TOP_K * matrices * 2 * INTER * HIDDEN
    return max(nbytes / BYTES_PER_US, flop / FLOP_PER_US)


def show(good, lines, form, stack, tokens):
    count = 8 if tokens <= 128 else 4 if tokens <= 1024 else 2
    rows = heights(tokens)
    operands = [operand(form, tokens, EXPERTS, rows) for _ in range(count)]
    given = [one for one, _ in operands]
    best = {}
    for kind in (GATE_UP, DOWN):
        floor, found = floors(tokens, form, operands, kind), []
        tried = [(height, cut) for height in rows for cut in cuts(kind, form, height)]
        for height, cut in tried:
            if (kind, form, height, cut) not in good:
                continue
            us = each_us(partial(run, kind, stack, height, cut), given, 1)
            found.append((us, height, cut))
            record = [form, tokens, kind, height, us, floor, list(vars(cut).values())]
            lines.write(json.dumps(record) + "\n")
        found.sort(key=lambda one: one[0])
        best[kind] = found
        text = "; ".join(f"{us:.1f} {h} {tuple(vars(cut).values())}" for us, h, cut in found[:4])
        print(f"{form}, {tokens} tokens, {kind}: floor {floor:.1f}; {text}", flush=True)
    lines.flush()
    layers(form, stack, tokens, operands, best)


def layers(form, stack, tokens, operands, best):
    """Whole layers: with the best tiles of each height, and with those in use."""
    pairs = tokens * TOP_K
    used = moe_w8a8_config(pairs, EXPERTS) if form == ROWS else None
    shapes = {"in use": used or moe_config(pairs, EXPERTS, 16 if form == BF16 else 8)}
    for height in heights(tokens):
        found = [next((c for _, h, c in best[k] if h == height), None) for k in (GATE_UP, DOWN)]
        if None not in found:
            shapes[str(height)] = MoeConfig(height, *found)
    (gate_up, gate_up_scale), (down, down_scale) = stack[GATE_UP], stack[DOWN]

    def whole(one, shape):
        (x, _, weights, _), chosen = one
        if form == ROWS:
            by_pair = fused_experts_w8a8_by_pair(
                x, stack[GATE_UP], stack[DOWN], weights, chosen, config=shape
            )
            return moe_sum(by_pair, chosen, None, EXPERTS)
        scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
        return fused_experts(x, gate_up, down, weights, chosen, shape, **scales)

    times = {
        name: each_us(partial(whole, shape=shape), operands, 1) for name, shape in shapes.items()
    }
    text = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    quickest = min(times, key=lambda name: times[name])
    print(f"{form}, {tokens} tokens, experts: {text}; {quickest}: {shapes[quickest]}", flush=True)


def main():
    begin, limit = time.monotonic(), float(sys.argv[1]) if len(sys.argv) > 1 else 1e9
    forms = sys.argv[2:] or FORMS
    good = checked(forms)
    stack = {form: stacks(form, EXPERTS) for form in forms}
    with (Path(os.environ.get("OUT", ".")) / "moe.jsonl").open("w") as lines:
        for tokens, form in itertools.product(TOKENS, forms):
            if time.monotonic() - begin < limit:
                show(good, lines, form, stack[form], tokens)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
