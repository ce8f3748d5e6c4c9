"""What keys of 8 bits are stored less: it changes no weights of attention, it is the key that
queries see on average, and every load finds the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dense_attention import causal, split
from pipeinfer.checkpoint.config import read_config
from pipeinfer.engine import kv_store as module
from pipeinfer.engine.kv_store import find_key_centers
from pipeinfer.engine.loading import load_engine
from pipeinfer.kernels.formats import hadamard_transform
from pipeinfer.layers.attention import RotatedQKV
from pipeinfer.models.loading import build_model, load_weights
from pipeinfer.settings import Settings
from pipeinfer.step import AttentionShape
from transformers_checkpoints import write_configuration

CPU = torch.device("cpu")
FP8 = {"kv_cache_dtype": "fp8_e4m3", "kv_pages": 8, "page_size": 16, "max_running": 2}


def model_of(folder):
    model = build_model(read_config(folder))
    load_weights(model, folder)
    return model


def key_centers_of(folder, **further):
    return load_engine(Settings(**(FP8 | further)), folder).runner.pool.key_centers


def heads_of(shape: AttentionShape, tokens: int = 30):
    generator = torch.manual_seed(2)
    sizes = [shape.num_heads, *[shape.num_kv_heads] * 2]
    return [torch.randn(tokens, n, shape.head_dim, generator=generator) for n in sizes]


SHAPE = AttentionShape(4, 2, 48, 48**-0.5)


@pytest.mark.parametrize("window", [None, 7])
def test_turned_and_shifted_keys_have_the_weights_that_plain_ones_have(window):
    shape = replace(SHAPE, sliding_window=window)
    q, k, v = heads_of(shape)
    attend, shift = causal([shape]), 5 * torch.randn(2, 48)
    plain = attend(0, q, k, v)
    torch.testing.assert_close(
        attend(0, hadamard_transform(q), hadamard_transform(k - shift), v), plain, atol=1e-4, rtol=0
    )


def test_with_sinks_a_turn_changes_nothing_but_a_shift_would():
    shape = replace(SHAPE, sinks=torch.randn(4))
    q, k, v = heads_of(shape)
    attend, shift = causal([shape]), torch.randn(2, 48)
    plain = attend(0, q, k, v)
    torch.testing.assert_close(
        attend(0, hadamard_transform(q), hadamard_transform(k), v), plain, atol=1e-4, rtol=0
    )
    assert (
        attend(0, hadamard_transform(q), hadamard_transform(k - shift), v) - plain
    ).abs().max() > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_the_shift_is_the_key_that_queries_see_on_average(checkpoint, architecture, monkeypatch):
    monkeypatch.setattr(module, "CENTERING_TOKENS", 70)  # more than Gemma's window
    model = model_of(checkpoint(architecture))
    shapes, wanted = model.attention_shapes(), {}
    attend = causal(shapes)

    def watch(layer, q, k, v):
        wanted[layer] = attend(layer, q, k, k).mean(0).unflatten(0, (k.shape[1], -1)).mean(1)
        return attend(layer, q, k, v)

    ids = torch.from_numpy(np.random.RandomState(0).randint(0, model.vocab_shard.vocab_size, 70))
    model(ids, torch.arange(70), split(watch))
    found = find_key_centers(model, 1000, CPU)
    assert len(found) == len(wanted) == len(shapes)
    for layer, shift in enumerate(found):
        torch.testing.assert_close(shift, wanted[layer], rtol=1e-4, atol=1e-5)
        assert shift.abs().max() > 1e-2
    assert not torch.equal(find_key_centers(model, 30, CPU)[0], found[0]), (
        "of the tokens there may be"
    )


def test_layers_with_sinks_or_a_soft_cap_have_none(checkpoint, tmp_path):
    assert set(key_centers_of(checkpoint("GptOssForCausalLM"))) == {None}
    write_configuration(tmp_path, "gemma2", "Gemma2ForCausalLM")
    capped = key_centers_of(tmp_path, load_format="dummy", model_impl="transformers")
    assert set(capped) == {None} and len(capped) == 2


def test_two_loads_give_the_same_key_centers_bit_for_bit_and_other_weights_others(checkpoint):
    folder = checkpoint("Qwen3ForCausalLM")
    first, second = (
        key_centers_of(folder),
        key_centers_of(folder, max_step_tokens=32, max_running=1),
    )
    other = key_centers_of(folder, load_format="dummy")
    for one, two, three in zip(first, second, other, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, two)
        assert one.isfinite().all() and not torch.equal(one, three)
    plain = load_engine(Settings(kv_pages=8, page_size=16), folder).runner.pool
    assert set(plain.key_centers) == {None}, "of pages as the model has them"


def test_by_transformers_a_model_has_the_key_centers_of_its_own_implementation(checkpoint):
    folder = checkpoint("Qwen3ForCausalLM")
    for ours, theirs in zip(
        key_centers_of(folder), key_centers_of(folder, model_impl="transformers"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_numbers_that_are_not_finite_shift_nothing():
    average = module._Average([SHAPE])
    q, k, v = heads_of(SHAPE)
    k[3] = float("nan")
    average(0, RotatedQKV(q, k, v))
    assert not average.found[0].any()
