"""Reads RoPE out of config.json: `rope_parameters`, or `rope_scaling` and `rope_theta`; one for all
layers, or one for those with a sliding window and one for the others.

Knows no torch; what the numbers do is in layers/rope.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipeinfer.checkpoint.fields import Fields
from pipeinfer.json_values import JsonObject

# What a file of gpt-oss means that says nothing.
GPT_OSS_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read_rope(
    fields: Fields, theta: float = 10_000.0, missing: JsonObject | None = None
) -> RopeConfig:
    """`theta`, `missing`: where the file has none, or no object about RoPE. Raises
    ConfigurationError for an unknown type or a missing number."""
    rope = _rope_fields(fields)
    if not rope.raw and missing is not None:
        rope = Fields(fields.path, missing)
    partial = _partial(fields, rope)
    if partial not in (None, 1, 1.0):
        raise fields.error(f"partial_rotary_factor {partial!r} is not supported")
    return _read(fields, rope, theta)


def read_partial_rope(fields: Fields, interleaved: bool) -> RopeConfig:
    """Of half of each head, where the file does not say of how much."""
    rope = _rope_fields(fields)
    given = Fields(fields.path, {"partial_rotary_factor": _partial(fields, rope)})
    rotary = given.number("partial_rotary_factor", 0.5)
    if rotary > 1:
        raise fields.error(f"partial_rotary_factor {rotary!r} is above 1")
    return replace(_read(fields, rope, 10_000.0), rotary=rotary, interleaved=interleaved)


def _partial(fields: Fields, rope: Fields) -> object:
    return rope.raw.get("partial_rotary_factor", fields.raw.get("partial_rotary_factor"))


def _read(fields: Fields, rope: Fields, theta: float) -> RopeConfig:
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise fields.error(f"unknown RoPE type {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    limit = fields.integer("max_position_embeddings")
    if kind == "default":
        return RopeConfig(theta=theta, original_max=limit)
    factor = rope.number("factor")
    if kind in ("linear", "dynamic"):
        return RopeConfig(type=kind, theta=theta, factor=factor, original_max=limit)
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", limit),
    )
    scaled = RopeConfig(type=kind, theta=theta, factor=factor, original_max=original)
    return _llama3(rope, scaled) if kind == "llama3" else _yarn(rope, scaled)


def read_two_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """(of layers that see everything, of layers with a window), default or linear.

    transformers 5 has an object for each in `rope_parameters`; before it there were `rope_theta`
    and `rope_scaling` for the former, `rope_local_base_freq` for the latter. The scaling is already
    in max_position_embeddings. Raises ConfigurationError as `read_rope` does.
    """
    both = fields.raw.get("rope_parameters") or {}
    if not isinstance(both, dict) or not all(isinstance(one, dict) for one in both.values()):
        raise fields.error("rope_parameters must have an object for each layer type")
    scaling = fields.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.error(f"rope_scaling must be an object, not {scaling!r}")
    full = Fields(fields.path, (both.get("full_attention") or {}) | scaling)
    sliding = Fields(fields.path, both.get("sliding_attention") or {})
    limit = fields.integer("max_position_embeddings")
    return (
        _plain_or_linear(full, fields.number("rope_theta", 1_000_000.0), limit),
        _plain_or_linear(sliding, fields.number("rope_local_base_freq", 10_000.0), limit),
    )


def _plain_or_linear(rope: Fields, theta: float, limit: int) -> RopeConfig:
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    theta = rope.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta, original_max=limit)
    if kind != "linear":
        raise rope.error(f"RoPE type {kind!r} by layer type is not supported, only default, linear")
    factor = rope.number("factor")
    return RopeConfig(type="linear", theta=theta, factor=factor, original_max=int(limit / factor))


def _llama3(rope: Fields, scaled: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return replace(scaled, low_freq=low, high_freq=high)


def _yarn(rope: Fields, scaled: RopeConfig) -> RopeConfig:
    return replace(
        scaled,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(rope, scaled.factor),
    )


def _rope_fields(fields: Fields) -> Fields:
    """The object that describes RoPE, empty where there is none; the older one wins, as in
    transformers."""
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    raw = fields.raw.get(name) or {}
    if not isinstance(raw, dict):
        raise fields.error(f"{name} must be an object, not {raw!r}")
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.error("rope_parameters that differ between layers are not supported")
    return Fields(fields.path, raw)


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """What cos and sin are multiplied by. Source: https://arxiv.org/abs/2309.00071, eq. 22."""
    if rope.raw.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(frozen=True)
class RopeConfig:
    """`original_max` is the context of the pretraining, before any scaling, in tokens.

    rotary: how much of a head is rotated, from its first value on. interleaved: in files, a value
    is rotated with its neighbour; otherwise with the one half of what is rotated behind it.
    factor: all types but default. low_freq, high_freq: llama3. beta_fast, beta_slow, truncate,
    attention_factor (multiplies cos and sin): yarn.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    rotary: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """How many values of a head are."""
        return int(head_dim * self.rotary)
