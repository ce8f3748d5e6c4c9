"""Routing of mixtures, and their experts as grouped GEMMs: cases for interpreter and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.triton_cases import DEVICE, HALVES, INTERPRETED, TOLERANCE, randn, relative_error
from pipeinfer.kernels import moe
from pipeinfer.kernels.elementwise import rms_norm_reference, sum_rms_norm
from pipeinfer.kernels.formats import quantize_rows
from pipeinfer.kernels.moe import (
    ClampedSwiglu,
    down_gemm,
    fused_experts,
    fused_experts_by_pair,
    fused_experts_reference,
    moe_align_block_size,
    moe_align_block_size_reference,
    topk_softmax,
    topk_softmax_reference,
)
from pipeinfer.kernels.tile_configs import (
    MOE_CONFIGS_MXFP4,
    MOE_CONFIGS_W8A16,
    MOE_CONFIGS_W16,
    MoeConfig,
    MoeGemmConfig,
)
from pipeinfer.layers.experts import StackedExperts, TorchExperts, TritonExperts
from quantized_checkpoints import mxfp4

SHAPES = [(1, 8, 2), (3, 128, 8), (9, 60, 4), (6, 5, 5), (2, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_choices_and_weights_are_those_of_the_reference(tokens, experts, top_k, normalize, dtype):
    scores = (2 * randn(0, tokens, experts + 8)).to(dtype)[:, :experts]
    weights, chosen = topk_softmax(scores, top_k, normalize, dtype)
    expected, experts_expected = topk_softmax_reference(scores, top_k, normalize, dtype)
    assert torch.equal(chosen, experts_expected) and weights.dtype == dtype
    assert relative_error(weights, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_that_are_still_to_be_summed_are_rounded_as_a_product_is(dtype, splits):
    partials = (32 * randn(0, splits, 5, 24)).round() / 32  # their sums have one value in any order
    if dtype == torch.bfloat16 and INTERPRETED:
        partials = partials.round()  # it truncates
    weights, chosen = topk_softmax(partials, 4, True, dtype)
    expected, experts = topk_softmax_reference(partials, 4, True, dtype)
    assert torch.equal(chosen, experts)
    assert relative_error(weights, expected) < 2 * TOLERANCE[dtype]


def test_of_equal_scores_the_lower_expert_comes_first():
    scores = torch.zeros(2, 16, device=DEVICE)
    scores[0, [3, 5]] = -0.0
    scores[1, [2, 9, 12]] = 1.0
    _, chosen = topk_softmax(scores, 4, True, torch.float32)
    assert chosen.tolist() == [[0, 1, 2, 3], [2, 9, 12, 0]]


def test_scores_that_cannot_be_chosen_or_are_no_numbers():
    scores = randn(0, 4, 12)
    scores[0, :10] = float("-inf")
    scores[1, 4] = float("nan")
    scores[2, :] = float("-inf")
    scores[3, 7] = -float("nan")
    weights, chosen = topk_softmax(scores, 4, True, torch.float32)
    expected, experts = topk_softmax_reference(scores, 4, True, torch.float32)
    assert torch.equal(chosen[0], experts[0])
    torch.testing.assert_close(weights[0], expected[0])
    assert weights[1:].isnan().all()
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in chosen.tolist())


def test_a_token_chooses_the_same_in_any_batch():
    scores = randn(0, 11, 32)
    weights, chosen = topk_softmax(scores, 4, True, torch.float32)
    alone, expert = topk_softmax(scores[6:7], 4, True, torch.float32)
    assert torch.equal(alone, weights[6:7]) and torch.equal(expert, chosen[6:7])
    assert topk_softmax(scores[:0], 4, True, torch.float32)[0].shape == (0, 4)


ERROR = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # two more roundings
CUT = MoeGemmConfig(block_n=16, block_k=16, num_warps=4, num_stages=2)
SMALL = MoeConfig(16, CUT, replace(CUT, block_k=32), group_m=2)
TURNED = MoeConfig(
    16, replace(CUT, block_n=64, swap_ab=True), replace(CUT, block_n=32, swap_ab=True)
)


def routed(tokens: int, experts: int, top_k: int, seed: int = 0, skew: float = 0.0):
    """(weights float32, chosen int64) of a router that prefers low experts by `skew`."""
    scores = randn(seed, tokens, experts) - skew * torch.arange(experts, device=DEVICE)
    weights, chosen = scores.softmax(-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), chosen


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "skew"),
    [(1, 8, 2, 0), (3, 128, 8, 0), (50, 6, 2, 0), (40, 16, 4, 2.0), (100, 1, 1, 0)],
)
def test_pairs_come_by_expert_in_their_order_and_padded(tokens, experts, top_k, skew, block):
    _, chosen = routed(tokens, experts, top_k, skew=skew)
    got, expected = (
        moe_align_block_size(chosen, experts, block),
        moe_align_block_size_reference(chosen, experts, block),
    )
    used = int(got.num_padded_pairs)
    assert used == int(expected.num_padded_pairs) <= len(got.sorted_pair_ids)
    assert torch.equal(got.sorted_pair_ids[:used].cpu(), expected.sorted_pair_ids)
    assert torch.equal(got.expert_ids[: used // block].cpu(), expected.expert_ids)


def test_more_pairs_than_a_program_looks_at_in_one_go_keep_their_order(monkeypatch):
    monkeypatch.setattr(moe, "PAIRS_PER_CHUNK", 16)
    _, chosen = routed(30, 5, 3)
    got, expected = (
        moe_align_block_size(chosen, 5, 16),
        moe_align_block_size_reference(chosen, 5, 16),
    )
    assert torch.equal(
        got.sorted_pair_ids[: int(got.num_padded_pairs)].cpu(), expected.sorted_pair_ids
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [SMALL, TURNED])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inter"),
    [(1, 8, 2, 64, 32), (9, 4, 2, 40, 24), (45, 4, 3, 48, 20), (17, 16, 4, 64, 32)],
)
def test_experts_are_those_of_the_reference(tokens, experts, top_k, hidden, inter, shape, dtype):
    x = randn(1, tokens, hidden, dtype=dtype)
    gate_up = randn(2, experts, 2 * inter, hidden, dtype=dtype) / hidden**0.5
    down = randn(3, experts, hidden, inter, dtype=dtype) / inter**0.5
    weights, chosen = routed(tokens, experts, top_k)
    expected = fused_experts_reference(x, gate_up, down, weights, chosen)
    got = fused_experts(x, gate_up, down, weights, chosen, shape)
    assert relative_error(got, expected) < ERROR[dtype]


def tried(table):
    """The shapes of a table; in the interpreter, which has no tensor cores, a shape for each order
    of the operands."""
    shapes = [shape for _, shape in table]
    if INTERPRETED:
        by_order = {(shape.gate_up.swap_ab, shape.down.swap_ab): shape for shape in shapes}
        shapes = by_order.values()
    return list(dict.fromkeys(shapes))


@pytest.mark.parametrize("table", [MOE_CONFIGS_W16, MOE_CONFIGS_W8A16])
def test_every_tile_shape_that_may_be_chosen_computes_the_same(table):
    hidden, inter, experts = 160, 144, 2
    x = randn(1, 70, hidden)
    gate_up = randn(2, experts, 2 * inter, hidden) / hidden**0.5
    down = randn(3, experts, hidden, inter) / inter**0.5
    weights, chosen = routed(70, experts, 1)
    expected = fused_experts_reference(x, gate_up, down, weights, chosen)
    x16, gate16, down16 = x.half(), gate_up.half(), down.half()
    for shape in tried(table):
        got = fused_experts(x16, gate16, down16, weights, chosen, shape)
        assert relative_error(got, expected) < 2e-3


def in_8_bits(weight, blocks):
    """(e4m3, scales, what they stand for in float32) of weight [experts, rows, columns]."""
    experts, rows, columns = weight.shape
    if not blocks:
        rounded, scale = quantize_rows(weight)
        return rounded, scale, rounded.float() * scale
    scale = randn(9, experts, rows // 128, columns // 128).abs() / 100 + 0.01
    wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    rounded = (weight / wide).to(torch.float8_e4m3fn)
    return rounded, scale, rounded.float() * wide


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [SMALL, TURNED])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "blocks"),
    [(5, 256, 128, True), (21, 128, 256, True), (5, 64, 48, False), (21, 80, 32, False)],
)
def test_experts_in_8_bits_are_those_of_the_values_they_stand_for(
    tokens, hidden, inter, blocks, shape, dtype
):
    x = randn(1, tokens, hidden, dtype=dtype)
    gate_up, gate_up_scale, plain = in_8_bits(randn(2, 4, 2 * inter, hidden) / 10, blocks)
    down, down_scale, plain_down = in_8_bits(randn(3, 4, hidden, inter) / 8, blocks)
    weights, chosen = routed(tokens, 4, 2)
    expected = fused_experts_reference(x, plain, plain_down, weights, chosen)
    got = fused_experts(
        x, gate_up, down, weights, chosen, shape, gate_up_scale=gate_up_scale, down_scale=down_scale
    )
    assert got.dtype == dtype and relative_error(got, expected) < ERROR[dtype]


def bounds(experts, inter, hidden, dtype, adds=True):
    """Biases and bounds that matter: about a third of all values are beyond the limit."""
    gate_up_bias = randn(7, experts, 2 * inter, dtype=dtype)
    down_bias = randn(8, experts, hidden, dtype=dtype)
    return ClampedSwiglu(1.702, 1.0, gate_up_bias, down_bias if adds else None)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [SMALL, TURNED])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(1, 64, 32), (9, 40, 24), (45, 48, 20)])
def test_experts_with_bounds_and_biases_are_those_of_the_reference(
    tokens, hidden, inter, adds, shape, dtype
):
    x = randn(1, tokens, hidden, dtype=dtype)
    gate_up = randn(2, 4, 2 * inter, hidden, dtype=dtype) / hidden**0.5
    down = randn(3, 4, hidden, inter, dtype=dtype) / inter**0.5
    weights, chosen = routed(tokens, 4, 2)
    bounded = bounds(4, inter, hidden, dtype, adds)
    expected = fused_experts_reference(x, gate_up, down, weights, chosen, bounded)
    got = fused_experts(x, gate_up, down, weights, chosen, shape, clamped=bounded)
    assert relative_error(got, expected) < ERROR[dtype]
    usual = fused_experts_reference(x, gate_up, down, weights, chosen)
    assert relative_error(usual, expected) > 0.1, "bounds and biases are to be seen"


def in_4_bits(weight):
    """(bytes, exponents, what they stand for) of weight [experts, rows, columns]."""
    stored, plain = mxfp4("w", weight.transpose(1, 2).float().cpu())
    exponents = stored["w_scales"]
    filled = torch.nn.functional.pad(exponents, (0, -exponents.shape[2] % 4), value=127)
    values = stored["w_blocks"].flatten(2)
    return values.to(DEVICE), filled.to(DEVICE), plain.transpose(1, 2).contiguous().to(DEVICE)


FEW = MoeConfig(16, replace(CUT, block_k=64), replace(CUT, block_n=32, block_k=32), group_m=2)
TURNED_FEW = MoeConfig(16, replace(CUT, block_n=64, block_k=128, swap_ab=True),
                   replace(CUT, block_n=64, block_k=64, swap_ab=True))  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [FEW, TURNED_FEW])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter"), [(1, 128, 128), (9, 160, 96), (30, 64, 32), (21, 96, 192)]
)
def test_experts_in_mxfp4_are_those_of_the_values_they_stand_for(
    tokens, hidden, inter, shape, dtype
):
    x = randn(1, tokens, hidden, dtype=dtype)
    gate_up, gate_up_scale, plain = in_4_bits(randn(2, 4, 2 * inter, hidden) / hidden**0.5)
    down, down_scale, plain_down = in_4_bits(randn(3, 4, hidden, inter) / inter**0.5)
    weights, chosen = routed(tokens, 4, 2)
    bounded = bounds(4, inter, hidden, dtype)
    expected = fused_experts_reference(x, plain, plain_down, weights, chosen, bounded)
    got = fused_experts(
        x, gate_up, down, weights, chosen, shape, gate_up_scale=gate_up_scale,
        down_scale=down_scale, clamped=bounded,
    )  # fmt: skip
    assert got.dtype == dtype and relative_error(got, expected) < ERROR[dtype]


def test_every_tile_shape_for_mxfp4_computes_the_same():
    hidden = inter = 128
    x = randn(1, 70, hidden, dtype=torch.bfloat16)
    gate_up, gate_up_scale, plain = in_4_bits(randn(2, 2, 2 * inter, hidden) / hidden**0.5)
    down, down_scale, plain_down = in_4_bits(randn(3, 2, hidden, inter) / inter**0.5)
    weights, chosen = routed(70, 2, 1)
    bounded = bounds(2, inter, hidden, torch.bfloat16)
    expected = fused_experts_reference(x, plain, plain_down, weights, chosen, bounded)
    for shape in tried(MOE_CONFIGS_MXFP4):
        got = fused_experts(
            x, gate_up, down, weights, chosen, shape, gate_up_scale=gate_up_scale,
            down_scale=down_scale, clamped=bounded,
        )  # fmt: skip
        assert relative_error(got, expected) < ERROR[torch.bfloat16]


def test_every_number_and_power_of_mxfp4_is_exact():
    """The product with a unit matrix, of all that 16 bits can hold."""
    dtype = HALVES[-1]
    powers = 9 if dtype == torch.float16 else 100
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    values = (codes[::2] | (codes[1::2] << 4)).repeat(1, 32, 1)
    exponents = torch.full((1, 32, 4), 127, dtype=torch.uint8)
    exponents[0, :, 0] = 127 + torch.linspace(-powers, powers, 32).to(torch.int64)
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wide = table.repeat(2) * (exponents[0, :, :1].double() - 127).exp2()  # [rows, columns]
    x = torch.eye(32, dtype=dtype, device=DEVICE)
    plan = moe_align_block_size(torch.zeros(32, 1, dtype=torch.int32, device=DEVICE), 1, 16)
    ones = torch.ones(32, dtype=torch.float32, device=DEVICE)
    for tile in (FEW, TURNED_FEW):
        got = down_gemm(x, values.to(DEVICE), exponents.to(DEVICE), ones, plan, tile)
        assert torch.equal(got.cpu().double(), wide.T)


def test_exponents_that_do_not_fit_are_refused():
    x, (weights, chosen) = randn(1, 3, 192, dtype=HALVES[0]), routed(3, 4, 2)
    gate_up, gate_up_scale, _ = in_4_bits(randn(2, 4, 64, 192))
    down, down_scale, _ = in_4_bits(randn(3, 4, 192, 32))
    for wrong in (gate_up_scale[:, :, :6].contiguous(), gate_up_scale[:, :, :4].contiguous()):
        scales = {"gate_up_scale": wrong, "down_scale": down_scale}
        with pytest.raises(ValueError, match="exponents for"):
            fused_experts(x, gate_up, down, weights, chosen, FEW, **scales)


def test_what_is_no_number_stays_so_beyond_bounds():
    x, (weights, chosen) = randn(1, 3, 64), routed(3, 4, 2)
    x[1, 5] = float("nan")
    gate_up, down = randn(2, 4, 64, 64), randn(3, 4, 64, 32)
    got = fused_experts(
        x, gate_up, down, weights, chosen, SMALL, clamped=bounds(4, 32, 64, torch.float32)
    )
    assert got.isnan().all(1).tolist() == [False, True, False] and not got[::2].isnan().any()


def test_scales_of_blocks_that_are_not_whole_are_refused():
    x, (weights, chosen) = randn(1, 3, 192), routed(3, 4, 2)
    gate_up, down = torch.zeros(4, 256, 192).to(x), torch.zeros(4, 192, 128).to(x)
    scales = {"gate_up_scale": torch.ones(4, 2, 2).to(x), "down_scale": torch.ones(4, 2, 1).to(x)}
    with pytest.raises(ValueError, match="nor of whole blocks of 128 x 128"):
        fused_experts(x, gate_up, down, weights, chosen, SMALL, **scales)


@pytest.mark.parametrize("spans", [[(0, 3), (3, 8)], [(0, 1), (1, 2), (2, 8)]])
def test_experts_of_several_ranks_add_up_to_all(spans):
    x = randn(1, 37, 64, dtype=torch.float16)
    gate_up = randn(2, 8, 64, 64, dtype=torch.float16) / 8
    down = randn(3, 8, 64, 32, dtype=torch.float16) / 6
    weights, chosen = routed(37, 8, 3, skew=0.3)
    parts = [
        fused_experts(
            x, gate_up[a:b].contiguous(), down[a:b].contiguous(), weights, chosen, SMALL, a, 8
        )
        for a, b in spans
    ]
    for (a, b), part in zip(spans, parts, strict=True):
        there = ((chosen >= a) & (chosen < b)).any(-1)
        assert there.any() and torch.equal(part.any(-1), there), "others' choices count nothing"
    together = torch.stack(parts).float().sum(0)
    expected = fused_experts_reference(x, gate_up, down, weights, chosen)
    assert relative_error(together.half(), expected) < 2 * ERROR[torch.float16]


def test_pairs_of_another_ranks_experts_are_left_out():
    _, chosen = routed(50, 12, 3)
    got, expected = (
        moe_align_block_size(chosen, 5, 16, first_expert=4),
        moe_align_block_size_reference(chosen, 5, 16, first_expert=4),
    )
    used = int(got.num_padded_pairs)
    assert used == int(expected.num_padded_pairs) and torch.equal(
        got.sorted_pair_ids[:used].cpu(), expected.sorted_pair_ids
    )
    assert torch.equal(got.expert_ids[: used // 16].cpu(), expected.expert_ids)


def test_a_token_gets_the_same_result_in_any_batch():
    x = randn(1, 20, 64, dtype=torch.float16)
    gate_up = randn(2, 4, 64, 64, dtype=torch.float16)
    down = randn(3, 4, 64, 32, dtype=torch.float16)
    weights, chosen = routed(20, 4, 2)
    together = fused_experts(x, gate_up, down, weights, chosen, SMALL)
    some = slice(5, 9)
    alone = fused_experts(x[some], gate_up, down, weights[some], chosen[some], SMALL)
    assert torch.equal(alone, together[some])


def test_a_norm_makes_the_sums_of_a_tokens_pairs():
    x, residual, weight = (randn(seed, 7, 64, dtype=torch.float16) for seed in (1, 5, 6))
    gate_up = randn(2, 4, 64, 64, dtype=torch.float16) / 8
    down = randn(3, 4, 64, 32, dtype=torch.float16) / 6
    weights, chosen = routed(7, 4, 3)
    by_pair = fused_experts_by_pair(x, gate_up, down, weights, chosen, SMALL)
    expected = fused_experts_reference(x, gate_up, down, weights, chosen)
    assert relative_error(by_pair.float().sum(1).half(), expected) < ERROR[torch.float16]
    theirs = residual.clone()
    got = sum_rms_norm(by_pair.transpose(0, 1), residual, weight[0], 1e-6)
    normed = rms_norm_reference(expected, weight[0], 1e-6, theirs)
    assert relative_error(residual, theirs) < ERROR[torch.float16]
    assert relative_error(got, normed) < 2 * ERROR[torch.float16]


def test_strided_tokens_and_none_are_accepted():
    wide = randn(1, 6, 128, dtype=torch.float16)
    gate_up = randn(2, 4, 64, 64, dtype=torch.float16)
    down = randn(3, 4, 64, 32, dtype=torch.float16)
    weights, chosen = routed(6, 4, 2)
    x = wide[:, :64]
    expected = fused_experts(x.contiguous(), gate_up, down, weights, chosen, SMALL)
    assert torch.equal(fused_experts(x, gate_up, down, weights, chosen.int(), SMALL), expected)
    assert fused_experts(x[:0], gate_up, down, weights[:0], chosen[:0]).shape == (0, 64)
    assert fused_experts_by_pair(x[:0], gate_up, down, weights[:0], chosen[:0]).shape == (0, 2, 64)


BACKENDS = [TritonExperts, TorchExperts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("tokens", "span"), [(1, (0, 8)), (37, (0, 8)), (37, (2, 5)), (5, (7, 8))])
def test_every_backend_computes_the_experts_of_the_reference(backend, bounded, tokens, span):
    hidden, inter = 64, 32
    # The interpreter multiplies no bfloat16, and torch's products take nothing else on a GPU.
    dtype = torch.bfloat16 if backend is TorchExperts else HALVES[-1]
    x, (first, stop) = randn(1, tokens, hidden, dtype=dtype), span
    gate_up = randn(2, 8, 2 * inter, hidden, dtype=dtype) / 8
    down = randn(3, 8, hidden, inter, dtype=dtype) / 6
    weights, chosen = routed(tokens, 8, 3, skew=0.3)
    limits = bounds(8, inter, hidden, dtype) if bounded else None
    here = torch.where((chosen >= first) & (chosen < stop), weights, 0.0)
    expected = fused_experts_reference(x.float(), gate_up, down, here, chosen, limits)
    mine = limits and replace(
        limits,
        gate_up_bias=limits.gate_up_bias[first:stop],
        down_bias=limits.down_bias[first:stop],
    )
    stack = StackedExperts(
        (gate_up[first:stop], None), (down[first:stop], None), first, 8, bounded=mine
    )
    got = backend(stack).summed(x, weights, chosen)
    assert got.dtype == dtype and relative_error(got, expected) < 2 * ERROR[dtype]


def test_a_token_is_computed_alike_by_torch_whatever_other_tokens_there_are():
    dtype = torch.bfloat16
    gate_up, down = randn(2, 8, 64, 64, dtype=dtype) / 8, randn(3, 8, 64, 32, dtype=dtype) / 6
    x, (weights, chosen) = randn(1, 20, 64, dtype=dtype), routed(20, 8, 3)
    backend = TorchExperts(StackedExperts((gate_up, None), (down, None), 0, 8))
    whole = backend.summed(x, weights, chosen)
    turned = backend.summed(x.flip(0), weights.flip(0), chosen.flip(0)).flip(0)
    assert relative_error(turned, whole) < ERROR[dtype]
