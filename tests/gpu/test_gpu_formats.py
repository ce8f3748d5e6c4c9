"""Matrices that stay in FP8 or in 4 bits on a GPU compute what the same values do as plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draws import seeded
from pipeinfer.checkpoint.quantization import Fp8, Int4, Mxfp4, Quantization
from pipeinfer.engine.weight_memory import ParameterSizes, WeightMemory
from pipeinfer.layers.elementwise import GATED_ACTIVATIONS, RMSNorm
from pipeinfer.layers.experts import ClampedExperts, GatedExperts
from pipeinfer.layers.linear import GatedMLP, create_weight
from pipeinfer.layers.placement import PartialSum, Placement, Shard
from pipeinfer.layers.weight import DequantizedWeight, QuantizedActivations, QuantizedWeight

pytestmark = pytest.mark.gpu
WIDTH, DEPTH = 1024, 512
FORMATS = {
    "fp8 rows": Fp8(),
    "fp8 blocks": Fp8("weight_scale_inv", "block", (128, 128)),
    "4 bits": Int4("awq", 128),
    "4 bits, small groups": Int4("gptq", 32, zero_shift=1),
    "4 bits, rows": Int4("compressed-tensors", 0, zeros=False),
}
# In FP8 rows are rounded to e4m3, too, 2^-4 of each value at the worst.
BOUNDS = {"fp8": 5e-2, "4": 6e-3}


def placement(form, decoded=False):
    where = torch.device("cuda")
    quantization = Quantization("any", form, dequantize_at_load=decoded)
    return Placement(Shard(), torch.bfloat16, where, quantization=quantization)


def fill(sources):
    for number, source in enumerate(sources):
        generator = seeded(number, "cuda")
        if source.stored_dtypes == ("I32",):
            full = torch.empty(source.shape, dtype=torch.int32, device="cuda")
            full.random_(generator=generator)
        elif source.stored_dtypes == ("U8",):
            full = torch.empty(source.shape, dtype=torch.uint8, device="cuda")
            low, high = (0, 256) if source.name.endswith("_blocks") else (117, 122)
            full.random_(low, high, generator=generator)
        else:
            full = torch.empty(source.shape, device="cuda")
            full.normal_(0.0, source.dummy, generator=generator)
            full = full.abs() if "scale" in source.name else full
        source.target.copy_(full[source.slices])


def filled(at, bias, split):
    made = create_weight(at, ["m"], (WIDTH, DEPTH), bias, small_m=True, split_k=split)
    every = slice(0, WIDTH)
    fill(made.sources("m", every, (WIDTH, DEPTH), (every, slice(0, DEPTH))))
    made.pack()
    return made


def mixture(at, inter):
    made = GatedExperts(DEPTH, inter, 16, at)
    fill(made.sources(""))
    made.pack()
    return made


@pytest.mark.parametrize("form", FORMATS)
@torch.inference_mode()
def test_a_matrix_is_there_where_another_one_was_packed(form):
    at, every = placement(FORMATS[form]), slice(0, WIDTH)

    def created(memory):
        return create_weight(replace(at, memory=memory), ["m"], (WIDTH, DEPTH), None)

    created(sizes := ParameterSizes())
    data = torch.zeros(sizes.size, dtype=torch.uint8, device="cuda")
    first = created(places := WeightMemory(data))
    fill(first.sources("m", every, (WIDTH, DEPTH), (every, slice(0, DEPTH))))
    first.pack(places)
    assert places.complete and places.used == sizes.size
    second = created(final := WeightMemory(data, final=True))
    second.pack(final)
    for rows in (1, 100):
        x = torch.randn(rows, DEPTH, device="cuda").bfloat16()
        assert torch.allclose(first(x).float(), second(x).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64, 100, 700])
@torch.inference_mode()
def test_a_matrix_in_a_format_is_the_plain_one(form, rows):
    how, bound = FORMATS[form], BOUNDS[form.split()[0]]
    bias = torch.randn(WIDTH, device="cuda").bfloat16()
    kept, plain = filled(placement(how), bias, True), filled(placement(how, True), bias, False)
    assert isinstance(kept, QuantizedWeight) and isinstance(plain, DequantizedWeight)
    x = torch.randn(rows, DEPTH, device="cuda").bfloat16()
    expected = plain(x).float()
    bound *= expected.norm()
    assert (kept(x).float() - expected).norm() < bound
    out = torch.empty(rows, WIDTH, device="cuda").bfloat16()
    assert (
        kept.into(out, x, None).float() - plain.into(torch.empty_like(out), x, None).float()
    ).norm() < bound
    later = kept.split_k(x)
    if later is not None:
        assert isinstance(later, PartialSum)
        assert (later.partial.sum(0) - expected).norm() < bound
    assert (kept.input_quantizer is None) == form.startswith("4")
    if kept.input_quantizer is not None:
        assert torch.equal(kept(kept.input_quantizer.quantize(x)), kept(x))


@pytest.mark.parametrize("form", FORMATS)
@torch.inference_mode()
def test_no_rows_have_no_products(form):
    made = filled(placement(FORMATS[form]), None, False)
    none = torch.empty(0, DEPTH, device="cuda").bfloat16()
    assert made(none).shape == (0, WIDTH)
    if made.input_quantizer is not None:
        assert made(made.input_quantizer.quantize(none)).shape == (0, WIDTH)


@pytest.mark.parametrize("form", FORMATS)
@torch.inference_mode()
def test_a_graph_holds_products_of_few_and_many_rows(form):
    made = filled(placement(FORMATS[form]), None, False)
    for rows in (8, 256):
        x = torch.randn(rows, DEPTH, device="cuda").bfloat16()
        expected = made(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = made(x)
        x.copy_(x.flip(0).clone())
        graph.replay()
        assert torch.equal(out, expected.flip(0))


@pytest.mark.parametrize("form", ["fp8 rows", "fp8 blocks"])
@pytest.mark.parametrize("rows", [3, 200])
@torch.inference_mode()
def test_norms_and_swiglu_round_rows_as_the_next_weight_wants_them(form, rows):
    at = placement(FORMATS[form])
    norm, mlp = RMSNorm("norm", DEPTH, 1e-6, at), dense(at)
    norm.weight.normal_(1.0, 0.2)
    x, residual = (torch.randn(rows, DEPTH, device="cuda").bfloat16() for _ in range(2))
    exact = dense(placement(FORMATS[form], decoded=True))
    apart, together = residual.clone(), residual.clone()
    expected = summed(exact(norm.add_norm(x.clone(), residual)[0]))
    usual = summed(mlp(norm.add_norm(x.clone(), apart)[0]))
    rounded, total = norm.add_norm(x.clone(), together, mlp.input_quantizer)
    assert isinstance(rounded, QuantizedActivations) and total is together
    assert (together.float() - residual.float()).norm() < BOUNDS["4"] * residual.float().norm()
    got = summed(mlp(rounded))
    # Rounded once instead of twice: no farther off.
    assert (got - expected).norm() < 1.1 * (usual - expected).norm()
    assert (got - expected).norm() < BOUNDS["fp8"] * expected.norm()


def dense(at):
    mlp = GatedMLP(DEPTH, WIDTH, False, at, GATED_ACTIVATIONS["silu"])
    fill(mlp.sources(""))
    mlp.pack()
    return mlp


def summed(out):
    return out.partial.sum(0) if isinstance(out, PartialSum) else out.float()


KEPT = {"fp8 rows": (384, True), "fp8 blocks": (384, True), "4 bits": (256, False)}


@pytest.mark.parametrize("form", KEPT)
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 1200])
@torch.inference_mode()
def test_experts_in_a_format_are_the_plain_ones(form, tokens):
    how, (inter, stays) = FORMATS[form], KEPT[form]
    kept, plain = mixture(placement(how), inter), mixture(placement(how, True), inter)
    for stack in (kept.gate_up, kept.down):
        assert (stack.scale is not None) == stays
        assert (stack.stacked.dtype == torch.float8_e4m3fn) == stays
    assert plain.gate_up.stacked.dtype == plain.down.stacked.dtype == torch.bfloat16
    x = torch.randn(tokens, DEPTH, device="cuda").bfloat16()
    weights, chosen = torch.rand(tokens, 16, device="cuda").topk(4)
    expected = plain.fused(x, weights, chosen).float()
    got = kept.fused(x, weights, chosen).float()
    # Rows are rounded twice in FP8; 4 bits become bfloat16 first.
    bound = 1.3 * BOUNDS["fp8"] if stays else 2 * BOUNDS["4"]
    assert (got - expected).norm() < bound * expected.norm()
    unsummed = kept.unsummed(x, weights, chosen)
    assert unsummed.shape == (4, tokens, DEPTH)
    assert (unsummed.float().sum(0) - expected).norm() < bound * expected.norm()
    assert (kept.input_quantizer is not None) == stays
    if kept.input_quantizer is not None:
        rows = kept.input_quantizer.quantize(x)
        assert rows.unquantized is x and torch.equal(kept.fused(rows, weights, chosen).float(), got)


@torch.inference_mode()
def test_experts_in_blocks_that_do_not_divide_become_plain():
    made = GatedExperts(DEPTH, 192, 4, placement(FORMATS["fp8 rows"]))
    assert made.down.scale is not None, "of rows, all multiples of 16 do"
    assert made.input_quantizer is None, "but their rows are not rounded"
    made = GatedExperts(DEPTH, 192, 4, placement(FORMATS["fp8 blocks"]))
    assert made.down.scale is None


def clamped(at, inter=192):
    """Biases, and bounds that matter."""
    made = ClampedExperts(DEPTH, inter, 16, (1.702, 0.5), at)
    fill(made.sources(""))
    made.pack()
    return made


def one_by_one(made, x, weights, chosen):
    """The float32 sums of what experts give that are computed one after the other."""
    held, top_k = made.shard, chosen.shape[1]
    pairs = chosen.flatten() - held.first
    here = (pairs >= 0) & (pairs < held.count)
    order = torch.where(here, pairs, held.count).argsort(stable=True)[: int(here.sum())]
    counts = pairs[here].bincount(minlength=held.count).tolist()
    by_pair = torch.zeros(len(pairs), x.shape[1], device="cuda")
    by_pair[order] = made(x[order // top_k], counts).float()
    return by_pair.view(*chosen.shape, -1).mul(weights[..., None]).sum(1)


SHARDS = {
    "all": Shard(),
    "share": Shard(1, 2),
    "first share": Shard(0, 2),
    "some": Shard(1, 2, True),
}


def routed(tokens):
    """Weights and numbers [tokens, 4] of 16 experts; the first token has two of either half, so
    that each of two ranks has something to compute."""
    weights, chosen = torch.rand(tokens, 16, device="cuda").topk(4)
    chosen[0] = (
        torch.rand(2, 8, device="cuda").topk(2)[1] + torch.tensor([[0], [8]]).cuda()
    ).flatten()
    return weights, chosen


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
@torch.inference_mode()
def test_experts_with_bounds_are_those_that_are_computed_one_by_one(shard, tokens):
    at = Placement(SHARDS[shard], torch.bfloat16, torch.device("cuda"))
    made = clamped(at)
    x = torch.randn(tokens, DEPTH, device="cuda").bfloat16()
    weights, chosen = routed(tokens)
    expected = one_by_one(made, x, weights, chosen)
    got = made.fused(x, weights, chosen).float()
    assert (got - expected).norm() < 2 * BOUNDS["4"] * expected.norm()
    assert (made.unsummed is None) == (shard == "some")
    if made.unsummed is not None:
        unsummed = made.unsummed(x, weights, chosen).float()
        assert unsummed.shape == (4, tokens, DEPTH)
        assert (unsummed.sum(0) - expected).norm() < 2 * BOUNDS["4"] * expected.norm()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 1200])
@torch.inference_mode()
def test_experts_with_bounds_in_mxfp4_are_the_plain_ones(shard, tokens):
    how = SHARDS[shard]
    kept = clamped(replace(placement(Mxfp4()), shard=how))
    plain = clamped(replace(placement(Mxfp4(), decoded=True), shard=how))
    for stacks, dtype in ((kept, torch.uint8), (plain, torch.bfloat16)):
        assert stacks.gate_up.for_kernels[0].dtype == stacks.down.for_kernels[0].dtype == dtype
    x = torch.randn(tokens, DEPTH, device="cuda").bfloat16()
    weights, chosen = routed(tokens)
    expected = one_by_one(plain, x, weights, chosen)
    got = kept.fused(x, weights, chosen).float()
    assert (got - expected).norm() < 2 * BOUNDS["4"] * expected.norm()
    together = plain.fused(x, weights, chosen).float()
    assert (got - together).norm() < BOUNDS["4"] * expected.norm(), "the values are the same"


@pytest.mark.parametrize("form", [None, Mxfp4()])
@torch.inference_mode()
def test_a_graph_holds_experts_with_bounds(form):
    made = clamped(placement(form))
    x = torch.randn(8, DEPTH, device="cuda").bfloat16()
    weights, chosen = routed(8)
    expected = made.fused(x, weights, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.fused(x, weights, chosen)
    for one in (x, weights, chosen):
        one.copy_(one.flip(0).clone())
    graph.replay()
    assert torch.equal(out, expected.flip(0))
