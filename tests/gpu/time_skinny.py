"""Times products of few rows with every tile that could be good, beside torch's; a tool.

Prints, for each shape and number of rows, the best tiles in microseconds. One graph holds a product
with each of many weights, so that none is in the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from graph_timing import each_us
from torch.nn import functional

from pipeinfer.kernels import gemm
from pipeinfer.kernels.tile_configs import GemmConfig

PRODUCT, GATED, SPLIT = "product", "gated", "split"
# Hidden, rows of QKV, columns of the output projection, intermediate; after "/", ranks.
MODELS = {
    "0.6B": (1024, 4096, 2048, 3072),
    "4B": (2560, 6144, 4096, 9728),
    "8B": (4096, 6144, 4096, 12288),
    "14B": (5120, 7168, 5120, 17408),
    "14B/2": (5120, 3584, 2560, 8704),
    "14B/4": (5120, 1792, 1280, 4352),
    "32B/4": (5120, 2560, 2048, 6400),
}
# Rows, and those of a tile.
ROWS = {"1": (1, 16), "32": (32, 32), "64": (64, 64), "128": (128, 64), "128b": (128, 128),
        "192": (192, 64), "256": (256, 64), "256b": (256, 128), "384b": (384, 128)}  # fmt: skip
BYTES_PER_US = 4.3e6
MORE_THAN_L2 = 150e6
EACH = 16


def asked():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shape later")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(ROWS))
    return parser.parse_args()


def products(models):
    for name in models.split(","):
        hidden, qkv, inner, inter = MODELS[name]
        summed = PRODUCT if "/" in name else SPLIT  # ranks add up whole products
        yield name, "qkv", PRODUCT, qkv, hidden
        yield name, "out", summed, hidden, inner
        yield name, "gate-up", GATED, inter, hidden
        yield name, "down", summed, hidden, inter


def tiles(kind, width, depth, rows, height):
    found = []
    for columns, step, splits, warps, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (4, 8), (3, 4, 6)
    ):
        programs = width // columns * splits * -(-rows // height)
        shared = stages * step * 2 * (height + columns * (2 if kind == GATED else 1))
        fits = 24_000 <= shared <= 200_000 and columns * height <= 64 * 32 * warps
        divides = depth % (splits * step) == 0 and width % columns == 0
        if divides and fits and 60 <= programs <= 700 and (splits == 1 or kind == SPLIT):
            found.append(GemmConfig(height, columns, step, splits, warps, stages))
    random.Random(f"{kind}{width}{depth}{rows}").shuffle(found)
    return found[:EACH]


def run(kind, x, weight, tile):
    call = {
        PRODUCT: gemm.small_m_gemm,
        GATED: gemm.small_m_gemm_swiglu,
        SPLIT: gemm.split_k_gemm,
    }[kind]
    return call(x, weight, tile)


def torchs(kind, x, weight):
    out = functional.linear(x, weight)
    if kind == GATED:
        import sgl_kernel

        return sgl_kernel.silu_and_mul(out)
    return out


def tensors(kind, width, depth, rows, copies):
    source = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": source}
    tall = width * (2 if kind == GATED else 1)
    x = torch.randn(rows, depth, **options)
    return x, [torch.randn(tall, depth, **options) * 0.02 for _ in range(copies)]


def check(job):
    """Compiles; the relative error, or what went wrong."""
    kind, width, depth, rows, tile = job
    try:
        x, (weight,) = tensors(kind, width, depth, rows, 1)
        got = run(kind, x, weight, tile).float()
        got = got.sum(0) if kind == SPLIT else got
        if kind == GATED:
            want = gemm.gemm_swiglu_reference(x, weight)
        else:
            want = gemm.gemm_reference(x, weight)
        return job, float((got - want).norm() / want.norm())
    except Exception as error:
        return job, repr(error)[:100]


def main():
    options, begin = asked(), time.monotonic()
    sizes = {label: ROWS[label] for label in options.rows.split(",")}
    jobs = [
        (kind, width, depth, rows, tile)
        for _, _, kind, width, depth in products(options.models)
        for rows, height in sizes.values()
        for tile in tiles(kind, width, depth, rows, height)
    ]
    jobs = list(dict.fromkeys(jobs))
    with ProcessPoolExecutor(15, multiprocessing.get_context("spawn")) as pool:
        checked = list(pool.map(check, jobs, chunksize=4))
    good = {job for job, error in checked if isinstance(error, float) and error < 0.006}
    print(
        f"{len(good)} of {len(jobs)} tiles are right, {time.monotonic() - begin:.0f} s", flush=True
    )
    for job, error in checked:
        if job not in good:
            print("WRONG", job, error, flush=True)
    with (Path(os.environ.get("OUT", ".")) / "skinny.jsonl").open("w") as lines:
        for name, part, kind, width, depth in products(options.models):
            for label, (rows, height) in sizes.items():
                if time.monotonic() - begin < options.seconds:
                    show(good, lines, name, part, kind, width, depth, label, rows, height)


def show(good, lines, name, part, kind, width, depth, label, rows, height):
    nbytes = 2 * width * depth * (2 if kind == GATED else 1)
    copies = max(2, min(28, int(MORE_THAN_L2 / nbytes) + 1))
    x, weights = tensors(kind, width, depth, rows, copies)
    times = max(1, 20 // copies)
    base = each_us(lambda weight: torchs(kind, x, weight), weights, times)
    found = []
    for tile in tiles(kind, width, depth, rows, height):
        if (kind, width, depth, rows, tile) in good:
            us = each_us(lambda weight, tile=tile: run(kind, x, weight, tile), weights, times)
            found.append((us, tile))
            record = [name, part, kind, width, depth, label, us, base, list(vars(tile).values())]
            lines.write(json.dumps(record) + "\n")
    found.sort(key=lambda one: one[0])
    what = f"{name} {part} {width}x{depth}, {label} rows"
    best = "; ".join(f"{us:.1f} {tuple(vars(tile).values())}" for us, tile in found[:4])
    floor = nbytes / BYTES_PER_US
    print(f"{what}: floor {floor:.1f} torch {base:.1f}; {best}", flush=True)


if __name__ == "__main__":
    main()
