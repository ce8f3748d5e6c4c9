"""Times the kernels of exact mode beside those of the fast mode: one GPU, by CUDA graphs.

`python tests/gpu/time_exact.py gemm`: each tile, beside torch's product, whose bits are compared.
Weights are several, so that none stays in the L2 cache. `... attention`: of prompts beside
FlashAttention-3, of decodes beside the fast kernel. Not a test: a tool beside the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from pipeinfer.attention.fa3_backend import Fa3Kernel, Fa3Metadata
from pipeinfer.attention.interface import KVPool
from pipeinfer.attention.triton_backend import DecodeMetadata, TritonDecodeKernel
from pipeinfer.kernels.decode_attention import DecodeRows
from pipeinfer.kernels.exact import ExactRows, ExactWorkspace, exact_attention, exact_gemm
from pipeinfer.kernels.tile_configs import ExactGemmConfig as Tile
from pipeinfer.step import AttentionShape

SHAPES = {  # [width, depth] of QKV, O, gate and up, down
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "14B": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
}
# block_n, block_k, warps, stages
LOW = [(16, 256, 2, 5), (32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 5), (64, 64, 4, 6)]
TILES = {
    1: [Tile(16, *rest, swap_ab=True) for rest in LOW],
    16: [Tile(16, *rest, swap_ab=True) for rest in LOW],
    32: [Tile(32, *rest, swap_ab=True) for rest in LOW[1:]],
    64: [Tile(64, 32, 128, 4, 4), Tile(64, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4, swap_ab=True)],
    128: [Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 5)],
    256: [Tile(128, 64, 64, 8, 4), Tile(128, 128, 64, 8, 4), Tile(256, 128, 64, 8, 3)],
}
COLD_BYTES = 160 << 20  # of weights in turn: more than the L2 cache has
HEADS = ((16, 8), (40, 8))  # of queries, of keys
PROMPTS = ((0, 8192), (0, 1000), (6000, 2048))  # tokens before, tokens
DECODES = ((1, 600), (1, 8000), (8, 1000), (64, 600), (64, 8000), (256, 600))  # rows, keys
POOL_TOKENS = 1 << 19
REPEATS = 8


def micros(run: Callable[[], object], calls: int = 1) -> float:
    """Of one call; `run` makes `calls` of them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(min(times[1:]) / calls, 1)


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def each(product: Callable[..., torch.Tensor], weights: list[torch.Tensor]) -> None:
    for weight in weights:
        product(weight)


def compile_tile(item: tuple[int, Tile]) -> None:
    rows, tile = item
    exact_gemm(randn(rows, 1024), randn(4096, 1024), config=tile)
    torch.cuda.synchronize()


def gemm() -> None:
    items = [(rows, tile) for rows, tiles in TILES.items() for tile in tiles]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_tile, items, chunksize=2))
    for model, shapes in SHAPES.items():
        for width, depth in shapes:
            copies = max(COLD_BYTES // (2 * width * depth), 2)
            weights = [randn(width, depth) for _ in range(copies)]
            for rows, tiles in TILES.items():
                x = randn(rows, depth)
                library = partial(torch.nn.functional.linear, x)
                same = torch.equal(library(weights[0]), exact_gemm(x, weights[0]))
                found = [
                    (micros(partial(each, partial(exact_gemm, x, config=t), weights), copies), t)
                    for t in tiles
                ]
                took, tile = min(found, key=lambda one: one[0])
                print(
                    f"GEMM {model} {width} x {depth}, {rows} rows: torch "
                    f"{micros(partial(each, library, weights), copies)} us, "
                    f"{'the same' if same else 'other'} bits; own {took} us by {tile}",
                    flush=True,
                )


def repeat(run: Callable[[], object]) -> None:
    for _ in range(REPEATS):
        run()


def attention() -> None:
    device = torch.device("cuda")
    for heads, kv_heads in HEADS:
        shape, scale = AttentionShape(heads, kv_heads, 128, 128**-0.5), 128**-0.5
        pages = POOL_TOKENS // 64 + 1
        pool = KVPool([shape], pages, 64, torch.bfloat16, device)
        for part in (pool.k[0], pool.v[0]):
            part.normal_()
        indices = torch.arange(1, pages, dtype=torch.int32, device=device)
        fa3 = Fa3Kernel([shape], device)
        fa3.bind(pool, 64)
        exact = partial(exact_attention, k=pool.k[0], v=pool.v[0], scale=scale)
        for before, tokens in PROMPTS:
            q, length = randn(tokens, heads, 128), before + tokens
            out, table = torch.empty_like(q), indices[None, : -(-length // 64)]
            metadata = Fa3Metadata(ints(0, tokens), ints(length), table, tokens)
            rows = ExactRows(ints(length), ints(0), indices, ints(0, tokens))
            work = ExactWorkspace(1, (heads, kv_heads, 128), device)
            fast = micros(partial(fa3.run, 0, q, out, metadata))
            took = micros(partial(exact, q, rows=rows, out=out, workspace=work))
            print(f"PREFILL {heads}/{kv_heads} {before}+{tokens}: FA3 {fast}, exact {took} us")
        for count, length in DECODES:
            q = randn(count, heads, 128)
            out, each_pages = torch.empty_like(q), -(-length // 64)
            begins = (row * each_pages % (pages - 1 - each_pages) for row in range(count + 1))
            rows = ExactRows(ints(*[length] * count), ints(*begins), indices)
            work = ExactWorkspace(count, (heads, kv_heads, 128), device)
            run = partial(exact, q, rows=rows, out=out, workspace=work)
            took = micros(partial(repeat, run), REPEATS)
            fast = micros(partial(repeat, by_hybrid(shape, pool, q, out, rows)), REPEATS)
            print(f"DECODE {heads}/{kv_heads} {count} x {length}: hybrid {fast}, exact {took} us")


def by_hybrid(
    shape: AttentionShape, pool: KVPool, q: torch.Tensor, out: torch.Tensor, rows: ExactRows
) -> Callable[[], object]:
    kernel = TritonDecodeKernel([shape], q.device)
    kernel.bind(pool, len(q))
    splits = kernel._splits[None]
    known = DecodeRows(rows.seq_lens, rows.kv_indptr, rows.kv_indices, splits)
    return partial(kernel.run, 0, q, out, DecodeMetadata({None: known}, early=True))


if __name__ == "__main__":
    {"gemm": gemm, "attention": attention}[sys.argv[1]]()
