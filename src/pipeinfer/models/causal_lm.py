"""The decoder-only transformer that all architectures here are: embedding, layers, norm, head.

What differs between architectures is handed in as layers. Knows no cache, no request and no file;
`sources` says which checkpoint tensor fills which parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.attention import Attend, SelfAttention
from pipeinfer.layers.linear import Embedding, LMHead, VocabShard
from pipeinfer.layers.norm import RMS_NORM, NormKind, RMSNorm
from pipeinfer.layers.placement import PartialSum, Placement, WeightSource
from pipeinfer.layers.rope import Rope, Rotation
from pipeinfer.layers.weight import ActivationQuantizer, Activations
from pipeinfer.step import AttentionShape


class FeedForward(Protocol):
    """A dense or a sparse MLP: [T, hidden] to [T, hidden]. input_quantizer: see Weight
    (layers/weight.py)."""

    @property
    def input_quantizer(self) -> ActivationQuantizer | None: ...

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum: ...

    def pack(self) -> None: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


class Layer(Protocol):
    """One layer of the residual stream, called and filled as DecoderLayer is."""

    @property
    def attention(self) -> SelfAttention: ...

    @property
    def mlp(self) -> FeedForward: ...

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


class TokenEmbedding(Protocol):
    """Ids int64 [T] to vectors [T, hidden], a new tensor, out of `rows`."""

    rows: VocabShard

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    input_norm: RMSNorm
    attention: SelfAttention
    middle_norm: RMSNorm
    mlp: FeedForward

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """(what is to be added to the residual, the residual [T, hidden], changed in place), or of
        `rows` alone, int64 [S]."""
        rounded, residual = self.input_norm.add_norm(x, residual, self.attention.input_quantizer)
        x = self.attention(rounded, rotation, attend, rows)
        if rows is not None:
            residual = residual[rows]
        rounded, residual = self.middle_norm.add_norm(x, residual, self.mlp.input_quantizer)
        return self.mlp(rounded), residual

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this layer, with its dot."""
        yield from self.input_norm.sources(prefix)
        yield from self.attention.sources(f"{prefix}self_attn.")
        yield from self.middle_norm.sources(prefix)
        yield from self.mlp.sources(f"{prefix}mlp.")


class CausalLM:
    """A `Model`: `model(tokens, positions, attend)` gives hidden states, `logits` their logits.

    `embed` makes the embedding out of its rows. Layers with the same RoPE share its rotation.
    """

    may_not_capture = False

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        placement: Placement,
        norm_kind: NormKind = RMS_NORM,
        embed: Callable[[VocabShard, Placement], TokenEmbedding] = Embedding,
    ) -> None:
        self.config = config
        self.layers = layers
        size = (config.vocab_size, config.hidden_size)
        rows = VocabShard("embed_tokens", *size, placement)
        self.embedding = embed(rows, placement)
        tied = config.tie_word_embeddings
        self.head = LMHead(rows if tied else VocabShard("lm_head", *size, placement), placement)
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, placement, norm_kind)
        different = list(dict.fromkeys(config.ropes))
        self.ropes = [
            Rope(rope, config.head_dim, placement.dtype, placement.device, config.context_length)
            for rope in different
        ]
        self._rope_of_layer = [different.index(rope) for rope in config.ropes]

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions: int64 [T], or int32 on a GPU. Hidden states [T, hidden], normed; or of
        `rows` alone, int64 [S]: of the other tokens, the last layer computes keys and values only.
        """
        rotations = [rope(positions) for rope in self.ropes]
        residual = self.embedding(tokens)
        x = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rotation = rotations[self._rope_of_layer[index]]
            x, residual = layer(x, residual, rotation, attend, rows if index == last else None)
        return self.norm.add_norm(x, residual)[0]

    @property
    def vocabulary(self) -> VocabShard:
        """What its logits are about."""
        return self.head.rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] to [S, vocab] in the model's dtype; the same on all ranks."""
        return self.head(hidden)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's share of them: [S, hidden] to [S, share], from id `head.rows.start` on."""
        return self.head.local_logits(hidden)

    def attention_shapes(self) -> list[AttentionShape]:
        """This rank's heads, layer by layer."""
        return [
            AttentionShape(
                layer.attention.num_heads,
                layer.attention.num_kv_heads,
                layer.attention.head_dim,
                self.config.attention_scale or layer.attention.head_dim**-0.5,
                window,
                layer.attention.sinks,
            )
            for layer, window in zip(self.layers, self.config.sliding_windows, strict=True)
        ]

    def pack(self) -> None:
        """Lays the weights out for speed; they are final then, and `sources` is over.

        A tied embedding is kept beside the head's packed copy of it.
        """
        for layer in self.layers:
            layer.attention.pack()
            layer.mlp.pack()
        self.head.rows.weight.pack()

    def sources(self) -> Iterator[WeightSource]:
        """Every parameter, and the checkpoint tensor that fills it."""
        yield from self.embedding.rows.sources("model.")
        for index, layer in enumerate(self.layers):
            yield from layer.sources(f"model.layers.{index}.")
        yield from self.norm.sources("model.")
        if not self.config.tie_word_embeddings:
            yield from self.head.rows.sources("")
