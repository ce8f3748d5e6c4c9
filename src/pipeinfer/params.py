"""What a client may ask of sampling, and nothing about how it is done.

Shared vocabulary of the gateway, the offline classes, the scheduler and the engine. Knows no
HTTP, no tokenizer and no torch; names and defaults are those of vLLM's SamplingParams.
"""

from __future__ import annotations

import math

import msgspec

MAX_STOP_STRINGS = 16
MOST_PENALTY = 2  # OpenAI's


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose tokens and when to stop.

    temperature: 0 is greedy. top_k: 0 or -1 turns it off. top_p, min_p: in [0, 1].
    seed: None lets the server choose one. max_tokens: None means as many as fit.
    stop: strings that end the text, not part of it unless include_stop_str_in_output.
    stop_token_ids: ids that end it beside the model's own; ignore_eos ignores only the model's own.
    min_tokens: no stop token of either kind is sampled before that many output tokens.
    repetition_penalty: what prompt and output hold is divided by it where its logit is positive,
    else multiplied; above 1 makes it rarer. presence_penalty, frequency_penalty: in [-2, 2], taken
    off the logits of what the output holds, once, or as often as it does.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class InvalidParameter(ValueError):
    """A parameter outside its range; `param` is the field's name, for the client's error."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def normalized(params: SamplingParams) -> SamplingParams:
    """`params` with tuples for `stop` and `stop_token_ids`; raises InvalidParameter."""
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    params = msgspec.structs.replace(
        params,
        stop=stop,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        top_k=max(params.top_k, 0) if params.top_k >= -1 else params.top_k,
    )
    _check_sampling(params)
    _check_penalties(params)
    _check_end(params)
    return params


def _check_sampling(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidParameter("temperature", f"temperature must be >= 0, not {params.temperature}")
    if params.top_k < 0:
        raise InvalidParameter("top_k", f"top_k must be -1, 0 or positive, not {params.top_k}")
    if not 0 < params.top_p <= 1:
        raise InvalidParameter("top_p", f"top_p must be in (0, 1], not {params.top_p}")
    if not 0 <= params.min_p <= 1:
        raise InvalidParameter("min_p", f"min_p must be in [0, 1], not {params.min_p}")
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise InvalidParameter("seed", f"seed must fit into 64 bits, not {params.seed}")


def _check_penalties(params: SamplingParams) -> None:
    repetition = params.repetition_penalty
    if not (math.isfinite(repetition) and repetition > 0):
        raise InvalidParameter(
            "repetition_penalty", f"repetition_penalty must be above 0, not {repetition}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -MOST_PENALTY <= value <= MOST_PENALTY:
            raise InvalidParameter(name, f"{name} must be in [-2, 2], not {value}")


def _check_end(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidParameter(
            "max_tokens", f"max_tokens must be at least 1, not {params.max_tokens}"
        )
    if params.min_tokens < 0:
        raise InvalidParameter("min_tokens", f"min_tokens must be >= 0, not {params.min_tokens}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidParameter(
            "min_tokens", f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}"
        )
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidParameter(
            "stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(params.stop)}"
        )
    if any(not text for text in params.stop):
        raise InvalidParameter("stop", "a stop string must not be empty")
    if any(token < 0 for token in params.stop_token_ids):
        raise InvalidParameter("stop_token_ids", "stop_token_ids must not be negative")
