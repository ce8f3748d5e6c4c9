"""The scales of keys and values that a checkpoint brings, for pages of 8 bits.

Files name them in several ways, by whoever quantized them. Where keys and values are stored as they
are, nobody asks for them. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

import torch

from pipeinfer.kernels.formats import UNIT_KV_SCALES, KVScales
from pipeinfer.layers.placement import Source, whole
from pipeinfer.models.weights import DTYPES, Stored, open_weights
from pipeinfer.settings import ConfigurationError

# layers.N.self_attn. and then, in this order: llm-compressor and older files, vLLM, ModelOpt,
# compressed-tensors. Of queries there may be some too, which nobody here needs.
SCALE = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<part>[qkv])_scale|attn\.(?P<attn>[qkv])_scale"
    r"|(?P<proj>[qkv])_proj\.(?P=proj)_scale|(?P<output>[qkv])_proj\.output_scale)$"
)


def read_scales(stored: Mapping[str, Stored], layers: int) -> tuple[KVScales, ...]:
    """Of each layer; 1 where there is none. `stored`: what `check_checkpoint` gave.

    Raises ConfigurationError for a scale that is not one positive number.
    """
    found: list[dict[str, float]] = [{} for _ in range(layers)]
    for name, entry in sorted(stored.items()):
        match = SCALE.search(name)
        if match is None or int(match["layer"]) >= layers:
            continue
        part = match["part"] or match["attn"] or match["proj"] or match["output"]
        if part == "q":
            continue
        of_layer, scale = found[int(match["layer"])], _scale(name, entry, stored)
        if of_layer.setdefault(part, scale) != scale:
            raise ConfigurationError(
                f"{entry.file} has two scales of {part.upper()} in layer {match['layer']}: "
                f"{of_layer[part]:g}, and {scale:g} as {name}"
            )
    return tuple(
        KVScales(one.get("k", UNIT_KV_SCALES.k), one.get("v", UNIT_KV_SCALES.v)) for one in found
    )


def _scale(name: str, entry: Stored, stored: Mapping[str, Stored]) -> float:
    target = torch.empty(entry.shape, dtype=torch.float32)
    if target.numel() != 1 or entry.dtype not in DTYPES:
        raise ConfigurationError(
            f"{name} in {entry.file} is {entry.dtype} {list(entry.shape)}; --kv-cache-dtype "
            "fp8_e4m3 takes one number for each layer's keys and one for its values"
        )
    with open_weights(entry.file, stored) as opened:
        opened.fill(Source(name, entry.shape, whole(entry.shape), target))
    scale = float(target)
    if not (isfinite(scale) and scale > 0):
        raise ConfigurationError(f"{name} in {entry.file} is {scale:g}, no positive number")
    return scale
