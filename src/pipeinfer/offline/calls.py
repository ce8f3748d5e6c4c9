"""From a caller's prompts and parameters to calls that the pipeline can carry.

SamplingParams and StructuredOutputsParams are as scripts for vLLM write them: mutable, and with
vLLM's other fields. Stages are sent `pipeinfer.params.RequestParams`, which `plain` makes from
these; OfflineAdapters makes what calls carry of an adapter from vLLM's LoRARequest. What cannot
travel is refused here, before it leaves the caller: a frame that no stage can read would be
dropped, and its request never answered. PoolingParams says what is wanted of vectors:
embedding_batch and score_batch make the calls of LLM.embed and LLM.score. LoopThread is an event
loop on a thread of its own, for callers that block. Knows no pipeline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar, Unpack, cast

import msgspec
import numpy as np
import uvloop

from pipeinfer import params
from pipeinfer.checkpoint.lora import CONFIG, WEIGHTS, identify
from pipeinfer.checkpoint.pooling import Pooling
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.pooling import (
    EmbeddingRequest,
    PairScorer,
    ScoreRequest,
    TextPairs,
    Texts,
    VectorOptions,
    as_vector,
    embedding_params,
    pairs_to_score,
    prompt_before,
    vector_options,
)
from pipeinfer.gateway.requests import RequestDefaults
from pipeinfer.offline.keywords import is_neutral
from pipeinfer.offline.outputs import (
    Collector,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OfflineRequest,
    RequestError,
    vector_of,
)
from pipeinfer.other_servers import TEXTS_ONLY
from pipeinfer.params import (
    MAX_INT,
    Adapter,
    InvalidParameter,
    JsonObject,
    JsonValue,
    normalized,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.wire import pack

T = TypeVar("T")
Message: TypeAlias = Mapping[str, JsonValue]
# Parts of a message that are texts, and which of their fields is the text.
TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text",
    "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class TextPrompt(TypedDict):
    """A prompt as a dict, as vLLM has it; cache_salt: shares cached prefixes only with the same."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids as a dict, as vLLM has it. prompt: the text, to be given back."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt


class Options(TypedDict, total=False):
    """Options of a call beside its prompt; see Call."""

    priority: int
    timeout: float
    cache_salt: str
    add_special_tokens: bool
    adapter: Adapter | None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, of one or several: a text, a dict or a sequence of ids is one prompt.
    Raises RequestError."""
    if not isinstance(prompts, (str, Mapping)) and not hasattr(prompts, "__len__"):
        what = type(prompts).__name__
        message = f"a prompt is text, a list of token ids or a dict with one of them, not {what}"
        raise RequestError(message, "prompts")
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and _is_id(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """A list of chats, of one or several. Raises RequestError for an argument that is neither."""
    many: list[object] = list(messages) if _is_list(messages) else []
    if many and all(isinstance(one, Mapping) for one in many):
        return [cast("list[Message]", many)]
    if not _is_list(messages) or not all(_is_list(chat) for chat in many):
        form = 'a list of dicts with "role" and "content"'
        raise RequestError(f"messages are a chat, {form}, or a list of chats", "messages")
    return [list(chat) for chat in cast("list[Sequence[Message]]", many)]


def each_params(given: AnyParams | Sequence[AnyParams], count: int) -> list[AnyParams]:
    """The parameters of each of `count` prompts. Raises ValueError if there are not as many."""
    if isinstance(given, (SamplingParams, params.RequestParams)):
        return [given] * count
    if isinstance(given, Mapping):  # of fields, as other libraries take it
        raise RequestError("sampling_params must be SamplingParams, not a dict", "params")
    return each(given, count, "SamplingParams")


def each(given: Sequence[T], count: int, name: str) -> list[T]:
    """A list of `given`, one value for each of `count` prompts. Raises ValueError if there are not
    as many."""
    if len(given) != count:
        raise ValueError(f"{count} prompts, but {len(given)} {name}")
    return list(given)


def with_options(
    count: int,
    priority: int | Sequence[int] | None,
    lora_request: object,
    tokenization_kwargs: Mapping[str, object] | None,
    mm_processor_kwargs: Mapping[str, object] | None,
) -> list[Options]:
    """Options of each of `count` prompts, from the keywords of vLLM's methods. Raises ValueError if
    there are not as many priorities, RequestError for keywords that are not supported."""
    adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request]
    if any(one is not None for one in adapters):
        message = "lora_request: adapters are for texts that are generated"
        raise RequestError(message, "lora_request")
    if not is_neutral(mm_processor_kwargs):
        raise RequestError(f"mm_processor_kwargs: {TEXTS_ONLY}", "mm_processor_kwargs")
    given = dict(tokenization_kwargs or {})
    special = bool(given.pop("add_special_tokens", True))
    for name, value in given.items():
        if not is_neutral(value):
            message = f"tokenization_kwargs: {name}: use truncate_prompt_tokens of SamplingParams"
            raise RequestError(message, "tokenization_kwargs")
    if priority is None or isinstance(priority, int):
        priority = [priority or 0] * count
    ranks = each(priority, count, "priorities")
    return [Options(priority=rank, add_special_tokens=special) for rank in ranks]


def check_content_format(name: str) -> None:
    """Raises RequestError for what a template's messages cannot be."""
    if name not in ("auto", "string"):
        param = "chat_template_content_format"
        message = f"{param}={name!r}: parts of type text reach the template as one text"
        raise RequestError(message, param)


def without_texts(given: AnyParams) -> SamplingParams:
    """A copy of the parameters for outputs without texts."""
    made = given.clone() if isinstance(given, SamplingParams) else public(given)
    made.detokenize = False
    return made


def checked(given: AnyParams) -> params.RequestParams:
    """The parameters in the form of the stages. Raises RequestError for a wrong value or type."""
    if not isinstance(given, (SamplingParams, params.RequestParams)):
        message = f"sampling_params must be SamplingParams, not {type(given).__name__}"
        raise RequestError(message, "params")
    plain = given.plain() if isinstance(given, SamplingParams) else given
    try:
        plain = normalized(plain)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=params.RequestParams)
    except InvalidParameter as error:
        raise RequestError(str(error), error.param) from None
    except ENCODE_ERRORS as error:
        wrong = ", ".join(wrong_types(plain)) or str(error)
        raise RequestError(f"SamplingParams: {wrong}", "params") from None


def completion(
    request_id: str, prompt: Prompt, given: AnyParams, **options: Unpack[Options]
) -> OfflineRequest:
    """A request for the continuation of a text or of token ids. Raises RequestError."""
    plain, detokenize, only_prompt = _as_sent(given)
    text, ids, salt = prompt_parts(prompt)
    if salt:
        options["cache_salt"] = salt
    if ids is None:
        call = Call(request_id, plain, text=text, **options)
    else:
        call = Call(request_id, plain, prompt_ids=_packed(ids), **options)
    return OfflineRequest(_sendable(call, "prompt"), text, detokenize, only_prompt)


class ChatOptions(Options, total=False):
    """Options of a chat beside its messages; None: not given.

    Attributes:
    - chat_template: another template, as text
    - tools: a variable of it, in OpenAI's form
    - continue_final_message: the last message goes on; add_generation_prompt must be False then
    """

    chat_template: str | None
    tools: Sequence[JsonObject] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def template_arguments(
    variables: Mapping[str, JsonValue] | None, options: ChatOptions
) -> tuple[JsonObject, Options]:
    """A chat template's variables, with what `options` say of it; and the other options.

    Nothing is said of what is so anyway: some templates take a variable's presence as a wish.
    """
    rest: dict[str, Any] = dict(options)
    arguments: dict[str, Any] = dict(variables or {})
    if rest.pop("add_generation_prompt", True) is False:
        arguments["add_generation_prompt"] = False
    for name in ("chat_template", "continue_final_message"):
        if given := rest.pop(name, None):
            arguments[name] = given
    if tools := rest.pop("tools", None):
        arguments["tools"] = list(tools)
    return arguments, cast(Options, rest)


def chat(
    request_id: str,
    messages: Sequence[Message],
    given: AnyParams,
    arguments: Mapping[str, JsonValue] | None = None,
    **options: Unpack[Options],
) -> OfflineRequest:
    """A request for an answer to a chat, whose template has these `arguments`. Raises
    RequestError."""
    plain, detokenize, only_prompt = _as_sent(given)
    call = Call(
        request_id,
        plain,
        chat=[_message(i, one) for i, one in enumerate(messages)],
        template_arguments=cast(JsonObject, arguments or {}),  # looked at when it is packed
        return_prompt_text=True,
        **options,
    )
    return OfflineRequest(_sendable(call, "messages"), None, detokenize, only_prompt)


def longest_first(batch: Sequence[Call], extra_tokens: Sequence[T]) -> list[tuple[Call, T]]:
    """The calls of a batch with what belongs to each, those that may generate most first.

    A batch is over with its longest request: one that began late would end alone, in steps that
    read all weights for a single token.
    """

    def most(pair: tuple[Call, T]) -> float:
        wanted = pair[0].params.max_tokens
        return float("inf") if wanted is None else wanted

    return sorted(zip(batch, extra_tokens, strict=True), key=most, reverse=True)


def _as_sent(given: AnyParams) -> tuple[params.RequestParams, bool, bool]:
    """(as stages take them, whether outputs have texts, whether they have no tokens)."""
    detokenize = True
    if isinstance(given, SamplingParams):
        detokenize, given = given.detokenize, given.plain()
    only_prompt = isinstance(given, params.RequestParams) and given.max_tokens == 0
    if only_prompt:
        given = msgspec.structs.replace(given, max_tokens=1, min_tokens=0)
    return checked(given), detokenize, only_prompt


def prompt_parts(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str]:
    """(text, token ids, cache_salt); the text is the prompt where there are no ids."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if not isinstance(prompt, Mapping):
        return None, prompt, ""
    given: dict[str, Any] = dict(prompt)
    text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    salt = given.pop("cache_salt", None) or ""
    for name, value in given.items():
        if not is_neutral(value):
            raise RequestError(f"prompt: {name}: {TEXTS_ONLY}", "prompt")
    if text is None and ids is None:
        raise RequestError('a prompt has "prompt" or "prompt_token_ids"', "prompt")
    return text, ids, salt


def _message(i: int, given: Message) -> JsonObject:
    """With parts that are texts as templates know them. Raises RequestError for what none shows."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise RequestError(f'messages[{i}] must be a dict with a text as its "role"', "messages")
    content = given.get("content")
    if isinstance(content, (list, tuple)):
        parts: list[object] = list(content)
        shown = [_part(f"messages[{i}].content[{j}]", part) for j, part in enumerate(parts)]
        return {**given, "content": shown}
    if content is not None and not isinstance(content, str):
        what = f"must be a text or a list of parts, not {type(content).__name__}"
        raise RequestError(f"messages[{i}].content {what}", "messages")
    return dict(given)


def _part(where: str, part: object) -> JsonValue:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    given = dict(cast("Message", part)) if isinstance(part, Mapping) else {}
    kind = str(given.get("type"))
    field = TEXT_PARTS.get(kind)
    if field is None:
        what = f"a part of type {kind:.60}" if "type" in given else "a part without a type"
        message = f"{where} is {what}. {TEXTS_ONLY} Say it in a part of type text."
        raise RequestError(message, "messages")
    text = given.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field} must be a text", "messages")
    return given if kind == "thinking" else {"type": "text", "text": text}


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _sendable(call: Call, param: str) -> Call:
    if call.adapter is not None:
        salt = call.adapter.salted(call.cache_salt)
        call = msgspec.structs.replace(call, cache_salt=salt)
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call)
    except ENCODE_ERRORS as error:
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


# Fields of vLLM's that ask for what there is not, unless their value is one of those here (None:
# one that asks for nothing, see is_neutral); and what to use instead.
Refusals = Mapping[str, tuple[tuple[object, ...] | None, str]]
OF_SAMPLING: Refusals = {
    "spaces_between_special_tokens": ((True,), "special tokens are written as they are"),
    "output_kind": ((0, 2), "LLM returns whole outputs, AsyncLLM yields deltas"),
    "stream_interval": ((1,), "AsyncLLM yields output as it comes"),
    "flat_logprobs": (None, "logprobs are a list with a dict for each token"),
    "prompt_logprob_token_ids": (None, "use prompt_logprobs, of the likeliest ids, at most 20"),
    "prompt_logprob_start": (None, "use prompt_logprobs, which are of the whole prompt"),
    "logprob_token_ids": (None, "use logprobs, of the likeliest ids, at most 20"),
    "extra_args": (None, "no code of others runs in a step"),
    "logits_processors": (None, "use logit_bias, allowed_token_ids or bad_words"),
    "skip_clone": ((True, False), ""),
    "skip_reading_prefix_cache": (None, "use a cache_salt of its own"),
    "repetition_detection": (None, "use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": (None, "routed experts are not returned"),
    "trace_decode_token_ids": (None, "give the ids as a prompt, with prompt_logprobs"),
    "watermarking": (None, "outputs are not marked"),
    "best_of": ((1,), "use n, and choose by cumulative_logprob"),
    "guided_decoding": (None, "use structured_outputs"),
}
OF_FORMS: Refusals = {
    "disable_any_whitespace": (None, "say in the schema or grammar what may stand between"),
    "disable_additional_properties": ((True,), "the setting allow_additional_properties says so"),
    "whitespace_pattern": (None, "use grammar"),
    "structural_tag": (None, "use grammar, or after for text that goes before"),
}
ELSEWHERE = ("logit_bias", "structured_outputs")  # types are checked where they are read
ANY_OBJECT = '{"type":"object"}'


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """The form that the whole output must have; exactly one of the fields is given.

    Attributes:
    - json: a JSON schema, as text or as a dict
    - regex: a regular expression
    - choice: one of these texts
    - grammar: in llguidance's Lark, or GBNF
    - json_object: any JSON object
    - after: what comes up to this text is free

    The other fields are vLLM's. RequestError names all that ask for something that there is not,
    and fields of another type.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str = ""
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None

    @classmethod
    def of(cls, given: object) -> StructuredOutputsParams | params.StructuredOutputs | None:
        """`given`, of a dict with these fields what it says. Raises RequestError."""
        fields = params.StructuredOutputs.__struct_fields__
        if given is None or all(hasattr(given, name) for name in fields):
            return cast("StructuredOutputsParams | params.StructuredOutputs | None", given)
        if not isinstance(given, Mapping):
            what = f"{given!r:.60}" if isinstance(given, str) else type(given).__name__
            message = f"structured_outputs is StructuredOutputsParams or a dict, not {what}"
            raise RequestError(message, "structured_outputs")
        values: dict[str, Any] = {str(name): value for name, value in given.items()}
        if unknown := [name for name in values if name not in cls.__struct_fields__]:
            known = ", ".join(cls.__struct_fields__)
            message = f"structured_outputs has no {', '.join(unknown)}; its fields are {known}"
            raise RequestError(message, "structured_outputs")
        return cls(**values)

    def __post_init__(self) -> None:
        if wrong := _wrong_types(self):
            said = ", ".join(f"structured_outputs.{one}" for one in wrong)
            raise RequestError(said, "structured_outputs")
        _refuse(self, OF_FORMS, "structured_outputs")
        kinds = ("json", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            message = f"an output has one form of {', '.join(kinds)} and json_object, not {what}"
            raise RequestError(message, "structured_outputs")

    def plain(self) -> params.StructuredOutputs:
        """The constraint in the form of the stages."""
        self.__post_init__()  # fields may have been set since
        json: Any = ANY_OBJECT if self.json_object else self.json
        choice = None if self.choice is None else tuple(self.choice)
        return params.StructuredOutputs(
            json=json, regex=self.regex, choice=choice, grammar=self.grammar, after=self.after
        )


class SamplingParams(msgspec.Struct, kw_only=True):
    """How to choose tokens and when to stop; fields may be changed until a call is made.

    Up to truncation_side these are the fields of pipeinfer.params.RequestParams, which says what
    they are. `stop` and `bad_words` may be one text; these, `stop_token_ids` and `logit_bias` may
    be None, and `structured_outputs` a dict of its fields. A seed of -1 and a
    thinking_token_budget of -1 are None; logprobs of True are 1. max_tokens may be 0: the prompt
    alone is computed, for its prompt_logprobs or for the prefix cache. detokenize: False leaves
    `text` empty; not with `stop`.

    The other fields are vLLM's, for scripts that give their defaults. RequestError names all that
    ask for something that there is not; values out of range are refused when a call is made.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: (
        StructuredOutputsParams | params.StructuredOutputs | Mapping[str, Any] | None
    ) = None
    n: int = 1
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = ()
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    truncation_side: str = "left"
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: Any = None
    stream_interval: int | None = None
    flat_logprobs: bool = False
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Any = None
    extra_args: Any = None
    logits_processors: Any = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Any = None
    watermarking: bool | None = None
    best_of: int | None = None
    guided_decoding: Any = None

    def __post_init__(self) -> None:
        _refuse(self, OF_SAMPLING, "SamplingParams")
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        self.seed = None if self.seed == -1 else self.seed
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs

    @classmethod
    def from_optional(cls, **given: object) -> SamplingParams:
        """None counts as not given, but for max_tokens, which is without limit then."""
        values: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if value is not None or name == "max_tokens"
        }
        return cls(**values)

    def clone(self) -> SamplingParams:
        """A copy of its own."""
        return msgspec.structs.replace(self)

    def plain(self) -> params.RequestParams:
        """The parameters in the form of the stages; max_tokens may still be 0. Raises
        RequestError."""
        self.__post_init__()  # fields may have been set since
        if self.stop and not self.detokenize:
            raise RequestError("stop looks at the text, which detokenize=False leaves out", "stop")
        values: dict[str, Any] = {name: getattr(self, name) for name in SHARED_FIELDS}
        make = getattr(self.structured_outputs, "plain", None)  # else it is as stages know it
        if make is not None:
            values["structured_outputs"] = make()
        return params.RequestParams(**values)


# Vectors are asked for by LLM.embed alone.
SHARED_FIELDS = tuple(
    name for name in params.RequestParams.__struct_fields__ if not name.startswith("vector_")
)


class BeamSearchParams:
    """Refused: there is no beam search."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RequestError(
            "there is no beam search: ask for n outputs, and choose by cumulative_logprob",
            "beam_width",
        )


AnyParams = SamplingParams | params.RequestParams


def public(given: params.RequestParams) -> SamplingParams:
    """A copy of the parameters in the public form, which callers may change."""
    return SamplingParams(**{name: getattr(given, name) for name in SHARED_FIELDS})


def wrong_types(given: AnyParams) -> list[str]:
    """The fields whose values are of no type that they may have, each with its type and theirs."""
    values = {name: getattr(given, name) for name in SHARED_FIELDS}
    return _wrong_types(SamplingParams(**values))


def _wrong_types(given: msgspec.Struct) -> list[str]:
    wrong: list[str] = []
    for field in msgspec.structs.fields(given):
        if field.name in ELSEWHERE:
            continue
        try:
            msgspec.convert(getattr(given, field.name), field.type)
        except msgspec.ValidationError as error:
            wrong.append(f"{field.name}: {error}")
    return wrong


def _refuse(given: msgspec.Struct, table: Refusals, whole: str) -> None:
    wrong = {
        name: reason
        for name, (allowed, reason) in table.items()
        if not is_neutral(getattr(given, name), allowed)
    }
    if wrong:
        lines = [f"{name}={getattr(given, name)!r:.60}: {reason}" for name, reason in wrong.items()]
        first = next(iter(wrong)) if len(wrong) == 1 else whole
        raise RequestError("\n".join(lines), first)


LORA_OFF = "lora_request: the model was loaded without enable_lora=True"


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request is computed with, under vLLM's names.

    Attributes:
    - lora_name: for people
    - lora_int_id: taken for vLLM's scripts; adapters are distinguished by what their files hold
    - lora_path: a folder with PEFT's files
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


GivenLoRA = LoRARequest | Sequence[LoRARequest | None] | None


KNOWN_ADAPTERS = 1_000  # of which the files need not be read again


class OfflineAdapters:
    """The adapters that requests have named; files that have not changed are read once, unless
    KNOWN_ADAPTERS others were named since."""

    def __init__(self, settings: Settings) -> None:
        self._enabled, self._max_rank = settings.enable_lora, settings.max_lora_rank
        self._known: dict[tuple[object, ...], Adapter] = {}

    def each(self, given: GivenLoRA, count: int) -> list[LoRARequest | None]:
        """The adapters of each of `count` prompts. Raises RequestError for an object that is no
        adapter, ValueError if there are not as many."""
        listed = list(given) if isinstance(given, Sequence) else [given] * count
        if any(one is not None and not isinstance(one, LoRARequest) for one in listed):
            raise RequestError("lora_request must be a LoRARequest", "lora_request")
        if len(listed) != count:
            raise ValueError(f"{count} prompts, but {len(listed)} lora_request")
        return listed

    def add_to(self, options: Sequence[Options], given: GivenLoRA) -> list[LoRARequest | None]:
        """Puts the adapter of each call into its options; returns them as they were given. Raises
        as `each` and `of` do."""
        listed = self.each(given, len(options))
        for option, one in zip(options, listed, strict=True):
            option["adapter"] = self.of(one)
        return listed

    def of(self, given: LoRARequest | None) -> Adapter | None:
        """The adapter in the form of calls; None for None. Raises RequestError for an adapter that
        is not served."""
        if given is None:
            return None
        if not self._enabled:
            raise RequestError(LORA_OFF, "lora_request")
        folder = Path(given.lora_path).expanduser()
        try:
            stats = [(folder / name).stat() for name in (CONFIG, WEIGHTS) if folder.is_dir()]
            changed = [part for one in stats for part in (one.st_mtime_ns, one.st_size)]
            key = (given.lora_name, str(folder), *changed)
            adapter = self._known.pop(key, None)
            if adapter is None:
                adapter = identify(given.lora_name, str(folder), self._max_rank)
        except (OSError, ConfigurationError) as error:
            raise RequestError(f"lora_request: {error}", "lora_request") from None
        self._known[key] = adapter
        if len(self._known) > KNOWN_ADAPTERS:
            del self._known[next(iter(self._known))]
        return adapter


NOT_EMBEDDING = "this model generates texts; loaded with task='embed' it makes embeddings"
NOT_SCORING = "this model generates texts; loaded with task='score' it makes scores"
SCORES_ALONE = "this model makes scores alone: use score()"
NOT_GENERATING = "this model generates no texts: use embed() or score()"


@dataclass(slots=True)
class PoolingParams:
    """Options of vectors.

    Attributes:
    - dimensions: so many of a vector's first numbers are kept; None: all
    - normalize: vectors get the length 1; None: as the checkpoint has it
    - truncate_prompt_tokens: so many of a text's last tokens are kept; None: all
    - prompt_name: which of the checkpoint's prompts comes before each text, as "query"; None: the
      checkpoint's default
    - task: for scripts of vLLM; None or "embed"
    - use_activation: vLLM's name of `normalize`
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None
    task: str | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, "embed"):
            raise ValueError(f"task {self.task!r}: there are vectors of texts alone, 'embed'")
        if self.normalize is None:
            self.normalize = self.use_activation


@dataclass(frozen=True)
class EmbeddingBatch:
    """Calls for a vector each, and how these are wanted."""

    asked: list[OfflineRequest]
    options: VectorOptions

    def outputs(self, collectors: Sequence[Collector]) -> list[EmbeddingRequestOutput]:
        """The vectors, in the order of the calls. Raises RequestError for one that failed."""
        return [self._output(collector) for collector in collectors]

    def _output(self, collector: Collector) -> EmbeddingRequestOutput:
        vector, output = vector_of(collector), collector.output()
        embedding = as_vector(vector, self.options.normalize).tolist()
        return EmbeddingRequestOutput(
            output.request_id,
            EmbeddingOutput(embedding),
            output.prompt_token_ids,
            output.cached_tokens,
        )


def score_batch(
    name: str, data_1: Texts, data_2: Texts, instruction: str | None, scorer: PairScorer
) -> tuple[TextPairs, list[OfflineRequest]]:
    """The pairs, and the calls for their scores. Raises RequestError for what a server would
    refuse."""
    try:
        body = msgspec.convert(
            {"text_1": data_1, "text_2": data_2, "instruction": instruction}, ScoreRequest
        )
        pairs = pairs_to_score(body, max_pairs=MAX_INT)
        scorer.check(pairs, MAX_INT, MAX_INT)
        calls = scorer.calls(pairs, name, body, RequestDefaults(params.RequestParams()), "")
        return pairs, [OfflineRequest(call) for call in calls]
    except ApiError as error:
        raise RequestError(str(error), error.param, error.code) from None
    except msgspec.ValidationError as error:
        raise RequestError(f"data_1, data_2 and instruction are texts: {error}", "data_1") from None


def embedding_batch(
    name: str, prompts: Sequence[Prompt], params: PoolingParams, special: bool, pooling: Pooling
) -> EmbeddingBatch:
    """Calls for the vectors of `prompts`; `name` begins their ids. special: the tokenizer adds its
    tokens to texts. Raises RequestError for what a server would refuse."""
    if not hasattr(params, "prompt_name"):
        raise RequestError("pooling_params is one PoolingParams, for all prompts", "pooling_params")
    fields = {
        name: getattr(params, name)
        for name in ("dimensions", "normalize", "truncate_prompt_tokens", "prompt_name")
    }
    try:
        body = msgspec.convert({"input": "text", **fields}, EmbeddingRequest)
        options = vector_options(body, pooling)
        before, sampling = prompt_before(body, pooling), embedding_params(body, options.size)
    except ApiError as error:
        raise RequestError(str(error), error.param, error.code) from None
    except msgspec.ValidationError as error:
        raise RequestError(f"PoolingParams: {error}", "pooling_params") from None
    asked = [
        completion(
            f"{name}-{i}", _with_instruction(before, prompt), sampling, add_special_tokens=special
        )
        for i, prompt in enumerate(prompts)
    ]
    return EmbeddingBatch(asked, options)


def _with_instruction(before: str, prompt: Prompt) -> Prompt:
    """A text behind the checkpoint's prompt; ids have none."""
    text, ids, salt = prompt_parts(prompt)
    if not before or ids is not None or not isinstance(text, str):
        return prompt
    return {"prompt": before + text, "cache_salt": salt}


WAKE = 0.1  # seconds that a wait takes at most, and between two calls of `meanwhile`
CANCELLING = 1.0  # seconds that a cancelled coroutine is waited for


class LoopThread:
    """Runs coroutines for other threads, among them the main one, which Ctrl-C interrupts."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        # A daemon: a caller who never closes it must still be able to exit.
        self._thread = threading.Thread(target=self._work, name="pipeinfer", daemon=True)
        self._thread.start()

    def run(
        self, coroutine: Coroutine[object, None, T], meanwhile: Callable[[], None] | None = None
    ) -> T:
        """The coroutine's result. If the wait is interrupted, the coroutine is cancelled first."""
        over = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_telling(coroutine, over), self._loop)
        try:
            # In slices: a signal that comes just before a wait would not end it.
            while not wait([future], WAKE).done:
                if meanwhile is not None:
                    meanwhile()
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(CANCELLING)
            raise

    def submit(self, coroutine: Coroutine[object, None, T]) -> Future[T]:
        """Begins the coroutine for a caller that waits otherwise, as on a loop of its own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self, coroutine: Coroutine[object, None, object]) -> None:
        """Begins the coroutine and does not wait for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends the thread; not from itself."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _telling(coroutine: Coroutine[object, None, T], over: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        over.set()
