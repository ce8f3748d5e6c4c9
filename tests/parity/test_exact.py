"""Exact mode on a CPU: the tokens of a request are the same whatever else is computed; and what
cannot keep that is refused.

On a CPU, float32 is what keeps it: logits differ in their last bits. On a GPU they are the same
bits (tests/gpu/test_exact_on_gpu.py).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from company import ask as answers
from cores import Cores

from checkpoints import CheckpointCache
from draws import numbers
from pipeinfer.attention import registry
from pipeinfer.attention.registry import Gpu
from pipeinfer.engine.choices import choose_engine
from pipeinfer.settings import ConfigurationError, Settings

LENGTHS = (1, 2, 17, 40, 90, 64, 33)
WANTED = 24  # tokens of each answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return CheckpointCache(tmp_path_factory.mktemp("exact"))


def cores(folder: Path, policy: str = "mixed", loaded=None, **changes) -> Cores:
    settings = Settings(
        model=str(folder), exact=True, device="cpu", dtype="float32", page_size=16, kv_pages=128,
        max_running=8, threads=1, max_step_tokens=256,
    )  # fmt: skip
    settings = msgspec.structs.replace(settings, **changes)
    return Cores(folder, settings, policy, settings.max_step_tokens, loaded=loaded)


def test_tokens_are_the_same_in_any_step(checkpoint):
    """Of a model with layers of both kinds, sinks and experts."""
    folder, random = checkpoint("GptOssForCausalLM"), numbers(0)
    ask = partial(answers, wanted=WANTED)
    asked = [random.integers(0, 256, length).tolist() for length in LENGTHS]
    made = cores(folder)
    expected = ask(made, asked)
    assert len(expected.logits) == WANTED * len(asked)
    loaded = made.loaded
    found = {
        "warm": ask(made, asked, tag="w"),
        "alone": ask(cores(folder, loaded=loaded), asked, alone=True),
        "backwards": ask(cores(folder, loaded=loaded), asked, [*range(len(asked))][::-1]),
        "chunks of 16": ask(cores(folder, loaded=loaded, max_step_tokens=16), asked),
        "depth 1": ask(cores(folder, loaded=loaded, overlap_depth=1), asked),
        "preempted": ask(cores(folder, "cores:Nuisance", loaded), asked),
    }
    assert sum(made.cached[f"r{index}w"] for index in range(len(asked))) >= 64
    differ = {how: other.other_tokens(expected) for how, other in found.items()}
    assert differ == dict.fromkeys(found, 0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "bfloat16"}, "--exact: on a CPU only --dtype float32"),
        ({"compile": True}, "--exact: not with --compile"),
        ({"attention": "hybrid"}, "--exact: with --attention hybrid tokens depend on"),
    ],
)
def test_what_does_not_keep_it_is_refused_on_a_cpu(checkpoint, changes, why):
    folder = checkpoint("Qwen3ForCausalLM")
    usual = {"device": "cpu", "dtype": "float32"}
    with pytest.raises(ConfigurationError, match=why):
        choose_engine(Settings(exact=True, **usual | changes), folder)


def test_on_a_cpu_it_chooses_float32(checkpoint):
    folder = checkpoint("Qwen3ForCausalLM", dtype=torch.bfloat16)
    assert choose_engine(Settings(exact=True, device="cpu"), folder).dtype == torch.float32


HOPPER = Gpu((9, 0), "bfloat16", 128, frozenset())


def test_on_a_gpu_it_has_attention_of_its_own_that_needs_no_package():
    assert registry.resolve_exact("auto", "cuda", HOPPER) == "exact"
    with_sinks = Gpu((9, 0), "float16", 64, frozenset(), sinks=True)
    assert registry.resolve_exact("auto", "cuda", with_sinks) == "exact"


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (Gpu((8, 0), "bfloat16", 128, frozenset()), "capability 9.0 alone"),
        (Gpu((9, 0), "float32", 128, frozenset()), "not float32"),
        (Gpu((9, 0), "bfloat16", 96, frozenset()), "no kernel for heads of 96"),
        (Gpu((9, 0), "bfloat16", 128, frozenset(), soft_cap=True), "soft cap"),
        (Gpu((9, 0), "bfloat16", 128, frozenset(), e4m3=True), "fp8_e4m3"),
    ],
)
def test_what_does_not_keep_it_is_refused_on_a_gpu(gpu, why):
    with pytest.raises(ConfigurationError, match=f"--exact: .*{why}"):
        registry.resolve_exact("auto", "cuda", gpu)


def test_no_name_of_a_backend_means_it():
    with pytest.raises(ConfigurationError, match="no backend 'exact'"):
        registry.resolve("exact", "cuda", HOPPER)
