"""Tensors of a checkpoint that no model asks for because they repeat what is known: compared with
that before they are left out.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.checkpoint.rope import RopeConfig
from pipeinfer.layers.placement import WeightSource, full_slices
from pipeinfer.layers.rope import inverse_frequencies
from pipeinfer.models.weights import Opened, Stored, open_weights
from pipeinfer.settings import ConfigurationError

log = logging.getLogger(__name__)

FREQUENCIES = re.compile(r"(?:^|\.)rotary_emb\.inv_freq$")
COLUMNS, SHAPE = re.compile(r"\.g_idx$"), re.compile(r"\.weight_shape$")
LAYER = re.compile(r"\.layers\.(\d+)\.")
INTEGERS = ("I64", "I32", "I16", "I8", "U8")
# How far values may be from what is computed in float32: what rounding to their type comes to.
CLOSE = {"F64": 1e-5, "F32": 1e-5, "F16": 2e-3, "BF16": 1.6e-2}


def compare_left_out(
    names: Iterable[str], stored: Mapping[str, Stored], config: ModelConfig
) -> None:
    """Warns of RoPE's frequencies that differ from those of config.json, which are used, as
    transformers does. Raises ConfigurationError for columns in another order, and for a shape that
    is not that of the matrix: its weights would be read wrongly. Other `names` are not looked at.
    """
    by_file: dict[Path, list[tuple[_Comparison, str]]] = defaultdict(list)
    for name in names:
        for pattern, comparison in COMPARISONS.items():
            if pattern.search(name):
                by_file[stored[name].file].append((comparison, name))
    for file, found in by_file.items():
        with open_weights(file, stored) as opened:
            for comparison, name in found:
                comparison(name, stored, config, opened)


_Comparison = Callable[[str, Mapping[str, Stored], ModelConfig, Opened], None]


def _frequencies(
    name: str, stored: Mapping[str, Stored], config: ModelConfig, opened: Opened
) -> None:
    entry, layer = stored[name], LAYER.search(name)
    ropes = config.ropes if layer is None else config.ropes[int(layer[1]) :][:1]
    if entry.dtype in CLOSE and len(entry.shape) == 1:
        found = _read(name, entry, opened, torch.float32)
        wanted = [one for rope in ropes for one in _known(rope, config.head_dim)]
        if any(_close(found, one, CLOSE[entry.dtype]) for one in wanted):
            return
    log.warning(
        "%s: %s is not what config.json says of RoPE, which is used, as transformers does",
        entry.file,
        name,
    )


def _known(rope: RopeConfig, head_dim: int) -> Iterable[torch.Tensor]:
    """With the scaling, and without it, as older files have them."""
    rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    yield inverse_frequencies(rope, exponents)
    yield inverse_frequencies(RopeConfig(theta=rope.theta), exponents)


def _close(found: torch.Tensor, wanted: torch.Tensor, by: float) -> bool:
    # What float16 has near zero is less exact than `by`.
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=by, atol=6e-8)


def _columns(name: str, stored: Mapping[str, Stored], config: ModelConfig, opened: Opened) -> None:
    """Which group of columns each belongs to: one behind the other, as many as there are scales."""
    entry, scales = stored[name], stored.get(f"{name.removesuffix('g_idx')}scales")
    if scales is None:
        return
    if entry.dtype in INTEGERS and len(entry.shape) == 1 and scales.shape[:1] > (0,):
        found = _read(name, entry, opened, torch.int64)
        group = max(len(found) // scales.shape[0], 1)
        if torch.equal(found, torch.arange(len(found)) // group):
            return
    raise ConfigurationError(
        f"{name} in {entry.file} has columns in another order, as desc_act gives it, which is not "
        "supported"
    )


def _shape(name: str, stored: Mapping[str, Stored], config: ModelConfig, opened: Opened) -> None:
    """Of a matrix of which eight columns are packed into a number."""
    entry, packed = stored[name], stored.get(f"{name.removesuffix('_shape')}_packed")
    if packed is None:
        return
    if entry.dtype in INTEGERS and entry.shape == (2,) and len(packed.shape) == 2:
        rows, columns = _read(name, entry, opened, torch.int64).tolist()
        if (rows, -(-columns // 8)) == packed.shape:
            return
    raise ConfigurationError(
        f"{name} in {entry.file} is not the shape of what is packed, {list(packed.shape)}"
    )


def _read(name: str, entry: Stored, opened: Opened, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty(entry.shape, dtype=dtype)
    opened.fill(WeightSource(name, entry.shape, full_slices(entry.shape), target))
    return target


COMPARISONS: dict[re.Pattern[str], _Comparison] = {
    FREQUENCIES: _frequencies,
    COLUMNS: _columns,
    SHAPE: _shape,
}
