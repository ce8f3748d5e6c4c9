"""Experts that are one tensor on disk: the order of their rows, how MXFP4 is
handed on; backends."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.checkpoint.quantization import Fp8, Mxfp4
from pipeinfer.layers.experts import (
    ClampedExperts,
    FlashInferExperts,
    GatedExperts,
    MergedExpertWeights,
    StackedExperts,
    TorchExperts,
    choose_backend,
    resolve_backend,
)
from pipeinfer.layers.placement import Placement, Shard
from pipeinfer.layers.quantized import Mxfp4Tensor
from pipeinfer.settings import ConfigurationError

ALONE = Placement(Shard(), torch.float32, torch.device("cpu"))
SIZE = (3, 8, 64)


def filled(stack: MergedExpertWeights, dtype: torch.dtype) -> list[torch.Tensor]:
    """What was put into it, source by source."""
    every = tuple(slice(0, side) for side in SIZE)
    found = []
    for source in stack.sources("m", SIZE, every):
        full = torch.randint(110, 140, source.shape).to(dtype)
        source.target.copy_(full[source.slices])
        found.append(full)
    return found


@pytest.mark.parametrize("interleaved", [True, False])
def test_plain_rows_that_stand_in_turn_come_one_half_after_the_other(interleaved: bool) -> None:
    stack = MergedExpertWeights(None, SIZE, ALONE, interleaved)
    with pytest.raises(RuntimeError, match="not final yet"):
        _ = stack.for_kernels
    (full,) = filled(stack, torch.float32)
    stack.pack()
    rows = full.transpose(1, 2)
    order = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(8))
    weight, scale = stack.for_kernels
    assert scale is None and torch.equal(weight, rows[:, order])


@pytest.mark.parametrize("interleaved", [True, False])
def test_where_no_kernel_takes_mxfp4_it_becomes_plain(interleaved: bool) -> None:
    stack = MergedExpertWeights(Mxfp4(), SIZE, ALONE, interleaved)
    stored = Mxfp4Tensor(*filled(stack, torch.uint8))
    stack.pack()
    plain = torch.empty(SIZE)
    stored.dequantize_into(plain)
    order = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(8))
    weight, scale = stack.for_kernels
    assert scale is None and torch.equal(weight, plain[:, order])


def test_exponents_of_a_row_are_filled_up_to_whole_words_with_ones() -> None:
    values = Mxfp4Tensor.empty((2, 4, 160), ALONE)
    values.values.random_()
    values.exponents.fill_(120)
    bytes_, exponents = values.for_kernels
    assert bytes_.shape == (2, 4, 80) and exponents.shape == (2, 4, 8)
    assert exponents.is_contiguous() and torch.equal(bytes_, values.values.flatten(2))
    assert exponents[0, 0].tolist() == [120] * 5 + [127] * 3


def test_other_formats_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="plain or in mxfp4"):
        MergedExpertWeights(Fp8(), SIZE, ALONE)


def test_auto_is_triton_on_a_gpu_and_torch_elsewhere():
    assert resolve_backend("auto", "cuda") == "triton"
    assert (
        resolve_backend("auto", "cpu")
        == resolve_backend("auto", "meta")
        == resolve_backend("torch", "cpu")
        == "torch"
    )
    assert resolve_backend("torch", "cuda") == "torch"


@pytest.mark.parametrize(
    ("name", "device", "text"),
    [
        ("triton", "cpu", "no backend 'triton' for cpu; known: auto, torch"),
        ("flashinfer", "cpu", "no backend 'flashinfer' for cpu; known: auto, torch"),
        ("tritn", "cuda", "known: auto, triton, torch, flashinfer; did you mean 'triton'"),
    ],
)
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(name, device, text):
    with pytest.raises(ConfigurationError, match=text):
        resolve_backend(name, device)


def test_experts_on_a_cpu_compute_by_themselves():
    assert choose_backend(Placement(Shard(), torch.float32, torch.device("cpu"))) is None


def plain(experts: int, hidden: int = 16, size: int = 8, dtype=torch.bfloat16) -> StackedExperts:
    """Experts 0 .. `experts` - 1 of eight."""
    gate_up = torch.zeros(experts, 2 * size, hidden, dtype=dtype)
    return StackedExperts((gate_up, None), (gate_up.new_zeros(experts, hidden, size), None), 0, 8)


@pytest.mark.parametrize("backend", [TorchExperts, FlashInferExperts])
def test_backends_of_plain_weights_take_no_quantized_ones_and_no_other_dtype(backend):
    weight, scale = torch.zeros(2, 8, 4, dtype=torch.float8_e4m3fn), torch.ones(2, 8, 1)
    with pytest.raises(ConfigurationError, match="stay quantized; --moe-backend triton works"):
        backend(StackedExperts((weight, scale), (weight, scale), 0, 2))
    with pytest.raises(ConfigurationError, match=r"in bfloat16 on a GPU, not in torch\.float16"):
        backend(plain(8, dtype=torch.float16))


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (plain(8, hidden=20), "hidden size must be a multiple of 8, not 20"),
        (plain(8, size=12), "share of an expert's size must be a multiple of 8, not 12"),
        (plain(3), "every rank must have as many experts, and this one has 3 of 8"),
    ],
)
def test_flashinfer_refuses_shapes_that_it_cannot_multiply(stack, reason):
    with pytest.raises(ConfigurationError, match=f"--moe-backend flashinfer: .*{reason}"):
        FlashInferExperts(stack)


def test_flashinfer_is_refused_without_its_package_and_on_gpus_it_has_no_kernels_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="the package flashinfer is not installed"):
        resolve_backend("flashinfer", "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigurationError, match=r"this one has 8\.0; --moe-backend triton works"):
        resolve_backend("flashinfer", "cuda")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert resolve_backend("flashinfer", "cuda") == "flashinfer"


class UpFirst:
    """A backend that keeps what it is made of."""

    up_first = True
    unsummed = None

    def __init__(self, stack: StackedExperts) -> None:
        self.summed = stack


def filled_experts(kind: type, *more: object) -> GatedExperts | ClampedExperts:
    """Four experts of 8 numbers, the same at each call."""
    experts = kind(8, 8, 4, *more, ALONE)
    for number, source in enumerate(experts.sources("")):
        source.target.copy_(torch.arange(source.target.numel()).view(source.target.shape) + number)
    return experts


@pytest.mark.parametrize(("kind", "more"), [(GatedExperts, ()), (ClampedExperts, ((1.7, 7.0),))])
def test_up_stands_before_gate_where_a_backend_wants_that(kind, more):
    stacks = []
    for up_first in (False, True):
        experts = filled_experts(kind, *more)
        experts._backend = type("Backend", (UpFirst,), {"up_first": up_first})
        assert experts.fused is None  # weights are not final
        experts.pack()
        stacks.append(experts.fused)
    usual, turned = stacks
    pairs = [(usual.gate_up[0], turned.gate_up[0])]
    if usual.bounded is not None:
        pairs.append((usual.bounded.gate_up_bias, turned.bounded.gate_up_bias))
    for before, after in pairs:
        gate, up = before.chunk(2, dim=1)
        assert torch.equal(after, torch.cat((up, gate), 1)) and not torch.equal(after, before)
    assert torch.equal(usual.down[0], turned.down[0])
