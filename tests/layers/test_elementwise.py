"""`--compile`: the same numbers through torch.compile, wherever no fused kernel is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor

from checkpoints import CheckpointCache
from kept_logits import logits_of
from pipeinfer.engine.loading import load_engine
from pipeinfer.engine.step_builder import filled
from pipeinfer.layers import elementwise
from pipeinfer.layers.elementwise import RMSNorm, fused_ops, gelu_and_mul, silu_and_mul
from pipeinfer.layers.placement import Placement, Shard
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import Step
from step_pages import all_pages

CPU = torch.device("cpu")


@pytest.fixture
def not_compiled(monkeypatch):
    """The same functions as they stand, for what is not about the compiler: it takes its time."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    elementwise.compiled_ops.cache_clear()
    yield
    elementwise.compiled_ops.cache_clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@torch.inference_mode()
@inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": True})  # else it compiles to try them
def test_what_torch_compiles_computes_what_the_layers_do_for_any_number_of_rows():
    ops = elementwise.compiled_ops()
    norm = RMSNorm("n", 48, 1e-6, Placement(Shard(), torch.float32, CPU))
    norm.weight.normal_()
    for rows in (5, 17):
        x, residual, merged = torch.randn(rows, 48), torch.randn(rows, 48), torch.randn(rows, 80)
        found = ops.norm.add_norm(x, residual, norm.weight, 1e-6)
        activated = ops.silu_and_mul(merged)
        torch.testing.assert_close(found, norm.add_norm(x, residual), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(activated, silu_and_mul(merged), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_with_it_computes_the_same_logits(not_compiled, tmp_path, dtype, architecture):
    folder = CheckpointCache(tmp_path)(architecture, tokenizer=False)
    plain, other = (
        logits_of(load_engine(settings, folder).runner, STEP)
        for settings in (Settings(compile=yes, kv_pages=4, dtype=dtype) for yes in (False, True))
    )
    error = (plain.float() - other.float()).norm() / plain.float().norm()
    assert error < (1e-5 if dtype == "float32" else 2e-2)


STEP = Step(
    0, 0, 0, np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, 9, np.int32),
    np.ones(1, bool), np.arange(9, dtype=np.int32), filled(1), delta=all_pages([0], [[1]]),
)  # fmt: skip


def test_without_it_nothing_is_replaced_on_a_cpu():
    assert fused_ops(CPU, torch.float32) is None
    assert fused_ops(CPU, torch.float32, exact=True) is None
    assert fused_ops(CPU, torch.float32, compiled=True) is elementwise.compiled_ops()


@pytest.mark.parametrize(
    ("architecture", "function"),
    [
        ("Qwen3ForCausalLM", "_silu_and_mul"),
        ("Gemma3ForCausalLM", "_gelu_and_mul"),
        ("Gemma3ForCausalLM", "_add_gemma_rms_norm"),
    ],
)
def test_a_compiler_that_fails_is_a_configuration_error(
    not_compiled, monkeypatch, tmp_path, architecture, function
):
    def fails(*_):
        raise RuntimeError("no C++ compiler\nfurther lines")

    monkeypatch.setattr(elementwise, function, fails)
    folder = CheckpointCache(tmp_path)(architecture, tokenizer=False)
    with pytest.raises(ConfigurationError, match=r"--compile: .*no C\+\+ compiler$"):
        load_engine(Settings(compile=True, kv_pages=4), folder)


def test_gated_activation() -> None:
    x = torch.randn(3, 10)
    gate, up = x[:, :5].clone(), x[:, 5:].clone()
    torch.testing.assert_close(silu_and_mul(x), gate * gate.sigmoid() * up)


def test_gated_activation_by_tanh() -> None:
    x = torch.randn(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_and_mul(x), 0.5 * gate * (1 + inner.tanh()) * up)
