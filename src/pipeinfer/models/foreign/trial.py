"""Whether a loaded model of transformers can compute a step: tried before anybody is served.

A step is one flat row of tokens of many requests, so nothing of a token may depend on the tokens
beside it, but for attention, nor on its place in the row. Knows no page and no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from transformers.modeling_utils import PreTrainedModel

from pipeinfer.checkpoint.config import ModelOutline
from pipeinfer.models.foreign.hook import Called, hooked
from pipeinfer.models.foreign.refusals import refused
from pipeinfer.step import AttentionShape

TOKENS = 8
TOLERANCE = 0.02  # of the largest value; a median over tokens, since experts may be near ties


class Tried(NamedTuple):
    """shapes: with the sinks that the model has. hidden: [n, hidden], as its head takes them."""

    shapes: list[AttentionShape]
    hidden: torch.Tensor


@torch.inference_mode()
def tried(
    model: PreTrainedModel,
    shapes: Sequence[AttentionShape],
    outline: ModelOutline,
    most_tokens: int,
) -> Tried:
    """`shapes`: as traced; `most_tokens`: of a request.

    Raises ConfigurationError for a model whose tokens depend on their neighbours.
    """
    sinks: list[torch.Tensor | None] = []

    def answer(called: Called) -> torch.Tensor:
        sinks.append(cast("torch.Tensor | None", called.options.get("s_aux")))
        return _of_itself(called)

    hooked(model).answer = answer
    ids = torch.arange(3, 3 + 7 * TOKENS, 7, device=model.device) % outline.vocab_size
    positions = torch.linspace(0, most_tokens - 1, TOKENS, device=model.device).long()
    first = _hidden(model, ids, positions)
    if len(sinks) != len(shapes):
        raise refused(
            outline.architecture, f"it called attention {len(shapes)}, then {len(sinks)} times"
        )
    found = [replace(shape, sinks=s) for shape, s in zip(shapes, sinks, strict=True)]
    # The other way round, and another token in the place of the last.
    ids, positions = ids.flip(0), positions.flip(0)
    ids[0], positions[0] = (ids[0] + 1) % outline.vocab_size, 0
    again = _hidden(model, ids, positions).flip(0)
    changed = (first - again)[:-1].float().abs().amax(dim=1)
    apart = changed.median() / first.float().abs().max()
    if not float(apart) <= TOLERANCE:
        raise refused(
            outline.architecture,
            "its tokens depend on those beside them by more than attention (a convolution, a "
            "recurrence, or positions that are counted)",
        )
    return Tried(found, first)


def _hidden(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    out = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return out.last_hidden_state[0]


def _of_itself(called: Called) -> torch.Tensor:
    """In attention's place: of a token's own query, key and value, so wrong rotations show."""
    group = called.query.shape[1] // called.key.shape[1]
    own = called.query + (called.key + called.value).repeat_interleave(group, dim=1)
    return (own / 3).transpose(1, 2).contiguous()
