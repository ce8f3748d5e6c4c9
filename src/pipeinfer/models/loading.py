"""Builds one rank's share of a model from a ModelConfig, and loads its weights from a checkpoint.

- `build_model` checks that the model can be split, then allocates. Builders of architectures are in
  the table ARCHITECTURES (checkpoint/config.py).
- `check_checkpoint` reads headers and reports tensors that are missing, have another shape or
  dtype, or are not used; `check_redundant_tensors`, `untied_if_different` look at values that
  repeat others.
- `load_weights` fills parameters tensor by tensor, in their merged and sharded places, so there is
  never a second copy of the model; ReadAhead brings the next file into the page cache meanwhile.
- `fill_dummy` fills them with random values instead.
- `read_kv_scales` reads the scales of keys and values for pages of 8 bits.

Files are safetensors or GGUF. Knows no architecture: the model's `sources` map tensors to
parameters.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from pipeinfer.checkpoint.config import ARCHITECTURES, ModelConfig, RopeConfig
from pipeinfer.checkpoint.files import StoredTensor, read_headers, with_model_names
from pipeinfer.gguf.config import GgufTensor, WeightFile, model_tensors
from pipeinfer.gguf.header import BLOCKS, is_gguf, read_header
from pipeinfer.kernels.formats import UNIT_KV_SCALES, KVScales
from pipeinfer.layers import experts
from pipeinfer.layers.attention import inverse_frequencies
from pipeinfer.layers.elementwise import GATED_ACTIVATIONS, fused_ops
from pipeinfer.layers.lora import AdapterBank
from pipeinfer.layers.placement import (
    IN_TORCH,
    AllReduceFusion,
    Collectives,
    ParameterMemory,
    Placement,
    Shard,
    WeightSource,
    full_slices,
)
from pipeinfer.models.causal_lm import CausalLM
from pipeinfer.settings import ConfigurationError

SINGLE_RANK = Shard()


def build_model(
    config: ModelConfig,
    shard: Shard = SINGLE_RANK,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    collectives: Collectives | None = None,
    compiled: bool = False,
    fusion: AllReduceFusion | None = None,
    moe_backend: str = "auto",
    memory: ParameterMemory = IN_TORCH,
    exact: bool = False,
    adapters: AdapterBank | None = None,
) -> CausalLM:
    """Builds the share of one rank, with its parameters allocated, not filled.

    - shard: this rank, and the number of ranks
    - dtype, device: of the parameters; "meta" allocates nothing
    - collectives: sums over ranks; without them a share of several ranks can be loaded, not run
    - compiled: norms and activations by torch.compile, see layers/elementwise.py
    - fusion: of sums over ranks with the norm that follows, see layers/placement.py
    - moe_backend: a name of layers/experts.py
    - memory: of parameters
    - exact, adapters: see Placement; the former without `fusion`

    Raises ConfigurationError if heads or MLP do not divide by the ranks, if the operations to be
    compiled cannot be compiled, or if there is no such backend.
    """
    check_shard(config, shard.size, shard.expert_parallel)
    where = torch.device(device)
    placement = Placement(
        shard,
        dtype,
        where,
        collectives,
        compiled,
        fusion,
        quantization=config.quantization,
        moe_backend=experts.resolve_backend(moe_backend, where.type),
        memory=memory,
        exact=exact,
        adapters=adapters,
    )
    model = cast(CausalLM, _builder(config.architecture)(config, placement))
    if compiled:
        _compile(model, placement)
    return model


def _builder(architecture: str) -> Callable[..., object]:
    """The builder, imported only now; raises KeyError for one that is not in the table."""
    return pkgutil.resolve_name(ARCHITECTURES[architecture])


def _compile(model: CausalLM, placement: Placement) -> None:
    """Compiles the operations that torch.compile is used for, at the start, because later a step
    would wait for it.
    """
    norm, config = model.norm.fused, model.config
    if norm is None or fused_ops(placement.device, placement.dtype) is not None:
        return
    multiply = GATED_ACTIVATIONS[config.activation].on(placement)
    intermediate = config.intermediate_size // placement.shard.size
    from pipeinfer.layers.elementwise import warm_up_compiled

    try:
        warm_up_compiled(
            norm, multiply, config.hidden_size, intermediate, placement.dtype, placement.device
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"--compile: torch.compile failed: {reason}") from error


def check_shard(config: ModelConfig, ranks: int, expert_parallel: bool = False) -> None:
    """Raises ConfigurationError if the model cannot be split over that many ranks."""
    divided = {
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "the shared expert's size": config.shared_intermediate_size,
        "moe_intermediate_size": 0 if expert_parallel else config.moe_intermediate_size,
    }
    if expert_parallel:
        _check_experts(config, ranks)
    for name, value in divided.items():
        if value % ranks:
            raise ConfigurationError(f"{name} {value} does not divide by {ranks} ranks (--tp)")
    kv_heads = config.num_kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigurationError(
            f"num_key_value_heads {kv_heads} neither divides by {ranks} ranks (--tp) nor divides it"
        )


def _check_experts(config: ModelConfig, ranks: int) -> None:
    if not config.num_experts:
        raise ConfigurationError(
            f"--enable-expert-parallel: {config.architecture} has no mixture of experts"
        )
    if config.num_experts < ranks:
        raise ConfigurationError(
            f"--enable-expert-parallel: num_experts {config.num_experts} is less than {ranks} "
            "ranks (--tp)"
        )


log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes of the checkpoint done, bytes in all
CheckpointTensor = StoredTensor | GgufTensor

SAFETENSORS_DTYPES = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors that are read as values
INTEGER_DTYPES = ("I64", "I32", "I16", "I8", "U8")
PACKED_INT_DTYPES = ("I32", "U8")  # dtypes of weights of 4 bits, several in a number

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
# Tensors of a head of 8 or 4 bits in place of its weight, or beside it.
QUANTIZED_HEAD_NAME = re.compile(r"lm_head\.(?:weight_\w+|qweight|qzeros|scales)")
# Names of scales of keys and values: layers.N.self_attn. and then, in this order, those of
# llm-compressor and older files, vLLM, ModelOpt, compressed-tensors. Scales of queries have no use.
KV_SCALE_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<part>[qkv])_scale|attn\.(?P<attn>[qkv])_scale"
    r"|(?P<proj>[qkv])_proj\.(?P=proj)_scale|(?P<output>[qkv])_proj\.output_scale)$"
)
INV_FREQ_NAME = re.compile(r"(?:^|\.)rotary_emb\.inv_freq$")  # RoPE's inverse frequencies
G_IDX_NAME = re.compile(r"\.g_idx$")  # the group of each column of a matrix of 4 bits
WEIGHT_SHAPE_NAME = re.compile(r"\.weight_shape$")  # the shape of a packed matrix
LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")
# Unused tensors without a warning: a tied head; scales of inputs, which are quantized by their own
# values; tensors for `check_redundant_tensors`; scales of keys and values.
IGNORED_TENSORS = re.compile(
    r"^lm_head\.weight$|\.input_scale$|\.activation_scale$"
    rf"|{INV_FREQ_NAME.pattern}|{G_IDX_NAME.pattern}|{WEIGHT_SHAPE_NAME.pattern}"
    rf"|{KV_SCALE_NAME.pattern}"
)

COMPARED_ROWS = 4096  # rows of embedding and head that are compared at a time: some megabytes
BUFFER_BYTES = 8 * 2**20  # bytes that ReadAhead holds
FILES_AHEAD = 1  # files that are read ahead of the one in use
# Relative difference of values from float32 results, as rounding to a dtype makes it.
ROUNDING_TOLERANCE = {"F64": 1e-5, "F32": 1e-5, "F16": 2e-3, "BF16": 1.6e-2}


class Checkpoint(NamedTuple):
    """The tensors of a checkpoint.

    Attributes:
    - config: not tied if the file has a head that differs from the embedding
    - tensors: by the names that a model has for them
    """

    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]


def check_checkpoint(folder: Path, config: ModelConfig, shard: Shard = SINGLE_RANK) -> Checkpoint:
    """Returns the tensors in `folder`.

    Raises ConfigurationError if they would not fill a model of `config`, or if `shard` would cut
    through values that are stored as one. Warns of tensors that the model lacks. Reads headers, and
    small tensors that repeat others, in milliseconds; only a head that is stored beside the
    embedding that it is tied to is read whole.
    """
    tensors = with_tied_embedding(config, read_tensor_index(folder))
    config = untied_if_different(config, tensors)
    model = build_model(config, device="meta")
    if config.quantization is not None and shard.size > 1:
        list(build_model(config, shard, device="meta").sources())
    requested = set()
    for source in model.sources():
        _checked_tensor(source, tensors, folder)
        requested.add(source.name)
    unrequested = sorted(name for name in tensors if name not in requested)
    check_redundant_tensors(unrequested, tensors, config)
    extra = [name for name in unrequested if not IGNORED_TENSORS.search(name)]
    if extra:
        shown = ", ".join(extra[:3]) + (" ..." if len(extra) > 3 else "")
        log.warning("%s: ignoring %d tensors that the model lacks: %s", folder, len(extra), shown)
    return Checkpoint(config, tensors)


def load_weights(
    model: CausalLM,
    folder: Path,
    progress: Progress | None = None,
    tensors: Mapping[str, CheckpointTensor] | None = None,
) -> None:
    """Reads this rank's share of every tensor; values are converted to the parameters' dtype. The
    weights are final then (`model.pack`).

    - progress: called with (bytes read, total)
    - tensors: those of `check_checkpoint`; None: headers are read here

    Raises ConfigurationError as `check_checkpoint` does.
    """
    if tensors is None:
        tensors = with_tied_embedding(model.config, read_tensor_index(folder))
    _fill(model, folder, progress, tensors)
    model.pack()  # no source may be referred to here: packing frees the plain weights one by one


def _fill(
    model: CausalLM,
    folder: Path,
    progress: Progress | None,
    tensors: Mapping[str, CheckpointTensor],
) -> None:
    by_file: dict[Path, list[WeightSource]] = defaultdict(list)
    remaining: Counter[str] = Counter()  # by tensor, number of sources to fill
    for source in model.sources():
        by_file[_checked_tensor(source, tensors, folder).file].append(source)
        remaining[source.name] += 1
    done, total = 0, sum(tensors[name].nbytes for name in remaining)
    if progress is not None:
        progress(done, total)
    with ReadAhead(list(by_file)) as ahead:
        for file, sources in by_file.items():
            ahead.begin_file(file)
            with open_weights(file, tensors) as reader:
                for source in sources:
                    reader.fill(source)
                    remaining[source.name] -= 1
                    done += 0 if remaining[source.name] else tensors[source.name].nbytes
                    if progress is not None and not remaining[source.name]:
                        progress(done, total)


def _checked_tensor(
    source: WeightSource, tensors: Mapping[str, CheckpointTensor], folder: Path
) -> CheckpointTensor:
    """The tensor for `source`; raises ConfigurationError unless it is there, in the shape and a
    dtype that the model expects."""
    entry = tensors.get(source.name)
    if entry is None:
        raise ConfigurationError(f"{folder} lacks tensor {source.name}")
    if entry.shape != source.shape and not (source.shape == (1,) and entry.shape == ()):
        raise ConfigurationError(
            f"{source.name} in {entry.file} has shape {list(entry.shape)}, "
            f"the configuration asks for {list(source.shape)}"
        )
    supported = source.stored_dtypes or readable_dtypes(entry.file)
    if entry.dtype not in supported:
        raise ConfigurationError(
            f"{source.name} in {entry.file} is {entry.dtype}; supported: {', '.join(supported)}"
        )
    return entry


def fill_dummy(model: CausalLM, seed: int = 0) -> None:
    """Random weights in place of a checkpoint's, in any number format: standard deviation 0.02,
    norms one.

    Each tensor depends on `seed` and its name only, so ranks hold shares of the same model. The
    weights are final then (`model.pack`).
    """
    for source in model.sources():
        if "norm" in source.name:
            source.target.copy_(torch.ones((), device=source.target.device))
            continue
        device = source.target.device
        generator = torch.Generator(device)
        generator.manual_seed(zlib.crc32(f"{seed} {source.name}".encode()))  # 32 bits count
        if "scale" in source.name:
            full = torch.full(source.shape, source.dummy, device=device)
        elif source.stored_dtypes is not None and source.stored_dtypes[0] in PACKED_INT_DTYPES:
            bits = torch.empty(source.shape, dtype=torch.int32, device=device)
            full = bits.random_(generator=generator)
        else:
            full = torch.empty(source.shape, dtype=torch.float32, device=device)
            full.normal_(0.0, source.dummy, generator=generator)
        source.target.copy_(full[source.slices])
    model.pack()


# ----------------------------------------------------------------------------- safetensors and GGUF


class WeightReader(Protocol):
    """An open file of weights."""

    def fill(self, source: WeightSource) -> None:
        """Copies the source's slices into its target, in the target's dtype."""
        ...


def read_tensor_index(checkpoint: Path) -> Mapping[str, CheckpointTensor]:
    """All tensors of a folder or a GGUF file, by name; no weight is read.

    Raises ConfigurationError for a file that is missing, cut, or contradicts itself.
    """
    if is_gguf(checkpoint):
        return model_tensors(read_header(checkpoint))
    return with_model_names(read_headers(checkpoint))


def readable_dtypes(file: Path) -> tuple[str, ...]:
    """The dtypes that can be read from a file of this kind."""
    return tuple(BLOCKS) if is_gguf(file) else SAFETENSORS_DTYPES


@contextmanager
def open_weights(file: Path, tensors: Mapping[str, CheckpointTensor]) -> Iterator[WeightReader]:
    """A reader of `file`. tensors: those of `read_tensor_index`."""
    if is_gguf(file):
        yield _GgufReader(WeightFile(file), tensors)
    else:
        with _open_safetensors(file) as opened:
            yield _SafetensorsReader(opened, tensors)


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None


class _SafetensorsReader:
    def __init__(self, file: Any, tensors: Mapping[str, Any]) -> None:
        self._file = file
        self._tensors = tensors

    def fill(self, source: WeightSource) -> None:
        within = self._tensors[source.name].slice
        slices = source.slices
        if within.index is not None:
            rows, columns = slices
            rows = slice(within.first + rows.start, within.first + rows.stop)
            slices = (within.index, rows, columns)
        if self._tensors[source.name].shape == ():
            source.target.copy_(self._file.get_tensor(within.name))
        else:
            source.target.copy_(self._file.get_slice(within.name)[slices])


class _GgufReader:
    """Reader of a GGUF file: pieces of a few megabytes are dequantized, unless they stay in 4 bits,
    and copied one after another.
    """

    def __init__(self, file: WeightFile, tensors: Mapping[str, Any]) -> None:
        self._file = file
        self._tensors = tensors

    def fill(self, source: WeightSource) -> None:
        rows = len(source.slices) > 1
        tensor = self._tensors[source.name]
        for part, values in self._file.pieces(tensor, source.slices, source.blocks):
            piece = torch.from_numpy(values)
            (source.target[part] if rows else source.target).copy_(piece)


class ReadAhead:
    """Reads files into the page cache a little before they are needed, on a thread: one file ahead.

    A context manager. The first file is read at once, file i + 1 from `begin_file(file i)` on. The
    data is not kept here: the kernel caches it, and frees it when memory is short. A file that
    cannot be read is left to its user, who gets the error.

    Attributes:
    - files_read: files that were read to their end, in order
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Starts to read the first file. files: in the order in which they will be used."""
        self._files = list(files)
        self._in_use = -1
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="read ahead", daemon=True)
        self.files_read: list[Path] = []

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def begin_file(self, file: Path) -> None:
        """`file` is in use from now on; raises ValueError if it is none of the files."""
        with self._changed:
            self._in_use = self._files.index(file)
            self._changed.notify_all()

    def wait_until_read(self, count: int, seconds: float) -> bool:
        """Whether `count` files are read within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.files_read) >= count, seconds)

    def _work(self) -> None:
        buffer = bytearray(BUFFER_BYTES)
        for index, file in enumerate(self._files):
            with self._changed:
                while not self._closed and index > self._in_use + FILES_AHEAD:
                    self._changed.wait()
            try:
                complete = self._read(file, memoryview(buffer))
            except OSError as error:
                log.warning("cannot read %s ahead of its use: %s", file, error)
                return
            with self._changed:
                if not complete:
                    return
                self.files_read.append(file)
                self._changed.notify_all()

    def _read(self, file: Path, buffer: memoryview) -> bool:
        """Whether the file was read to its end."""
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while not self._closed:
                if not os.readv(descriptor, [buffer]):
                    return True
        finally:
            os.close(descriptor)
        return False


# --------------------------------------------------------------- scales of keys and values in pages


def read_kv_scales(tensors: Mapping[str, CheckpointTensor], layers: int) -> tuple[KVScales, ...]:
    """Returns the scales of each of `layers` layers; 1 if the checkpoint has none.

    - tensors: those of `check_checkpoint`

    Raises ConfigurationError for a scale that is not one positive number, and for two different
    ones.
    """
    found: list[dict[str, float]] = [{} for _ in range(layers)]
    for name, entry in sorted(tensors.items()):
        match = KV_SCALE_NAME.search(name)
        if match is None or int(match["layer"]) >= layers:
            continue
        part = match["part"] or match["attn"] or match["proj"] or match["output"]
        if part == "q":
            continue
        of_layer, scale = found[int(match["layer"])], _read_kv_scale(name, entry, tensors)
        if of_layer.setdefault(part, scale) != scale:
            raise ConfigurationError(
                f"{entry.file} has two scales of {part.upper()} in layer {match['layer']}: "
                f"{of_layer[part]:g}, and {scale:g} as {name}"
            )
    return tuple(
        KVScales(one.get("k", UNIT_KV_SCALES.k), one.get("v", UNIT_KV_SCALES.v)) for one in found
    )


def _read_kv_scale(
    name: str, entry: CheckpointTensor, tensors: Mapping[str, CheckpointTensor]
) -> float:
    target = torch.empty(entry.shape, dtype=torch.float32)
    if target.numel() != 1 or entry.dtype not in SAFETENSORS_DTYPES:
        raise ConfigurationError(
            f"{name} in {entry.file} is {entry.dtype} {list(entry.shape)}; --kv-cache-dtype "
            "fp8_e4m3 takes one number for each layer's keys and one for its values"
        )
    with open_weights(entry.file, tensors) as reader:
        reader.fill(WeightSource(name, entry.shape, full_slices(entry.shape), target))
    scale = float(target)
    if not (isfinite(scale) and scale > 0):
        raise ConfigurationError(f"{name} in {entry.file} is {scale:g}, no positive number")
    return scale


# --------------------------------------- tensors without a parameter that repeat known values


def check_redundant_tensors(
    names: Iterable[str], tensors: Mapping[str, CheckpointTensor], config: ModelConfig
) -> None:
    """Compares the tensors of `names` that repeat known values with those values; does not read
    other tensors.

    Warns of RoPE frequencies that differ from those of config.json, which are used, as transformers
    does. Raises ConfigurationError for columns in another order, and for a shape that differs from
    that of the packed matrix: weights would be read wrongly.
    """
    by_file: dict[Path, list[tuple[RedundancyCheck, str]]] = defaultdict(list)
    for name in names:
        for pattern, check in REDUNDANT_TENSORS.items():
            if pattern.search(name):
                by_file[tensors[name].file].append((check, name))
    for file, found in by_file.items():
        with open_weights(file, tensors) as reader:
            for check, name in found:
                check(name, tensors, config, reader)


def _check_inv_freq(
    name: str, tensors: Mapping[str, CheckpointTensor], config: ModelConfig, reader: WeightReader
) -> None:
    entry, layer = tensors[name], LAYER_NUMBER.search(name)
    ropes = config.ropes if layer is None else config.ropes[int(layer[1]) :][:1]
    if entry.dtype in ROUNDING_TOLERANCE and len(entry.shape) == 1:
        found = _read_tensor(name, entry, reader, torch.float32)
        wanted = [one for rope in ropes for one in _expected_inv_freq(rope, config.head_dim)]
        if any(_is_close(found, one, ROUNDING_TOLERANCE[entry.dtype]) for one in wanted):
            return
    log.warning(
        "%s: %s is not what config.json says of RoPE, which is used, as transformers does",
        entry.file,
        name,
    )


def _expected_inv_freq(rope: RopeConfig, head_dim: int) -> Iterable[torch.Tensor]:
    """RoPE's inverse frequencies with scaling, and without, as older files have them."""
    rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    yield inverse_frequencies(rope, exponents)
    yield inverse_frequencies(RopeConfig(theta=rope.theta), exponents)


def _is_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    # Near zero, float16 is less exact than `tolerance`.
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=tolerance, atol=6e-8)


def _check_g_idx(
    name: str, tensors: Mapping[str, CheckpointTensor], config: ModelConfig, reader: WeightReader
) -> None:
    """Groups of columns must follow one another, as many as there are scales."""
    entry, scales = tensors[name], tensors.get(f"{name.removesuffix('g_idx')}scales")
    if scales is None:
        return
    if entry.dtype in INTEGER_DTYPES and len(entry.shape) == 1 and scales.shape[:1] > (0,):
        found = _read_tensor(name, entry, reader, torch.int64)
        group = max(len(found) // scales.shape[0], 1)
        if torch.equal(found, torch.arange(len(found)) // group):
            return
    raise ConfigurationError(
        f"{name} in {entry.file} has columns in another order, as desc_act gives it, which is not "
        "supported"
    )


def _check_weight_shape(
    name: str, tensors: Mapping[str, CheckpointTensor], config: ModelConfig, reader: WeightReader
) -> None:
    """The shape must be that of the packed matrix, which has eight columns in a number."""
    entry, packed = tensors[name], tensors.get(f"{name.removesuffix('_shape')}_packed")
    if packed is None:
        return
    if entry.dtype in INTEGER_DTYPES and entry.shape == (2,) and len(packed.shape) == 2:
        rows, columns = _read_tensor(name, entry, reader, torch.int64).tolist()
        if (rows, -(-columns // 8)) == packed.shape:
            return
    raise ConfigurationError(
        f"{name} in {entry.file} is not the shape of what is packed, {list(packed.shape)}"
    )


def _read_tensor(
    name: str, entry: CheckpointTensor, reader: WeightReader, dtype: torch.dtype
) -> torch.Tensor:
    target = torch.empty(entry.shape, dtype=dtype)
    reader.fill(WeightSource(name, entry.shape, full_slices(entry.shape), target))
    return target


RedundancyCheck = Callable[[str, Mapping[str, CheckpointTensor], ModelConfig, WeightReader], None]
REDUNDANT_TENSORS: dict[re.Pattern[str], RedundancyCheck] = {
    INV_FREQ_NAME: _check_inv_freq,
    G_IDX_NAME: _check_g_idx,
    WEIGHT_SHAPE_NAME: _check_weight_shape,
}


# ------------------------------------------------------------------------- head and embedding, tied


def with_tied_embedding(
    config: ModelConfig, tensors: Mapping[str, CheckpointTensor]
) -> Mapping[str, CheckpointTensor]:
    """`tensors`, with the head as the embedding if they are tied and only the head is there."""
    if config.tie_word_embeddings and EMBEDDING_NAME not in tensors and HEAD_NAME in tensors:
        return {**tensors, EMBEDDING_NAME: tensors[HEAD_NAME]}
    return tensors


def untied_if_different(
    config: ModelConfig, tensors: Mapping[str, CheckpointTensor]
) -> ModelConfig:
    """`config`, not tied if `tensors` have a head that differs from the embedding, as transformers
    does. Where both are stored, their values are read. Raises ConfigurationError for a tied head
    that is quantized.
    """
    if not config.tie_word_embeddings:
        return config
    for name in tensors:
        if QUANTIZED_HEAD_NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name} in {tensors[name].file}: a quantized head is not supported"
            )
    if HEAD_NAME not in tensors or EMBEDDING_NAME not in tensors:
        return config
    if tensors[HEAD_NAME] is tensors[EMBEDDING_NAME] or _head_equals_embedding(config, tensors):
        return config
    log.warning(
        "%s: config.json ties the head to the embedding, but %s is stored and differs, so it is "
        "used, as transformers does",
        tensors[HEAD_NAME].file,
        HEAD_NAME,
    )
    return replace(config, tie_word_embeddings=False)


def _head_equals_embedding(config: ModelConfig, tensors: Mapping[str, CheckpointTensor]) -> bool:
    """Whether all values of head and embedding are equal in the model's dtype, as transformers
    compares them. False for tensors that cannot be read as matrices; `_checked_tensor` reports the
    reason.
    """
    both, shape = (tensors[HEAD_NAME], tensors[EMBEDDING_NAME]), tensors[EMBEDDING_NAME].shape
    if tensors[HEAD_NAME].shape != shape or len(shape) != 2:
        return False
    if any(entry.dtype not in readable_dtypes(entry.file) for entry in both):
        return False
    dtype = getattr(torch, config.dtype)
    bounds = [*range(0, shape[0], COMPARED_ROWS), shape[0]]
    with (
        open_weights(tensors[HEAD_NAME].file, tensors) as head,
        open_weights(tensors[EMBEDDING_NAME].file, tensors) as embedding,
    ):
        for begin, end in pairwise(bounds):
            parts = []
            for reader, name in ((head, HEAD_NAME), (embedding, EMBEDDING_NAME)):
                target = torch.empty((end - begin, shape[1]), dtype=dtype)
                slices = (slice(begin, end), slice(0, shape[1]))
                reader.fill(WeightSource(name, shape, slices, target))
                parts.append(target)
            if not torch.equal(*parts):
                return False
    return True
