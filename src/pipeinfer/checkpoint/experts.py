"""Reads mixtures of experts out of config.json: the fields of a ModelConfig that are about them.

Each family has names and defaults of its own. Knows no torch; what the numbers do is in
layers/moe.py and layers/routing.py.
"""

from __future__ import annotations

from typing import TypedDict

from pipeinfer.checkpoint.fields import Fields


class Experts(TypedDict, total=False):
    """Fields of a ModelConfig, see there."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    shared_intermediate_size: int
    qk_norm: bool
    expert_groups: int
    top_expert_groups: int
    routed_scale: float
    swiglu: tuple[float, float]
    sinks: bool


def qwen_experts(fields: Fields, layers: int, chosen: int = 8) -> Experts:
    """num_experts is called num_local_experts by transformers 5."""
    experts = fields.integer("num_experts", fields.integer("num_local_experts", 0, least=0))
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers") or []
    return {
        "num_experts": experts,
        "num_experts_per_tok": _chosen(fields, experts, chosen),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.boolean("norm_topk_prob", False),
        "sparse_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    }


def qwen2_experts(fields: Fields, layers: int) -> Experts:
    """The same, and one for all tokens."""
    size = fields.integer("shared_expert_intermediate_size", 5632)
    return {**qwen_experts(fields, layers, chosen=4), "shared_intermediate_size": size}


def mixtral_experts(fields: Fields, layers: int) -> Experts:
    """Every layer is sparse, and an expert as large as another model's dense block."""
    experts = fields.integer("num_local_experts", 8)
    return {
        "num_experts": experts,
        "num_experts_per_tok": _chosen(fields, experts, 2),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "norm_topk_prob": True,
        "sparse_layers": (True,) * layers,
    }


def glm4_experts(fields: Fields, layers: int) -> Experts:
    """Experts in groups, of which the best are looked at; the first layers are dense."""
    experts, (groups, top_groups) = fields.integer("n_routed_experts", 128), _groups(fields)
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise fields.error(f"n_group {groups} does not fit n_routed_experts {experts}")
    size = fields.integer("moe_intermediate_size")
    first = fields.integer("first_k_dense_replace", 1, least=0)
    return {
        "num_experts": experts,
        "num_experts_per_tok": _chosen(fields, experts // groups * top_groups, 8),
        "moe_intermediate_size": size,
        "norm_topk_prob": fields.boolean("norm_topk_prob", True),
        "sparse_layers": tuple(i >= first for i in range(layers)),
        "shared_intermediate_size": size * fields.integer("n_shared_experts", 1, least=0),
        "qk_norm": fields.boolean("use_qk_norm", False),
        "expert_groups": groups,
        "top_expert_groups": top_groups,
        "routed_scale": fields.number("routed_scaling_factor", 1.0),
    }


def gpt_oss_experts(fields: Fields, layers: int) -> Experts:
    """As Mixtral's, with bounds; attention has sinks wherever it has such experts."""
    return {
        "num_experts": (experts := fields.integer("num_local_experts", 128)),
        "num_experts_per_tok": _chosen(fields, experts, 4),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "norm_topk_prob": True,
        "sparse_layers": (True,) * layers,
        "swiglu": (fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
        "sinks": True,
    }


def _groups(fields: Fields) -> tuple[int, int]:
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if top_groups > groups:
        raise fields.error(f"topk_group {top_groups} is above n_group {groups}")
    return groups, top_groups


def _chosen(fields: Fields, among: int, default: int) -> int:
    chosen = fields.integer("num_experts_per_tok", default)
    if chosen > among:
        raise fields.error(f"num_experts_per_tok {chosen} is above num_experts {among}")
    return chosen
