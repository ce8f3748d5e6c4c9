"""Headers of GGUF files: what is written is read; what is cut, lies or means harm is one error."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
import gguf_writing
from pipeinfer.checkpoint.config import read_config, read_generation
from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.gguf.config import model_tensors
from pipeinfer.gguf.header import DEEPEST, MAX_ENTRIES, read_header
from pipeinfer.models.loading import check_checkpoint
from pipeinfer.settings import ConfigurationError
from pipeinfer.text import load_tokenizer, read_tokenizer_config

MUTATIONS = int(os.environ.get("GGUF_MUTATIONS", "500"))
MORE_BYTES = 300 << 20  # that reading hostile files may take beyond what the process has
SLOWEST = 2.0  # seconds of CPU for one file of a few kilobytes


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    fields = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 2, "num_hidden_layers": 1}
    checkpoints.make_checkpoint(folder, "LlamaForCausalLM", **fields)
    return gguf_writing.write_gguf(folder, folder / "small.gguf")


def read_all(path: Path) -> None:
    """Everything that stages read before weights are."""
    resolve_model(str(path))
    config = read_config(path)
    read_generation(path)
    load_tokenizer(path, read_tokenizer_config(path))
    check_checkpoint(path, config)


def broken(path: Path) -> str:
    """The one line that is said of it."""
    with pytest.raises(ConfigurationError) as error:
        read_all(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def written(path: Path, pairs: list[bytes], tensors: bytes = b"", count: int = 0) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(pairs))
    path.write_bytes(head + b"".join(pairs) + tensors)
    return path


values = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(min_size=1),
    st.lists(st.text(), min_size=1),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.lists(st.booleans(), min_size=1),
)


@settings(max_examples=60, deadline=None)
@given(pairs=st.dictionaries(st.text(min_size=1).map("k.{}".format), values, max_size=8))
def test_what_is_written_is_read(tmp_path_factory, pairs):
    path = tmp_path_factory.mktemp("pairs") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in pairs.items():
        gguf_writing.add(writer, key, value)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert dict(header.metadata) == {"general.architecture": "llama"} | pairs
    first, second = header.tensors["a"], header.tensors["b"]
    assert (first.type, first.shape, second.type, second.shape) == ("F32", (2, 3), "F16", (5,))
    raw = path.read_bytes()
    assert np.frombuffer(raw, "<f4", 6, first.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(raw, "<f2", 5, second.offset).tolist() == [1] * 5


def test_every_cut_of_a_file_is_said_to_be_one(small, tmp_path):
    raw, cut = small.read_bytes(), tmp_path / "cut.gguf"
    end = read_header(small).tensors["token_embd.weight"].offset
    for size in {*range(0, end, 97), end, len(raw) - 1}:
        cut.write_bytes(raw[:size])
        said = broken(cut)
        assert "broken GGUF file" in said or "cannot be read" in said


def test_mutations_give_a_model_or_one_error(small, tmp_path):
    """Bytes of the header changed, numbers made huge, pieces cut out and doubled."""
    rng = random.Random(7)
    raw, changed = small.read_bytes(), tmp_path / "changed.gguf"
    head = min(tensor.offset for tensor in read_header(small).tensors.values())
    read_all(small)
    ends = {"read": 0, "refused": 0}
    for _ in range(MUTATIONS):
        changed.write_bytes(mutated(raw, head, rng))
        begin = time.process_time()
        try:
            read_all(changed)
            ends["read"] += 1
        except ConfigurationError as error:
            assert "\n" not in str(error), error
            ends["refused"] += 1
        assert time.process_time() - begin < SLOWEST
    assert min(ends.values()) > MUTATIONS // 100, ends


def mutated(raw: bytes, head: int, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(4, head)
        how = rng.randrange(5)
        if how == 0:
            changed[at] = rng.randrange(256)
        elif how == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            huge = rng.choice([2**64 - 1, 2**63, 2**40, 2**32 - 1, 2**31, 0, 1])
            changed[at : at + 8] = huge.to_bytes(8, "little")
        elif how == 3:
            del changed[at : at + rng.randrange(1, 64)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 64)]
    return bytes(changed)


def test_hostile_files_take_no_memory(small, tmp_path):
    """The same, in a process that may not have much more than it has."""
    if MUTATIONS < 1:
        pytest.skip("no mutations")
    script = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
import random, test_gguf_header as here
from pathlib import Path
small, path = Path({str(small)!r}), Path({str(tmp_path)!r}) / "m.gguf"
here.read_all(small)
pages = int(Path("/proc/self/statm").read_text().split()[5])
bound = pages * resource.getpagesize() + here.MORE_BYTES
resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
rng, raw = random.Random(8), small.read_bytes()
head = min(tensor.offset for tensor in here.read_header(small).tensors.values())
for _ in range({MUTATIONS}):
    path.write_bytes(here.mutated(raw, head, rng))
    try:
        here.read_all(path)
    except here.ConfigurationError:
        continue
try:
    bytearray(2 * here.MORE_BYTES)
except MemoryError:
    print("bounded")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.stdout.strip() == "bounded", done.stderr[-2000:]


LYING = {
    "not GGUF": (b"GGML" + bytes(40), "does not begin with GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 3, big-endian"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "things are said to follow"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors are said to follow"),
}


@pytest.mark.parametrize("name", LYING)
def test_head_that_lies(tmp_path, name):
    raw, said = LYING[name]
    (tmp_path / "m.gguf").write_bytes(raw)
    assert said in broken(tmp_path / "m.gguf")


def test_arrays_that_lie(tmp_path):
    path, key = tmp_path / "m.gguf", "general.architecture"
    cases = {
        struct.pack("<IQ", 8, 2**60): "things are said to follow",
        struct.pack("<IQ", 77, 1): "77 is no type",
        struct.pack("<IQ", 9, 1) * (DEEPEST + 1) + struct.pack("<IQ", 0, 0): "deep in each other",
        struct.pack("<IQ", 8, 2) + struct.pack("<Q", 2**40): "things are said to follow",
    }
    for value, said in cases.items():
        assert said in broken(written(path, [pair(key, 9, value)]))
    assert "general.architecture is missing" in broken(written(path, []))
    mamba = pair(key, 8, struct.pack("<Q", 5) + b"mamba")
    assert "unsupported architecture 'mamba'; supported: llama" in broken(written(path, [mamba]))
    assert "is not UTF-8" in broken(
        written(path, [pair(key, 8, struct.pack("<Q", 2) + b"\xff\xff")])
    )
    twice = pair(key, 8, struct.pack("<Q", 5) + b"llama")
    assert "twice" in broken(written(path, [twice, twice]))


def test_array_with_more_entries_than_anybody_needs_is_not_made(tmp_path):
    array = struct.pack("<IQ", 0, MAX_ENTRIES + 1) + bytes(MAX_ENTRIES + 1)
    path = written(tmp_path / "m.gguf", [pair("general.architecture", 9, array)])
    assert f"at most {MAX_ENTRIES:,} are read" in broken(path)


def test_tensors_may_not_lie_on_each_other(tmp_path):
    """A small file could stand for any number of large tensors else."""

    def tensor(name: bytes, offset: int) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, offset)

    pairs = [pair("general.architecture", 8, struct.pack("<Q", 5) + b"llama")]
    both = tensor(b"a", 0) + tensor(b"b", 16)
    path = written(tmp_path / "m.gguf", pairs, both + bytes(200), 2)
    assert "a and b lie on each other" in broken(path)
    assert "twice" in broken(written(path, pairs, tensor(b"a", 0) * 2 + bytes(200), 2))
    assert "truncated: b" in broken(
        written(path, pairs, tensor(b"a", 0) + tensor(b"b", 999) + bytes(200), 2)
    )


HYPERPARAMETERS = {
    "split": ({"split.count": 3}, "one part of several"),
    "layers": ({".block_count": 9999}, "block_count is"),
    "huge": ({".feed_forward_length": 2**31}, "feed_forward_length must be"),
    "no layers": ({".block_count": None}, "llama.block_count is missing"),
    "context": (
        {".context_length": 2**30},
        "context_length must be a whole number from 1 to 16,777,216",
    ),
    "heads": ({".attention.head_count": [4, 4]}, "head_count must be a whole number from 1"),
    "wide": ({".attention.head_count": 3, ".attention.key_length": None}, "not a multiple"),
    "eps": ({".attention.layer_norm_rms_epsilon": float("nan")}, "must be a positive number"),
    "base": ({".rope.freq_base": float("inf")}, "must be a positive number"),
    "part": ({".rope.dimension_count": 1}, "dimension_count 1 is not the key length"),
    "scaling": ({".rope.scaling.type": "longrope"}, "'longrope' is not supported"),
    "experts": ({".expert_count": 8}, "mixtures of experts of the llama"),
    "hidden": ({".embedding_length": 16}, "has shape"),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameter_that_cannot_be_is_named(small, tmp_path, name):
    changes, said = HYPERPARAMETERS[name]
    path = gguf_writing.write_gguf(small.parent, tmp_path / "m.gguf", **changes)
    assert said in broken(path)


@pytest.mark.parametrize(("scaling", "expected"), [
    ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, ("linear", 4.0)),
    ({".rope.scaling.type": "yarn", ".rope.scaling.factor": 2.0,
      ".rope.scaling.original_context_length": 256}, ("yarn", 2.0)),
    ({".rope.scaling.type": "none"}, ("default", 1.0)),
])  # fmt: skip
def test_rope_scaling(small, tmp_path, scaling, expected):
    path = gguf_writing.write_gguf(small.parent, tmp_path / "m.gguf", **scaling)
    rope = read_config(path).rope
    assert (rope.type, rope.factor) == expected


def divisors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1 and later, in wave lengths."""
    made = []
    for frequency in theta ** (-np.arange(0, head_dim, 2) / head_dim):
        wave = 2 * np.pi / frequency
        smooth = (8192 / wave - 1) / (4 - 1)
        if wave < 8192 / 4:
            made.append(1.0)
        elif wave > 8192 / 1:
            made.append(factor)
        else:
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_told_from_its_divisors(small, tmp_path, factor):
    heads = {".attention.key_length": 64, ".attention.value_length": 64, ".rope.freq_base": 5e5}
    stored = divisors(factor, 64, 5e5)
    assert len(set(stored.tolist())) > 3, "all three kinds of waves are there"
    path = tmp_path / "m.gguf"
    gguf_writing.write_gguf(small.parent, path, beside={"rope_freqs.weight": stored}, **heads)
    rope = read_config(path).rope
    assert (rope.type, rope.factor, rope.original_max) == ("llama3", factor, 8192)
    assert (rope.low_freq, rope.high_freq) == (1.0, 4.0)
    assert "rope_freqs.weight" not in model_tensors(read_header(path))
    for wrong, said in ((stored * 1.1, "other factors"), (stored[:-1], "rope_freqs.weight is F32")):
        gguf_writing.write_gguf(small.parent, path, beside={"rope_freqs.weight": wrong}, **heads)
        assert said in broken(path)


def test_names_that_nobody_knows_stay_as_they_are(small):
    assert "model.layers.0.self_attn.q_proj.weight" in model_tensors(read_header(small))
