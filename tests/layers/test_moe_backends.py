"""Which backend computes mixtures of experts, and what none of them takes."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.layers.moe_backends import (
    StackedExperts,
    TorchExperts,
    choose_backend,
    resolve_backend,
)
from pipeinfer.layers.placement import Placement, Shard
from pipeinfer.settings import ConfigurationError


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
        ("tritn", "cuda", "known: auto, triton, torch; did you mean 'triton'"),
    ],
)
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(name, device, text):
    with pytest.raises(ConfigurationError, match=text):
        resolve_backend(name, device)


def test_experts_on_a_cpu_compute_by_themselves():
    assert choose_backend(Placement(Shard(), torch.float32, torch.device("cpu"))) is None


def test_torch_takes_no_quantized_weights_and_no_other_dtype():
    weight, scale = torch.zeros(2, 8, 4, dtype=torch.float8_e4m3fn), torch.ones(2, 8, 1)
    with pytest.raises(ConfigurationError, match="stay quantized; --moe-backend triton works"):
        TorchExperts(StackedExperts((weight, scale), (weight, scale), 0, 2))
    plain = torch.zeros(2, 8, 4, dtype=torch.float16)
    with pytest.raises(ConfigurationError, match="in bfloat16 on a GPU, not in"):
        TorchExperts(StackedExperts((plain, None), (plain, None), 0, 2))
