"""From a caller's prompts and parameters to calls that the pipeline can carry.

Whatever cannot travel is refused here, before it leaves the caller: a frame that no stage can read
would be dropped, and its request never answered. Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict, TypeVar, Unpack, cast

import msgspec
import numpy as np

from pipeinfer.gateway.events import Call
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.offline.outputs import RequestError
from pipeinfer.packing import pack
from pipeinfer.params import InvalidParameter, SamplingParams, normalized

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, JsonValue]
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class Options(TypedDict, total=False):
    """What a call may say beside its prompt; see Call."""

    priority: int
    timeout: float
    cache_salt: str


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a text or a sequence of ids is one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and _is_id(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One chat, or several."""
    if len(messages) > 0 and isinstance(messages[0], dict):
        return [list(messages)]  # type: ignore[arg-type]
    return [list(chat) for chat in messages]  # type: ignore[arg-type]


def matched(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """Checked parameters for `count` prompts. Raises ValueError if there are not as many."""
    if params is None or isinstance(params, SamplingParams):
        return [checked(default if params is None else params)] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts, but {len(params)} SamplingParams")
    return [checked(one) for one in params]


def checked(params: SamplingParams) -> SamplingParams:
    """`params` as stages take them. Raises RequestError for a wrong value or type."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}", "params")
    try:
        params = normalized(params)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except InvalidParameter as error:
        raise RequestError(str(error), error.param) from None
    except UNSENDABLE as error:
        raise RequestError(f"{params}: {error}", "params") from None


def completion(
    request_id: str, prompt: Prompt, params: SamplingParams, **options: Unpack[Options]
) -> Call:
    """The call for a text or for token ids; `params` are checked. Raises RequestError."""
    if isinstance(prompt, str):
        call = Call(request_id, params, text=prompt, **options)
    else:
        call = Call(request_id, params, prompt_ids=_packed(prompt), **options)
    return _sendable(call, "prompt")


def with_tools(
    variables: Mapping[str, JsonValue] | None, tools: Sequence[JsonObject] | None
) -> Mapping[str, JsonValue]:
    """A chat template's variables with these tools, if there are any."""
    shown: dict[str, JsonValue] = {"tools": list(tools)} if tools else {}
    return {**(variables or {}), **shown}


def chat(
    request_id: str,
    messages: Sequence[Message],
    params: SamplingParams,
    template_arguments: Mapping[str, JsonValue] | None = None,
    **options: Unpack[Options],
) -> Call:
    """The call for a chat; `params` are checked. Raises RequestError."""
    arguments = cast(JsonObject, template_arguments or {})  # looked at when it is packed
    chat = cast(list[JsonObject], list(messages))
    call = Call(request_id, params, chat=chat, template_arguments=arguments, **options)
    return _sendable(call, "messages")


def longest_first(batch: Sequence[Call], beside: Sequence[T]) -> list[tuple[Call, T]]:
    """The calls of a batch with what belongs to each, those that may generate most first.

    A batch is over with its longest request: one that began late would end alone, in steps that
    read all weights for a single token.
    """

    def most(pair: tuple[Call, T]) -> float:
        wanted = pair[0].params.max_tokens
        return float("inf") if wanted is None else wanted

    return sorted(zip(batch, beside, strict=True), key=most, reverse=True)


def _sendable(call: Call, param: str) -> Call:
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call)
    except UNSENDABLE as error:
        raise RequestError(f"{param}: {error}", param) from None


def _packed(prompt: Sequence[int]) -> bytes:
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # lists of different lengths
        raise RequestError(f"a prompt is text or a list of token ids: {error}", "prompt") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("a prompt is text or a list of token ids", "prompt")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise RequestError("token ids must be between 0 and 2**31 - 1", "prompt")
    return pack(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer))
