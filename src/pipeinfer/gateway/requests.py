"""From a decoded body to the core's calls: one for each prompt, with all of its choices.

- parse_chat, parse_completion: a body as ParsedRequest.
- chat_prompt: from a chat's messages to what the chat template gets.
- AdapterRegistry: the adapters that requests may name. Their files are looked at when they are
  named, and hashed: what requests carry says which content is meant, and engines refuse files that
  have changed since.

Knows the schema and the core's events; no HTTP and no tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
from msgspec.structs import replace

from pipeinfer.checkpoint.config import read_generation
from pipeinfer.checkpoint.lora import identify, read_lora_modules
from pipeinfer.gateway.errors import ApiError, renamed, required
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.response_json import OutputOptions, ToolCallOptions
from pipeinfer.gateway.schema import (
    MAX_MESSAGES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Generation,
    PoolingBody,
    StreamOptions,
)
from pipeinfer.gateway.tool_parsers.base import ParserFactory
from pipeinfer.gateway.tool_parsers.harmony import (
    check_reasoning_effort,
    harmony_messages,
    with_descriptions,
)
from pipeinfer.gateway.tool_parsers.registry import NO_PARSERS, OutputParsers, ParserOptions
from pipeinfer.gateway.tools import (
    LEGACY_FIELD_NAMES,
    OutputConstraint,
    RequestTools,
    check_arguments_size,
    check_sendable,
    check_tool_support,
    final_message_constraint,
    function_messages_to_tool_messages,
    functions_to_tools,
    output_constraint,
    request_tools,
    tool_call_constraint,
    tool_call_for_template,
)
from pipeinfer.messages import AdapterChanges, AdapterState
from pipeinfer.params import (
    Adapter,
    InvalidParameter,
    JsonObject,
    JsonValue,
    RequestParams,
    check_choices,
    normalized,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.text import content_text
from pipeinfer.wire import pack


# Fields that mean the same in RequestParams; `stop` is a text or a list there as well.
class AdapterRegistry:
    """Adapters by name, in the order in which they came.

    Attributes:
    - enabled: whether there may be any
    - max_rank: the greatest rank of one
    - changes: what differs from the settings' adapters
    """

    def __init__(
        self, enabled: bool = False, max_rank: int = 0, adapters: Iterable[Adapter] = ()
    ) -> None:
        self.enabled = enabled
        self.max_rank = max_rank
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._configured = frozenset(self._by_name)
        self.changes = AdapterChanges()

    @classmethod
    def of(cls, settings: Settings) -> AdapterRegistry:
        """The adapters of the settings. Raises ConfigurationError for an adapter that cannot be
        served."""
        rank = settings.max_lora_rank
        found = [
            identify(name, str(files.folder), rank)
            for name, files in read_lora_modules(settings).items()
        ]
        return cls(settings.enable_lora, rank, found)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters."""
        return tuple(self._by_name)

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of that name, if there is one."""
        return self._by_name.get(name or "")

    def change(self, name: str, adapter: Adapter | None, gateway: int) -> None:
        """Requests may name `adapter` from now on, in the place of one with its name. None: those
        that come later may not name it any more, and those that run go on. gateway: index of this
        one."""
        state = AdapterState(
            name=name,
            version=self.changes.next_version,
            gateway=gateway,
            adapter=adapter,
            configured=name in self._configured,
        )
        self.adopt(AdapterChanges((state,)))

    def adopt(self, changes: AdapterChanges) -> bool:
        """Takes changes that this gateway, or another, was asked for; False if all were known."""
        before, self.changes = self.changes, self.changes.updated(changes)
        now = {state.name: state.adapter for state in self.changes.states}
        for state in before.states:
            now.setdefault(state.name, None)  # forgotten, so it was unloaded
        for name, adapter in now.items():
            if adapter is None:
                self._by_name.pop(name, None)
            else:
                self._by_name[name] = adapter
        return self.changes != before


def adapted_fingerprint(base: str, adapter: Adapter) -> str:
    """The fingerprint of answers with `adapter`, of a server whose own is `base`."""
    digest = blake2b(f"{base} {adapter.digest}".encode(), digest_size=8)
    return f"fp_{digest.hexdigest()}"


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


MAX_PROMPTS = 1024  # of a request, by default


@dataclass(frozen=True)
class RequestDefaults:
    """The server's defaults and limits for requests.

    Attributes:
    - sampling: parameters that a request leaves open
    - max_prompts: prompts of a request, each counted as often as it has choices
    - timeout: seconds, of requests that name none; 0: never
    - parsers: output parsers of the model
    - closed_objects: schemas allow only the properties that they name, unless they say otherwise
    - adapters: that requests may name as their model
    """

    sampling: RequestParams
    max_prompts: int = MAX_PROMPTS
    timeout: float = 0.0
    parsers: OutputParsers = NO_PARSERS
    closed_objects: bool = True
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)


class ParsedRequest(msgspec.Struct, frozen=True):
    """An HTTP request's calls and the form of its response.

    Attributes:
    - calls: one for each prompt, in order; built lazily, to be iterated once
    - choices: of all prompts together
    - prompts: number of prompts
    - best_of: choices of each prompt that are returned, the best ones; 0: all
    - parser_factory: makes the output parser of a choice; None: all output is content.
      parser_options: what it depends on
    - output_options, tool_call_options: how the response is written
    - params: sampling parameters of a chat
    - constraint: what the output must fit
    - adapter: that the calls are computed with
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
    parser_options: ParserOptions | None = None
    tool_call_options: ToolCallOptions = ToolCallOptions()
    params: RequestParams = msgspec.field(default_factory=RequestParams)
    constraint: OutputConstraint = OutputConstraint()
    adapter: Adapter | None = None


def parse_chat(
    request: ChatRequest, request_id: str, defaults: RequestDefaults, trace: str
) -> ParsedRequest:
    """The one call of a chat; `request_id` becomes its id. ApiError 400."""
    with_tools = functions_to_tools(request)
    if with_tools is None:
        return _parse_chat(request, request_id, defaults, trace)
    try:
        parsed = _parse_chat(with_tools, request_id, defaults, trace)
    except ApiError as error:
        raise renamed(error, LEGACY_FIELD_NAMES) from None
    tool_call_options = replace(parsed.tool_call_options, legacy_functions=True)
    return replace(
        parsed,
        tool_call_options=tool_call_options,
        constraint=parsed.constraint.with_field_names(LEGACY_FIELD_NAMES),
    )


def _parse_chat(
    request: ChatRequest, request_id: str, defaults: RequestDefaults, trace: str
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
        message = "thinking_token_budget: this model's reasoning is bounded by reasoning_effort"
        raise ApiError(400, message, "thinking_token_budget", "unsupported_parameter")
    if tools is not None:
        parallel = request.parallel_tool_calls is not False
        calls = tool_call_constraint(tools, parallel, parsers, constraint, defaults.closed_objects)
        calls_constrained, constraint = calls.spec is not constraint.spec, calls
        if calls_constrained and parsers.harmony and parsers.continues_message:
            message = "continue_final_message: calls cannot be constrained within a message"
            raise ApiError(400, message, "continue_final_message", "unsupported_parameter")
        if parsers.calls_need_special_tokens or calls_constrained:  # its tags may be special tokens
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
        request_id=request_id,
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
    # Space before JSON, which masks.AfterReasoningSource allows.
    strip_answer = spec is not None and spec.json is not None
    parser_options = ParserOptions(
        schemas=None if tools is None else tools.schemas,
        first_call_only=first_call_only,
        include_reasoning=include_reasoning,
        strip_answer=strip_answer,
        custom_tools=() if tools is None else tuple(sorted(tools.custom_tools)),
        continues_message=parsers.continues_message,
    )
    parser_factory = defaults.parsers.factory_for(parser_options)
    call = replace(
        call, token_offsets=parser_factory is not None and bool(parsers.reasoning_parser_name)
    )
    parsed = _parsed_request(request, [call], params.n, output_options, call.adapter)
    previous_calls = sum(
        len(calls) for message in chat or () if isinstance(calls := message.get("tool_calls"), list)
    )
    tool_call_options = ToolCallOptions(
        parsers.tool_parser.call_ids, previous_calls, tools is not None and tools.one_function
    )
    return replace(
        parsed,
        constraint=constraint,
        parser_factory=parser_factory,
        parser_options=parser_options,
        params=params,
        tool_call_options=tool_call_options,
    )


def _check_continuation(parsers: OutputParsers, last: JsonObject, params: RequestParams) -> None:
    """ApiError 400 where the answer cannot continue the last message."""
    if parsers.harmony and last.get("tool_calls"):
        message = "continue_final_message: a message that calls tools does not go on"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    reasoning_open = parsers.reasoning_state(content_text(last.get("content"))) == "open"
    if params.thinking_token_budget is not None and reasoning_open:
        message = "thinking_token_budget: the last message's own reasoning would not be counted"
        raise ApiError(400, message, "thinking_token_budget", "unsupported_parameter")


def parse_completion(
    request: CompletionRequest, request_id: str, defaults: RequestDefaults, trace: str
) -> ParsedRequest:
    """Parses a completion into calls, one for each prompt. If there are several, their ids are
    `request_id` with -0, -1 ... Raises ApiError 400. With best_of all choices need log-probs, by
    which the best are chosen."""
    prompts = listed_prompts(request.prompt, defaults.max_prompts)
    limit, field = _limit(request, COMPLETION_MAX_TOKENS)
    assert limit is not None
    output_options = _completion_output_options(request, limit)
    limit += output_options.no_new_tokens  # the model has no step that samples nothing
    constraint = output_constraint(request, defaults.closed_objects)
    params = _params(
        request, defaults.sampling, limit, output_options, {"max_tokens": field}, constraint
    )
    if output_options.echo and output_options.logprobs is not None and limit == 1:
        # A client that asks for a prompt's log-probs so (lm-eval) takes the last for that of the
        # one output token. A stop token has no log-prob, so no token may stop the output.
        params = replace(params, ignore_eos=True)
    choices = _best_of(request, params.n)
    best = params.n if choices > params.n else 0
    if best:
        params = replace(params, n=choices, logprobs=params.logprobs or 0)
    _check_count(len(prompts), "best_of" if best else "n", choices, defaults)
    special = request.add_special_tokens is not False
    shared = _shared_call(request, params, defaults, trace)
    shared = replace(
        shared, return_prompt_text=output_options.echo, fallback_grammar=constraint.fallback
    )
    calls = prompt_calls(shared, request_id, prompts, special)
    parsed = _parsed_request(request, calls, len(prompts) * choices, output_options, shared.adapter)
    return replace(parsed, prompts=len(prompts), best_of=best, constraint=constraint)


def _limit(request: Generation, default: int | None) -> tuple[int | None, str]:
    """The most output tokens, and the field of that limit."""
    if request.max_tokens is None and request.max_new_tokens is not None:
        return request.max_new_tokens, "max_new_tokens"
    return default if request.max_tokens is None else request.max_tokens, "max_tokens"


def _best_of(request: CompletionRequest, n: int) -> int:
    """Choices that are computed of each prompt, of which `n` are returned."""
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
    """max_tokens 0 (`limit`) asks for no new tokens only where the prompt is echoed."""
    if request.logprobs is True:
        message = "logprobs must be a number of alternatives, not true"
        raise ApiError(400, message, "logprobs", "invalid_type")
    logprobs = None if request.logprobs is False else request.logprobs
    echo = bool(request.echo)
    ids = bool(request.return_token_ids)
    return OutputOptions(logprobs, request.prompt_logprobs, echo, echo and limit == 0, ids)


def _parsed_request(
    request: Generation,
    calls: Iterable[Call],
    choices: int,
    output_options: OutputOptions,
    adapter: Adapter | None,
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
    return ParsedRequest(calls, choices, stream, usage, continuous, output_options, adapter=adapter)


def _shared_call(
    request: Generation, params: RequestParams, defaults: RequestDefaults, trace: str
) -> Call:
    """A call as shared_call makes it, with the fields that only requests for texts have."""
    salt = _salt(request.cache_salt or "", request.extra_key or "")
    adapter = defaults.adapters.get(request.model)
    return replace(
        shared_call(request, params, defaults, trace),
        cache_salt=salt if adapter is None else adapter.salted(salt),
        return_prompt_ids=bool(request.return_token_ids),
        adapter=adapter,
    )


def shared_call(
    request: Generation | PoolingBody,
    params: RequestParams,
    defaults: RequestDefaults,
    trace: str,
) -> Call:
    """A call with all that the calls of a request share, without id and prompt. ApiError 400."""
    if request.timeout == 0:
        message = "timeout must be more than 0 seconds; leave it out for the server's own"
        raise ApiError(400, message, "timeout", "invalid_value")
    return Call(
        request_id="",
        params=params,
        priority=request.priority or 0,
        timeout=request.timeout or defaults.timeout,
        cache_salt=_salt(request.cache_salt or "", ""),
        trace=trace,
    )


def prompt_calls(
    shared: Call,
    request_id: str,
    prompts: Sequence[str | list[int]],
    special: bool,
    before: str = "",
) -> Iterator[Call]:
    """`shared` for each prompt. If there are several, their ids are `request_id` with -0, -1 ...

    special: the tokenizer adds its tokens to texts. before: what comes before each text.
    """
    for i, prompt in enumerate(prompts):
        name = request_id if len(prompts) == 1 else f"{request_id}-{i}"
        if isinstance(prompt, str):
            text = before + prompt
            yield replace(shared, request_id=name, text=text, add_special_tokens=special)
        else:
            yield replace(shared, request_id=name, prompt_ids=pack(prompt))


def _salt(cache_salt: str, extra_key: str) -> str:
    """The salt of the prefix cache: another text for each pair. A salt alone is itself."""
    if not extra_key and not cache_salt.startswith("\0"):
        return cache_salt
    return f"\0{len(cache_salt)}:{cache_salt}{extra_key}"


def _params(
    request: Generation,
    defaults: RequestParams,
    max_tokens: int | None,
    output_options: OutputOptions,
    names: dict[str, str],
    constraint: OutputConstraint,
) -> RequestParams:
    """The request's sampling parameters over `defaults`. names: {name in RequestParams: the
    request's field}. Raises ApiError 400."""
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


def listed_prompts(
    prompt: str | list[int | str | list[int]], max_prompts: int, field: str = "prompt"
) -> list[str | list[int]]:
    """The prompts, all texts or all lists of ids; none of them empty, and at most `max_prompts`.
    field: of the request that has them. ApiError 400."""
    kinds = set(map(type, prompt)) if isinstance(prompt, list) else {str}  # of perhaps a million
    if len(kinds) > 1:
        message = f"{field} must be a text, a list of token ids, or a list of only one of these"
        raise ApiError(400, message, field, "invalid_type")
    single = isinstance(prompt, str) or kinds == {int}
    prompts = [prompt] if single else list(islice(prompt, max_prompts + 1))
    if len(prompts) > max_prompts:
        message = f"at most {max_prompts} prompts a request, not {len(prompt)}"
        raise ApiError(400, message, field, "invalid_value")
    for i, item in enumerate(prompts or [""]):
        if not item:
            param = field if single or not prompts else f"{field}[{i}]"
            raise ApiError(400, f"{param} must not be empty", param, "invalid_value")
    return cast(list[str | list[int]], prompts)  # of one kind, and no single ids


COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat has none


def sampling_defaults(folder: Path) -> RequestParams:
    """The checkpoint's default parameters, from generation_config.json, do_sample aside, as in
    vLLM.

    max_tokens (of chats) is None unless the checkpoint limits it. Raises ConfigurationError.
    """
    given = read_generation(folder).sampling()
    try:
        return normalized(replace(RequestParams(max_tokens=None), **given))
    except InvalidParameter as error:
        raise ConfigurationError(f"{folder / 'generation_config.json'}: {error}") from None


def _for_template(request: ChatRequest) -> JsonObject:
    """Fields of a chat that are variables of its template, or that change how it is rendered."""
    given: JsonObject = {
        "enable_thinking": request.enable_thinking,
        "reasoning_effort": request.reasoning_effort,
        "chat_template": request.chat_template,
        "continue_final_message": request.continue_final_message or None,
        "documents": None if request.documents is None else list[JsonValue](request.documents),
    }
    if request.reasoning_effort == "none" and request.enable_thinking is None:
        given["enable_thinking"] = False
    return {name: value for name, value in given.items() if value is not None}


class ChatPrompt(NamedTuple):
    """The arguments of a chat template.

    Attributes:
    - chat: messages, as the chat template wants them
    - arguments: all variables of the template
    - tools: of the request, which are among the variables; None if it has none
    """

    chat: list[JsonObject]
    arguments: JsonObject
    tools: RequestTools | None


def chat_prompt(request: ChatRequest, parsers: OutputParsers) -> ChatPrompt:
    """All of a chat that its prompt depends on, `functions` aside. ApiError 400."""
    chat = _chat(request.messages)
    arguments = {**_for_template(request), **(request.chat_template_kwargs or {})}
    check_sendable("chat_template_kwargs", arguments)
    if request.add_generation_prompt is not None:
        arguments["add_generation_prompt"] = request.add_generation_prompt
    tools = request_tools(request)
    if parsers.harmony:
        check_reasoning_effort(arguments)
        chat = harmony_messages(chat)
    if tools is not None:
        function_tools = (
            with_descriptions(tools.as_functions) if parsers.harmony else tools.as_functions
        )
        arguments["tools"] = list[JsonValue](function_tools)
    return ChatPrompt(chat, arguments, tools)


def _chat(messages: list[ChatMessage]) -> list[JsonObject]:
    """The conversation as chat templates want it."""
    messages = function_messages_to_tool_messages(messages)
    if not 0 < len(messages) <= MAX_MESSAGES:
        reason = f"be at most {MAX_MESSAGES}, not {len(messages)}" if messages else "not be empty"
        raise ApiError(400, f"messages must {reason}", "messages", "invalid_value")
    check_sendable("messages", [call for m in messages for call in m.tool_calls or ()])
    check_arguments_size(call for m in messages for call in m.tool_calls or ())
    return without_billing_header([_message(i, message) for i, message in enumerate(messages)])


def _message(i: int, message: ChatMessage) -> JsonObject:
    """The message as the tokenizer takes it: a content of texts alone, or null where the message
    only calls tools; reasoning under one name; no absent fields."""
    reasoning_texts = (message.reasoning_content, message.thinking, message.reasoning)
    reasoning = next((text for text in reasoning_texts if text is not None), None)
    message = replace(message, reasoning_content=reasoning, thinking=None, reasoning=None)
    plain: JsonObject = msgspec.to_builtins(replace(message, refusal=None))
    if message.tool_calls is not None:
        plain["tool_calls"] = [
            tool_call_for_template(call, f"messages[{i}].tool_calls[{j}]")
            for j, call in enumerate(message.tool_calls)
        ]
    content = message.content
    if message.refusal is not None and not content:
        content = message.refusal
    if isinstance(content, list):
        plain["content"] = [_text_part(i, j, part) for j, part in enumerate(content)]
    elif content is not None:
        plain["content"] = content
    elif message.role == "assistant" and message.tool_calls:
        plain["content"] = None
    else:
        param = f"messages[{i}].content"
        raise ApiError(400, f"{param} must be given", param, "invalid_value")
    if message.role == "developer":  # templates of open models know it as "system"
        plain["role"] = "system"
    return plain


def _text_part(i: int, j: int, part: ContentPart) -> JsonObject:
    """A part with text: of type text or refusal."""
    where = f"messages[{i}].content[{j}]"
    if part.type not in ("text", "refusal"):
        text = f"{where}.type: {part.type[:100]!r} is not supported, only 'text' is"
        raise ApiError(400, text, f"{where}.type", "unsupported_parameter")
    text = part.text if part.type == "text" else part.refusal
    return {"type": "text", "text": required(text, f"{where}.{part.type}")}


BILLING_HEADER = "x-anthropic-billing-header:"


def without_billing_header(chat: list[JsonObject]) -> list[JsonObject]:
    """The conversation without the billing line at the begin of system messages and of their parts.

    Claude Code begins the system prompt with a line that differs in each request, for billing. At
    the beginning of each prompt the line would prevent all hits in the prefix cache. Messages that
    are empty without the line are dropped, unless there are no others.
    """
    remaining = [message for message in map(_without_line, chat) if message is not None]
    return remaining or chat


def _without_line(message: JsonObject) -> JsonObject | None:
    content = message.get("content")
    if message.get("role") != "system":
        return message
    if isinstance(content, str) and content.startswith(BILLING_HEADER):
        remaining = _without_first_line(content)
        return {**message, "content": remaining} if remaining else None
    if isinstance(content, list) and any(
        _part_text(part).startswith(BILLING_HEADER) for part in content
    ):
        texts = [_without_first_line(text) for text in map(_part_text, content)]
        parts: list[JsonValue] = [{"type": "text", "text": text} for text in texts if text]
        return {**message, "content": parts} if parts else None
    return message


def _part_text(part: JsonValue) -> str:
    return str(part["text"]) if isinstance(part, dict) else ""


def _without_first_line(text: str) -> str:
    """The text behind the billing line, if there is one."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_HEADER) else text
