"""How a model of transformers calls an attention of ours: a function that is registered there.

transformers knows it by name, for all models of a process. It finds what answers in the module that
calls, where `hooked` has put it, so two models do not meet. Knows no step and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import NamedTuple, Protocol, cast

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

NAME, TRACED = "pipeinfer", "pipeinfer-traced"
ATTRIBUTE = "pipeinfer_hook"
# (batch, head, query, key) -> whether the query at that position sees the key there, tensors all.
Sees = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


class Called(NamedTuple):
    """query, key, value: [1, heads, T, head_dim], normed and rotated. mask: None by NAME; by TRACED
    what the model made of a stand-in for transformers' mask. options: all else that it passes."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: object
    options: Mapping[str, object]


Answer = Callable[[Called], torch.Tensor]  # gives [1, T, heads, head_dim]


class Hook:
    """Of one model: what answers its calls now."""

    answer: Answer


class _FromConfig(Protocol):
    """A class of a model. transformers does not say what `_from_config` returns, and pyright would
    read all models there are to find out, for half a minute."""

    def _from_config(
        self, config: PreTrainedConfig, *, attn_implementation: str, dtype: torch.dtype
    ) -> PreTrainedModel: ...


def built(
    kind: type[PreTrainedModel], config: PreTrainedConfig, name: str, dtype: torch.dtype
) -> PreTrainedModel:
    """One with weights that mean nothing, which calls the attention that `name` stands for."""
    made = cast(_FromConfig, kind)
    return made._from_config(deepcopy(config), attn_implementation=name, dtype=dtype)


def hooked(model: torch.nn.Module) -> Hook:
    """The hook of `model`, which all its modules have from now on."""
    hook = Hook()
    for module in model.modules():
        setattr(module, ATTRIBUTE, hook)
    return hook


def register() -> None:
    """Makes both names known to transformers. By NAME models make no mask; by TRACED one that says
    what it would hide (`seen_through`)."""
    AttentionInterface.register(NAME, _forward)
    AttentionInterface.register(TRACED, _forward)
    AttentionMaskInterface.register(TRACED, _stand_in)


def seen_through(mask: object) -> Sees | None:
    """What a mask lets through, if it is the stand-in that a model was given."""
    return getattr(mask, "sees", None)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    hook: Hook = getattr(module, ATTRIBUTE)
    return hook.answer(Called(query, key, value, attention_mask, options)), None


def _stand_in(
    *, q_length: int, kv_length: int, mask_function: Sees, **others: object
) -> torch.Tensor:
    """Without values, since a window may be longer than any mask that one could look at."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(mask, "sees", mask_function)  # noqa: B010
    return mask
