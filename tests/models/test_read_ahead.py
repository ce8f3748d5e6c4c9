"""The next weights file is read while this one is used: one ahead, in order, and never kept."""

from __future__ import annotations

import logging
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

from dense_attention import dense_causal
from pipeinfer.checkpoint.config import read_config
from pipeinfer.checkpoint.safetensors import weight_files
from pipeinfer.models import loading as module
from pipeinfer.models.build import build_model
from pipeinfer.models.loading import BUFFER_BYTES, ReadAhead, load_weights

PATIENCE = 30.0


@pytest.fixture
def files(tmp_path) -> list[Path]:
    made = [tmp_path / f"{index}.bin" for index in range(4)]
    for file in made:
        file.write_bytes(bytes(1000))
    return made


def test_one_file_beyond_the_one_in_use_is_read_and_no_more(files):
    with ReadAhead(files) as ahead:
        assert ahead.wait_until_read(1, PATIENCE)
        assert ahead.files_read == files[:1]
        ahead.begin_file(files[0])
        assert ahead.wait_until_read(2, PATIENCE)
        assert not ahead.wait_until_read(3, 0.05)
        ahead.begin_file(files[2])
        assert ahead.wait_until_read(4, PATIENCE)
        assert ahead.files_read == files


def test_leaving_early_ends_the_thread(files):
    before = threading.active_count()
    with pytest.raises(KeyError), ReadAhead(files):
        raise KeyError("the user failed")
    assert threading.active_count() == before


def test_a_file_that_cannot_be_read_is_left_to_its_user(files, caplog):
    files[1].unlink()
    with caplog.at_level(logging.WARNING), ReadAhead(files) as ahead:
        ahead.begin_file(files[3])
        ahead._thread.join(PATIENCE)
    assert ahead.files_read == files[:1]
    assert str(files[1]) in caplog.text


def test_a_large_file_takes_no_more_than_the_buffer(tmp_path):
    large = tmp_path / "large.bin"
    with large.open("wb") as stream:
        stream.truncate(8 * BUFFER_BYTES)
    tracemalloc.start()
    with ReadAhead([large]) as ahead:
        assert ahead.wait_until_read(1, PATIENCE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert BUFFER_BYTES <= peak < 1.1 * BUFFER_BYTES


def test_loading_a_sharded_checkpoint_is_read_ahead_of(checkpoint, monkeypatch):
    """The second file is read to its end while the first one's tensors are still being taken."""
    folder = checkpoint("Qwen3ForCausalLM", max_shard_size="40KB")
    model = build_model(read_config(folder))
    seen = []

    class Watched(ReadAhead):
        def begin_file(self, file):
            super().begin_file(file)
            nth = self._files.index(file)
            assert self.wait_until_read(min(nth + 2, len(self._files)), PATIENCE)
            seen.append((file, len(self.files_read)))

    monkeypatch.setattr(module, "ReadAhead", Watched)
    load_weights(model, folder)
    count = len(weight_files(folder))
    assert count > 3
    assert [done for _, done in seen] == [*range(2, count + 1), count]
    plain = build_model(read_config(folder))
    monkeypatch.undo()
    load_weights(plain, folder)
    tokens, places = torch.tensor([1, 2, 3]), torch.arange(3)
    attend = dense_causal(model.attention_shapes())
    assert torch.equal(model(tokens, places, attend), plain(tokens, places, attend))
