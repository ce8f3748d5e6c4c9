"""The weights of a checkpoint in either form, safetensors or GGUF: a list of what is stored, and
the reading of a slice of a tensor into its place.

Knows files; not what a tensor is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from pipeinfer.checkpoint.safetensors import StoredTensor, read_headers, with_model_names
from pipeinfer.gguf.header import BLOCKS, is_gguf, read_header
from pipeinfer.gguf.weights import GgufTensor, WeightFile, model_tensors
from pipeinfer.layers.placement import WeightSource
from pipeinfer.settings import ConfigurationError

DTYPES = ("F64", "F32", "F16", "BF16")  # of safetensors
Stored = StoredTensor | GgufTensor


class Opened(Protocol):
    """A file that weights are read from."""

    def fill(self, source: WeightSource) -> None:
        """Copies the source's slices into its target, in the target's dtype."""
        ...


def read_stored(checkpoint: Path) -> Mapping[str, Stored]:
    """All tensors of a folder or a GGUF file by name; no weight is read.

    Raises ConfigurationError for a file that is missing, cut or lies.
    """
    if is_gguf(checkpoint):
        return model_tensors(read_header(checkpoint))
    return with_model_names(read_headers(checkpoint))


def dtypes(file: Path) -> tuple[str, ...]:
    """The types of tensors in such a file that can be read."""
    return tuple(BLOCKS) if is_gguf(file) else DTYPES


@contextmanager
def open_weights(file: Path, stored: Mapping[str, Stored]) -> Iterator[Opened]:
    """`stored`: what `read_stored` gave."""
    if is_gguf(file):
        yield _Packed(WeightFile(file), stored)
    else:
        with _opened(file) as opened:
            yield _Plain(opened, stored)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None


class _Plain:
    def __init__(self, opened: Any, stored: Mapping[str, Any]) -> None:
        self._opened = opened
        self._stored = stored

    def fill(self, source: WeightSource) -> None:
        within = self._stored[source.name].slice
        slices = source.slices
        if within.index is not None:
            rows, columns = slices
            rows = slice(within.first + rows.start, within.first + rows.stop)
            slices = (within.index, rows, columns)
        if self._stored[source.name].shape == ():
            source.target.copy_(self._opened.get_tensor(within.name))
        else:
            source.target.copy_(self._opened.get_slice(within.name)[slices])


class _Packed:
    """Pieces of a few megabytes are decoded and copied one after another."""

    def __init__(self, file: WeightFile, stored: Mapping[str, Any]) -> None:
        self._file = file
        self._stored = stored

    def fill(self, source: WeightSource) -> None:
        rows = len(source.slices) > 1
        for run, values in self._file.pieces(self._stored[source.name], source.slices):
            piece = torch.from_numpy(values)
            (source.target[run] if rows else source.target).copy_(piece)
