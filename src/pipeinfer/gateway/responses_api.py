"""OpenAI's Responses API, /v1/responses: its bodies as chats, its responses and events.

Knows no memory: callers pass the earlier turns.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from pipeinfer.gateway.errors import RESPONSES, ApiError, Refusals, required
from pipeinfer.gateway.response_json import ResponseMetadata
from pipeinfer.gateway.retention import StoredResponse
from pipeinfer.gateway.schema import (
    INT32,
    MAX_MESSAGES,
    MAX_TOOLS,
    SAMPLING_ONLY_FIELDS,
    AllowedTools,
    Body,
    CacheSalt,
    ChatMessage,
    ChatRequest,
    ChatTemplateKwargs,
    Choice,
    Chosen,
    CustomTool,
    ExtraKey,
    FrequencyPenalty,
    Function,
    GrammarFormat,
    IgnoreEos,
    IncludeReasoning,
    IncludeStopStrInOutput,
    InputFormat,
    Int32,
    JsonSchema,
    LogitBias,
    MinP,
    NamedTool,
    ParallelToolCalls,
    Part,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    ResponseFormat,
    Role,
    Seed,
    SkipSpecialTokens,
    Stop,
    StopTokenIds,
    Stream,
    StreamOptions,
    StructuredField,
    Temperature,
    Timeout,
    Tool,
    ToolChoice,
    ToolName,
    TopK,
    TopP,
    about,
)
from pipeinfer.gateway.tools import check_tool_type
from pipeinfer.gateway.translation import (
    CALL_BLOCKS,
    BlockEvent,
    ConversationBuilder,
    OutputBlock,
    OutputBlocks,
    ResponseEnd,
)
from pipeinfer.params import JsonObject, JsonValue, RequestParams

INCLUDE_LOGPROBS = "message.output_text.logprobs"
# Values of `include` that are accepted.
KNOWN_INCLUDES = frozenset((INCLUDE_LOGPROBS, "reasoning.encrypted_content"))
# The most calls of the server's own tools. There are none, and calls of functions do not count.
MaxToolCalls = Annotated[int, Meta(ge=1, le=INT32)]
TEXT_PARTS = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text"))
CALL_ITEMS = ("function_call", "custom_tool_call")
RESULT_ITEMS = ("function_call_output", "custom_tool_call_output")
UNFINISHED = frozenset(("in_progress", "incomplete"))
# {field of a chat: field of this API}.
FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class InputPart(msgspec.Struct, frozen=True):
    """A part of an item's content: a text. A refusal is one as well."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """An item of the conversation. `type`: message (also where there is none), function_call,
    custom_tool_call, the same with _output, or reasoning; each has some of the other fields."""

    type: str | None = None
    id: str | None = None
    role: Role | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    phase: str | None = None
    status: str | None = None


class ToolFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a custom tool's input: any text, or a text of a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponsesTool(Part, frozen=True):
    """A tool: a function, of which `parameters` is the JSON schema of its arguments, or a custom
    one that takes a text of the `format`."""

    unsupported = ("defer_loading",)
    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    defer_loading: bool | None = None

    def echoed(self) -> JsonObject:
        """The tool as a response shows it."""
        echo: JsonObject = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == "function":
            return {**echo, "parameters": self.parameters, "strict": self.strict}
        return {**echo, "format": msgspec.to_builtins(self.format) or {"type": "text"}}


class ResponsesNamedTool(msgspec.Struct, frozen=True):
    """A tool of the request, by its name."""

    type: str
    name: str | None = None


class ResponsesToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tool that must be called; or, with the type "allowed_tools", those `tools` that may be or
    ("required") of which some must be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponsesNamedTool], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """Options of the answer's text. `verbosity` is a wish, and changes nothing."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """`effort` is handed to the chat template; "none" asks it for no reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


EchoedText = Annotated[str | None, about("Comes back as it is, and changes nothing.")]


class ResponsesPrompt(Body, frozen=True, kw_only=True):
    """The fields on which a response's prompt depends. `truncation`: "auto" leaves out the first
    turns of a prompt that does not fit."""

    unsupported_fields: ClassVar[Refusals] = RESPONSES
    # fmt: off
    input: Annotated[str | list[InputItem], about(
        "A text, or a list of items: messages with a text or parts `input_text`, `output_text` and "
        "`refusal`; `function_call`, `custom_tool_call` and the same with `_output`; `reasoning`. "
        "The `output` of an answer may be put there as it is. Required.")]
    previous_response_id: Annotated[str | None, about(
        "A stored response: its conversation, but for its `instructions`, stands before `input`. "
        "Refused without `--store`. Default: none.")] = None
    instructions: Annotated[str | None, about(
        "A system message before all others. System messages that follow each other become one. "
        "Default: none.")] = None
    tools: Annotated[Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None, about(
        'Functions: `{"type": "function", "name", "description", "parameters"}`. Custom '
        'tools: `{"type": "custom", "name", "description", "format"}` with a format '
        '`{"type": "text"}` or `{"type": "grammar", "syntax", "definition"}`. Built-in '
        "tools are refused. Default: none.")] = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ResponsesToolChoice | None, about(
        'As for chats. A tool that must be called is `{"type": "function", "name": '
        '"..."}`, or the same with `custom`. `{"type": "allowed_tools", "mode", "tools": '
        '[{"type": "function", "name": "..."}]}`: those alone are called. Default: '
        "`auto`.")] = None
    parallel_tool_calls: ParallelToolCalls = None
    text: Annotated[TextOptions | None, about(
        "`format` is the form of the answer: `text`, `json_object`, or `json_schema` with `name` "
        "and `schema`. `verbosity` changes nothing, and comes back. Default: none.")] = None
    reasoning: Annotated[Reasoning | None, about(
        "`effort` is handed to the chat template as `reasoning_effort`, with `enable_thinking` "
        "true. `none` gives the template `enable_thinking` false. Default: none.")] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, about(
        "With `auto`, of a conversation that does not fit as few of the first turns are left out "
        "as it takes. What system and developer say, and the last turn, stay. With `disabled` it "
        "gets 400. Default: `disabled`.")] = None
    chat_template_kwargs: ChatTemplateKwargs = None
    # fmt: on


class InputTokensRequest(ResponsesPrompt, frozen=True, kw_only=True):
    """The body of /v1/responses/input_tokens. Fields with which a response is only sampled are
    ignored, so that a response's body can be counted."""

    ignored_fields: ClassVar[frozenset[str]] = SAMPLING_ONLY_FIELDS | {
        "max_output_tokens",
        "include",
        "personality",
        "background",
    }


class ResponsesRequest(ResponsesPrompt, frozen=True, kw_only=True):
    """The body of /v1/responses."""

    # fmt: off
    max_tool_calls: Annotated[MaxToolCalls | None, about(
        "At least 1. It bounds calls of built-in tools, of which there are none, and comes back as "
        "it is. Default: none.")] = None
    max_output_tokens: Annotated[Int32 | None, about(
        "The most output tokens, reasoning included. Default: as many as fit.")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    repetition_penalty: RepetitionPenalty = None
    min_p: MinP = None
    logit_bias: LogitBias = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    ignore_eos: IgnoreEos = None
    skip_special_tokens: SkipSpecialTokens = None
    include_stop_str_in_output: IncludeStopStrInOutput = None
    include_reasoning: IncludeReasoning = None
    structured_outputs: StructuredField = None
    top_logprobs: Annotated[Int32 | None, about(
        "Alternatives of each token's log-prob, 0 to 20. Default: 0.")] = None
    include: Annotated[list[str] | None, about(
        "`message.output_text.logprobs` asks for log-probs. `reasoning.encrypted_content` is "
        "taken, and there is none. Default: none.")] = None
    stream: Stream = None
    background: Annotated[bool | None, about(
        "The response is computed without a connection, and kept for 600 s after its end, within "
        "`--kept-mib`: `GET /v1/responses/{id}`. Default: false.")] = None
    stream_options: Annotated[StreamOptions | None, about(
        "Changes nothing: the last event always has the usage. Default: none.")] = None
    store: Annotated[bool | None, about(
        "Whether the response is stored in the file of `--store`. Without that setting nothing is, "
        "and the answer says false. Default: true.")] = None
    metadata: Annotated[JsonObject | None, about(
        "Comes back as it is, and changes nothing.")] = None
    user: EchoedText = None
    safety_identifier: EchoedText = None
    prompt_cache_key: EchoedText = None
    seed: Seed = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    extra_key: ExtraKey = None
    # fmt: on


ResponsesBody = TypeVar("ResponsesBody", bound=ResponsesPrompt)


def message_starts(request: ResponsesPrompt) -> list[int]:
    """Indices in `input` of the user's messages, but for index 0. The items before any of them can
    be left out. Empty if the request does not allow truncation, or its input is a string.
    """
    items = request.input
    if request.truncation != "auto" or isinstance(items, str):
        return []
    return [i for i, item in enumerate(items) if i and _is_message(item) and item.role == "user"]


def without_items_before(request: ResponsesBody, first: int) -> ResponsesBody:
    """The request from item `first` on. System and developer messages stay; results go with
    their calls.
    """
    assert isinstance(request.input, list)
    dropped, remaining = request.input[:first], request.input[first:]
    calls = {item.call_id for item in dropped if item.type in CALL_ITEMS}
    items = [item for item in dropped if _is_message(item) and item.role in ("system", "developer")]
    items += [i for i in remaining if i.type not in RESULT_ITEMS or i.call_id not in calls]
    return msgspec.structs.replace(request, input=items)


def _is_message(item: InputItem) -> bool:
    return item.type in (None, "message")


def to_prompt_chat(request: ResponsesPrompt) -> ChatRequest:
    """The chat without sampling parameters. ApiError 400."""
    messages = _messages(request)
    continues = _continues_message(request, messages)
    return ChatRequest(
        messages=messages,
        continue_final_message=continues or None,
        add_generation_prompt=False if continues else None,
        model=request.model,
        chat_template_kwargs=_arguments(request),
        tools=_tools(request),
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
    )


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """The body of a chat that asks for the same. ApiError 400."""
    logprobs = _logprobs(request)
    chat = msgspec.structs.replace(
        to_prompt_chat(request),
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        min_p=request.min_p,
        logit_bias=request.logit_bias,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
        include_reasoning=request.include_reasoning,
        structured_outputs=request.structured_outputs,
        max_tokens=request.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        seed=request.seed,
        priority=request.priority,
        timeout=request.timeout,
        cache_salt=request.cache_salt,
        extra_key=request.extra_key,
    )
    form = request.text.format if request.text is not None else None
    if form is None:
        return chat
    if chat.continue_final_message and form.type != "text":
        message = "text.format cannot be used when continuing an incomplete assistant message"
        raise ApiError(400, message, "text.format", "unsupported_parameter")
    schema = JsonSchema(form.schema, form.name, form.description, form.strict)
    return msgspec.structs.replace(chat, response_format=ResponseFormat(form.type, schema))


def _continues_message(request: ResponsesPrompt, messages: list[ChatMessage]) -> bool:
    """Whether the last item is a message of the assistant whose status is unfinished."""
    last = None if isinstance(request.input, str) else request.input[-1]
    if last is None or last.status not in UNFINISHED or last.role != "assistant":
        return False
    return (last.type or "message") == "message" and bool(messages[-1].content)


def _logprobs(request: ResponsesRequest) -> bool:
    for i, name in enumerate(request.include or ()):
        if name not in KNOWN_INCLUDES:
            param = f"include[{i}]"
            message = f"{param}: {name[:100]!r} is not supported by this server"
            raise ApiError(400, message, param, "unsupported_parameter")
    return INCLUDE_LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


def _arguments(request: ResponsesPrompt) -> JsonObject | None:
    """Variables of the template; those that a client names itself win."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort is None:
        return request.chat_template_kwargs
    arguments: JsonObject = {"enable_thinking": effort != "none"}
    if effort != "none":
        arguments["reasoning_effort"] = effort
    return {**arguments, **(request.chat_template_kwargs or {})}


def _tools(request: ResponsesPrompt) -> list[Tool] | None:
    if request.tools is None:
        return None
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]


def _tool(tool: ResponsesTool, where: str) -> Tool:
    check_tool_type(tool.type, f"{where}.type")
    name = required(tool.name, f"{where}.name")
    if tool.type == "function":
        return Tool("function", Function(name, tool.description, tool.parameters, tool.strict))
    format = None if tool.format is None else _format(tool.format, f"{where}.format")
    return Tool("custom", custom=CustomTool(name, tool.description, format))


def _format(given: ToolFormat, where: str) -> InputFormat:
    if given.type == "text":
        return InputFormat("text")
    definition = required(given.definition, f"{where}.definition")
    syntax: Literal["lark", "regex"] = required(given.syntax, f"{where}.syntax")
    return InputFormat("grammar", GrammarFormat(syntax, definition))


def _choice(request: ResponsesPrompt) -> Choice | None:
    choice = request.tool_choice
    if choice == "auto" and not request.tools:
        return None  # the API's own default, which clients send along
    if isinstance(choice, str) or choice is None:
        return choice
    if choice.type != "allowed_tools":
        one = _named(choice.type, choice.name, "tool_choice")
        return ToolChoice(one.type, one.function, one.custom)
    mode: Literal["auto", "required"] = required(choice.mode, "tool_choice.mode")
    tools = required(choice.tools, "tool_choice.tools")
    named = [
        _named(tool.type, tool.name, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)
    ]
    return ToolChoice("allowed_tools", allowed_tools=AllowedTools(mode, named))


def _named(kind: str, name: str | None, where: str) -> NamedTool:
    check_tool_type(kind, f"{where}.type", *(("allowed_tools",) if where == "tool_choice" else ()))
    chosen = Chosen(required(name, f"{where}.name"))
    return NamedTool(kind, **{kind: chosen})


def _messages(request: ResponsesPrompt) -> list[ChatMessage]:
    conversation = ConversationBuilder()
    if request.instructions:
        conversation.add_message("system", [request.instructions])
    if isinstance(request.input, str):
        conversation.add_message("user", [request.input])
        return conversation.messages()
    if not 0 < len(request.input) <= MAX_MESSAGES:
        count = len(request.input)
        reason = f"hold at most {MAX_MESSAGES} items, not {count}" if count else "not be empty"
        raise ApiError(400, f"input must {reason}", "input", "invalid_value")
    for i, item in enumerate(request.input):
        _add_item(conversation, item, f"input[{i}]")
    return conversation.messages()


def _add_item(conversation: ConversationBuilder, item: InputItem, where: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        if item.role is None or item.role in ("tool", "function"):
            message = f"{where}.role must be system, developer, user or assistant"
            raise ApiError(400, message, f"{where}.role", "invalid_value")
        conversation.add_message(item.role, _texts(item.content, f"{where}.content"), item.phase)
    elif kind == "reasoning":
        reasoning = item.content or item.summary or ""
        if reasoning:  # encrypted reasoning comes from another server, and cannot be read here
            conversation.add_reasoning("\n".join(_texts(reasoning, f"{where}.content")))
    elif kind == "function_call":
        call_id = required(item.call_id, f"{where}.call_id")
        arguments = required(item.arguments, f"{where}.arguments")
        conversation.add_tool_call(call_id, required(item.name, f"{where}.name"), arguments)
    elif kind == "custom_tool_call":
        call_id = required(item.call_id, f"{where}.call_id")
        text = required(item.input, f"{where}.input")
        conversation.add_custom_call(call_id, required(item.name, f"{where}.name"), text)
    elif kind in RESULT_ITEMS:
        call_id = required(item.call_id, f"{where}.call_id")
        conversation.add_tool_result(call_id, _texts(item.output, f"{where}.output"))
    else:
        message = f"{where}.type: {kind[:100]!r} is not supported by this server"
        raise ApiError(400, message, f"{where}.type", "unsupported_parameter")


def _texts(content: str | list[InputPart] | None, where: str) -> list[str]:
    """The texts of a content's parts, all of which must be texts."""
    if isinstance(content, str):
        return [content]
    if content is None:
        raise ApiError(400, f"{where} must be given", where, "invalid_value")
    texts: list[str] = []
    for j, part in enumerate(content):
        here = f"{where}[{j}]"
        if part.type == "refusal":
            texts.append(required(part.refusal, f"{here}.refusal"))
            continue
        if part.type not in TEXT_PARTS:
            message = f"{here}.type: {part.type[:100]!r} is not supported, only texts are"
            raise ApiError(400, message, f"{here}.type", "unsupported_parameter")
        texts.append(required(part.text, f"{here}.text"))
    return texts


ID_BYTES = 24  # bytes of an item's id, in hexadecimal digits after its prefix
INPUT_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def input_items(given: str | list[InputItem], response_id: str) -> list[JsonObject]:
    """The items of a request's input as /input_items shows them: each has a type and an id."""
    items = enumerate(items_of(given))
    return [_shown_item(item, f"{response_id}-input-{i}") for i, item in items]


def items_of(given: str | list[InputItem]) -> list[InputItem]:
    """The items of an input; a text is a message of the user."""
    return [InputItem(role="user", content=given)] if isinstance(given, str) else given


def stored_items(stored: StoredResponse) -> list[InputItem]:
    """The items that a stored response adds to a conversation: its own input, then its output."""
    response = msgspec.json.decode(stored.response, type=_Output)
    return [*msgspec.json.decode(stored.input, type=list[InputItem]), *response.output]


class _Output(msgspec.Struct):
    """The part of a response that the next one reads."""

    output: list[InputItem]


def _shown_item(item: InputItem, name: str) -> JsonObject:
    kind = item.type or "message"
    made: JsonObject = {
        **_given(msgspec.to_builtins(item)),
        "type": kind,
        "id": item.id or _item_id(INPUT_ID_PREFIXES[kind], name),
        "status": item.status or "completed",
    }
    text = "output_text" if item.role == "assistant" else "input_text"
    if isinstance(item.content, str):
        made["content"] = [{"type": text, "text": item.content}]
    elif item.content is not None:
        made["content"] = [_given(msgspec.to_builtins(part)) for part in item.content]
    return made


def _given(fields: JsonObject) -> JsonObject:
    return {name: value for name, value in fields.items() if value is not None}


def _item_id(prefix: str, name: str) -> str:
    digest = hashlib.blake2b(name.encode(), digest_size=ID_BYTES).hexdigest()
    return f"{prefix}_{digest}"


ITEM_ID_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
# By kind of call: the item's type, its field that grows, and the prefix of that field's events.
CALL_ITEM_EVENTS = {
    "call": ("function_call", "arguments", "response.function_call_arguments"),
    "custom": ("custom_tool_call", "input", "response.custom_tool_call_input"),
}
ABORTED_MESSAGE = "the request was ended before its answer was complete: its time was up"


class ResponsesFormatter:
    """Formats responses of /v1/responses.

    Attributes:
    - fields: see echoed_fields
    - clock: Unix seconds
    - final: the response when it has ended
    """

    def __init__(
        self,
        fields: JsonObject,
        metadata: ResponseMetadata,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.final: JsonObject | None = None
        self._metadata = metadata
        self._clock = clock
        self._fields = fields
        self._number = 0  # of the next event
        self._queued = False
        self._started = False
        self._blocks: list[OutputBlock] = []

    def queued_events(self) -> Iterator[JsonObject]:
        """Events before those of the start, of a background response."""
        self._queued = True
        for name in ("created", "queued"):
            yield self._event(f"response.{name}", response=self._response("queued", []))

    def start_events(self, prompt_tokens: int) -> Iterator[JsonObject]:
        self._started = True
        for name in ("in_progress",) if self._queued else ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def snapshot(self) -> JsonObject:
        """The response as far as it is."""
        status = "in_progress" if self._started else "queued"
        return self._response(status, list[JsonValue](map(self._growing_item, self._blocks)))

    def cancelled_event(self) -> JsonObject:
        """The end of a response that its client did not want any more."""
        items = list[JsonValue](map(self._item, self._blocks))
        self.final = self._response("cancelled", items)
        return self._event("response.cancelled", response=self.final)

    def clear(self) -> None:
        """Forgets the output, which the last event has."""
        self._blocks.clear()
        self.final = None

    def block_events(self, step: BlockEvent, logprobs: list[JsonValue]) -> Iterator[JsonObject]:
        block = step.block
        if step.action == "more":
            yield self._delta_event(block, step.text, logprobs)
        elif step.action == "open":
            self._blocks.append(block)
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind not in CALL_BLOCKS:
                yield self._event(
                    "response.content_part.added", **self._position(block), part=_part(block)
                )
        else:
            yield from self._done_events(block)

    def end_events(self, blocks: OutputBlocks, end: ResponseEnd) -> Iterator[JsonObject]:
        full = self.full_response(blocks, end)
        yield self._event(f"response.{full['status']}", response=full)

    def full_response(self, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        status = {"length": "incomplete", "abort": "failed"}.get(end.finish or "", "completed")
        response = self._response(status, list[JsonValue](map(self._item, blocks.all)))
        response["usage"] = _usage(end)
        if status == "completed":
            response["completed_at"] = int(self._clock())
        elif status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["error"] = {"code": "server_error", "message": ABORTED_MESSAGE}
        self.final = response
        return response

    def error_event(self, error: ApiError, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        response = self._response("failed", list[JsonValue](map(self._item, blocks.all)))
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        self.final = response
        return self._event("response.failed", response=response)

    def _delta_event(self, block: OutputBlock, text: str, logprobs: list[JsonValue]) -> JsonObject:
        if block.kind in CALL_BLOCKS:
            _, _, name = CALL_ITEM_EVENTS[block.kind]
            return self._event(
                f"{name}.delta", item_id=self._id(block), output_index=block.index, delta=text
            )
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._position(block), delta=text)
        return self._event(
            "response.output_text.delta", **self._position(block), delta=text, logprobs=logprobs
        )

    def _done_events(self, block: OutputBlock) -> Iterator[JsonObject]:
        if block.kind in CALL_BLOCKS:
            _, field, name = CALL_ITEM_EVENTS[block.kind]
            fields: JsonObject = {"name": block.name} if block.kind == "call" else {}
            fields = {"output_index": block.index, **fields, field: block.text}
            yield self._event(f"{name}.done", item_id=self._id(block), **fields)
        elif block.kind == "reasoning":
            yield self._event(
                "response.reasoning_text.done", **self._position(block), text=block.text
            )
        else:
            yield self._event(
                "response.output_text.done",
                **self._position(block),
                text=block.text,
                logprobs=block.logprobs,
            )
        if block.kind not in CALL_BLOCKS:
            yield self._event(
                "response.content_part.done", **self._position(block), part=_part(block)
            )
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, /, **fields: JsonValue) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _position(self, block: OutputBlock) -> JsonObject:
        return {"item_id": self._id(block), "output_index": block.index, "content_index": 0}

    def _id(self, block: OutputBlock) -> str:
        return _item_id(ITEM_ID_PREFIXES[block.kind], f"{self._metadata.id}-{block.index}")

    def _growing_item(self, block: OutputBlock) -> JsonObject:
        return {**self._item(block), "status": "completed" if block.complete else "in_progress"}

    def _item(self, block: OutputBlock, status: str = "") -> JsonObject:
        status = status or ("completed" if block.complete else "incomplete")
        item: JsonObject = {"id": self._id(block), "status": status}
        parts: list[JsonValue] = [] if status == "in_progress" else [_part(block)]
        if block.kind in CALL_BLOCKS:
            kind, field, _ = CALL_ITEM_EVENTS[block.kind]
            call_id = self._metadata.call_id(0, block.call_index, block.name)
            return {
                **item, "type": kind, "call_id": call_id, "name": block.name, field: block.text
            }  # fmt: skip
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}

    def _response(self, status: str, output: list[JsonValue]) -> JsonObject:
        return {**self._fields, "status": status, "output": output}


def _part(block: OutputBlock) -> JsonObject:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": list(block.logprobs),
    }


def _usage(end: ResponseEnd) -> JsonObject:
    usage = end.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def echoed_fields(
    request: ResponsesRequest, metadata: ResponseMetadata, params: RequestParams, stored: bool
) -> JsonObject:
    """The fields of the response that do not change while it grows. `params`: as the request is
    sampled. `stored`: whether the response will be.
    """
    effort = request.reasoning.effort if request.reasoning is not None else None
    form = request.text.format if request.text is not None else None
    verbosity = request.text.verbosity if request.text is not None else None
    echo: JsonObject = {"type": "text"}
    if form is not None:
        echo = {n: v for n, v in msgspec.to_builtins(form).items() if v is not None}
    return {
        "id": metadata.id,
        "object": "response",
        "created_at": metadata.created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": metadata.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": request.previous_response_id or None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": params.temperature,
        "text": {"format": echo, "verbosity": verbosity or "medium"},
        "tool_choice": msgspec.to_builtins(request.tool_choice) or "auto",
        "tools": [tool.echoed() for tool in request.tools or ()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
