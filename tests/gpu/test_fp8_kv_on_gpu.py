"""Keys and values in e4m3 on a GPU: each backend's kernels with scales, and whole engines.

The store and the decode kernel are in test_gpu_kernels.py, with the interpreter's cases.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_cuda_parity import BACKENDS, cores, generate, prompts

from device_steps import device_step
from draws import seeded
from pipeinfer.attention import registry
from pipeinfer.attention.interface import AttentionInputs, HostLengths, KVPool
from pipeinfer.kernels.formats import E4M3, KVScales, quantize_e4m3
from pipeinfer.kernels.interface import StepShape
from pipeinfer.step import AttentionShape

pytestmark = pytest.mark.gpu

PAGE, HEADS, KV_HEADS = 64, 8, 2
SCALES = KVScales(0.5, 0.02)
# (queries, keys) of rows: decodes, a whole prompt, a chunk behind others.
ROWS = ((1, 1), (1, 64), (1, 300), (50, 50), (70, 230))


def attention_inputs(rows, device) -> tuple[AttentionInputs, torch.Tensor]:
    """Their arrays, as a step without a graph has them, and the pages int64 [rows, P]."""
    counts, lengths = (np.array(part, dtype=np.int32) for part in zip(*rows, strict=True))
    held = -(-lengths // PAGE)
    width, order = int(held.max()), torch.randperm(int(held.sum()), generator=seeded(5))
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    starts, queries = (np.concatenate(([0], np.cumsum(part))) for part in (held, counts))
    for row, count in enumerate(held):
        table[row, :count] = order[starts[row] : starts[row + 1]].int() + 1
    decodes = int((counts == 1).sum())
    ints = {
        "last_page_len": lengths - (held - 1) * PAGE, "qo_indptr": queries, "kv_indptr": starts,
        "prefill_qo_indptr": queries[decodes:] - decodes,
    }  # fmt: skip
    both = {name: torch.from_numpy(values.astype(np.int32)) for name, values in ints.items()}
    listed = torch.cat([table[row, :count] for row, count in enumerate(held.tolist())])
    there = {name: tensor.to(device) for name, tensor in both.items()} | {
        "seq_lens": torch.from_numpy(lengths).to(device),
        "kv_indices": listed.to(device),
        "row_page_table": table.to(device),
    }
    shape = StepShape(int(counts.sum()), decodes, len(rows) - decodes)
    step = device_step(shape, lists_pages=True, **there)
    inputs = AttentionInputs(step, int(counts.max()), width, host=HostLengths(**both))
    return inputs, table.long().to(device)


def dense(pool, shape, q, rows, pages, rounded_q) -> torch.Tensor:
    """In float32, of what the pool holds; `rounded_q`: of which queries e4m3 is taken."""
    q = torch.where(rounded_q[:, None, None], quantize_e4m3(q, 1.0).float(), q.float())
    out, first = [], 0
    for row, (count, keys) in enumerate(rows):
        k, v = (
            (part.float()[pages[row]].flatten(0, 1)[:keys] * scale).repeat_interleave(
                HEADS // KV_HEADS, 1
            )
            for part, scale in ((pool.k[0], SCALES.k), (pool.v[0], SCALES.v))
        )
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count], k) * shape.scale
        back = torch.arange(keys - count, keys)[:, None] - torch.arange(keys)[None]
        hidden = (back < 0) | (back >= (shape.sliding_window or keys))
        weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
        first += count
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_reads_pages_of_8_bits_with_their_scales(backend, dim, window):
    device = torch.device("cuda")
    shape = AttentionShape(HEADS, KV_HEADS, dim, dim**-0.5, window)
    rows, pages = attention_inputs(ROWS, device)
    size = int(pages.max()) + 2
    pool = KVPool([shape], size, PAGE, torch.bfloat16, device, scales=[SCALES])
    generator = seeded(0, device)

    def random(*sizes):
        return torch.randn(*sizes, device=device, generator=generator)

    for part in (*pool.k, *pool.v):
        part.copy_((2 * random(*part.shape)).to(E4M3))
    tokens = sum(count for count, _ in ROWS)
    q = random(tokens, HEADS, dim).bfloat16()
    made = registry.create(backend, [shape], device)
    made.bind(pool, 16)
    got = made.attend(0, q, None, None, made.build_metadata(rows)).float()
    torch.cuda.synchronize()
    prompt = torch.arange(tokens, device=device) >= rows.step.shape.num_decodes
    rounded_q = {"fa3": prompt | True, "hybrid": prompt, "flashinfer": prompt & False}[backend]
    expected = dense(pool, shape, q, ROWS, pages, rounded_q)
    assert got.shape == expected.shape and got.isfinite().all()

    def error(part):
        return float((got[part] - expected[part]).norm() / expected[part].norm())

    # FlashAttention-3 rounds its weights to e4m3 as well, a 16th of each at the most.
    assert error(rounded_q) < 4e-2 if rounded_q.any() else True
    assert error(~rounded_q) < 1e-2 if (~rounded_q).any() else True


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_engines_with_pages_of_8_bits_say_what_the_torch_backend_says(
    gpu_checkpoints, backend, graphs
):
    folder = gpu_checkpoints("Qwen3ForCausalLM", 128)
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "no_cuda_graph": not graphs}
    plain = cores(folder, attention="torch", **fp8)
    wanted = generate(plain)
    made = cores(folder, attention=backend, **fp8)
    got = generate(made)
    pool = made.loaded.runner.pool
    assert (made.loaded.kv_dtype, pool.storage_dtype, pool.dtype) == (
        "fp8_e4m3",
        E4M3,
        torch.bfloat16,
    )
    usual = cores(folder, attention=backend).loaded.runner.pool
    assert 2 * pool.bytes_per_page == usual.bytes_per_page
    error = norm = 0.0
    seen = 0
    for index, prompt in enumerate(prompts()):
        name = f"r{index}"
        for at, (one, other) in enumerate(zip(got[name], wanted[name], strict=True)):
            ours, theirs = (m.logits[name, len(prompt) + at] for m in (made, plain))
            error, norm = error + ((ours - theirs) ** 2).sum(), norm + (theirs**2).sum()
            seen += 1
            if one != other:
                break  # from here on they are asked about different texts
    assert seen > 60
    print(f"FP8KV {backend} graphs {graphs}: {(error / norm) ** 0.5:.4f} over {seen} positions")
    assert (error / norm) ** 0.5 < (3e-2 if backend == "flashinfer" else 6e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_cached_and_chunked_ends_all_requests(gpu_checkpoints, backend):
    folder = gpu_checkpoints("Qwen3ForCausalLM", 128)
    made = cores(folder, budget=64, attention=backend, kv_cache_dtype="fp8_e4m3")
    generate(made, wanted=10)
    generate(made, wanted=10, tag="w")
    assert sum(made.cached[f"r{index}w"] for index in range(12)) >= 64
