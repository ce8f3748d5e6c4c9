"""Every backend on a GPU, in bfloat16, against transformers in float32 on the same tokens.

Of each combination of architecture, backend and head size: cold, with a warm prefix cache, without
CUDA graphs and at depth 1. `-s` shows a line for each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from overlapped import GpuCores

from checkpoints import load_reference
from pipeinfer.attention import triton_backend
from pipeinfer.engine.graphs import Graphs
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings
from quantized_checkpoints import quantize

pytestmark = pytest.mark.gpu

RELATIVE_ERROR = 1e-2
# Of all logits together, where a router at a near tie may choose another expert for few positions.
ROUTED_ERROR = 3e-2
NEAR_TIE = 0.02  # of the range of the logits: what rounding may turn around
APART = 0.02  # of the range of the logits: two candidates that are not a near tie
AGREEMENT = 0.99
ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Gemma3ForCausalLM",
)  # fmt: skip
MORE_ARCHITECTURES = (
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GlmForCausalLM", "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
)  # fmt: skip
BACKENDS = ("flashinfer", "fa3", "hybrid")


def prompts(count=12, seed=0, vocab=1024):
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, int(n)).tolist() for n in random.integers(3, 300, count)]


def cores(folder, budget=256, masks=None, **changes):
    settings = {
        "device": "cuda", "kv_pages": 256, "page_size": 64, "max_running": 16,
        "max_step_tokens": budget, "cuda_graph_max_batch": 16,
    } | changes  # fmt: skip
    return GpuCores(folder, Settings(model=str(folder), **settings), budget=budget, masks=masks)


def again(made, folder, **changes):
    """New cores, with an empty prefix cache, around the engine of others that are over."""
    settings = msgspec.structs.replace(made.settings, **changes)
    return GpuCores(folder, settings, budget=settings.max_step_tokens, loaded=made.loaded)


def generate(made, wanted=40, temperature=0.0, tag="", asked=None, **knobs):
    """Request to tokens; `tag` keeps apart what one engine is asked twice."""
    asked = asked or prompts()
    for index, prompt in enumerate(asked):
        params = RequestParams(temperature=temperature, max_tokens=wanted, **knobs)
        made.submit(f"r{index}{tag}", prompt, params, seed=index)
    made.run()
    assert set(made.finished.values()) == {"length"}
    return {f"r{index}": made.outputs[f"r{index}{tag}"] for index in range(len(asked))}


class Compared(NamedTuple):
    """Against float32: relative error of all logits, the median of a position's, the share of
    clear argmaxes that agree.

    usual_*: the same of transformers in bfloat16, for comparison.
    """

    error: float
    median: float
    usual_error: float
    agreement: float
    usual_agreement: float

    def check(self, routed: bool = False) -> None:
        """Within the bounds, or no further off than transformers in bfloat16 is."""
        bound = max(RELATIVE_ERROR, self.usual_error)
        assert self.median < bound
        assert self.error < (ROUTED_ERROR if routed else bound)
        assert self.agreement >= AGREEMENT


def compare(folder, made, asked=None) -> Compared:
    """Teacher-forced, over all that was generated."""
    reference = load_reference(folder).cuda()
    rounded = load_reference(folder, torch.bfloat16).cuda()
    error = norm = usual = 0.0
    each = []
    clear = equal = equal_usual = 0
    for index, prompt in enumerate(asked or prompts()):
        name = f"r{index}"
        ids = prompt + made.outputs[name]
        with torch.inference_mode():
            batch = torch.tensor([ids], device="cuda")
            logits = reference(batch).logits[0].cpu().numpy()
            bf16 = rounded(batch).logits[0].float().cpu().numpy()
        for position in range(len(prompt), len(ids)):
            ours, theirs = made.logits[name, position], logits[position - 1]
            off, whole = float(((ours - theirs) ** 2).sum()), float((theirs**2).sum())
            error, norm = error + off, norm + whole
            each.append((off / whole) ** 0.5)
            usual += float(((bf16[position - 1] - theirs) ** 2).sum())
            second, first = np.partition(theirs, -2)[-2:]
            if first - second > APART * (theirs.max() - theirs.min()):
                clear += 1
                equal += int(ours.argmax() == theirs.argmax())
                equal_usual += int(bf16[position - 1].argmax() == theirs.argmax())
    return Compared(
        (error / norm) ** 0.5, float(np.median(each)), (usual / norm) ** 0.5, equal / clear,
        equal_usual / clear,
    )  # fmt: skip


CASES = [
    *((name, backend, dim) for name in ARCHITECTURES for backend in BACKENDS for dim in (64, 128)),
    ("Gemma3ForCausalLM", "flashinfer", 256),
    *((name, "hybrid", 128) for name in MORE_ARCHITECTURES),
    *((name, "flashinfer", 64) for name in MORE_ARCHITECTURES),
]


@pytest.mark.parametrize(("architecture", "backend", "head_dim"), CASES)
def test_logits_are_those_of_float32_within_bfloat16(
    gpu_checkpoints, architecture, backend, head_dim
):
    folder = gpu_checkpoints(architecture, head_dim)
    made = cores(folder, attention=backend)
    cold = generate(made)
    compared = compare(folder, made)
    others = {"warm": generate(made, tag="w")}
    warmed = sum(made.cached[f"{name}w"] for name in cold)
    assert warmed >= 64 and not any(made.cached[name] for name in cold)
    runner = made.loaded.runner
    graphs, runner._graphs = runner._graphs, Graphs(runner.device)
    assert graphs.decodes
    others["no graphs"] = generate(again(made, folder))
    made.loaded.runner._graphs = graphs
    others["depth 1"] = generate(again(made, folder, overlap_depth=1))
    margins = {how: first_differences(made, cold, other) for how, other in others.items()}
    note(architecture, backend, head_dim, compared, margins)
    compared.check(routed=any(word in architecture for word in ("Moe", "Mixtral")))
    near = max(NEAR_TIE, compared.usual_error)
    assert all(margin < near for found in margins.values() for margin in found), margins


def first_differences(made, cold, other):
    """How far apart, as a share of the range of the logits, the two tokens stood at which each
    request of `cold` that differs began to differ.
    """
    margins = []
    for index, prompt in enumerate(prompts()):
        name = f"r{index}"
        if name not in cold:
            continue
        pairs = list(zip(cold[name], other[name], strict=True))
        at = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
        if at is not None:
            logits = made.logits[name, len(prompt) + at]
            one, two = pairs[at]
            margins.append(float((logits[one] - logits[two]) / (logits.max() - logits.min())))
    return margins


def note(architecture, backend, head_dim, compared, margins):
    """A line on stdout, and one of JSON in the file that PARITY_OUT names."""
    name = architecture.removesuffix("ForCausalLM")
    counts = ", ".join(f"{how} {len(found)}" for how, found in margins.items())
    print(
        f"PARITY {name:9} {backend:10} {head_dim:3}: error {compared.error:.4f}, median "
        f"{compared.median:.4f} (transformers {compared.usual_error:.4f}), agreement "
        f"{compared.agreement:.4f} ({compared.usual_agreement:.4f}); of 12 requests other tokens: "
        f"{counts}"
    )
    if "PARITY_OUT" in os.environ:
        line = {"architecture": name, "backend": backend, "head_dim": head_dim,
                **compared._asdict(), "margins": margins}  # fmt: skip
        with Path(os.environ["PARITY_OUT"]).open("a") as out:
            out.write(msgspec.json.encode(line).decode() + "\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sliding_windows_and_qk_norm_hold_on_every_backend(gpu_checkpoints, backend):
    folder = gpu_checkpoints("MistralForCausalLM", 128, sliding_window=100)
    made = cores(folder, attention=backend)
    generate(made)
    compare(folder, made).check()


@pytest.mark.parametrize("backend", ["hybrid", "fa3", "torch"])
def test_attention_sinks_hold_with_graphs_and_without(gpu_checkpoints, backend):
    """Every second layer has a window that is shorter than most prompts, too."""
    folder = gpu_checkpoints("GptOssForCausalLM", 64, sliding_window=100)
    made = cores(folder, attention="auto" if backend == "hybrid" else backend)
    assert made.loaded.attention == backend
    assert bool(made.loaded.graph_sizes) == (backend != "torch")
    generate(made, wanted=20)
    compare(folder, made).check()


def test_experts_in_mxfp4_hold_in_graphs(gpu_checkpoints, tmp_path):
    source = gpu_checkpoints("GptOssForCausalLM", 64, sliding_window=100)
    folder, plain = quantize(source, tmp_path, "mxfp4")
    made = cores(folder)
    assert made.loaded.graph_sizes
    generate(made, wanted=20)
    compare(plain, made).check()


@pytest.mark.parametrize("graphs", [True, False])
def test_long_prompts_beside_decodes_in_large_steps(gpu_checkpoints, graphs):
    """In graphs, decodes attend while prompts do."""
    folder = gpu_checkpoints("Qwen3ForCausalLM", 128, max_position_embeddings=8192)
    asked = prompts(5) + [[(7 * i + n) % 1024 for i in range(2500 + 300 * n)] for n in range(6)]
    made = cores(
        folder, 8192, mixed_step_tokens=4096, kv_pages=600, no_cuda_graph=not graphs,
        attention="hybrid",
    )  # fmt: skip
    generate(made, wanted=12, asked=asked)
    mixed = made.loaded.runner._graphs.mixed
    assert bool(graphs) == any(room.num_decodes and room.num_tokens > 2048 for room in mixed)
    assert made.kinds["mixed"][0] >= 3
    compare(folder, made, asked).check()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("graphs", [True, False])
def test_what_rows_begin_with_in_common_is_read_once(
    gpu_checkpoints, graphs, architecture, monkeypatch
):
    """Two beginnings, of 5 and 9 pages; the first of each leaves it in the cache."""
    monkeypatch.setattr(triton_backend, "tile_config", lambda *_: triton_backend.MANY_ROWS)
    folder = gpu_checkpoints(architecture, 128, max_position_embeddings=2048)
    random = np.random.default_rng(7)
    heads = [random.integers(0, 1024, 64 * pages).tolist() for pages in (5, 9)]
    first = [[*head, 3] for head in heads]
    asked = [heads[n % 2] + tail for n, tail in enumerate(prompts(10))] + prompts(4, seed=5)
    made = cores(folder, 2048, attention="hybrid", no_cuda_graph=not graphs)
    generate(made, wanted=4, asked=first, tag="first")
    assert not made.sharing
    generate(made, asked=asked)
    assert all(made.cached[f"r{n}"] >= 64 * (5, 9)[n % 2] for n in range(10))
    assert made.sharing >= 30
    compare(folder, made, asked).check()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("change", [{"no_cuda_graph": True}, {"overlap_depth": 1}])
def test_graphs_and_overlap_depth_do_not_change_tokens(gpu_checkpoints, change, temperature):
    folder = gpu_checkpoints("Qwen3ForCausalLM")
    made = cores(folder)
    plain = generate(made, temperature=temperature)
    changed = generate(cores(folder, **change), temperature=temperature)
    margins = first_differences(made, plain, changed)
    print(f"FLIPS {change} {temperature}: {len(margins)} of {len(plain)} requests, by {margins}")
    if temperature:  # what noise decides is hardly ever near a tie
        assert len(margins) <= len(plain) // 3
    else:
        assert all(margin < NEAR_TIE for margin in margins)


def test_graphs_captured_between_steps_do_not_change_tokens(gpu_checkpoints):
    folder = gpu_checkpoints("Qwen3ForCausalLM")
    made = cores(folder)
    plain = generate(made)
    late = GpuCores(folder, made.settings, budget=256, late=True)
    runner = late.loaded.runner
    before, left = runner.graphs, runner.graphs_deferred
    assert left
    margins = first_differences(made, plain, generate(late))
    assert (runner.graphs, runner.graphs_deferred) == (before + left, 0)
    assert all(margin < NEAR_TIE for margin in margins)


def test_the_same_run_twice_gives_the_same_tokens(gpu_checkpoints):
    folder = gpu_checkpoints("Qwen3ForCausalLM")
    first = generate(cores(folder), temperature=0.8, top_k=50, top_p=0.9)
    assert first == generate(cores(folder), temperature=0.8, top_k=50, top_p=0.9)


def test_small_memory_and_restricted_sampling_finish_all_requests(gpu_checkpoints):
    folder = gpu_checkpoints("Qwen3ForCausalLM")
    made = cores(folder, budget=128, kv_pages=24, page_size=16)
    for index, prompt in enumerate(prompts(40, seed=3)):
        params = RequestParams(
            temperature=0.9, top_k=20 * (index % 2), top_p=0.9, max_tokens=30, min_tokens=5,
            stop_token_ids=(7, 8),
        )  # fmt: skip
        made.submit(f"r{index}", prompt, params, seed=index)
    made.run()
    assert len(made.finished) == 40
    assert all(len(ids) >= 5 for name, ids in made.outputs.items())


def test_the_torch_backend_in_float32_is_as_exact_on_the_gpu_as_on_the_cpu(gpu_checkpoints):
    folder = gpu_checkpoints("Qwen3ForCausalLM")
    made = cores(folder, attention="torch", dtype="float32")
    generate(made, wanted=10)
    assert compare(folder, made).error < 1e-3
