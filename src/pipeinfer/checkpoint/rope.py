"""The RoPE of a model, read from config.json: from `rope_parameters`, or from `rope_scaling` and
`rope_theta`.

Most models have one RoPE for all layers; some have one for layers with a sliding window and one for
the others. layers/attention.py computes with the numbers. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipeinfer.checkpoint.files import Fields
from pipeinfer.params import JsonObject

# The RoPE of a gpt-oss file that has no object about it.
GPT_OSS_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read_rope(
    fields: Fields, theta: float = 10_000.0, missing: JsonObject | None = None
) -> RopeConfig:
    """The RoPE of a model that rotates whole heads.

    theta: default of rope_theta.
    missing: the object about RoPE if the file has none; None: an empty one.

    Raises ConfigurationError for an unknown type, a missing number, or a partial rotation.
    """
    rope = _rope_fields(fields)
    if not rope.raw and missing is not None:
        rope = Fields(fields.path, missing)
    partial = _partial(fields, rope)
    if partial not in (None, 1, 1.0):
        raise fields.error(f"partial_rotary_factor {partial!r} is not supported")
    return _read(fields, rope, theta)


def read_partial_rope(fields: Fields, interleaved: bool) -> RopeConfig:
    """The RoPE of a model that rotates the first part of each head; without partial_rotary_factor,
    half of it.

    interleaved: as in RopeConfig.

    Raises ConfigurationError as `read_rope` does, and for a factor above 1.
    """
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
    """(RoPE of layers without a window, RoPE of layers with one), each of type "default" or
    "linear".

    Files of transformers 5 have an object for each in `rope_parameters`. Older ones have
    `rope_theta` and `rope_scaling` for the first, `rope_local_base_freq` for the second.
    max_position_embeddings includes the scaling already. Raises ConfigurationError as `read_rope`
    does.
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
    """The object about RoPE, empty if there is none. `rope_scaling` wins over `rope_parameters`, as
    in transformers.
    """
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    raw = fields.raw.get(name) or {}
    if not isinstance(raw, dict):
        raise fields.error(f"{name} must be an object, not {raw!r}")
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.error("rope_parameters that differ between layers are not supported")
    return Fields(fields.path, raw)


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """The factor of cos and sin. Source: https://arxiv.org/abs/2309.00071, eq. 22."""
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
    """One RoPE.

    type: of the scaling.
    theta: base of the frequencies.
    factor: by which the context is extended; for all types but "default".
    original_max: context length of the pretraining, before any scaling, in tokens.
    low_freq, high_freq: low_freq_factor and high_freq_factor, for "llama3".
    beta_fast, beta_slow, truncate: as config.json calls them, for "yarn".
    attention_factor: factor of cos and sin, for "yarn".
    rotary: the share of a head that is rotated, from its first value on.
    interleaved: which values form a pair in the checkpoint's matrices. True: values 2 i and 2 i +
        1; False: values i and i + half of the rotated ones.
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
        """The number of values of a head that are rotated."""
        return int(head_dim * self.rotary)
