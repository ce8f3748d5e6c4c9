"""Times products with weights in FP8 and in 4 bits, of the 14B shape, beside bfloat16's; a tool.

`python tests/gpu/time_formats.py [SECONDS [fp8] [int4] [ROWS ...]]` prints microseconds for each
matrix and number of rows. One graph holds a product with each of several weights, so that none is
in the L2 cache. The rounding of rows is timed by itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from graph_timing import each_us
from torch.nn import functional

from pipeinfer.kernels import gemm
from pipeinfer.kernels.elementwise import (
    quantize_groups,
    rms_norm_quantized,
    swiglu_quantize_groups,
)
from pipeinfer.kernels.formats import INT4_TILE_K, dequantize_int4, quantize_rows
from pipeinfer.kernels.tile_configs import GemmConfig, Int4GemmConfig, small_m_gemm_config

SHAPES = {"qkv": (7168, 5120), "out": (5120, 5120), "gate-up": (34816, 5120), "down": (5120, 17408)}
ROWS = (1, 16, 32, 64, 128, 256, 1024, 8192)
MORE_THAN_L2 = 150e6
GROUP = 128
BYTES_PER_US = 4.3e6
# rows, columns, step, splits, warps, stages; splits are summed up by what follows.
NARROW = [(16, 64, 128, 1, 4, 8), (16, 64, 256, 1, 4, 5), (16, 64, 128, 2, 4, 6),
          (16, 64, 128, 4, 4, 4), (16, 64, 256, 2, 4, 4), (16, 64, 256, 4, 4, 4),
          (16, 32, 256, 1, 4, 5), (16, 128, 128, 2, 4, 5), (16, 128, 128, 4, 8, 4),
          (32, 64, 128, 1, 4, 6), (32, 64, 256, 2, 4, 4), (64, 64, 128, 1, 4, 5),
          (64, 64, 128, 2, 4, 5), (64, 128, 128, 1, 4, 4), (64, 128, 128, 2, 8, 4)]  # fmt: skip
# rows, columns, runs, splits, warps, stages
FEW = [(8, 64, 2, 1, 4, 3), (8, 64, 2, 2, 4, 3), (8, 64, 2, 4, 4, 3), (8, 64, 1, 8, 4, 4),
       (8, 32, 2, 2, 2, 3), (8, 32, 2, 4, 2, 4), (8, 128, 2, 2, 8, 3), (8, 128, 1, 4, 4, 3),
       (16, 64, 2, 1, 4, 3), (16, 64, 2, 2, 4, 3), (16, 64, 2, 4, 4, 3), (16, 64, 2, 5, 4, 3),
       (16, 64, 2, 2, 4, 4), (16, 64, 1, 8, 4, 3), (16, 128, 2, 2, 8, 3), (16, 128, 1, 8, 8, 4),
       (32, 64, 2, 1, 4, 3), (32, 64, 1, 4, 4, 4), (32, 64, 2, 4, 4, 3), (32, 64, 1, 8, 4, 4),
       (32, 128, 1, 4, 8, 3), (64, 64, 2, 2, 4, 3), (64, 64, 1, 1, 4, 4), (64, 128, 1, 2, 8, 3),
       (64, 128, 1, 4, 8, 3), (128, 64, 1, 1, 4, 4), (128, 64, 1, 2, 4, 3)]  # fmt: skip
PARTS = ("out", "down")  # which what follows adds up


@lru_cache
def arrived():
    return torch.zeros(4096, device="cuda", dtype=torch.int32)


def operands(width, depth, rows, copies=1):
    source = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": source}
    x = torch.randn(rows, depth, **options)
    return x, [torch.randn(width, depth, **options) * 0.02 for _ in range(copies)]


def in_4_bits(weight):
    """Of random numbers: what they are costs nothing more or less."""
    width, depth = weight.shape
    numbers = torch.randint(-(2**31), 2**31, (depth // INT4_TILE_K, width, 16), device="cuda").int()
    kept = torch.full((depth // GROUP, width, 2), 8, device="cuda", dtype=torch.bfloat16)
    kept[..., 0] = 0.005
    return numbers, kept


def suits(rows, height):
    return height == (8 if rows <= 8 else rows) or (height == 16 and rows <= 16)


def jobs(kinds, heights):
    for name, (width, depth) in SHAPES.items():
        for rows in heights:
            for shape in NARROW if "fp8" in kinds and rows <= 64 else ():
                divides = depth % (shape[3] * shape[2]) == 0 and width % shape[1] == 0
                if divides and rows <= shape[0] <= max(rows, 16):
                    yield name, rows, "fp8", shape
            for shape in FEW if "int4" in kinds else ():
                if suits(rows, shape[0]) and depth // INT4_TILE_K % (shape[2] * shape[3]) == 0:
                    yield name, rows, "int4", shape


def call(kind, x, weight, shape, name):
    """x: in FP8, RoundedRows' two parts."""
    if kind == "int4":
        return gemm.int4_small_m_gemm(
            x, *weight, Int4GemmConfig(*shape), None, None if name in PARTS else arrived()
        )
    made, scales = GemmConfig(*shape), gemm.GemmScales(x[1], weight[1])
    if made.split_k > 1:
        return gemm.split_k_gemm(x[0], weight[0], made, None, scales)
    return gemm.small_m_gemm(x[0], weight[0], made, None, scales, torch.bfloat16)


def check(job):
    """Compiles; the relative error, or what went wrong."""
    name, rows, kind, shape = job
    try:
        x, (plain,) = operands(*SHAPES[name], rows)
        if kind == "int4":
            weight = in_4_bits(plain)
            numbers, kept = weight
            scale, zero = kept.permute(2, 1, 0)
            plain = dequantize_int4(numbers.transpose(0, 1), scale, zero, x.dtype)
            want = functional.linear(x, plain).float()
        else:
            weight, x = quantize_rows(plain), quantize_rows(x)
            left, right = (values.float() * scale for values, scale in (x, weight))
            want = functional.linear(left, right)
        got = call(kind, x, weight, shape, name).float()
        got = got.sum(0) if got.dim() == 3 else got
        return job, float((got - want).norm() / want.norm())
    except Exception as error:
        return job, repr(error)[:150]


def main():
    begin, limit = time.monotonic(), float(sys.argv[1]) if len(sys.argv) > 1 else 1e9
    kinds = [word for word in sys.argv[2:] if not word.isdigit()] or ("fp8", "int4")
    heights = [int(word) for word in sys.argv[2:] if word.isdigit()] or ROWS
    every = list(jobs(kinds, heights))
    with ProcessPoolExecutor(10, multiprocessing.get_context("spawn")) as pool:
        checked = dict(pool.map(check, every, chunksize=2))
    for job, error in checked.items():
        if not isinstance(error, float) or error > 0.01:
            print("WRONG", job, error, flush=True)
    print(f"{len(every)} compiled, {time.monotonic() - begin:.0f} s", flush=True)
    with (Path(os.environ.get("OUT", ".")) / "formats.jsonl").open("w") as lines:
        for name, (width, depth) in SHAPES.items():
            for rows in heights:
                if time.monotonic() - begin < limit:
                    show(lines, checked, name, width, depth, rows)


def show(lines, checked, name, width, depth, rows):
    copies = max(2, min(8, int(MORE_THAN_L2 / (width * depth)) + 1))
    x, plain = operands(width, depth, rows, copies)
    eight = [quantize_rows(weight) for weight in plain]
    four = [in_4_bits(weight) for weight in plain]
    rounded, by_row = quantize_groups(x)
    parts, by_part = quantize_groups(x, 128)
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
        return gemm.block_scaled_gemm(parts, by_part, weight[0], blocks, x.dtype)

    times = max(1, 12 // copies)
    found = {"bf16": each_us(lambda weight: functional.linear(x, weight), plain, times)}
    usual = small_m_gemm_config("product", rows, width, depth)
    if usual is not None:
        found["bf16 skinny"] = each_us(lambda w: gemm.small_m_gemm(x, w, usual), plain, times)
    merged = torch.cat((x, x), dim=1)
    found["round"] = each_us(lambda _: quantize_groups(x), plain, times)
    found["swiglu, round"] = each_us(lambda _: swiglu_quantize_groups(merged), plain, times)
    found["norm, round"] = each_us(lambda _: rms_norm_quantized(x, x[0], 1e-6, x), plain, times)
    for label, one in (("scaled_mm", scaled), ("sgl", of_sgl), ("blocks", in_blocks)):
        try:
            found[label] = each_us(one, eight, times)
        except Exception as error:
            print(name, rows, label, repr(error)[:200], flush=True)
    found["decode 4 bits"] = each_us(lambda w: gemm.int4_dequantize(*w, x.dtype), four, times)
    for (of, height, kind, shape), error in checked.items():
        if (of, height) == (name, rows) and isinstance(error, float):
            weights, given = (four, x) if kind == "int4" else (eight, (rounded, by_row))
            found[f"{kind} {shape}"] = each_us(
                lambda w, kind=kind, shape=shape, given=given: call(kind, given, w, shape, name),
                weights, times,
            )  # fmt: skip
    lines.write(json.dumps([name, rows, found]) + "\n")
    floor = width * depth / BYTES_PER_US
    said = "; ".join(f"{label} {us:.1f}" for label, us in found.items())
    print(f"{name} {rows}: floor of 8 bits {floor:.1f}: {said}", flush=True)


if __name__ == "__main__":
    main()
