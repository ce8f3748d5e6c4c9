"""Weights that outlive their engine: what a successor has of them, and which it may take for its
own: those of the same files, laid out in the same way."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from dataclasses import replace

import pytest
import torch

import gguf_writing
from checkpoints import make_checkpoint
from kept_engines import two_lives
from memory_holders import running_holder
from pipeinfer.engine import loading
from pipeinfer.engine.choices import choose_engine
from pipeinfer.engine.kept_memory import KeptMemory, model_key
from pipeinfer.engine.loading import ModelFiles, load_engine
from pipeinfer.layers.weight import unsupported_reason
from pipeinfer.models.loading import build_model, load_weights
from pipeinfer.runtime.memory_holder import HolderLink
from pipeinfer.settings import Settings
from quantized_checkpoints import quantize


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Two checkpoints of one architecture, with files of the same names and sizes."""
    root = tmp_path_factory.mktemp("others")
    return [make_checkpoint(root / str(seed), "Qwen3ForCausalLM", seed=seed) for seed in (0, 1)]


def key_of(folder, device="cpu", **settings):
    asked = Settings(kv_pages=8, **settings)
    return ModelFiles(asked, folder, replace(choose_engine(asked, folder), device=device)).key


def test_a_model_and_its_draft_model_are_not_the_same_the_other_way_round(others):
    one, other = others
    assert key_of(one, speculate=str(other)) == key_of(one, speculate=str(other))
    assert key_of(one, speculate=str(other)) != key_of(other, speculate=str(one))
    assert key_of(one, speculate=str(one)) != key_of(one)


def test_each_backend_of_mixtures_has_weights_of_its_own(checkpoint):
    """One of them wants up before gate."""
    folder = checkpoint("Qwen3MoeForCausalLM")
    keys = [key_of(folder, "cuda", moe_backend=name) for name in ("auto", "triton", "torch")]
    assert keys[0] == keys[1] != keys[2]


def test_another_release_of_transformers_computes_other_pages(checkpoint, monkeypatch):
    folder = checkpoint("LlamaForCausalLM")
    before = [key_of(folder, model_impl=name) for name in ("transformers", "pipeinfer")]
    monkeypatch.setattr(loading.metadata, "version", lambda name: f"another {name}")
    after = [key_of(folder, model_impl=name) for name in ("transformers", "pipeinfer")]
    assert before[0] != after[0] and before[1] == after[1]


def test_a_few_numbers_that_were_written_into_a_large_file_make_it_another_one(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    before, about = model_key([[file]], []), file.stat()
    with file.open("r+b") as opened:
        opened.seek(10_000)  # between two samples
        opened.write(b"another")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert model_key([[file]], []) != before


def put_files(source, folder):
    """In place of those in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


class Sleeper:
    """An engine in this process, and what its holder has."""

    def __init__(self, folder, address, **settings):
        self.address, self.settings = address, Settings(kv_pages=8, max_running=2, **settings)
        self.folder, self.kept = folder, KeptMemory(address)
        self.engine = load_engine(self.settings, folder, kept=lambda: self.kept)

    def logits(self):
        model = self.engine.runner._model
        return model.logits(torch.ones(3, 64, dtype=self.engine.runner.pool.dtype))

    def sleep(self):
        self.engine.memory.withdraw()
        self.engine.memory.give_back(2)

    def wake(self):
        self.engine.memory.take_back()
        self.engine.memory.keep()

    def keys(self):
        link = HolderLink(self.address, 30)
        found = link.borrow()[0]
        link.close()
        return {entry.key for entry in (*found.shared, *found.others)}

    def key_now(self):
        return ModelFiles(self.settings, self.folder, choose_engine(self.settings, self.folder)).key


def test_what_is_kept_after_a_sleep_belongs_to_the_files_that_were_read_then(others, tmp_path):
    folder = tmp_path / "model"
    put_files(others[0], folder)
    with running_holder() as address:
        engine = Sleeper(folder, address)
        before, first, directory = engine.logits(), engine.keys(), engine.kept.opened.directory
        assert first == {engine.key_now()}
        engine.sleep()
        put_files(others[1], folder)
        engine.wake()
        assert engine.keys() == {engine.key_now()} != first
        assert not torch.equal(engine.logits(), before)
        assert engine.kept.key == engine.key_now() and not directory.belongs_to(engine.kept.key)
        expected = load_engine(Settings(kv_pages=8, max_running=2), others[1]).runner._model
        hidden = torch.ones(3, 64, dtype=engine.engine.runner.pool.dtype)
        assert torch.equal(engine.logits(), expected.logits(hidden))
        engine.kept.close()


def test_an_engine_does_not_wake_with_files_that_it_was_not_built_for(others, tmp_path):
    folder = tmp_path / "model"
    put_files(others[0], folder)
    with running_holder() as address:
        engine = Sleeper(folder, address)
        engine.sleep()
        shutil.rmtree(folder)
        make_checkpoint(folder, "Qwen3ForCausalLM", rms_norm_eps=0.1)
        with pytest.raises(RuntimeError, match="another model's"):
            engine.wake()
        engine.kept.close()


@pytest.mark.parametrize("standby", [False, True])
def test_files_that_change_while_they_are_read_are_not_served(others, tmp_path, standby):
    """It would take pages of the model before for its own; a standby may wait for days."""
    folder = tmp_path / "model"
    put_files(others[0], folder)

    def change(_done, _total):
        (folder / "generation_config.json").write_text('{"another": 1}')

    with pytest.raises(RuntimeError, match="files have changed"):
        load_engine(Settings(kv_pages=8, max_running=2, standby=standby), folder, change)


def test_an_engine_that_is_to_sleep_sleeps_whichever_model_it_has():
    with running_holder() as address:
        first = KeptMemory(address)
        first.begin(b"model")
        first.note_sleep(2, True)
        first.discard("nothing")  # which is answered when the holder has all that came before
        follows = KeptMemory(address, lambda: None)
        follows.begin(b"another")
        assert follows.sleep_note() == (2, True)
        first.close()


@pytest.mark.parametrize(
    ("architecture", "stack"),
    [("Qwen3MoeForCausalLM", "stacked"), ("GptOssForCausalLM", "unquantized")],
)
def test_experts_on_a_cpu_are_in_memory_once(checkpoint, architecture, stack):
    """Packed, each by itself; what they were read into is gone."""
    folder = checkpoint(architecture)
    model = build_model(choose_engine(Settings(), folder).config)
    experts = model.layers[0].mlp._experts
    read = [weakref.ref(getattr(one, stack)) for one in (experts.gate_up, experts.down)]
    del experts
    load_weights(model, folder)
    gc.collect()
    assert [one() for one in read] == [None, None]


def test_a_successor_has_the_weights_of_any_format_as_they_were_packed(checkpoint, tmp_path):
    """And reads no file for them."""
    tied, half = {"tie_word_embeddings": True}, {"dtype": "bfloat16"}
    experts = quantize(checkpoint("GptOssForCausalLM"), tmp_path / "mxfp4", "mxfp4")[0]
    wide = checkpoint("LlamaForCausalLM", hidden_size=64, num_hidden_layers=2, vocab_size=288)
    models = [
        (checkpoint("LlamaForCausalLM", **tied), {}),
        (checkpoint("GlmForCausalLM"), {}),  # whose rows are permuted when they are packed
        (checkpoint("Qwen3MoeForCausalLM"), {}),
        (experts, half),
        (quantize(checkpoint("Qwen2ForCausalLM"), tmp_path / "fp8", "fp8 rows")[0], {}),
        (gguf_writing.write_gguf(wide, tmp_path / "model.gguf", "Q4_0"), half),
        (wide, half | {"quantization": "int8", "speculate": str(wide)}),
    ]
    for (folder, more), first, second in zip(models, *two_lives(models), strict=True):
        names = ["draft weights", "weights"] if "speculate" in more else ["weights"]
        assert (first.left, second.left) == ([], names), folder
        assert first.reads > 0 == second.reads and second.numbers == first.numbers, folder


def test_matrices_that_onednn_has_packed_can_be_made_over_their_bytes():
    """By torch as it is installed here: else each engine reads its weights anew."""
    assert unsupported_reason(torch.float32) == unsupported_reason(torch.bfloat16) == ""


def test_where_they_cannot_an_engine_reads_its_weights_and_sleeps_as_ever(others, monkeypatch):
    monkeypatch.setattr(loading, "unsupported_reason", lambda dtype: "not with this torch")
    with running_holder() as address:
        engine = Sleeper(others[0], address)
        before = engine.logits()
        assert "weights" not in engine.kept._kept
        engine.sleep()
        engine.wake()
        assert torch.equal(engine.logits(), before)
        engine.kept.close()


def test_a_draft_model_is_read_anew_with_the_model(others, tmp_path):
    for name, source in zip(("model", "draft"), others, strict=True):
        put_files(source, tmp_path / name)
    with running_holder() as address:
        engine = Sleeper(tmp_path / "model", address, speculate=str(tmp_path / "draft"))
        draft, hidden = engine.engine.runner._draft._model, torch.ones(2, 64)
        before = draft.logits(hidden)
        engine.sleep()
        put_files(others[0], tmp_path / "draft")
        engine.wake()
        assert engine.keys() == {engine.key_now()}
        assert not torch.equal(draft.logits(hidden), before)
        assert torch.equal(draft.logits(hidden), engine.engine.runner._model.logits(hidden))
        engine.kept.close()
