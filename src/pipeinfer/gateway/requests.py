"""From a decoded body to the core's calls: one for each prompt, with all of its choices.

Knows the schema and the core's events; no HTTP and no tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from pipeinfer.checkpoint.config import read_generation
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Call
from pipeinfer.gateway.prompts import chat_prompt
from pipeinfer.gateway.response_json import OutputOptions, ToolCallOptions
from pipeinfer.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    StreamOptions,
)
from pipeinfer.gateway.structured_outputs import OutputConstraint, output_constraint
from pipeinfer.gateway.tool_parsers.base import ParserFactory
from pipeinfer.gateway.tool_parsers.registry import NO_PARSERS, OutputParsers
from pipeinfer.gateway.tools import (
    LEGACY_FIELD_NAMES,
    check_tool_support,
    final_message_constraint,
    functions_to_tools,
    tool_call_constraint,
)
from pipeinfer.params import InvalidParameter, JsonObject, SamplingParams, check_choices, normalized
from pipeinfer.settings import ConfigurationError
from pipeinfer.text import content_text
from pipeinfer.wire import pack

# Fields that mean the same in SamplingParams; `stop` is a text or a list there as well.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "n",
    "thinking_token_budget",
)


MAX_PROMPTS = 1024


@dataclass(frozen=True)
class RequestDefaults:
    """The server's defaults and limits for requests.

    Attributes:
    - sampling: parameters that a request leaves open
    - max_prompts: prompts of a request, each counted as often as it has choices
    - timeout: seconds, of requests that name none; 0: never
    - parsers: output parsers of the model
    - closed_objects: schemas allow only the properties that they name, unless they say otherwise
    """

    sampling: SamplingParams
    max_prompts: int = MAX_PROMPTS
    timeout: float = 0.0
    parsers: OutputParsers = NO_PARSERS
    closed_objects: bool = True


class ParsedRequest(msgspec.Struct, frozen=True):
    """What one HTTP request asks for.

    Attributes:
    - calls: one for each prompt, in order; built lazily, to be iterated once
    - choices: of all prompts together
    - prompts: number of prompts
    - best_of: choices of each prompt that are shown, the best; 0: all
    - parser_factory: makes the output parser of a choice; None: all output is content
    - output_options, tool_call_options: how the response is written
    - params: sampling parameters of a chat
    - constraint: what the output must fit
    """

    calls: Iterable[Call]
    choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    output_options: OutputOptions
    prompts: int = 1
    best_of: int = 0
    parser_factory: ParserFactory | None = None
    tool_call_options: ToolCallOptions = ToolCallOptions()
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    constraint: OutputConstraint = OutputConstraint()


def parse_chat(
    request: ChatRequest, base: str, defaults: RequestDefaults, trace: str
) -> ParsedRequest:
    """The one call of a chat; `base` becomes its request id. ApiError 400."""
    with_tools = functions_to_tools(request)
    if with_tools is None:
        return _parse_chat(request, base, defaults, trace)
    try:
        job = _parse_chat(with_tools, base, defaults, trace)
    except ApiError as error:
        raise renamed(error, LEGACY_FIELD_NAMES) from None
    tool_call_options = replace(job.tool_call_options, legacy_functions=True)
    return replace(
        job,
        tool_call_options=tool_call_options,
        constraint=job.constraint.with_field_names(LEGACY_FIELD_NAMES),
    )


def _parse_chat(
    request: ChatRequest, base: str, defaults: RequestDefaults, trace: str
) -> ParsedRequest:
    limit, field = _limit(request, defaults.sampling.max_tokens)
    if request.max_completion_tokens is not None:
        limit, field = request.max_completion_tokens, "max_completion_tokens"
    ids = bool(request.return_token_ids)
    output_options = OutputOptions(_chat_logprobs(request), request.prompt_logprobs, token_ids=ids)
    names = {"max_tokens": field, "logprobs": "top_logprobs"}
    constraint = output_constraint(request, defaults.closed_objects)
    params = _params(request, defaults.sampling, limit, output_options, names, constraint)
    _check_count(1, "n", params.n, defaults)
    parsers = defaults.parsers
    chat, arguments, tools = chat_prompt(request, parsers)
    check_tool_support(tools, parsers)
    if request.continue_final_message and chat:
        _check_continuation(parsers, chat[-1], params)
        parsers = parsers.continuing_message()
    if parsers.harmony and params.thinking_token_budget is not None:
        message = "thinking_token_budget: this model's thoughts are bounded by reasoning_effort"
        raise ApiError(400, message, "thinking_token_budget", "unsupported_parameter")
    if tools is not None:
        parallel = request.parallel_tool_calls is not False
        calls = tool_call_constraint(tools, parallel, parsers, constraint, defaults.closed_objects)
        made, constraint = calls.spec is not constraint.spec, calls
        if made and parsers.harmony and parsers.continues_message:
            message = "continue_final_message: amid a message of this model no calls can be held"
            raise ApiError(400, message, "continue_final_message", "unsupported_parameter")
        if parsers.calls_need_special_tokens or made:  # its tags may be special tokens
            params = replace(params, skip_special_tokens=False)
    if parsers.harmony:
        if constraint.spec is not None and tools is None and not parsers.continues_message:
            final = final_message_constraint(constraint.spec, parsers, constraint.field)
            fallback = constraint.fallback and final_message_constraint(
                constraint.fallback, parsers, constraint.field
            )
            constraint = dataclasses.replace(constraint, spec=final, fallback=fallback)
        params = replace(params, skip_special_tokens=False)
    params = replace(params, structured_outputs=constraint.spec)
    if parsers.reasoning_needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    call = replace(
        _shared_call(request, params, defaults, trace),
        request_id=base,
        chat=chat,
        template_arguments=arguments,
        add_special_tokens=bool(request.add_special_tokens),
        fallback_grammar=constraint.fallback,
    )
    first_call_only, include_reasoning = (
        request.parallel_tool_calls is False,
        request.include_reasoning is not False,
    )
    spec = params.structured_outputs
    # Space before JSON, which masks.AfterThoughtsSource allows.
    strip_answer = spec is not None and spec.json is not None
    schemas = None if tools is None else tools.schemas
    custom_tools = () if tools is None else tools.custom_tools
    parser_factory = parsers.parser_factory(
        schemas, first_call_only, include_reasoning, strip_answer, custom_tools
    )
    call = replace(
        call, token_offsets=parser_factory is not None and bool(parsers.reasoning_parser_name)
    )
    job = _parsed_request(request, [call], params.n, output_options)
    before = sum(
        len(calls) for message in chat or () if isinstance(calls := message.get("tool_calls"), list)
    )
    tool_call_options = ToolCallOptions(
        parsers.tool_parser.call_ids, before, tools is not None and tools.one_function
    )
    return replace(
        job,
        constraint=constraint,
        parser_factory=parser_factory,
        params=params,
        tool_call_options=tool_call_options,
    )


def _check_continuation(parsers: OutputParsers, last: JsonObject, params: SamplingParams) -> None:
    """ApiError 400 where the answer cannot go on from the last message as it is asked to."""
    if parsers.harmony and last.get("tool_calls"):
        message = "continue_final_message: a message that calls tools does not go on"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    reasoning_open = parsers.reasoning_state(content_text(last.get("content"))) == "open"
    if params.thinking_token_budget is not None and reasoning_open:
        message = "thinking_token_budget: the last message's own thoughts would not be counted"
        raise ApiError(400, message, "thinking_token_budget", "unsupported_parameter")


def parse_completion(
    request: CompletionRequest, base: str, defaults: RequestDefaults, trace: str
) -> ParsedRequest:
    """One call for each prompt, with ids `base`-0, -1 ... if there are several. ApiError 400.

    With best_of all choices need log-probs, by which the best are known.
    """
    prompts = _prompts(request.prompt, defaults.max_prompts)
    limit, field = _limit(request, COMPLETION_MAX_TOKENS)
    assert limit is not None
    output_options = _completion_output_options(request, limit)
    limit += output_options.no_new_tokens  # the model has no step that samples nothing
    constraint = output_constraint(request, defaults.closed_objects)
    params = _params(
        request, defaults.sampling, limit, output_options, {"max_tokens": field}, constraint
    )
    if output_options.echo and output_options.logprobs is not None and limit == 1:
        # Whoever scores a prompt so takes the last log-prob for that of the one output (lm-eval).
        # A stop token has none; so nothing stops here.
        params = replace(params, ignore_eos=True)
    made = _best_of(request, params.n)
    best = params.n if made > params.n else 0
    if best:
        params = replace(params, n=made, logprobs=params.logprobs or 0)
    _check_count(len(prompts), "best_of" if best else "n", made, defaults)
    special = request.add_special_tokens is not False
    shared = _shared_call(request, params, defaults, trace)
    shared = replace(
        shared, return_prompt_text=output_options.echo, fallback_grammar=constraint.fallback
    )

    def calls() -> Iterator[Call]:
        for i, prompt in enumerate(prompts):
            name = base if len(prompts) == 1 else f"{base}-{i}"
            if isinstance(prompt, str):
                yield replace(shared, request_id=name, text=prompt, add_special_tokens=special)
            else:
                yield replace(shared, request_id=name, prompt_ids=pack(prompt))

    job = _parsed_request(request, calls(), len(prompts) * made, output_options)
    return replace(job, prompts=len(prompts), best_of=best, constraint=constraint)


def _limit(request: Generation, default: int | None) -> tuple[int | None, str]:
    """The most output tokens, and the field that says so."""
    if request.max_tokens is None and request.max_new_tokens is not None:
        return request.max_new_tokens, "max_new_tokens"
    return default if request.max_tokens is None else request.max_tokens, "max_tokens"


def _best_of(request: CompletionRequest, n: int) -> int:
    """Choices that are made of each prompt, of which `n` are shown."""
    if request.best_of is None:
        return n
    try:
        check_choices("best_of", request.best_of)
    except InvalidParameter as error:
        raise ApiError(400, str(error), error.param, "invalid_value") from None
    if request.best_of < n:
        message = f"best_of is {request.best_of}, but n is {n}: the best n are chosen from best_of"
        raise ApiError(400, message, "best_of", "invalid_value")
    if request.best_of > n and request.stream:
        message = "best_of above n is not allowed with stream: true: which are best is known late"
        raise ApiError(400, message, "best_of", "invalid_value")
    return request.best_of


def _check_count(prompts: int, param: str, each: int, defaults: RequestDefaults) -> None:
    if each > 1 and prompts * each > defaults.max_prompts:
        message = (
            f"at most {defaults.max_prompts} choices a request, not {each} of "
            f"{prompts} prompt{'s' * (prompts > 1)}"
        )
        raise ApiError(400, message, param, "invalid_value")


def _chat_logprobs(request: ChatRequest) -> int | None:
    """How many alternatives; None: no log-probs."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        message = "top_logprobs is only allowed with logprobs: true"
        raise ApiError(400, message, "top_logprobs", "invalid_value")
    return None


def _completion_output_options(request: CompletionRequest, limit: int) -> OutputOptions:
    """A limit of 0 is one only where the prompt is echoed."""
    if request.logprobs is True:
        message = "logprobs must be a number of alternatives, not true"
        raise ApiError(400, message, "logprobs", "invalid_type")
    logprobs = None if request.logprobs is False else request.logprobs
    echo = bool(request.echo)
    ids = bool(request.return_token_ids)
    return OutputOptions(logprobs, request.prompt_logprobs, echo, echo and limit == 0, ids)


def _parsed_request(
    request: Generation, calls: Iterable[Call], choices: int, output_options: OutputOptions
) -> ParsedRequest:
    stream = bool(request.stream)
    if stream and request.prompt_logprobs is not None:
        message = "prompt_logprobs is not allowed with stream: true"
        raise ApiError(400, message, "prompt_logprobs", "invalid_value")
    if request.stream_options is not None and not stream:
        message = "stream_options is only allowed with stream: true"
        raise ApiError(400, message, "stream_options", "invalid_value")
    options = request.stream_options or StreamOptions()
    usage = bool(options.include_usage)
    continuous = usage and bool(options.continuous_usage_stats)
    return ParsedRequest(calls, choices, stream, usage, continuous, output_options)


def _shared_call(
    request: Generation, params: SamplingParams, defaults: RequestDefaults, trace: str
) -> Call:
    """What all calls of a request share; the id and the prompt of each are still to come."""
    if request.timeout == 0:
        message = "timeout must be more than 0 seconds; leave it out for the server's own"
        raise ApiError(400, message, "timeout", "invalid_value")
    return Call(
        request_id="",
        params=params,
        priority=request.priority or 0,
        timeout=request.timeout or defaults.timeout,
        cache_salt=_salt(request.cache_salt or "", request.extra_key or ""),
        trace=trace,
        return_prompt_ids=bool(request.return_token_ids),
    )


def _salt(cache_salt: str, extra_key: str) -> str:
    """What separates cached prefixes: another text for each pair. A salt alone is itself."""
    if not extra_key and not cache_salt.startswith("\0"):
        return cache_salt
    return f"\0{len(cache_salt)}:{cache_salt}{extra_key}"


def _params(
    request: Generation,
    defaults: SamplingParams,
    max_tokens: int | None,
    output_options: OutputOptions,
    names: dict[str, str],
    constraint: OutputConstraint,
) -> SamplingParams:
    """names: of fields that are called otherwise in SamplingParams."""
    given = {name: getattr(request, name) for name in SAMPLING_FIELDS}
    known = {name: value for name, value in given.items() if value is not None}
    known["max_tokens"], known["logprobs"] = max_tokens, output_options.logprobs
    known["structured_outputs"] = constraint.spec
    try:
        params = normalized(replace(defaults, **known))
    except InvalidParameter as error:
        param = names.get(error.param, error.param)
        message = str(error).replace(f"{error.param} must", f"{param} must")
        raise ApiError(400, message, param, "invalid_value") from None
    return replace(params, prompt_logprobs=output_options.prompt_logprobs_needed)


def _prompts(prompt: str | list[int | str | list[int]], max_prompts: int) -> list[str | list[int]]:
    """The prompts, all texts or all lists of ids; none of them empty, and at most `logprobs`."""
    kinds = set(map(type, prompt)) if isinstance(prompt, list) else {str}  # of perhaps a million
    if len(kinds) > 1:
        message = "prompt must be a text, a list of token ids, or a list of only one of these"
        raise ApiError(400, message, "prompt", "invalid_type")
    single = isinstance(prompt, str) or kinds == {int}
    prompts = [prompt] if single else list(islice(prompt, max_prompts + 1))
    if len(prompts) > max_prompts:
        message = f"at most {max_prompts} prompts a request, not {len(prompt)}"
        raise ApiError(400, message, "prompt", "invalid_value")
    for i, item in enumerate(prompts or [""]):
        if not item:
            param = "prompt" if single or not prompts else f"prompt[{i}]"
            raise ApiError(400, f"{param} must not be empty", param, "invalid_value")
    return cast(list[str | list[int]], prompts)  # of one kind, and no single ids


COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has none


def sampling_defaults(folder: Path) -> SamplingParams:
    """The checkpoint's default parameters, from generation_config.json, do_sample aside, as in
    vLLM.

    max_tokens (of chats) is None unless the checkpoint limits it. Raises ConfigurationError.
    """
    given = read_generation(folder).sampling()
    try:
        return normalized(replace(SamplingParams(max_tokens=None), **given))
    except InvalidParameter as error:
        raise ConfigurationError(f"{folder / 'generation_config.json'}: {error}") from None
