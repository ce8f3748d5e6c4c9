"""Times products with weights in FP8 and in 4 bits, of the 14B shape, beside bfloat16's; a tool.

`python tests/gpu/time_formats.py [SECONDS]` prints microseconds for each matrix and number of rows.
One graph holds a product with each of several weights, so that none is in the L2 cache. The
rounding of rows is timed by itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from graph_timing import each_us
from torch.nn import functional

from pipeinfer.kernels import fp8_blocks, int4, skinny
from pipeinfer.kernels.fp8 import round_rows
from pipeinfer.kernels.rounding import round_parts
from pipeinfer.kernels.skinny_tiles import Tile, tile

SHAPES = {"qkv": (7168, 5120), "out": (5120, 5120), "gate-up": (34816, 5120), "down": (5120, 17408)}
ROWS = (1, 16, 32, 64, 128, 256, 1024, 8192)
MORE_THAN_L2 = 150e6
GROUP = 128
BYTES_PER_US = 4.3e6
# rows, columns, step, splits, warps, stages; splits are summed up by what follows.
SKINNY = {
    16: [(16, 32, 128, 1, 4, 5), (16, 64, 128, 1, 4, 4), (16, 64, 128, 4, 4, 4),
         (16, 64, 256, 2, 4, 4), (16, 32, 256, 1, 4, 4)],
    32: [(32, 32, 128, 1, 4, 4), (32, 64, 128, 1, 4, 4), (32, 64, 128, 4, 4, 4),
         (32, 64, 256, 2, 4, 3)],
    64: [(64, 64, 128, 1, 4, 4), (64, 64, 128, 1, 8, 4), (64, 64, 128, 4, 4, 4),
         (64, 128, 128, 1, 8, 4)],
    128: [(128, 64, 128, 1, 8, 4), (128, 128, 128, 1, 8, 3)],
}  # fmt: skip
# rows and columns of a tile, splits
FEW = [(16, 32, 8), (16, 32, 4), (16, 32, 2), (16, 64, 8), (16, 64, 4), (32, 32, 4), (32, 64, 4),
       (64, 32, 4), (64, 64, 4), (64, 64, 2)]  # fmt: skip


def operands(width, depth, rows, copies=1):
    source = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": source}
    x = torch.randn(rows, depth, **options)
    return x, [torch.randn(width, depth, **options) * 0.02 for _ in range(copies)]


def in_4_bits(weight):
    """Of random numbers: what they are costs nothing more or less."""
    width, depth = weight.shape
    numbers = torch.randint(0, 256, (width, depth // 2), device="cuda", dtype=torch.uint8)
    scale = torch.full((width, depth // GROUP), 0.005, device="cuda", dtype=torch.bfloat16)
    return numbers, scale, torch.full(scale.shape, 8, device="cuda", dtype=torch.uint8)


def height(rows):
    return next((most for most in SKINNY if rows <= most), 0)


def divides(width, depth, shape):
    return depth % (shape[3] * shape[2]) == 0 and width % shape[1] == 0


def jobs():
    for name, (width, depth) in SHAPES.items():
        for rows in ROWS:
            for shape in SKINNY.get(height(rows), []):
                if divides(width, depth, shape):
                    yield name, rows, "fp8", shape
            for shape in FEW:
                if rows <= 64 and shape[0] <= max(16, rows) and depth % (shape[2] * 128) == 0:
                    yield name, rows, "int4", shape


def call(kind, x, weight, shape):
    if kind == "int4":
        return int4.few_rows(x, *weight, None, shape[2], shape[0], shape[1])
    made = Tile(*shape)
    return (skinny.split_product if made.splits > 1 else skinny.product)(
        x, weight[0], made, None, weight[1]
    )


def check(job):
    """Compiles; the relative error, or what went wrong."""
    name, rows, kind, shape = job
    try:
        x, (plain,) = operands(*SHAPES[name], rows)
        if kind == "int4":
            weight = in_4_bits(plain)
            want = functional.linear(x, int4.decode_reference(*weight, x.dtype)).float()
        else:
            weight = round_rows(plain)
            want = functional.linear(x, (weight[0].float() * weight[1]).to(x.dtype)).float()
        got = call(kind, x, weight, shape).float()
        got = got.sum(0) if got.dim() == 3 else got
        return job, float((got - want).norm() / want.norm())
    except Exception as error:
        return job, repr(error)[:150]


def main():
    begin, limit = time.monotonic(), float(sys.argv[1]) if len(sys.argv) > 1 else 1e9
    every = list(jobs())
    with ProcessPoolExecutor(10, multiprocessing.get_context("spawn")) as pool:
        checked = dict(pool.map(check, every, chunksize=2))
    for job, error in checked.items():
        if not isinstance(error, float) or error > 0.01:
            print("WRONG", job, error, flush=True)
    print(f"{len(every)} compiled, {time.monotonic() - begin:.0f} s", flush=True)
    with (Path(os.environ.get("OUT", ".")) / "formats.jsonl").open("w") as lines:
        for name, (width, depth) in SHAPES.items():
            for rows in ROWS:
                if time.monotonic() - begin < limit:
                    show(lines, checked, name, width, depth, rows)


def show(lines, checked, name, width, depth, rows):
    copies = max(2, min(8, int(MORE_THAN_L2 / (width * depth)) + 1))
    x, plain = operands(width, depth, rows, copies)
    eight = [round_rows(weight) for weight in plain]
    four = [in_4_bits(weight) for weight in plain]
    rounded, by_row = round_parts(x)
    parts, by_part = round_parts(x, 128)
    blocks = torch.ones(width // 128, depth // 128, device="cuda")

    def scaled(weight):
        return torch.ops.aten._scaled_mm(
            rounded, weight[0].t(), by_row, weight[1].t(), None, out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def of_sgl(weight):
        from sgl_kernel import fp8_scaled_mm

        return fp8_scaled_mm(rounded, weight[0].t(), by_row, weight[1], x.dtype)

    def in_blocks(weight):
        return fp8_blocks.block_product(parts, by_part, weight[0], blocks, x.dtype)

    times = max(1, 12 // copies)
    found = {"bf16": each_us(lambda weight: functional.linear(x, weight), plain, times)}
    usual = tile("product", rows, width, depth)
    if usual is not None:
        found["bf16 skinny"] = each_us(lambda w: skinny.product(x, w, usual), plain, times)
    found["round"] = each_us(lambda _: round_parts(x), plain, times)
    for label, one in (("scaled_mm", scaled), ("sgl", of_sgl), ("blocks", in_blocks)):
        try:
            found[label] = each_us(one, eight, times)
        except Exception as error:
            print(name, rows, label, repr(error)[:200], flush=True)
    found["decode 4 bits"] = each_us(lambda w: int4.decode(*w, x.dtype), four, times)
    for (of, height, kind, shape), error in checked.items():
        if (of, height) == (name, rows) and isinstance(error, float):
            weights = four if kind == "int4" else eight
            found[f"{kind} {shape}"] = each_us(
                lambda w, kind=kind, shape=shape: call(kind, x, w, shape), weights, times
            )
    lines.write(json.dumps([name, rows, found]) + "\n")
    floor = width * depth / BYTES_PER_US
    said = "; ".join(f"{label} {us:.1f}" for label, us in found.items())
    print(f"{name} {rows}: floor of 8 bits {floor:.1f}: {said}", flush=True)


if __name__ == "__main__":
    main()
