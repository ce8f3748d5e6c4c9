"""From a ModelConfig to one rank's share of a model: checks that it can be split, then allocates.

Builders of architectures are in the table ARCHITECTURES (checkpoint/config.py). Knows no file;
loading.py fills the parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import torch

from pipeinfer.checkpoint.config import ARCHITECTURES, ModelConfig
from pipeinfer.layers import experts
from pipeinfer.layers.elementwise import fused_ops
from pipeinfer.layers.linear import GATED_ACTIVATIONS
from pipeinfer.layers.placement import AllReduceFusion, Collectives, Placement, Shard
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
) -> CausalLM:
    """The share of one rank, with its parameters allocated, not filled.

    shard: which rank of how many.
    dtype, device: of the parameters; "meta" allocates nothing.
    collectives: sums over ranks; without them a share of several ranks can be loaded, not run.
    compiled: norms and activations by torch.compile, see layers/elementwise.py.
    fusion: of sums over ranks with the norm that follows, see layers/placement.py.
    moe_backend: a name of layers/experts.py.

    Raises ConfigurationError if heads or MLP do not divide by the ranks, if what is to be compiled
    cannot be, or if there is no such backend.
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
    )
    model = cast(CausalLM, _builder(config.architecture)(config, placement))
    if compiled:
        _compile(model, placement)
    return model


def _builder(architecture: str) -> Callable[..., object]:
    """The builder, imported only now; raises KeyError for one that is not in the table."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)


def _compile(model: CausalLM, placement: Placement) -> None:
    """Compiles what torch.compile is used for; now, because later a step would wait for it."""
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
