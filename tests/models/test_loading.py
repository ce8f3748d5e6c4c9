"""A checkpoint that cannot be loaded is refused from its headers, in a line that names why; the
next file is read while one is used.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import struct
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import CheckpointCache
from dense_attention import dense_causal
from pipeinfer.checkpoint.config import read_config
from pipeinfer.checkpoint.files import weight_files
from pipeinfer.layers.placement import ParameterMemory
from pipeinfer.layers.weight import UnquantizedWeight
from pipeinfer.models import loading as module
from pipeinfer.models.loading import (
    BUFFER_BYTES,
    ReadAhead,
    build_model,
    check_checkpoint,
    load_weights,
)
from pipeinfer.settings import ConfigurationError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copied(checkpoint: CheckpointCache, tmp_path: Path) -> Path:
    """A Qwen3 checkpoint in one file, to be broken."""
    return Path(shutil.copytree(checkpoint("Qwen3ForCausalLM"), tmp_path / "copy"))


@pytest.fixture
def sharded(checkpoint: CheckpointCache, tmp_path: Path) -> Path:
    """The same in several files."""
    source = checkpoint("Qwen3ForCausalLM", max_shard_size="40KB")
    return Path(shutil.copytree(source, tmp_path / "copy"))


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def refusal(folder: Path) -> str:
    """What both the check and the loading say; they must agree."""
    config = read_config(folder)
    with pytest.raises(ConfigurationError) as checked:
        check_checkpoint(folder, config)
    with pytest.raises(ConfigurationError) as loading:
        load_weights(build_model(config), folder)
    assert str(checked.value) == str(loading.value)
    assert "\n" not in str(checked.value)
    return str(checked.value)


def test_missing_tensor_is_named(copied: Path) -> None:
    name = "model.layers.1.self_attn.k_norm.weight"
    change_tensors(copied, lambda tensors: tensors.pop(name))
    assert f"lacks tensor {name}" in refusal(copied)


def test_wrong_shape_is_named_with_both_shapes(copied: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(copied, lambda tensors: tensors.update({name: torch.zeros(95, 64)}))
    message = refusal(copied)
    assert name in message and "[95, 64]" in message and "[96, 64]" in message


def test_quantized_tensor_is_refused(copied: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(
        copied, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    assert f"{name} in {copied / WEIGHTS} is F8_E4M3" in refusal(copied)


@pytest.mark.parametrize("kept", [-1, 4096, 100, 3])
def test_truncated_file_is_named(copied: Path, kept: int) -> None:
    raw = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(raw[:kept])
    message = refusal(copied)
    assert f"{copied / WEIGHTS} is truncated" in message


def test_truncated_shard_is_named_although_others_are_whole(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-16])
    message = refusal(sharded)
    assert f"{shard} is truncated: {shard.stat().st_size} bytes of {shard.stat().st_size + 16}" in (
        message
    )


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}" in refusal(sharded)


def test_folder_without_safetensors_is_refused(copied: Path) -> None:
    (copied / WEIGHTS).rename(copied / "pytorch_model.bin")
    assert f"{copied} has no *.safetensors" in refusal(copied)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"<html>not found</html>", "is not a safetensors file"),
        (struct.pack("<Q", 4) + b"nope", "broken safetensors header"),
        (struct.pack("<Q", 14) + b'{"a":{"x": 1}}', "has no dtype, shape or offsets"),
    ],
)
def test_broken_file_is_named(copied: Path, raw: bytes, named: str) -> None:
    (copied / WEIGHTS).write_bytes(raw)
    message = refusal(copied)
    assert str(copied / WEIGHTS) in message and named in message


def test_empty_index_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {}}))
    assert "weight_map is missing or empty" in refusal(sharded)


def test_untied_model_needs_its_head(copied: Path) -> None:
    change_tensors(copied, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks tensor lm_head.weight" in refusal(copied)


def test_known_extra_tensors_are_ignored_and_others_warned_about(
    checkpoint: CheckpointCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint("Qwen3ForCausalLM", tie_word_embeddings=True)
    folder = Path(shutil.copytree(source, tmp_path / "copy"))
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16),
        "model.layers.0.mlp.up_proj.input_scale": torch.ones(1),
    }
    change_tensors(folder, lambda tensors: tensors.update(harmless))
    with caplog.at_level(logging.WARNING):
        check_checkpoint(folder, read_config(folder))
    assert not caplog.records
    change_tensors(folder, lambda tensors: tensors.update({"adapter.up": torch.zeros(2)}))
    with caplog.at_level(logging.WARNING):
        check_checkpoint(folder, read_config(folder))
    assert "adapter.up" in caplog.text


def test_second_copy_of_the_weights_under_mistrals_names_is_left_alone(copied: Path) -> None:
    (copied / WEIGHTS).rename(copied / "weights.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, copied / "consolidated.safetensors")
    check_checkpoint(copied, read_config(copied))


def test_progress_rises_to_the_bytes_of_all_files(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = build_model(read_config(sharded))
    load_weights(model, sharded, lambda done, total: seen.append((done, total)))
    expected = sum(
        tensor.nbytes
        for file in sharded.glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    assert seen[0] == (0, expected) and seen[-1] == (expected, expected)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_checking_reads_headers_only(copied: Path) -> None:
    """Weights are not looked at: the check holds for a sparse file of the right size."""
    raw = (copied / WEIGHTS).read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    with (copied / WEIGHTS).open("wb") as stream:
        stream.write(raw[:header])
        stream.truncate(len(raw))
    check_checkpoint(copied, read_config(copied))


def test_plain_weights_are_given_back_one_by_one_while_packing(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise loading would hold the model twice."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this CPU has no packed form")
    freed: list[bool] = []
    pack = UnquantizedWeight.pack

    def watched(matrix: UnquantizedWeight, memory: ParameterMemory) -> None:
        plain = weakref.ref(matrix.weight)
        pack(matrix, memory)
        freed.append(plain() is None)

    monkeypatch.setattr(UnquantizedWeight, "pack", watched)
    load_weights(build_model(read_config(copied)), copied)
    assert len(freed) == 2 * 4 + 1
    assert all(freed)


def rewritten(file: Path, header: object) -> None:
    """The same data behind another header."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def one(**changed: object) -> dict[str, Any]:
    """A header of one tensor."""
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed}


HEADERS: dict[str, tuple[object, str]] = {
    "nested": (b"[" * 100_000, "nested too deeply|cannot be read|broken safetensors header"),
    "a list": ([], "not an object"),
    "not JSON": (b"{", "broken safetensors header"),
    "metadata": (one() | {"__metadata__": {"a": 1}}, "its __metadata__"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "'a' has no dtype, shape or offsets"),
    "a name of two lines": ({"a\nb": 1}, r"'a\\nb' has no dtype, shape or offsets"),
    "negative size": (one(shape=[-2]), "'a' has a shape or offsets that no tensor has"),
    "size with a point": (one(shape=[2.0]), "'a' has a shape or offsets that no tensor has"),
    "huge size": (one(shape=[2**62]), "'a' has a shape or offsets that no tensor has"),
    "huge product": (one(shape=[2**40, 2**40]), "values of type 'F32'"),
    "many dimensions": (one(shape=[1] * 10_000), "'a' has a shape or offsets that no tensor has"),
    "offsets turned": (one(data_offsets=[8, 0]), "'a' has 2 values of 'F32' in -8 bytes"),
    "bytes do not fit": (one(data_offsets=[0, 4]), "'a' has 2 values of 'F32' in 4 bytes"),
    "a hole": (
        one(data_offsets=[8, 16]),
        "begins at 8, where the one before it ends at 0",
    ),
    "type": (one(dtype=4), "'a' has 2 values of type 4"),
    "more data": (one(), "bytes that belong to no tensor"),
}


@pytest.mark.parametrize(("header", "named"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_one_clear_error(copied: Path, header: object, named: str) -> None:
    rewritten(copied / WEIGHTS, header)
    message = refusal(copied)
    assert re.search(named, message) and "\n" not in message and str(copied / WEIGHTS) in message


def test_an_index_names_files_of_its_folder_only(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    assert "names a file that is not in the folder" in refusal(sharded)


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
