"""Anthropic's Messages API, /v1/messages: its bodies as chats, its responses and errors.

A turn is a list of blocks, and the system prompt stands beside the turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from pipeinfer.gateway.errors import IGNORED_FIELDS, MESSAGES, ApiError, Refusals, required
from pipeinfer.gateway.response_json import ResponseMetadata, TokenUsage
from pipeinfer.gateway.schema import (
    CHAT_LIMITS,
    INT32,
    MAX_MESSAGES,
    MAX_TOOLS,
    SAMPLING_ONLY_FIELDS,
    Body,
    CacheSalt,
    ChatMessage,
    ChatRequest,
    ChatTemplateKwargs,
    Choice,
    Chosen,
    ExtraKey,
    Function,
    Int32,
    JsonLimitExceeded,
    JsonSchema,
    Part,
    Priority,
    ResponseFormat,
    Seed,
    Stream,
    Temperature,
    Timeout,
    Tool,
    ToolChoice,
    TopK,
    TopP,
    about,
    prescan,
)
from pipeinfer.gateway.translation import (
    BlockEvent,
    ConversationBuilder,
    OutputBlock,
    OutputBlocks,
    ResponseEnd,
)
from pipeinfer.params import JsonObject, JsonValue

# {field of a chat: field of this API}.
FIELD_NAMES = {
    "stop": "stop_sequences",
    "tools": "tools",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}
# Budgets below which the effort is low, and medium, of models with efforts alone; else it is high.
LOW_EFFORT_BUDGET, MEDIUM_EFFORT_BUDGET = 4_096, 16_384


class SourceBlock(msgspec.Struct, frozen=True):
    """A text within a document."""

    type: str
    text: str | None = None


class DocumentSource(msgspec.Struct, frozen=True):
    """The text of a document: in `data`, with type "text", or in `content`, with type "content"."""

    type: str
    media_type: str | None = None
    data: str | None = None
    content: str | list[SourceBlock] | None = None


class CitationsOptions(msgspec.Struct, frozen=True):
    """Whether answers are to cite a document."""

    enabled: bool | None = None


class TextBlock(SourceBlock, frozen=True):
    """A text, of the system or of what a tool gave; there also a document."""

    source: DocumentSource | None = None
    title: str | None = None
    context: str | None = None
    citations: CitationsOptions | list[JsonObject] | None = None


class MessageBlock(TextBlock, frozen=True):
    """A block of a turn. `type`: text, document, thinking, redacted_thinking, tool_use or
    tool_result; each has some of the other fields."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, frozen=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class InputTool(Part, frozen=True):
    """A tool of the client; `input_schema` is the JSON schema of its arguments."""

    unsupported = ("defer_loading",)
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")] | None = None
    input_schema: JsonObject | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True):
    """Whether and which tools are called; `name` goes with "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, frozen=True):
    """Whether the model thinks, with "enabled" how many tokens at most, and whether it shows."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=INT32)] | None = None  # -1 is no limit in chats
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(Part, frozen=True):
    """`effort` is handed to the chat template."""

    unsupported = ("task_budget",)
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: JsonObject | None = None


class CountRequest(Body, frozen=True, kw_only=True):
    """The body of /v1/messages/count_tokens: a conversation."""

    unsupported_fields: ClassVar[Refusals] = MESSAGES
    ignored_fields: ClassVar[frozenset[str]] = SAMPLING_ONLY_FIELDS
    # fmt: off
    messages: Annotated[list[InputMessage], about(
        "Turns of `user`, `assistant` and `system`: a text, or blocks `text`, `document` (of plain "
        "text) and `tool_result` (of the user), `thinking` and `tool_use` (of the assistant). "
        "`redacted_thinking`, `signature`, `is_error` and `cache_control` are taken and say "
        "nothing. A last turn of the assistant goes on from the end of its text: such an answer "
        "has no calls, and no form. Required.")]
    system: Annotated[str | list[TextBlock] | None, about(
        "A text or blocks of text, before all messages. Default: none.")] = None
    tools: Annotated[Annotated[list[InputTool], Meta(max_length=MAX_TOOLS)] | None, about(
        "A list of `{\"name\", \"description\", \"input_schema\"}`. Tools of Anthropic's servers "
        "are refused. Default: none.")] = None
    tool_choice: Annotated[MessagesToolChoice | None, about(
        '`{"type": "auto"}`, `none`, `any` or `tool` with a `name`. '
        "`disable_parallel_tool_use`: only the first call is returned. Default: `auto`.")] = None
    thinking: Annotated[ThinkingOptions | None, about(
        "`{\"type\": \"enabled\"}`, `adaptive` or `disabled` is the template's `enable_thinking`. "
        "`budget_tokens` bounds the reasoning. `display`: `summarized` shows all of it, with "
        "`omitted` its blocks are empty. Default: the template's.")] = None
    output_config: Annotated[OutputConfig | None, about(
        "`effort` is handed to the chat template as `reasoning_effort`, to that of gpt-oss the "
        'nearest one that it knows. `format`, `{"type": "json_schema", "schema"}`, is the '
        "form of the answer. Default: none.")] = None
    chat_template_kwargs: ChatTemplateKwargs = None
    # fmt: on


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of /v1/messages."""

    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    # fmt: off
    max_tokens: Annotated[Int32, about("The most output tokens, reasoning included. Required.")]
    stop_sequences: Annotated[list[str] | None, about(
        "A text, or up to 16 of at most 1,024 characters each, that ends the answer. It is not "
        "part of the answer. Default: none.")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stream: Stream = None
    metadata: Annotated[JsonObject | None, about("Is taken, and changes nothing.")] = None
    seed: Seed = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    extra_key: ExtraKey = None
    # fmt: on


def to_chat(request: MessagesRequest, thinks: bool, by_effort: bool = False) -> ChatRequest:
    """The body of a chat that asks for the same. ApiError 400.

    Arguments:
    - thinks: the model has reasoning; else a budget of reasoning has no effect
    - by_effort: a budget bounds reasoning as a reasoning effort
    """
    thinking, budget = request.thinking, None
    if thinks and not by_effort and thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
    return msgspec.structs.replace(
        to_prompt_chat(request, by_effort),
        thinking_token_budget=budget,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stream=request.stream,
        seed=request.seed,
        priority=request.priority,
        timeout=request.timeout,
        cache_salt=request.cache_salt,
        extra_key=request.extra_key,
    )


def to_prompt_chat(request: CountRequest, by_effort: bool = False) -> ChatRequest:
    """The chat without sampling parameters; `by_effort` as in to_chat. ApiError 400."""
    choice, messages = request.tool_choice, _messages(request)
    continues = messages[-1].role == "assistant"
    single_call = choice is not None and choice.disable_parallel_tool_use
    chat = ChatRequest(
        messages=messages,
        model=request.model,
        chat_template_kwargs=_arguments(request, by_effort),
        tools=_tools(request),
        tool_choice=_choice(choice),
        parallel_tool_calls=False if single_call else None,
        continue_final_message=continues or None,
        add_generation_prompt=False if continues else None,
    )
    form = request.output_config.format if request.output_config is not None else None
    if form is None:
        return chat
    if continues:
        where = "output_config.format"
        message = f"{where}: what goes on from the assistant's last message has no form of its own"
        raise ApiError(400, message, where, "unsupported_parameter")
    response_format = ResponseFormat("json_schema", JsonSchema(form.schema, "answer"))
    return msgspec.structs.replace(chat, response_format=response_format)


def _arguments(request: CountRequest, by_effort: bool) -> JsonObject | None:
    """Variables of the template; those that a client names itself win."""
    arguments: JsonObject = {}
    if request.thinking is not None:
        arguments["enable_thinking"] = request.thinking.type != "disabled"
    effort = request.output_config.effort if request.output_config is not None else None
    if by_effort:
        effort = _effort(effort, request.thinking)
    if effort is not None:
        arguments["reasoning_effort"] = effort
    return {**arguments, **(request.chat_template_kwargs or {})} or None


def _effort(
    effort: str | None, thinking: ThinkingOptions | None
) -> Literal["low", "medium", "high"] | None:
    """The nearest of three to the effort, else to the budget. None: the template's default."""
    if effort in ("low", "medium"):
        return effort
    if effort is not None:
        return "high"
    if thinking is None or thinking.type == "adaptive":
        return None
    budget = thinking.budget_tokens or 0
    if thinking.type == "disabled" or budget < LOW_EFFORT_BUDGET:
        return "low"
    return "medium" if budget < MEDIUM_EFFORT_BUDGET else "high"


def _tools(request: CountRequest) -> list[Tool] | None:
    if request.tools is None:
        return None
    tools: list[Tool] = []
    for i, tool in enumerate(request.tools):
        if tool.type not in (None, "custom"):
            where = f"tools[{i}].type"
            message = f"{where}: {tool.type[:100]!r} is not supported, only 'custom' is"
            raise ApiError(400, message, where, "unsupported_parameter")
        name = required(tool.name, f"tools[{i}].name")
        function = Function(name, tool.description, tool.input_schema, tool.strict)
        tools.append(Tool("function", function))
    return tools


def _choice(choice: MessagesToolChoice | None) -> Choice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            message = "tool_choice.name must be given"
            raise ApiError(400, message, "tool_choice.name", "invalid_value")
        return ToolChoice("function", Chosen(choice.name))
    return "required" if choice.type == "any" else choice.type


def _messages(request: CountRequest) -> list[ChatMessage]:
    count = len(request.messages)
    if not 0 < count <= MAX_MESSAGES:
        reason = f"be at most {MAX_MESSAGES}, not {count}" if count else "not be empty"
        raise ApiError(400, f"messages must {reason}", "messages", "invalid_value")
    conversation = ConversationBuilder()
    if request.system:
        conversation.add_message("system", _texts(request.system, "system"))
    for i, message in enumerate(request.messages):
        _add_message(conversation, message, f"messages[{i}].content")
    messages = conversation.messages()
    _check_last_message(messages[-1], f"messages[{count - 1}].content")
    return messages


def _check_last_message(last: ChatMessage, where: str) -> None:
    """ApiError 400 if the last message is the assistant's and has no text to continue."""
    if last.role != "assistant" or (last.content and not last.tool_calls):
        return
    why = "its calls have no tool_result" if last.tool_calls else "there is no text to go on from"
    message = f"{where}: the last message is the assistant's, and {why}"
    raise ApiError(400, message, where, "invalid_value")


def _add_message(conversation: ConversationBuilder, message: InputMessage, where: str) -> None:
    if isinstance(message.content, str):
        conversation.add_message(message.role, [message.content])
        return
    texts: list[str] = []
    for j, block in enumerate(message.content):
        here = f"{where}[{j}]"
        if block.type == "text":
            texts.append(required(block.text, f"{here}.text"))
            continue
        if block.type == "document" and message.role == "user":
            texts.append(_document(block, here))
            continue
        if texts:
            conversation.add_message(message.role, texts)
            texts = []
        _BLOCK_HANDLERS.get((message.role, block.type), _refuse_block)(conversation, block, here)
    if texts or not message.content:
        conversation.add_message(message.role, texts)


def _add_thinking(conversation: ConversationBuilder, block: MessageBlock, where: str) -> None:
    conversation.add_reasoning(required(block.thinking, f"{where}.thinking"))


def _skip_redacted_thinking(
    conversation: ConversationBuilder, block: MessageBlock, where: str
) -> None:
    """Reasoning that another server has encrypted cannot be read here."""


def _add_tool_use(conversation: ConversationBuilder, block: MessageBlock, where: str) -> None:
    call_id, name = required(block.id, f"{where}.id"), required(block.name, f"{where}.name")
    conversation.add_tool_call(call_id, name, msgspec.json.encode(block.input or {}).decode())


def _add_tool_result(conversation: ConversationBuilder, block: MessageBlock, where: str) -> None:
    content, here = block.content or "", f"{where}.content"
    texts = [content] if isinstance(content, str) else []
    for j, part in enumerate([] if isinstance(content, str) else content):
        text_of = _document if part.type == "document" else _text
        texts.append(text_of(part, f"{here}[{j}]"))
    conversation.add_tool_result(required(block.tool_use_id, f"{where}.tool_use_id"), texts)


def _refuse_block(conversation: ConversationBuilder, block: MessageBlock, where: str) -> None:
    message = f"{where}.type: {block.type[:100]!r} is not supported in a message of this role"
    raise ApiError(400, message, f"{where}.type", "unsupported_parameter")


_BLOCK_HANDLERS = {
    ("assistant", "thinking"): _add_thinking,
    ("assistant", "redacted_thinking"): _skip_redacted_thinking,
    ("assistant", "tool_use"): _add_tool_use,
    ("user", "tool_result"): _add_tool_result,
}


def _document(block: TextBlock, where: str) -> str:
    """The text that a model sees for a document: tags around its title, its context and its
    text."""
    citations = block.citations
    if citations is not None and not isinstance(citations, list) and citations.enabled:
        param = f"{where}.citations"
        message = f"{param}: citations are not supported by this server"
        raise ApiError(400, message, param, "unsupported_parameter")
    param = f"{where}.source"
    source = required(block.source, param)
    if source.type == "text":
        if source.media_type not in (None, "text/plain"):
            param = f"{param}.media_type"
            message = f"{param}: {source.media_type[:100]!r} is not supported, text/plain is"
            raise ApiError(400, message, param, "unsupported_parameter")
        text = required(source.data, f"{param}.data")
    elif source.type == "content":
        content = required(source.content, f"{param}.content")
        text = "\n\n".join(_texts(content, f"{param}.content"))
    else:
        message = f"{param}.type: {source.type[:100]!r} is not supported, 'text' and 'content' are"
        raise ApiError(400, message, f"{param}.type", "unsupported_parameter")
    head = [
        f"<{name}>{value}</{name}>"
        for name, value in (("title", block.title), ("context", block.context))
        if value
    ]
    return "\n".join(("<document>", *head, text, "</document>", ""))


def _texts(content: str | Sequence[SourceBlock], where: str) -> list[str]:
    """The texts of a source's blocks. Raises ApiError for a block that is no text."""
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{j}]") for j, block in enumerate(content)]


def _text(block: SourceBlock, where: str) -> str:
    if block.type != "text":
        param = f"{where}.type"
        message = f"{param}: {block.type[:100]!r} is not supported, only 'text' is"
        raise ApiError(400, message, param, "unsupported_parameter")
    return required(block.text, f"{where}.text")


OVERLOADED = 529
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormatter:
    """Formats responses of /v1/messages. `omit_reasoning`: thinking blocks are empty. `request_id`:
    of the response's header.
    """

    def __init__(
        self,
        metadata: ResponseMetadata,
        omit_reasoning: bool = False,
        request_id: str | None = None,
    ) -> None:
        self._metadata = metadata
        self._request_id = request_id
        self._omit_reasoning = omit_reasoning

    def start_events(self, prompt_tokens: int) -> Iterator[JsonObject]:
        usage = _full_usage(TokenUsage(prompt_tokens))
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def block_events(self, step: BlockEvent, logprobs: list[JsonValue]) -> Iterator[JsonObject]:
        block = step.block
        if step.action == "more":
            if self._omit_reasoning and block.kind == "reasoning":
                return
            kind, field = DELTAS[block.kind]
            yield {
                "type": "content_block_delta",
                "index": block.index,
                "delta": {"type": kind, field: step.text},
            }
        elif step.action == "open":
            empty = OutputBlock(block.kind, block.index, block.call_index, block.name)
            text_of = self._content(empty)
            yield {"type": "content_block_start", "index": block.index, "content_block": text_of}
        else:
            yield {"type": "content_block_stop", "index": block.index}

    def end_events(self, blocks: OutputBlocks, end: ResponseEnd) -> Iterator[JsonObject]:
        reason, sequence = _stop_reason(blocks, end)
        yield {
            "type": "message_delta",
            "delta": _stop_fields(reason, sequence),
            "usage": _usage(end.usage),
        }
        yield {"type": "message_stop"}

    def full_response(self, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        content: list[JsonValue] = [self._content(block) for block in blocks.all]
        return self._message(content, *_stop_reason(blocks, end), _full_usage(end.usage))

    def error_event(self, error: ApiError, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        return error_object(error, self._request_id)

    def _message(
        self, content: list[JsonValue], reason: str | None, sequence: str | None, usage: JsonObject
    ) -> JsonObject:
        return {
            "id": self._metadata.id,
            "type": "message",
            "role": "assistant",
            "model": self._metadata.model,
            "content": content,
            **_stop_fields(reason, sequence),
            "usage": usage,
        }

    def _content(self, block: OutputBlock) -> JsonObject:
        if block.kind == "content":
            return {"type": "text", "text": block.text, "citations": None}
        if block.kind == "reasoning":
            text = "" if self._omit_reasoning else block.text
            return {"type": "thinking", "thinking": text, "signature": ""}
        call_id = self._metadata.call_id(0, block.call_index, block.name)
        if call_id.startswith("call_"):
            call_id = f"toolu_{call_id.removeprefix('call_')}"
        given = _tool_input(block.text)
        call: JsonObject = {"type": "tool_use", "id": call_id, "caller": {"type": "direct"}}
        return {**call, "name": block.name, "input": given}


def _tool_input(text: str) -> JsonObject:
    """The arguments of a call. If they are no JSON object, cut off perhaps, their text stands under
    a key that no tool knows."""
    raw = text.encode("utf-8", "surrogatepass") or b"{}"
    try:
        for _ in prescan(raw, CHAT_LIMITS):
            continue
        return msgspec.json.decode(raw, type=JsonObject)
    except (JsonLimitExceeded, msgspec.DecodeError, UnicodeDecodeError):
        return {"invalid_json": text}


def _stop_reason(blocks: OutputBlocks, end: ResponseEnd) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) of a finished message. After a timeout: as after max_tokens."""
    if end.finish != "stop":
        return "max_tokens", None
    if isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    return ("tool_use" if blocks.has_calls else "end_turn"), None


def _stop_fields(reason: str | None, sequence: str | None) -> JsonObject:
    """The fields that say how a message ended."""
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }


def _usage(usage: TokenUsage) -> JsonObject:
    """`input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "server_tool_use": None,
    }


def _full_usage(usage: TokenUsage) -> JsonObject:
    """With the fields that a message has once."""
    further: JsonObject = {"cache_creation": None, "inference_geo": None, "service_tier": None}
    return {**_usage(usage), **further}


def status_of(error: ApiError) -> int:
    """An error's status here: a server that is full, or not there yet, is overloaded."""
    return OVERLOADED if error.status == 503 else error.status


def error_object(error: ApiError, request_id: str | None = None) -> JsonObject:
    """An error as Anthropic's clients read it; `request_id`: of the header `request-id`."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail: JsonObject = {"type": kind, "message": error.message}
    return {"type": "error", "error": detail, "request_id": request_id}
