"""FlashInfer's fused experts as a backend of mixtures, against the project's own and torch's.

They are skipped where FlashInfer has its kernels not yet, because it compiles them for long.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.register_assert_rewrite("kernels.moe_cases", "kernels.triton_cases")
pytest.importorskip("flashinfer")

import torch  # noqa: E402
from flashinfer_kernels import missing_kernels  # noqa: E402
from test_cuda_parity import compare, cores, generate  # noqa: E402

from kernels.moe_cases import ERROR, bounds, routed  # noqa: E402
from kernels.triton_cases import randn, relative_error  # noqa: E402
from pipeinfer.kernels.moe import fused_experts_reference  # noqa: E402
from pipeinfer.layers.experts import (  # noqa: E402
    FlashInferExperts,
    GatedExperts,
    StackedExperts,
    TorchExperts,
    TritonExperts,
    swap_halves,
)
from pipeinfer.layers.placement import Placement, Shard  # noqa: E402

MISSING = missing_kernels()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
HIDDEN, INTER = 256, 128
BF16 = torch.bfloat16


class Case:
    """Experts first .. stop - 1 of `num_experts`, by every backend, and what the reference computes
    with them in float32."""

    def __init__(self, tokens, num_experts=8, span=None, bounded=False):
        first, stop = span or (0, num_experts)
        self.x = randn(1, tokens, HIDDEN, dtype=BF16)
        gate_up = randn(2, num_experts, 2 * INTER, HIDDEN, dtype=BF16) / 16
        down = randn(3, num_experts, HIDDEN, INTER, dtype=BF16) / 11
        skew = 0.3 if num_experts == 8 else 0.0
        self.weights, self.chosen = routed(tokens, num_experts, min(8, num_experts // 2), skew=skew)
        limits = bounds(num_experts, INTER, HIDDEN, BF16) if bounded else None
        here = torch.where((self.chosen >= first) & (self.chosen < stop), self.weights, 0.0)
        self.expected = fused_experts_reference(
            self.x.float(), gate_up, down, here, self.chosen, limits
        )
        mine = limits and replace(
            limits,
            gate_up_bias=limits.gate_up_bias[first:stop],
            down_bias=limits.down_bias[first:stop],
        )
        self._stack = StackedExperts(
            (gate_up[first:stop], None), (down[first:stop], None), first, num_experts, mine
        )

    def by(self, kind):
        """A backend of these experts, which are its own."""
        (gate_up, _), bounded = self._stack.gate_up, self._stack.bounded
        stack = replace(
            self._stack,
            gate_up=(gate_up.clone(), None),
            bounded=bounded and replace(bounded, gate_up_bias=bounded.gate_up_bias.clone()),
        )
        if kind.up_first:
            swap_halves(stack.gate_up[0])
            if stack.bounded is not None:
                swap_halves(stack.bounded.gate_up_bias)
        return kind(stack)

    def summed(self, backend):
        return backend.summed(self.x, self.weights, self.chosen)


def assert_alike(case):
    """Its experts by FlashInfer are the reference's, and not far from those of the others."""
    got = case.summed(case.by(FlashInferExperts))
    assert got.dtype == BF16 and got.shape == case.x.shape
    assert relative_error(got, case.expected) < 2 * ERROR[BF16]
    for other in (TritonExperts, TorchExperts):
        assert relative_error(got, case.summed(case.by(other)).float()) < 3 * ERROR[BF16]


@pytest.mark.parametrize("num_experts", [8, 128])
@pytest.mark.parametrize("tokens", [1, 7, 64, 512])
def test_flashinfer_computes_the_experts_of_the_reference_and_of_other_backends(
    tokens, num_experts
):
    assert_alike(Case(tokens, num_experts))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("tokens", "span"), [(37, (0, 8)), (37, (4, 8)), (5, (7, 8))])
def test_a_rank_adds_what_its_experts_give_by_flashinfer_too(tokens, span, bounded):
    assert_alike(Case(tokens, 8, span, bounded))


def test_biases_of_down_may_be_another_ranks_by_flashinfer_too():
    case = Case(7, bounded=True)
    bounded = replace(case._stack.bounded, down_bias=None)
    case._stack = replace(case._stack, bounded=bounded)
    got = case.summed(case.by(FlashInferExperts))
    assert relative_error(got, case.summed(case.by(TritonExperts)).float()) < 3 * ERROR[BF16]


@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 128), (7, 8), (64, 128), (512, 8)])
def test_flashinfers_experts_stand_in_a_graph_and_look_at_the_choice_anew(tokens, num_experts):
    case = Case(tokens, num_experts)
    backend = case.by(FlashInferExperts)
    case.summed(backend)  # times kernels, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.summed(backend)
    graph.replay()
    assert relative_error(out, case.expected) < 2 * ERROR[BF16]
    case.chosen.copy_((case.chosen + 1) % num_experts)
    graph.replay()
    assert relative_error(out, case.summed(backend).float()) < ERROR[BF16]
    assert relative_error(out, case.expected) > 0.1


def test_packed_experts_of_a_model_give_the_same_by_flashinfer_as_by_triton():
    results = []
    x, (weights, chosen) = randn(1, 64, HIDDEN, dtype=BF16), routed(64, 16, 4)
    for name in ("triton", "flashinfer"):
        at = Placement(Shard(), BF16, torch.device("cuda"), moe_backend=name)
        experts = GatedExperts(HIDDEN, INTER, 16, at)
        for number, source in enumerate(experts.sources("")):
            source.target.copy_(randn(number, *source.shape, dtype=BF16) / 12)
        experts.pack()
        results.append(experts.fused(x, weights, chosen).float())
    assert relative_error(results[1], results[0]) < 3 * ERROR[BF16]


@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("Qwen3MoeForCausalLM", 128), ("GptOssForCausalLM", 64)]
)
def test_a_model_in_graphs_is_the_one_in_float32_within_bfloat16(
    gpu_checkpoints, architecture, head_dim
):
    folder = gpu_checkpoints(architecture, head_dim)
    made = cores(folder, moe_backend="flashinfer")
    assert made.loaded.graph_sizes
    generate(made, wanted=20)
    compare(folder, made).check(routed=True)
