"""What lies in a checkpoint's safetensors files, read from their headers alone.

Knows no model and no torch. Format: 8 bytes little-endian length, that many bytes of JSON, data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.checkpoint.fields import read_json
from pipeinfer.settings import ConfigurationError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes


@dataclass(frozen=True)
class Place:
    """Tensor `name` of a file; of several matrices in it, number `index` from row `first` on."""

    name: str
    index: int | None = None
    first: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk: its file, dtype ("F32", "BF16" ...), shape, size in bytes and place."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    within: Place


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint by name; no weight is read.

    Raises ConfigurationError for a missing or truncated file, naming it.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= read_header(file)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, else model.safetensors, else any."""
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    # Mistral's folders hold all weights a second time, under other names, as "consolidated".
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
    files = [folder / str(name) for name in sorted(set(names.values()))]
    for file in files:
        if not file.exists():
            raise ConfigurationError(f"{folder} lacks {file.name}, which {INDEX} names")
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; raises ConfigurationError if its size is not what it says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or (length <= LONGEST_HEADER and 8 + length > size):
            raise ConfigurationError(f"{file} is truncated: {size} bytes, header not complete")
        if length > LONGEST_HEADER:
            raise ConfigurationError(f"{file} is not a safetensors file")
        header = _decode(file, stream.read(length))
    tensors = {name: _entry(file, name, entry) for name, entry in header.items()}
    needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < needed:
        raise ConfigurationError(f"{file} is truncated: {size} bytes of {needed}")
    return tensors


def _decode(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ConfigurationError(f"{file} has a broken safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise ConfigurationError(f"{file} has a broken safetensors header: not an object")
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, name: str, entry: Any) -> StoredTensor:
    try:
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        return StoredTensor(file, entry["dtype"], shape, stop - start, Place(name))
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(
            f"{file} has a broken safetensors header: no dtype, shape or offsets for {name}"
        ) from None
