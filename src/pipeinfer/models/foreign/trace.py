"""What attention a model of transformers wants of each layer: found out by calling it once.

Without weights, on torch's meta device. What a layer hides is asked of its mask, not of its
configuration, so a model whose mask is no window is refused, and not served wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from pipeinfer.models.foreign import hook
from pipeinfer.models.foreign.hook import Called, Sees
from pipeinfer.models.foreign.refusals import refused
from pipeinfer.step import AttentionShape

TOKENS = 4
MOST_HEAD_DIM = 256
FAR = 16_777_213  # a position behind all windows; odd, so that no chunk begins there
# What may be passed and changes nothing here; the window is the mask's.
IGNORED = {
    "dropout", "position_ids", "cache_position", "use_cache", "sliding_window", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "is_causal",
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """Layer by layer, in the order of calls; sinks are with the weights."""

    shapes: tuple[AttentionShape, ...]
    sinks: bool

    @property
    def head_dim(self) -> int:
        """The largest."""
        return max(shape.head_dim for shape in self.shapes)

    @property
    def soft_cap(self) -> bool:
        """Whether some layer has one."""
        return any(shape.soft_cap is not None for shape in self.shapes)


class _Unservable(Exception):
    """The text is the reason."""


def trace(kind: type[PreTrainedModel], config: PreTrainedConfig, architecture: str) -> Traced:
    """Raises ConfigurationError for attention that no backend here computes, with the reason."""
    hook.register()
    calls: list[Called] = []
    windows: list[int | None] = []

    def answer(called: Called) -> torch.Tensor:
        calls.append(called)
        windows.append(_window(called.mask))
        query, dim = called.query, called.value.shape[-1]
        return query.new_zeros((1, query.shape[2], query.shape[1], dim))

    try:
        with torch.device("meta"), torch.inference_mode():
            model = hook.built(kind, config, hook.TRACED, torch.bfloat16).eval()
            _refuse_alibi(model)
            hook.hooked(model).answer = answer
            ids = torch.zeros((1, TOKENS), dtype=torch.long)
            model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        if not calls:
            raise _Unservable("its attention does not go through transformers' interface for it")
        shapes = tuple(map(_shape, calls, windows))
    except _Unservable as error:
        raise refused(architecture, str(error)) from None
    except Exception as error:  # of code of others, which was not made for this
        reason = f"a trial of it failed with {type(error).__name__}: {error}"
        if isinstance(error, KeyError) and hook.TRACED in str(error):
            reason = "its attention does not go through transformers' interface for it"
        raise refused(architecture, reason) from error
    return Traced(shapes, any(called.options.get("s_aux") is not None for called in calls))


def _refuse_alibi(model: PreTrainedModel) -> None:
    if any("alibi" in name for name in dir(model.base_model)):
        raise _Unservable("it has ALiBi, a bias of scores that no backend here adds")


def _shape(called: Called, window: int | None) -> AttentionShape:
    heads, dim = called.query.shape[1], called.query.shape[3]
    kv_heads, values = called.key.shape[1], called.value.shape[3]
    if called.key.shape[3] != dim or values != dim:
        raise _Unservable(f"its heads have keys of {dim} values, and values of {values}")
    if dim > MOST_HEAD_DIM:
        raise _Unservable(f"its heads have {dim} values, and at most {MOST_HEAD_DIM} are served")
    if called.value.shape[1] != kv_heads or heads % kv_heads:
        raise _Unservable(f"it has {heads} query heads, {kv_heads} of keys")
    options = dict(called.options)
    if options.get("is_causal") is False:
        raise _Unservable("its attention is not causal")
    scale, cap = options.pop("scaling", None), options.pop("softcap", None)
    options.pop("s_aux", None)
    unknown = [
        name
        for name, value in options.items()
        if name not in IGNORED and value is not None and value is not False
    ]
    if unknown:
        raise _Unservable(f"it passes its attention {', '.join(unknown)}")
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5 if scale is None else float(cast(float, scale)),
        sliding_window=window,
        soft_cap=None if cap is None else float(cast(float, cap)),
    )


def _window(mask: object) -> int | None:
    """The tokens that a query sees, itself included; None is all."""
    sees = hook.seen_through(mask)
    if sees is None:
        raise _Unservable("its attention has a mask or a bias of its own")
    with torch.device("cpu"):
        low, high = 0, FAR  # the first key that the last query sees
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _visible(sees, FAR, middle) else (middle + 1, high)
        window = None if low == 0 else FAR - low + 1
        for query in {0, 1, 5, 100, 8191, 8192, low, FAR - low, 2 * (FAR - low) + 1, FAR}:
            edge = -1 if window is None else query - window
            for key in {0, edge, edge + 1, query // 2, query - 1, query, query + 1}:
                if key >= 0 and _visible(sees, query, key) != (edge < key <= query):
                    raise _Unservable("its mask is neither causal nor a sliding window")
    return window


def _visible(sees: Sees, query: int, key: int) -> bool:
    return bool(sees(0, 0, torch.tensor(query), torch.tensor(key)))
