"""Loading an engine: what settings and checkpoint come to, and what is refused beforehand."""

from __future__ import annotations

import json
import mmap
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from single_steps import Row, build_step

from kept_logits import logits_of
from pipeinfer.engine import choices, machine
from pipeinfer.engine.calibrate import allow_all, largest_step
from pipeinfer.engine.choices import choose_engine
from pipeinfer.engine.loading import load_engine, refused_without_memory
from pipeinfer.engine.machine import available_bytes
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.sampling import truncated
from pipeinfer.models import loading as checkpoint_files
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import Step


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("Qwen3ForCausalLM")


@pytest.mark.parametrize(("fast", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_automatic_choices_on_a_cpu(checkpoint, monkeypatch, fast, dtype):
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: fast)
    chosen = choose_engine(Settings(), checkpoint("LlamaForCausalLM", dtype=torch.bfloat16))
    assert (chosen.device, chosen.attention, chosen.page_size) == ("cpu", "torch", 16)
    assert chosen.config.dtype == "bfloat16"
    assert chosen.dtype == dtype
    assert chosen.max_model_len == 512


def test_headers_are_read_once_for_checking_and_loading(folder, monkeypatch):
    read, seen = checkpoint_files.read_tensor_index, []
    monkeypatch.setattr(
        checkpoint_files, "read_tensor_index", lambda path: seen.append(path) or read(path)
    )
    settings = Settings(kv_pages=4)
    load_engine(settings, folder, choices=choose_engine(settings, folder))
    assert seen == [folder]
    assert choose_engine(Settings(load_format="dummy"), folder).stored is None
    assert seen == [folder]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_asked_dtype_is_that_of_weights_and_pool(folder, dtype):
    engine = load_engine(Settings(dtype=dtype, kv_pages=8), folder)
    assert engine.dtype == dtype
    assert str(engine.runner.pool.dtype) == f"torch.{dtype}"
    row = Row(0, 0, [1, 2, 3], np.array([1]), True)
    step = build_step([row], 0, 1)
    assert str(logits_of(engine.runner, step).dtype) == f"torch.{dtype}"
    assert 0 <= engine.runner.run(step).ids[0] < 264


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "--max-model-len: 513 is more than the checkpoint's 512"),
        ({"attention": "fa3"}, "--attention: no backend 'fa3'"),
        ({"device": "cuda"}, "--device cuda"),
        ({"tp": 3}, "does not divide by 3 ranks"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_weights_are_read(folder, settings, message):
    seen = []
    with pytest.raises(ConfigurationError, match=message):
        load_engine(Settings(**settings), folder, lambda done, total: seen.append(done))
    assert seen == []


def test_a_checkpoint_without_a_tensor_is_refused_before_weights_are_read(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)
    (copy / "config.json").write_text(json.dumps(config))
    seen = []
    with pytest.raises(ConfigurationError, match=r"layers\.2"):
        load_engine(Settings(), copy, lambda done, total: seen.append(done))
    assert seen == []


@pytest.mark.parametrize("built_by", ["auto", "transformers"])
def test_progress_begins_with_nothing_and_ends_with_all_bytes(folder, built_by):
    seen = []
    settings = Settings(kv_pages=8, model_impl=built_by)
    load_engine(settings, folder, lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > 0


def test_dummy_weights_need_no_weight_file(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    engine = load_engine(Settings(load_format="dummy", kv_pages=8), tmp_path)
    row = Row(0, 0, [1, 2, 3], np.array([1]), True)
    assert logits_of(engine.runner, build_step([row], 0, 1)).isfinite().all()


def test_kv_pages_is_the_number_of_pages_for_tokens(folder):
    engine = load_engine(Settings(kv_pages=100, page_size=4), folder)
    assert engine.pages == engine.runner.pool.num_pages == 101  # and the dummy


def test_pages_are_no_more_than_all_requests_can_fill(folder):
    engine = load_engine(Settings(max_running=3, max_model_len=100), folder)
    assert engine.pages == 1 + 3 * 7
    assert (engine.max_slots, engine.max_model_len) == (3, 100)


def test_more_slots_than_a_step_has_rows_take_no_memory(folder):
    engine = load_engine(Settings(kv_pages=8, max_running=10**9, max_step_tokens=64), folder)
    assert engine.max_slots == engine.runner.largest.rows == 64


def test_more_pages_than_there_is_memory_are_refused(folder):
    with pytest.raises(ConfigurationError, match=r"--kv-pages 1,000,000,000: they take .* GiB, of"):
        load_engine(Settings(kv_pages=10**9), folder)


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (lambda: np.zeros((2**24, 2**24)), "Unable to allocate"),
        (lambda: torch.zeros(2**45), "DefaultCPUAllocator"),
        (lambda: [None] * 2**59, "none is left"),
        (lambda: mmap.mmap(-1, 2**62), "Cannot allocate"),
    ],
)
def test_arrays_beyond_all_memory_are_refused_in_a_sentence(allocate, said):
    with (
        pytest.raises(ConfigurationError, match=f"no memory for it .*{said}.*--max-running"),
        refused_without_memory(),
    ):
        allocate()
    for error in (RuntimeError("another"), FileNotFoundError(2, "another")):
        with pytest.raises(type(error), match="another"), refused_without_memory():
            raise error


@pytest.mark.parametrize(
    ("most", "said"),
    [(8, "--cuda-graph-max-batch 16 captures graphs for all of them"), (16, None), (0, None)],
)
def test_more_requests_than_graphs_have_room_for_is_said(folder, monkeypatch, caplog, most, said):
    asked = []
    monkeypatch.setattr(Runner, "capture", lambda runner, sizes, *_, **kinds: asked.append(sizes))
    monkeypatch.setattr(Runner, "graph_sizes", property(lambda runner: asked[0]))
    load_engine(Settings(kv_pages=8, max_running=16, cuda_graph_max_batch=most), folder)
    found = [line.message for line in caplog.records if "cuda-graph-max-batch" in line.message]
    assert [line.endswith(said) for line in found] == ([True] if said else [])


def test_pages_follow_free_memory_and_are_capped(folder, monkeypatch):
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, heads, head_dim, tokens, float32
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000 * page_bytes)
    loaded = load_engine(Settings(memory_fraction=0.5), folder)
    sampling = loaded.runner.sampling_bytes
    assert sampling == 2 * 256 * 264 * 4, "counts and float32 logits, of all slots and ids"
    assert loaded.pages == (500 * page_bytes - sampling) // page_bytes
    monkeypatch.setattr(machine, "resident_bytes", lambda: 400 * page_bytes)
    beside = load_engine(Settings(memory_fraction=0.5, standby=True), folder)
    assert beside.pages == (300 * page_bytes - sampling) // page_bytes
    monkeypatch.setattr(machine, "MAX_HOST_BYTES", 50 * page_bytes)
    assert load_engine(Settings(), folder).pages == 50
    monkeypatch.setattr(machine, "available_bytes", lambda: page_bytes)
    with pytest.raises(ConfigurationError, match="no memory for KV pages"):
        load_engine(Settings(), folder)


def test_the_step_that_memory_is_measured_with_asks_for_all_that_sampling_can_do(folder):
    """What only a request asked for would be allocated beside a pool that has taken the rest."""
    runner = load_engine(Settings(kv_pages=8, max_running=4, max_step_tokens=32), folder).runner
    step = largest_step(runner.largest, 16, 24)
    optional = {field.name for field in fields(Step) if field.default in (None, ())}
    missing = {name for name in optional if not getattr(step, name)}
    # Log-probs of prompts are made of a few tokens at a time; common beginnings need no memory, and
    # vectors less than the log-probs in whose place they are. Drafts are verified where few
    # requests decode, and have fewer rows of logits than a full step.
    assert missing == {"prompt_logprob_chunks", "shared_prefixes", "vectors", "drafts"}
    assert len(step.tokens) == 32 and step.samples.sum() == len(step.penalties.rows) == 4
    assert truncated(step.fields).tolist() == [0, 1, 2, 3]
    launched = runner.launch(step)
    runner.sample_masked(launched, allow_all)
    sampled = launched.take()
    assert runner._state.biased.all()
    assert sampled.num_sampled.tolist() == [1] * 4 and len(sampled.logprobs) > 0


def test_available_memory_respects_the_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("5000\n")
    assert available_bytes(tmp_path) == 4000


def test_available_memory_respects_a_control_group_of_version_1(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.usage_in_bytes").write_text("1000\n")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    (group / "memory.limit_in_bytes").write_text("5000\n")
    assert available_bytes(tmp_path) == 4000
