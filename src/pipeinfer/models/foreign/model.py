"""A decoder of transformers, called as the engine calls a model: all tokens of a step as one row.

Its attention is handed in with each call, as CausalLM's is; its head, with whatever scales or caps
logits, stays its own. Knows no cache, no request and no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from pipeinfer.layers.attention import Attend, RotatedQKV
from pipeinfer.models.foreign.hook import Called, hooked
from pipeinfer.step import AttentionShape


@dataclass(frozen=True)
class Ids:
    """The `Vocabulary` of one rank that has all ids."""

    vocab_size: int
    start: int = 0

    @property
    def stop(self) -> int:
        """See Vocabulary."""
        return self.vocab_size


class Given:
    """What a base model would return, `hidden` [1, S, hidden] and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class GivenBase(torch.nn.Module):
    """In a base model's place: what is put in comes out, for the head that follows."""

    @property
    def decoder(self) -> GivenBase:
        """What some heads call, within the base model."""
        return self

    def forward(self, *ids: None, inputs_embeds: torch.Tensor, **others: object) -> Given:
        """inputs_embeds: [1, S, hidden]; some heads put the ids, which are none, in front."""
        return Given(inputs_embeds)


class ForeignModel:
    """A `Model`. Heads are padded with zeros to `head_dim` where that is more than they have."""

    may_not_capture = True

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[AttentionShape],
        vocab_size: int,
        head_dim: int = 0,
    ) -> None:
        """`shapes`: of the layers, in the order in which they call, with their sinks."""
        self._hook = hooked(model)
        self._shapes = tuple(shapes)
        self._dims = [max(shape.head_dim, head_dim) for shape in shapes]
        self.vocabulary = Ids(vocab_size)
        self._base: torch.nn.Module = model.base_model
        setattr(model, model.base_model_prefix, GivenBase())
        self._head = model

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See interface.py."""
        layers = itertools.count()

        def answer(called: Called) -> torch.Tensor:
            return self._attended(next(layers), called, attend)

        self._hook.answer = answer
        ids, at = tokens.long()[None], positions.long()[None]
        out = self._base(input_ids=ids, position_ids=at, use_cache=False)
        hidden = out.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def _attended(self, layer: int, called: Called, attend: Attend) -> torch.Tensor:
        """[1, T, heads, head_dim]."""
        dim, padded = self._shapes[layer].head_dim, self._dims[layer]
        heads = (called.query, called.key, called.value)
        ready = (_by_token(part[0], padded - dim) for part in heads)
        out = attend(layer, RotatedQKV(*ready))
        return out[None, ..., :dim]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] to [S, vocab]."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same: there is one rank."""
        return self.logits(hidden)

    def attention_shapes(self) -> Sequence[AttentionShape]:
        """With padded heads."""
        return [
            replace(shape, head_dim=dim)
            for shape, dim in zip(self._shapes, self._dims, strict=True)
        ]


def _by_token(heads: torch.Tensor, more: int) -> torch.Tensor:
    """[heads, T, dim] as [T, heads, dim + more], contiguous."""
    heads = heads.transpose(0, 1)
    return functional.pad(heads, (0, more)) if more else heads.contiguous()
