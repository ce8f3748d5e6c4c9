"""Weights of GGUF files: bit by bit what transformers decodes, in any part, a little at a time."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import gguf_writing
from checkpoints import CheckpointCache
from pipeinfer.checkpoint.config import read_config
from pipeinfer.checkpoint.quantization import Int4Blocks
from pipeinfer.gguf.config import (
    CHUNK_VALUES,
    GgufTensor,
    WeightFile,
    model_tensors,
)
from pipeinfer.gguf.header import BLOCKS, TYPES, read_header
from pipeinfer.layers.placement import Shard
from pipeinfer.models.loading import build_model, check_checkpoint, load_weights
from pipeinfer.settings import ConfigurationError

WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 288}
# Gemma's files do not say how queries are scaled: it follows from the size of a head.
MORE = {"Gemma3ForCausalLM": {"query_pre_attn_scalar": 16}}
# What the form does not keep, because its readers know it or take it from elsewhere.
ELSEWHERE = {"dtype", "eos_ids", "architecture", "sliding_windows"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> CheckpointCache:
    return CheckpointCache(tmp_path_factory.mktemp("checkpoints"))


def filled(path: Path, shard: Shard | None = None) -> dict[str, tuple]:
    """The part and the values of every parameter's sources, before they are packed."""
    model = build_model(read_config(path), shard or Shard())
    targets = {source.name: (source.slices, source.target) for source in model.sources()}
    model.pack = lambda: None
    load_weights(model, path)
    return targets


@pytest.mark.parametrize("architecture", sorted(gguf_writing.KINDS))
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_weights_are_what_transformers_decodes(checkpoint, tmp_path, architecture, kind):
    folder = checkpoint(architecture, **WIDE, **MORE.get(architecture, {}))
    path = gguf_writing.write_gguf(folder, tmp_path / "model.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        # It does not read all keys of the file; a Mistral's says that it is a Llama.
        config=None if "Mistral" in architecture else AutoConfig.from_pretrained(folder),
        dtype=torch.float32,
    ).state_dict()
    ours = filled(path)
    assert len(ours) >= 20
    for name, (part, values) in ours.items():
        expert = ".experts." in name
        wanted = expert_of(reference, name) if expert else reference[name]
        assert torch.equal(values, wanted[part].expand_as(values)), name


def expert_of(reference: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One expert's matrix: transformers keeps all of a layer in one, gate and up on each other."""
    stem, number, which = name.removesuffix("_proj.weight").rsplit(".", 2)
    if which == "down":
        return reference[f"{stem}.down_proj"][int(number)]
    return reference[f"{stem}.gate_up_proj"][int(number)].chunk(2)[which == "up"]


@pytest.mark.parametrize("architecture", sorted(gguf_writing.KINDS))
def test_configuration_is_that_of_the_folder(checkpoint, tmp_path, architecture):
    folder = checkpoint(architecture, **WIDE, **MORE.get(architecture, {}))
    path = gguf_writing.write_gguf(folder, tmp_path / "model.gguf")
    theirs, ours = read_config(folder), read_config(path)
    check_checkpoint(path, ours)
    for field in set(vars(theirs)) - ELSEWHERE:
        mine, wanted = getattr(ours, field), getattr(theirs, field)
        assert mine == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), field


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_gets_the_part_that_it_gets_of_the_folder(checkpoint, tmp_path, architecture, rank):
    folder = checkpoint(architecture, **WIDE, **MORE.get(architecture, {}))
    path = gguf_writing.write_gguf(folder, tmp_path / "model.gguf")
    wanted = filled(folder, Shard(rank, 2))
    for name, (_, values) in filled(path, Shard(rank, 2)).items():
        assert torch.equal(values, wanted[name][1]), name


@pytest.mark.parametrize("kind", Int4Blocks.types)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_of_4_bits_have_the_values_that_the_file_has(tmp_path_factory, kind, data):
    values, size = BLOCKS[kind]
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows, blocks = 4, data.draw(st.integers(1, 3))
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    floats = 4 if kind != "Q4_0" else 2
    scales = rng.standard_normal((rows, blocks, floats // 2)).astype(np.float16)
    raw[..., :floats] = scales.view(np.uint8)
    path = tmp_path_factory.mktemp("raw") / "raw"
    path.write_bytes(raw.tobytes())
    columns = blocks * values
    heads = data.draw(st.sampled_from([0, 1, 2]))
    packed = GgufTensor(path, kind, (rows, columns), raw.nbytes, 0, heads)
    first = data.draw(st.integers(0, columns // Int4Blocks.group - 1)) * Int4Blocks.group
    part = (slice(data.draw(st.integers(0, rows - 1)), rows), slice(first, columns))
    file = WeightFile(path)
    whole = np.concatenate([piece for _, piece in file.pieces(packed, part)])
    found = np.concatenate([piece for _, piece in file.pieces(packed, part, as_int4_blocks=True)])
    assert found.shape == (len(whole), (columns - first) // Int4Blocks.group, 24)
    numbers = np.concatenate((found[..., :16] & 15, found[..., :16] >> 4), -1).astype(np.float32)
    scale, zero = np.split(np.ascontiguousarray(found[..., 16:]).view(np.float32), 2, -1)
    mine = ((numbers - 8) * scale + zero).reshape(whole.shape)
    # Scale and zero may be rounded to float32 where the decoder rounds a product.
    most = np.abs(scale).max() * 16 + np.abs(zero).max()
    np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-6 * most)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_part_of_a_matrix_is_that_part_of_the_whole(tmp_path_factory, kind, data):
    values, size = BLOCKS[kind]
    heads = data.draw(st.sampled_from([0, 1, 2, 3]))
    rows = data.draw(st.integers(1, 5)) * 2 * max(heads, 1)
    columns = values * data.draw(st.integers(1, 3)) if values > 1 else data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    raw = rng.integers(0, 60, (rows, columns // values * size), dtype=np.uint8)
    path = tmp_path_factory.mktemp("raw") / "raw"
    path.write_bytes(bytes(7) + raw.tobytes())
    packed = GgufTensor(path, kind, (rows, columns), raw.nbytes, 7, heads, 0.5)
    whole = quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float32)
    if heads:  # neighbours of the file's are halves of transformers'
        whole = whole.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    begin, first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    end, last = data.draw(st.integers(begin, rows)), data.draw(st.integers(first + 1, columns))
    got = np.full((end - begin, last - first), np.nan, np.float32)
    for run, piece in WeightFile(path).pieces(packed, (slice(begin, end), slice(first, last))):
        got[run] = piece
    assert np.array_equal(got, whole[begin:end, first:last] - np.float32(0.5), equal_nan=True)


def test_tensors_that_were_read_are_no_memory_of_the_process(tmp_path):
    rows, columns = 4096, 1024
    path = tmp_path / "raw"
    path.write_bytes(bytes(7) + bytes(rows * columns * 4))
    packed = GgufTensor(path, "F32", (rows, columns), rows * columns * 4, 7, 0, 0.0)
    file = WeightFile(path)
    for _ in range(2):  # a tensor may be read again, for another part of the model
        read = sum(len(piece) for _, piece in file.pieces(packed, (slice(0, rows), slice(0, 9))))
        assert read == rows
        mapped = Path("/proc/self/smaps").read_text().partition(f"{path}\n")[2]
        assert int(mapped.partition("Rss:")[2].split()[0]) <= 64, "kB of 16,384"


def test_types_and_their_sizes_are_the_gguf_packages():
    assert TYPES.items() <= {int(kind): kind.name for kind in GGMLQuantizationType}.items()
    for kind, (values, size) in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (values, size)


def test_no_more_than_a_piece_is_held_while_weights_are_read(checkpoint, tmp_path):
    folder = checkpoint("LlamaForCausalLM", hidden_size=512, vocab_size=20_000)
    path = gguf_writing.write_gguf(folder, tmp_path / "model.gguf", "Q4_1")
    model = build_model(read_config(path))
    model.pack = lambda: None
    load_weights(model, path)  # what is imported and kept
    tracemalloc.start()
    load_weights(model, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = 20_000 * 512 * 4
    assert largest > 1.8 * peak, "numpy's arrays are counted; the model's own memory is not"
    assert peak > CHUNK_VALUES  # and something was


def test_type_that_cannot_be_decoded_is_named(checkpoint, tmp_path):
    folder = checkpoint("Qwen3ForCausalLM", **WIDE)
    path = gguf_writing.write_gguf(folder, tmp_path / "model.gguf")
    tensor = read_header(path).tensors["blk.0.ffn_gate.weight"]
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blk.0.ffn_gate.weight") + len("blk.0.ffn_gate.weight") + 4 + 2 * 8
    assert raw[at : at + 4] == bytes(4)  # F32
    raw[at : at + 4] = (16).to_bytes(4, "little")
    path.write_bytes(raw)
    assert tensor.nbytes > 0 == read_header(path).tensors[tensor.name].nbytes
    with pytest.raises(ConfigurationError, match=r"mlp.gate_proj.weight .* is IQ2_XXS; supported"):
        check_checkpoint(path, read_config(path))


def test_tied_head_and_unused_tensors(checkpoint, tmp_path):
    folder = checkpoint("Qwen3ForCausalLM", tie_word_embeddings=True, **WIDE)
    path = gguf_writing.write_gguf(folder, tmp_path / "model.gguf")
    assert read_config(path).tie_word_embeddings
    assert "lm_head.weight" not in model_tensors(read_header(path))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
