"""The decoder layer that every architecture here starts from, sized by a ModelConfig.

Knows no architecture: each says which projections have biases and hands in its feed-forward block.
"""

from __future__ import annotations

from pipeinfer.layers.attention import SelfAttention
from pipeinfer.layers.mlp import GATES, GatedMLP
from pipeinfer.layers.norm import RMSNorm
from pipeinfer.layers.placement import Placement
from pipeinfer.models.causal_lm import DecoderLayer, FeedForward
from pipeinfer.models.config import ModelConfig


def decoder_layer(
    config: ModelConfig,
    index: int,
    placement: Placement,
    mlp: FeedForward,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderLayer:
    """Layer `index` with pre-norms, its parts named on disk as Llama names them."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    attention = SelfAttention(
        index,
        hidden_size=hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=qkv_bias,
        output_bias=output_bias,
        norm_eps=eps if qk_norm else None,
        placement=placement,
    )
    return DecoderLayer(
        input_norm=RMSNorm("input_layernorm", hidden, eps, placement),
        attention=attention,
        middle_norm=RMSNorm("post_attention_layernorm", hidden, eps, placement),
        mlp=mlp,
    )


def dense_mlp(config: ModelConfig, placement: Placement, bias: bool = False) -> GatedMLP:
    """The gated block of a dense layer."""
    gate = GATES[config.activation]
    return GatedMLP(config.hidden_size, config.intermediate_size, bias, placement, gate)
