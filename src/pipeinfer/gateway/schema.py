"""The bodies of /v1/chat/completions and /v1/completions as typed structs, decoded and checked.

Every field is here in one of three ways: typed (it works), in NOT_BUILT (accepted with its neutral
value only), or absent (harmless, ignored). Knows no tokenizer and no HTTP library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from pipeinfer.gateway.errors import ApiError, from_validation
from pipeinfer.gateway.survey import CHAT, COMPLETION, Bounds, TooMuch, survey
from pipeinfer.json_values import JsonObject, JsonValue

INT32 = 2**31 - 1
# Seconds. The ledgers of three stages keep a request until its time is up; a day is longer than
# any answer takes, and short enough that what nobody waits for is forgotten.
MOST_TIMEOUT = 24 * 3600.0
MOST_SALT = 1024  # letters; enough for any hash or name, and every stage copies the salt
# Chat templates go over messages one by one in an interpreter, a tenth of a millisecond each.
MOST_MESSAGES = 10_000
LONGEST_NEUTRAL = 64  # bytes of JSON that may be a neutral value of NOT_BUILT

TokenId = Annotated[int, Meta(ge=0, le=INT32)]
Bounded = Annotated[int, Meta(ge=-INT32, le=INT32)]  # signs are checked with the other ranges
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]

# Fields of OpenAI or vLLM that change the answer and are not built, with the values that do not. A
# body that has such a field below is one for which it is built.
NOT_BUILT: dict[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: one more chunk at the end that carries the usage."""

    include_usage: bool | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints share; null is the same as not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Bounded | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: Bounded | None = None
    min_tokens: Bounded | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[TokenId, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Bounded | None = None
    timeout: Annotated[float, Meta(ge=0, le=MOST_TIMEOUT)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MOST_SALT)] | None = None
    prompt_logprobs: Bounded | None = None
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only type "text" is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Bounded | None = None
    max_completion_tokens: Bounded | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/completions; `prompt` is a text, token ids, or a list of either. `logprobs`:
    how many alternatives; false is as not given."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Bounded | bool | None = None
    echo: bool | None = None


Request = TypeVar("Request", ChatRequest, CompletionRequest)

_BOUNDS: dict[type[Generation], Bounds] = {ChatRequest: CHAT, CompletionRequest: COMPLETION}


def not_built(kind: type[Generation]) -> dict[str, tuple[JsonValue, ...]]:
    """What bodies of that kind may have with these values only."""
    built = kind.__struct_fields__
    return {name: neutral for name, neutral in NOT_BUILT.items() if name not in built}


def _with_unbuilt(kind: type[Request]) -> type[Request]:
    """`kind` with the fields of NOT_BUILT as raw JSON, so that one pass reads all, and builds
    nothing that will be refused."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in not_built(kind)]
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True)
    return cast(type[Request], made)


_BODIES: dict[type[Generation], type[Generation]] = {
    ChatRequest: _with_unbuilt(ChatRequest),
    CompletionRequest: _with_unbuilt(CompletionRequest),
}


def surveyed(body: bytes, kind: type[Request]) -> Iterator[None]:
    """Checks the bounds of depth and size of a `body` of `kind`, a slice each time it is asked to
    go on; to be done before decode(). ApiError 400."""
    try:
        yield from survey(body, _BOUNDS[kind])
    except TooMuch as error:
        raise ApiError(400, str(error), code="invalid_value") from None


def decode(body: bytes, kind: type[Request]) -> Request:
    """The typed request in a surveyed `body`; ApiError 400 says which field is wrong and why."""
    if not body.strip():
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    try:
        request = msgspec.json.decode(body, type=cast(type[Request], _BODIES[kind]))
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    for name, neutral in not_built(kind).items():
        if not _neutral(getattr(request, name), neutral):
            message = f"{name} is not supported by this server"
            raise ApiError(400, message, name, "unsupported_parameter")
    return request


def _neutral(raw: msgspec.Raw, neutral: tuple[JsonValue, ...]) -> bool:
    """Whether a field that is not built was left out, is null, or has a value that asks nothing."""
    size = memoryview(raw).nbytes
    if size == 0:
        return True
    if size > LONGEST_NEUTRAL:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a number that no float can hold; no UTF-8
        return False
    return value is None or any(_same(value, other) for other in neutral)


def _same(value: JsonValue, neutral: JsonValue) -> bool:
    """Equality that tells False from 0: `logprobs: 0` asks for something, `false` does not."""
    return type(value) is type(neutral) and value == neutral
