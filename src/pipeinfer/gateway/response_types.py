"""Types of answers, for /openapi.json and for tests that compare answers with them.

response_json.py and the modules of the APIs write answers by hand, because the parts that are equal
in all chunks are encoded once. A field that is UNSET may be absent.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pipeinfer.params import JsonObject

Finish = Literal["stop", "length", "abort", "tool_calls", "function_call"]
Stop = str | int | None


class ErrorDetail(msgspec.Struct):
    """`param`: the field that is wrong. `code`: see errors.py."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """An error as OpenAI's clients read it."""

    error: ErrorDetail


class MessageErrorDetail(msgspec.Struct):
    """The kind of an error, and its message."""

    type: str
    message: str


class MessageError(msgspec.Struct):
    """An error as Anthropic's clients read it."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None


class CachedTokens(msgspec.Struct):
    """Cached tokens of a prompt."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    """Reasoning tokens of an answer, without those of the tags."""

    reasoning_tokens: int


class Counts(msgspec.Struct):
    """Tokens, summed over the choices. Only chats count tokens of reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    """`arguments`: JSON, as text."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct):
    """A call of a custom tool; `input` is a text."""

    name: str
    input: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """A message that the model wrote."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """A choice of a chat."""

    index: int
    message: AssistantMessage
    logprobs: JsonObject | None
    finish_reason: Finish
    stop_reason: Stop


class ChatAnswer(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Counts
    prompt_logprobs: list[JsonObject | None] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """A choice of a completion."""

    index: int
    text: str
    logprobs: JsonObject | None
    finish_reason: Finish
    stop_reason: Stop
    prompt_logprobs: list[JsonObject | None] | UnsetType = UNSET


class TextAnswer(msgspec.Struct):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: Counts


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class OutputItem(msgspec.Struct):
    """An item of a response: a message, reasoning or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[JsonObject] | UnsetType = UNSET
    summary: list[JsonObject] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class Response(msgspec.Struct):
    """The answer of /v1/responses; it says the request's fields again."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: JsonObject | None
    incomplete_details: JsonObject | None
    background: bool
    completed_at: int | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: JsonObject
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: JsonObject
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class DeletedResponse(msgspec.Struct):
    """A response that is kept no longer."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class DeletedStream(msgspec.Struct):
    """A stream that is kept no longer."""

    id: str
    object: Literal["stream"]
    deleted: Literal[True]


class InputItems(msgspec.Struct):
    """A page of the items of a response's input."""

    object: Literal["list"]
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ThinkingTokens(msgspec.Struct):
    """Reasoning tokens of a message."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens of a message; `input_tokens` are those that the cache did not have. What is null only
    Anthropic's own servers have."""

    input_tokens: int
    cache_creation: None
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    inference_geo: None
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None
    service_tier: None


class Caller(msgspec.Struct):
    """The caller of a tool: the model."""

    type: Literal["direct"]


class ContentBlock(msgspec.Struct):
    """A text, reasoning or a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    citations: UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    caller: Caller | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: JsonObject | UnsetType = UNSET


class MessageAnswer(msgspec.Struct):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """How long a prompt is."""

    input_tokens: int


class InputTokenCount(msgspec.Struct):
    """How long a response's prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenIds(msgspec.Struct):
    """The ids of a prompt; `max_model_len`: 0 if not known. `token_strs`: as the vocabulary writes
    them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(msgspec.Struct):
    """The tokenizer's configuration, of which more may be there. Tokens: null where there is none.
    `model_max_length`: tokens, null if not known."""

    tokenizer_class: str
    chat_template: str | None
    model_max_length: int | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class PromptText(msgspec.Struct):
    """The text of ids."""

    prompt: str


class EmbeddingResponseData(msgspec.Struct):
    """The vector of a text: numbers, or in base64 as little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct):
    """Vectors, in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingResponseData]
    model: str
    usage: EmbeddingUsage


class ScoreResponseData(msgspec.Struct):
    """How well a pair of texts fits."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(msgspec.Struct):
    """Scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreResponseData]
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct):
    """The text of a document."""

    text: str


class RankedResult(msgspec.Struct):
    """A document; `index`: its place in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct):
    """A model that is served, or an adapter of it. `root`: what it is called here, of an adapter
    its folder; `parent`: of an adapter, the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | UnsetType = UNSET


class Models(msgspec.Struct):
    """All models of the server."""

    object: Literal["list"]
    data: list[ModelCard]


class StageHealth(msgspec.Struct):
    """A process of the pipeline. stage: its id. kv_cache_dtype: of engines, what their pages
    hold."""

    stage: str
    name: str
    group: int
    rank: int
    state: str
    pid: int
    reason: str
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] | UnsetType = UNSET


class PipelineHealth(msgspec.Struct):
    """The state of the whole pipeline."""

    status: Literal["starting", "ready", "degraded", "asleep", "draining"]
    stages: list[StageHealth]


class Readiness(msgspec.Struct):
    """Whether requests are answered."""

    status: str
    reason: str


class Sleeping(msgspec.Struct):
    """Whether a group sleeps."""

    is_sleeping: bool


class Liveness(msgspec.Struct):
    """A body that says that the gateway runs."""

    status: Literal["live"]


class Version(msgspec.Struct):
    """The version of this software."""

    version: str
