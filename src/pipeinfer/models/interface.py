"""What an engine calls a model, whoever implements it: CausalLM, or one of transformers.

Knows no cache, no request and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pipeinfer.layers.attention import Attend
from pipeinfer.step import AttentionShape


class Vocabulary(Protocol):
    """Of `vocab_size` ids a rank gives the logits of start..stop-1."""

    @property
    def vocab_size(self) -> int:
        """Of all ranks together."""
        ...

    @property
    def start(self) -> int:
        """This rank's first id."""
        ...

    @property
    def stop(self) -> int:
        """The first id behind this rank's."""
        ...


class Model(Protocol):
    """One rank's, with its weights."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What its logits are about."""
        ...

    @property
    def may_not_capture(self) -> bool:
        """Whether steps of it may turn out to be nothing that a CUDA graph can hold."""
        ...

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """tokens, positions: int64 [T], or int32 on a GPU. Hidden states [T, hidden], ready for
        `logits`; or of `rows` alone, int64 [S]."""
        ...

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[S, hidden] to [S, vocab]; the same on all ranks."""
        ...

    def local_logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """This rank's share of them."""
        ...

    def attention_shapes(self) -> Sequence[AttentionShape]:
        """This rank's heads, layer by layer."""
        ...
