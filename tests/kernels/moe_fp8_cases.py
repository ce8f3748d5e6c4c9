"""Experts whose rows and matrices are both FP8: cases for interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.moe_cases import in_8_bits, routed, tried
from kernels.triton_cases import DEVICE, HALVES, INTERPRETED, randn, relative_error
from pipeinfer.checkpoint.quantization import Fp8, Quantization
from pipeinfer.kernels.elementwise import quantize_groups
from pipeinfer.kernels.formats import SCALE_BLOCK
from pipeinfer.kernels.moe import fused_experts_reference, moe_sum
from pipeinfer.kernels.moe_fp8 import (
    INTERMEDIATE_GROUP,
    fused_experts_w8a8_by_pair,
    fused_experts_w8a8_reference,
)
from pipeinfer.kernels.tile_configs import MOE_CONFIGS_W8A8, MoeConfig, MoeGemmConfig
from pipeinfer.layers import quantized
from pipeinfer.layers.elementwise import RMSNorm
from pipeinfer.layers.experts import GatedExperts, TritonExperts
from pipeinfer.layers.moe import SoftmaxRouter, SparseMoeBlock
from pipeinfer.layers.placement import PartialSum, Placement, Shard

# What is between the products may be rounded to the other of two neighbours: on tensor cores, which
# add up products of FP8 with fewer bits than float32, up to a tenth of all values. A value that is
# rounded the other way is a whole unit in the last place apart, where rounding costs 0.29 of a unit
# on average (1 / sqrt(12)): sqrt(0.1) / 0.29 = 1.1 times what rounding costs, which is below 0.04.
ERROR = 8e-3 if INTERPRETED else 4e-2
SMALL = MoeConfig(
    16, MoeGemmConfig(64, SCALE_BLOCK, 4, 2), MoeGemmConfig(32, INTERMEDIATE_GROUP, 4, 2), group_m=2
)
TURNED = MoeConfig(
    16,
    MoeGemmConfig(128, SCALE_BLOCK, 4, 2, swap_ab=True),
    MoeGemmConfig(64, INTERMEDIATE_GROUP, 4, 2, swap_ab=True),
)


def operands(tokens, hidden, inter, blocks, experts=4, top_k=2):
    """(what the kernel takes, the same for the reference)"""
    x = randn(1, tokens, hidden, dtype=torch.float16) * torch.linspace(0.1, 9, hidden).to(DEVICE)
    rows = quantize_groups(x.half(), SCALE_BLOCK)
    gate_up, gate_up_scale, plain = in_8_bits(randn(2, experts, 2 * inter, hidden) / 40, blocks)
    down, down_scale, plain_down = in_8_bits(randn(3, experts, hidden, inter) / 8, blocks)
    weights, chosen = routed(tokens, experts, top_k)
    matrices = (gate_up, gate_up_scale), (down, down_scale)
    return (rows, *matrices, weights, chosen), (rows, plain, plain_down, weights, chosen)


@pytest.mark.parametrize("shape", [SMALL, TURNED])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter"), [(1, 256, 128), (5, 128, 256), (21, 384, 128)]
)
def test_rows_and_experts_in_8_bits_are_those_of_the_reference(
    tokens, hidden, inter, blocks, shape
):
    given, wanted = operands(tokens, hidden, inter, blocks)
    got = fused_experts_w8a8_by_pair(*given, config=shape)
    expected = fused_experts_w8a8_reference(*wanted)
    assert got.dtype == torch.bfloat16 and relative_error(got, expected) < ERROR
    rows, plain, plain_down, weights, chosen = wanted
    x = rows[0].float() * rows[1].repeat_interleave(SCALE_BLOCK, 1)
    exact = fused_experts_reference(x, plain, plain_down, weights, chosen)
    summed = moe_sum(got, chosen, None, 4)
    assert relative_error(summed.float(), exact) < 0.04, "no more than rounding costs"


def test_every_tile_shape_for_rows_in_8_bits_computes_the_same():
    given, wanted = operands(70, 256, 128, False, experts=2, top_k=1)
    expected = fused_experts_w8a8_reference(*wanted)
    for shape in tried(MOE_CONFIGS_W8A8):
        assert relative_error(fused_experts_w8a8_by_pair(*given, config=shape), expected) < ERROR


def test_a_token_in_8_bits_gets_the_same_result_in_any_batch():
    (rows, gate_up, down, weights, chosen), _ = operands(20, 128, 128, True)
    together = fused_experts_w8a8_by_pair(rows, gate_up, down, weights, chosen, config=SMALL)
    some = slice(5, 9)
    few = [one[some] for one in rows]
    alone = fused_experts_w8a8_by_pair(
        few, gate_up, down, weights[some], chosen[some], config=SMALL
    )
    assert torch.equal(alone, together[some])


def test_experts_in_8_bits_of_several_ranks_add_up_to_all():
    (rows, gate_up, down, weights, chosen), wanted = operands(37, 128, 128, False, experts=8)
    expected = fused_experts_w8a8_reference(*wanted).sum(1)
    total = torch.zeros_like(expected)
    for a, b in [(0, 3), (3, 8)]:
        part = [[each[a:b] for each in one] for one in (gate_up, down)]
        by_pair = fused_experts_w8a8_by_pair(rows, *part, weights, chosen, (a, 8), SMALL)
        total += moe_sum(by_pair, chosen, a, b - a).float()
    assert relative_error(total, expected) < 2 * ERROR


def test_rows_of_zeros_and_none_in_8_bits_give_as_much():
    rows = quantize_groups(
        torch.zeros(3, SCALE_BLOCK, dtype=torch.float16, device=DEVICE), SCALE_BLOCK
    )
    _, gate_up, down, weights, chosen = operands(3, SCALE_BLOCK, SCALE_BLOCK, True)[0]
    assert not fused_experts_w8a8_by_pair(rows, gate_up, down, weights, chosen, config=SMALL).any()
    assert fused_experts_w8a8_by_pair(
        [one[:0] for one in rows], gate_up, down, weights[:0], chosen[:0]
    ).shape == (0, 2, SCALE_BLOCK)


def layer(form, dtype, decoded):
    """(a norm, a mixture behind it, its experts), the same numbers for all kinds."""
    quantization = Quantization("any", form, dequantize_at_load=decoded)
    at = Placement(Shard(), dtype, torch.device(DEVICE), quantization=quantization)
    experts, router = GatedExperts(256, SCALE_BLOCK, 8, at), SoftmaxRouter(256, 8, 2, True, at)
    norm = RMSNorm("norm", 256, 1e-6, at)
    for number, source in enumerate(experts.sources("")):
        full = randn(number, *source.shape) * source.dummy
        full = full.abs() if "scale" in source.name else full
        source.target.copy_(full[source.slices])
    router.weight.weight.copy_(randn(98, 8, 256) / 4)
    norm.weight.copy_(randn(99, 256).abs())
    return norm, SparseMoeBlock(router, experts, at), experts


def summed(out):
    return out.partial.float().sum(0) if isinstance(out, PartialSum) else out


def chosen_by(mixture, x):
    """The experts of each row, ascending: [T, top_k]."""
    return mixture._router(x)[1].sort(dim=1).values


@pytest.mark.parametrize("form", [Fp8(), Fp8("weight_scale_inv", "block", (128, 128))])
@torch.inference_mode()
def test_a_mixture_takes_rows_as_the_norm_before_it_rounds_them(form, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(quantized, "small_m_gemm_8bit", lambda _: object())
    norm, mixture, experts = layer(form, HALVES[-1], False)
    experts._backend = TritonExperts
    experts.pack()
    plain_norm, plain, plain_experts = layer(form, torch.float32, True)
    plain_experts.pack()
    x, residual = randn(1, 9, 256), randn(2, 9, 256)
    given = plain_norm.add_norm(x.clone(), residual.clone(), plain.input_quantizer)[0]
    expected = summed(plain(given))
    x, residual = x.to(HALVES[-1]), residual.to(HALVES[-1])
    rounded, _ = norm.add_norm(x.clone(), residual.clone(), mixture.input_quantizer)
    assert rounded.values.dtype == torch.float8_e4m3fn and rounded.unquantized.dtype == HALVES[-1]
    # A row whose second and third expert score alike may get either: it is no measure of rounding.
    same = (chosen_by(plain, given) == chosen_by(mixture, rounded.unquantized)).all(dim=1)
    assert same.sum() >= 5
    for rows in (rounded, norm.add_norm(x.clone(), residual.clone())[0]):
        got = summed(mixture(rows))
        assert relative_error(got[same], expected[same]) < 0.06
