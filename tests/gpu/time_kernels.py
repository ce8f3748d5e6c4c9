"""Times the Triton kernels inside CUDA graphs: `python tests/gpu/time_kernels.py [NAME ...]`.

Prints medians in microseconds beside the time that the bytes or operations need at least.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from triton.testing import do_bench_cudagraph

from pipeinfer.kernels import gemm, rotate_and_store, sampling
from pipeinfer.kernels.elementwise import rms_norm, swiglu
from pipeinfer.kernels.formats import E4M3
from pipeinfer.kernels.gemm import split_k_gemm
from pipeinfer.kernels.interface import LowRankMatrices
from pipeinfer.kernels.moe import fused_experts, moe_align_block_size, topk_softmax
from pipeinfer.kernels.tile_configs import small_m_gemm_config

BYTES_PER_US = 4.3e6  # a device-to-device copy on an H200
FLOP_PER_US = 790e6  # bfloat16, a large product on an H200
VOCAB = 151_936


def line(name: str, run: Callable[[], object], floor: float) -> None:
    try:
        time = 1000 * do_bench_cudagraph(run, rep=20, return_mode="median")
    except Exception as error:  # one shape that does not fit must not hide the others
        print(f"{name:<82} {type(error).__name__}: {str(error)[:60]}", flush=True)
        return
    print(f"{name:<82} {time:8.1f} us   floor {floor:8.1f}", flush=True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def time_store() -> None:
    weight, table = randn(128), torch.rand(2, 4096, 64, device="cuda")
    for heads, tokens, elements in (
        *((16, tokens, size) for tokens in (256, 8192) for size in (2048, 4096)),
        *((40, tokens, 2048) for tokens in (256, 8192)),
    ):
        pool = randn(2, 1024, 16, 8, 128)
        qkv = randn(tokens, (heads + 16) * 128)
        places = torch.randperm(1024 * 16, device="cuda")[:tokens].int()
        positions = torch.randint(0, 4096, (tokens,), device="cuda").int()
        rotate_and_store.ELEMENTS_PER_PROGRAM = elements
        run = partial(rotate_and_store.rotate_and_store, qkv, *table, places, *pool, heads)
        run = partial(run, positions=positions, q_norm=weight, k_norm=weight)
        name = f"store {heads}/8 x 128, {tokens} tokens, {elements} a program"
        line(name, run, 4 * qkv.numel() / BYTES_PER_US)
        narrow = torch.zeros(pool.shape, device="cuda").to(E4M3)
        run = partial(rotate_and_store.rotate_and_store, qkv, *table, places, *narrow, heads)
        run = partial(run, positions=positions, q_norm=weight, k_norm=weight)
        stored = tokens * 16 * 128  # a byte each in place of two
        line(
            f"{name}, 8 bits",
            partial(run, key_center=randn(8, 128).float()),
            (4 * qkv.numel() - stored) / BYTES_PER_US,
        )
    rotate_and_store.ELEMENTS_PER_PROGRAM = 2048


def knobs(rows: int, temperature: float = 0.6, k: int = 0, p: float = 1.0, m: float = 0.0):
    """The same parameters for all rows."""
    temperatures, ps, ms = (torch.full((rows,), v, device="cuda") for v in (temperature, p, m))
    top_k = torch.full((rows,), k, device="cuda", dtype=torch.int32)
    ints = torch.arange(rows, device="cuda")
    return temperatures, top_k, ps, ms, ints * 7919, ints + 5


def time_sampling() -> None:
    default = sampling.SAMPLING_BLOCK, sampling.SCAN_WARPS
    for rows in (1, 64, 256):
        flat = randn(rows, VOCAB)
        peaked = flat * 4
        floor = 2 * flat.numel() / BYTES_PER_US
        line(f"torch.argmax, {rows} rows", partial(flat.argmax, -1), floor)
        for block, warps in ((2048, 2), (2048, 4), (4096, 4), (4096, 8)):
            sampling.SAMPLING_BLOCK, sampling.SCAN_WARPS = block, warps
            run = partial(sampling.sample, flat, *knobs(rows), truncate=False)
            line(f"sample, {rows} rows, {block} logits by {warps} warps", run, floor)
        sampling.SAMPLING_BLOCK, sampling.SCAN_WARPS = default
        run = partial(sampling.sample, flat, *knobs(rows, temperature=0.0), truncate=False)
        line(f"sample, {rows} rows, greedy", run, floor)
        cases = {
            "restriction possible, none": (flat, {}),
            "top-k 20, top-p 0.95, peaked": (peaked, {"k": 20, "p": 0.95}),
            "top-p 0.95, peaked": (peaked, {"p": 0.95}),
            "min-p 0.05, peaked": (peaked, {"m": 0.05}),
            "top-p 0.95, flat": (flat, {"p": 0.95}),
            "top-k 500, flat": (flat, {"k": 500}),
        }
        for name, (logits, options) in cases.items():
            run = partial(sampling.sample, logits, *knobs(rows, **options))
            line(f"sample, {rows} rows, {name}", run, floor)
        if rows > 1:
            time_choices(rows, peaked, floor)


def time_choices(rows: int, peaked: torch.Tensor, floor: float) -> None:
    """Ways to choose among candidates: the first is the one in use."""
    names = ("TRUNCATED_WARPS", "TRUNCATED_MAX_REGISTERS", "MAX_CANDIDATES", "MAX_PER_BLOCK")
    default = [getattr(sampling, name) for name in names]
    ways = [default, [8, 0, 4096, 1024], [16, 64, 4096, 1024], [8, 0, 2048, 1024],
            [16, 64, 2048, 1024], [16, 0, 8192, 1024], [16, 0, 4096, 64]]  # fmt: skip
    kinds = {"top-k 20, top-p 0.95": {"k": 20, "p": 0.95}, "top-p 0.95": {"p": 0.95}}
    for kind, options in kinds.items():
        for way in ways:
            for name, value in zip(names, way, strict=True):
                setattr(sampling, name, value)
            run = partial(sampling.sample, peaked, *knobs(rows, **options))
            shown = "{} warps, {} registers, {} of a row, {} of a block".format(*way)
            line(f"sample, {rows} rows, {kind}, {shown}", run, floor)
    for name, value in zip(names, default, strict=True):
        setattr(sampling, name, value)


def time_moe() -> None:
    """With the tiles in use; time_moe.py tries others."""
    experts, top_k, hidden, inter = 128, 8, 2048, 768
    gate_up, down = randn(experts, 2 * inter, hidden) / 45, randn(experts, hidden, inter) / 28
    for tokens in (1, 64, 256, 1024, 8192):
        x = randn(tokens, hidden)
        weights, chosen = torch.rand(tokens, experts, device="cuda").topk(top_k)
        bytes_read = len(chosen.unique()) * 3 * inter * hidden * 2
        flop = tokens * top_k * 6 * inter * hidden
        floor = max(bytes_read / BYTES_PER_US, flop / FLOP_PER_US)
        run = partial(fused_experts, x, gate_up, down, weights, chosen)
        line(f"moe, {tokens} tokens", run, floor)
    time_router(experts, hidden, top_k)
    scores = randn(8192, experts)
    _, chosen = topk_softmax(scores, top_k, True, torch.bfloat16)
    for tokens in (1, 256, 8192):
        run = partial(topk_softmax, scores[:tokens], top_k, True, torch.bfloat16)
        line(f"moe choice, {tokens} tokens", run, 0.0)
        line(
            f"moe align, {tokens} tokens",
            partial(moe_align_block_size, chosen[:tokens], experts, 64),
            0.0,
        )


def time_router(experts: int, hidden: int, top_k: int) -> None:
    """Product and choice, by the library's product and by ours."""
    weight = randn(experts, hidden) / 45
    for tokens in (1, 32, 64, 128, 256, 512):
        x = randn(tokens, hidden)

        def by_library(x: torch.Tensor = x) -> object:
            scores = torch.nn.functional.linear(x, weight)
            return topk_softmax(scores, top_k, True, x.dtype)

        def by_ours(x: torch.Tensor = x) -> object:
            cut = small_m_gemm_config("narrow", x.shape[0], experts, hidden)
            assert cut is not None
            return topk_softmax(split_k_gemm(x, weight, cut), top_k, True, x.dtype)

        line(f"router by the library's product, {tokens} tokens", by_library, 0.0)
        line(f"router by ours, {tokens} tokens", by_ours, 0.0)


def time_norm() -> None:
    for tokens, size in ((256, 1024), (256, 5120), (8192, 1024)):
        x, residual, weight = randn(tokens, size), randn(tokens, size), randn(size)
        run = partial(rms_norm, x, weight, 1e-6, residual)
        line(f"norm with residual, {tokens} x {size}", run, 8 * x.numel() / BYTES_PER_US)
        merged = randn(tokens, 6 * size)
        run = partial(swiglu, merged)
        line(f"swiglu, {tokens} x {3 * size}", run, 3 * merged.numel() / BYTES_PER_US)


def one_by_one(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def time_adapters() -> None:
    """Low-rank products in the layers of 14B, a quarter of a model's, so that no adapter waits in
    the L2 cache; rows have 8 adapters in turns."""
    rank, slots, layers = 16, 8, 10
    sizes = {"qkv": (5120, (5120, 1024, 1024)), "o": (5120, (5120,)),
             "gate and up": (5120, (17408, 17408)), "down": (17408, (5120,))}  # fmt: skip
    default = gemm.block_sizes, gemm.SPLIT_DEPTH, gemm.MAX_SPLITS
    ways = ((128, 128, 512, 16), (128, 256, 512, 16), (128, 512, 512, 16), (256, 128, 512, 16),
            (128, 128, 256, 32), (128, 256, 1024, 16), (64, 64, 512, 16))  # fmt: skip
    for name, (depth, widths) in sizes.items():
        ends = [sum(widths[: at + 1]) for at in range(len(widths))]
        parts = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
        model = [
            LowRankMatrices(
                randn(slots, len(widths) * rank, depth) / 90,
                randn(slots, sum(widths), rank),
                parts,
            )
            for _ in range(layers)
        ]
        for tokens in (1, 64, 256):
            x, y = randn(tokens, depth), randn(tokens, sum(widths))
            kernel = gemm.LowRankGemm()
            kernel.begin_step(torch.arange(tokens, device="cuda").int() % slots + 1, slots)
            calls = [partial(kernel, x, matrices, y) for matrices in model]
            used = min(slots, tokens) * rank * (len(widths) * depth + sum(widths))
            floor = (2 * used + 2 * x.numel() + 4 * y.numel()) / BYTES_PER_US
            for block_k, block_n, split_depth, max_splits in ways:
                gemm.block_sizes = lambda rank, found=(block_k, block_n): found
                gemm.SPLIT_DEPTH, gemm.MAX_SPLITS = split_depth, max_splits
                shown = f"blocks of {block_k}, {block_n}, {max_splits} of {split_depth}"
                run = partial(one_by_one, calls)
                line(f"10 times adapters of {name}, {tokens} tokens, {shown}", run, 10 * floor)
    gemm.block_sizes, gemm.SPLIT_DEPTH, gemm.MAX_SPLITS = default


AREAS = {
    "adapters": time_adapters,
    "sampling": time_sampling,
    "store": time_store,
    "norm": time_norm,
    "moe": time_moe,
}

if __name__ == "__main__":
    for area in sys.argv[1:] or AREAS:
        AREAS[area]()
