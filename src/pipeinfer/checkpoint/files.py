"""A checkpoint's files: fields of its JSON files, and the headers of its safetensors files.

- Fields: typed access, with errors that name file and field.
- read_headers: where each tensor lies; no weight is read. Format: length of the header in 8 bytes,
  little endian; the header, JSON; data.

Imports no torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any

from pipeinfer.gguf.config import document
from pipeinfer.gguf.header import is_gguf
from pipeinfer.params import JsonObject
from pipeinfer.settings import ConfigurationError


@dataclass(frozen=True)
class Fields:
    """A JSON object of a file. All methods that read a field raise ConfigurationError for a wrong
    value.

    Attributes:
    - path: of the file, for errors
    - raw: the object
    """

    path: Path
    raw: dict[str, Any]

    def error(self, message: str) -> ConfigurationError:
        """A ConfigurationError to be raised: `message` behind the file's path."""
        return ConfigurationError(f"{self.path}: {message}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`.

        - default: stands for a missing field and for null; None: the field is required
        """
        value = self.optional_integer(name, default, least)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        return value

    def optional_integer(self, name: str, missing: int | None = None, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None for null.

        - missing: stands for a missing field, not for null
        """
        if name not in self.raw:
            return missing
        value = self.raw[name]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{name} must be a whole number >= {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number.

        - default: stands for a missing field and for null; None: the field is required
        """
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
            raise self.error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Returns a field that is true or false; `default` stands for a missing field and for
        null.
        """
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, written as one number or as a list; none for null or a missing field."""
        value = self.raw.get(name)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        return tuple(listed)


def read_json(checkpoint: Path, name: str) -> Fields:
    """The object in file `name` of a checkpoint, as `read_object` finds it. Raises
    ConfigurationError also if there is no such file.
    """
    raw = read_object(checkpoint, name)
    if raw is None:
        raise ConfigurationError(f"{checkpoint} has no {name}")
    return Fields(checkpoint if is_gguf(checkpoint) else checkpoint / name, raw)


LFS_POINTER = "version https://git-lfs"  # the beginning of a Git LFS pointer


def pointer_error(path: Path) -> str:
    """The error message for `path`, a Git LFS pointer in place of the file."""
    return f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"


def read_object(checkpoint: Path, name: str) -> JsonObject | None:
    """Reads the JSON object in file `name` of a checkpoint, or its counterpart in a GGUF file.

    - checkpoint: a folder or a GGUF file

    Returns None if the folder has no such file. Raises ConfigurationError for a file that is broken
    or has no object.
    """
    if is_gguf(checkpoint):
        return document(checkpoint, name) or {}
    path = checkpoint / name
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER):
            raise ConfigurationError(pointer_error(path))
        raw = json.loads(text)
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return raw


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes
MAX_ELEMENTS, MAX_DIMENSIONS = 1 << 48, 16
# Bytes of a value, by dtype. Files may have tensors of other dtypes, which no model asks for.
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSlice:
    """The place of a StoredTensor in a tensor of a file.

    Attributes:
    - name: of the tensor in the file
    - index: into the first dimension of a stack of matrices; None: the tensor is one matrix
    - first: the first row of the part, in its matrix
    """

    name: str
    index: int | None = None
    first: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk, whole or a part of one.

    Attributes:
    - file: the file with the tensor
    - dtype: name in the file, such as "F32" or "BF16"
    - shape: of the part
    - nbytes: of the part
    - slice: place of the part in the file's tensor
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    slice: TensorSlice


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint in `folder`, by name in the files.

    Raises ConfigurationError for a missing, truncated or broken file, which it names.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= read_header(file)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: those that the index names, else model.safetensors, else all
    *.safetensors. Raises ConfigurationError if there are none, or if one is missing.
    """
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    # Mistral's folders have a second copy of all weights, "consolidated", with other names.
    found = sorted(
        path
        for path in folder.glob("*.safetensors")
        if not path.name.startswith(("consolidated", "adapter_"))
    )
    if not found:
        raise ConfigurationError(f"{folder} has no *.safetensors file to load weights from")
    return found


def _indexed_files(folder: Path) -> list[Path]:
    fields = read_json(folder, INDEX)
    names = fields.raw.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise fields.error("weight_map is missing or empty")
    if not all(isinstance(name, str) and "/" not in name for name in names.values()):
        raise fields.error("weight_map names a file that is not in the folder")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{folder} lacks {file.name}, which {INDEX} names")
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Reads the header of one file; returns its tensors by name. Raises ConfigurationError if the
    header is broken, or if the size of the file does not match the header.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == LFS_POINTER[:8].encode():
            raise ConfigurationError(pointer_error(file))
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or (length <= LONGEST_HEADER and 8 + length > size):
            raise ConfigurationError(f"{file} is truncated: {size} bytes, header not complete")
        if length > LONGEST_HEADER:
            raise ConfigurationError(f"{file} is not a safetensors file")
        header = _decode(file, stream.read(length))
    tensors = {name: _entry(file, name, entry) for name, entry in header.items()}
    needed = 8 + length + _end(file, header)
    if size < needed:
        raise ConfigurationError(f"{file} is truncated: {size} bytes of {needed}")
    if size > needed:
        raise ConfigurationError(f"{file} has {size - needed} bytes that belong to no tensor")
    return tensors


def _end(file: Path, header: dict[str, Any]) -> int:
    """The byte behind the last tensor, counted from the first one. Raises ConfigurationError if
    there are gaps or overlaps between tensors.
    """
    end = 0
    for start, stop in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if start != end:
            raise ConfigurationError(
                f"{file} has a broken safetensors header: a tensor begins at {start}, where the "
                f"one before it ends at {end}"
            )
        end = stop
    return end


def _decode(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except RecursionError:
        raise ConfigurationError(
            f"{file} has a broken safetensors header: nested too deeply"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{file} has a broken safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise ConfigurationError(f"{file} has a broken safetensors header: not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ConfigurationError(f"{file} has a broken safetensors header: its __metadata__")
    return header


def _entry(file: Path, name: str, entry: Any) -> StoredTensor:
    broken = f"{file} has a broken safetensors header: {name!r}"
    try:
        start, stop = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(f"{broken} has no dtype, shape or offsets") from None
    numbers = (start, stop, *shape)
    size = all(type(number) is int and 0 <= number <= MAX_ELEMENTS for number in numbers)
    if not size or len(shape) > MAX_DIMENSIONS:
        raise ConfigurationError(f"{broken} has a shape or offsets that no tensor has")
    elements = prod(shape)
    if not isinstance(dtype, str) or elements > MAX_ELEMENTS:
        raise ConfigurationError(f"{broken} has {elements} values of type {dtype!r}")
    fits = dtype not in SIZES or stop - start == elements * SIZES[dtype]
    if start > stop or not fits:
        raise ConfigurationError(
            f"{broken} has {elements} values of {dtype!r} in {stop - start} bytes"
        )
    return StoredTensor(file, dtype, shape, stop - start, TensorSlice(name))


# Names without the prefix "model.", or with two of them, become names with one, as in transformers.
WITHOUT_PREFIX = re.compile(r"(?:layers|embed_tokens|norm)\..*")
TWO_PREFIXES = re.compile(r"model\.((?:model|lm_head)\..*)")
MIXTRAL = re.compile(r"(.*\.)block_sparse_moe\.(?:(gate)|experts\.(\d+)\.(w[123]))\.(\w+)")
MERGED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
MIXTRAL_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# The parts of a merged matrix, in the order of its rows.
MERGED_PARTS = {
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def with_model_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`stored` under the names that models ask for. Matrices of experts become separate tensors,
    mlp.experts.N.gate_proj and so on.

    Merged experts with biases stay as they are: only gpt-oss has them, and there the rows of gate
    and up alternate. Raises ConfigurationError if two tensors get the same name.
    """
    stored = _with_prefixes(stored)
    return dict(
        pair for name, entry in stored.items() for pair in _model_names(name, entry, stored)
    )


def _with_prefixes(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, entry in stored.items():
        wrapped = TWO_PREFIXES.fullmatch(name)
        wanted = (
            wrapped[1] if wrapped else f"model.{name}" if WITHOUT_PREFIX.fullmatch(name) else name
        )
        if (other := found.setdefault(wanted, entry)) is not entry:
            raise ConfigurationError(
                f"{entry.file} has two tensors for {wanted}: {other.slice.name} and {name}"
            )
    return found


def _model_names(
    name: str, entry: StoredTensor, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    if (found := MIXTRAL.fullmatch(name)) is not None:
        layer, router, number, part, kind = found.groups()
        yield f"{layer}mlp.{router or f'experts.{number}.{MIXTRAL_PARTS[part]}'}.{kind}", entry
    elif (found := MERGED_EXPERTS.fullmatch(name)) is not None and f"{name}_bias" not in stored:
        yield from _experts(found[1], MERGED_PARTS[found[2]], entry)
    else:
        yield name, entry


def _experts(
    prefix: str, parts: tuple[str, ...], entry: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields (name, tensor) of each part of each expert, in a tensor [experts, rows of all parts,
    columns].
    """
    experts, rows, columns = entry.shape if len(entry.shape) == 3 else (0, 0, 0)
    rows //= len(parts)
    for expert in range(experts):
        for index, part in enumerate(parts):
            yield (
                f"{prefix}.{expert}.{part}.weight",
                replace(
                    entry,
                    shape=(rows, columns),
                    nbytes=entry.nbytes // (experts * len(parts)),
                    slice=TensorSlice(entry.slice.name, expert, index * rows),
                ),
            )
