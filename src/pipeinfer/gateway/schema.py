"""The bodies of all endpoints as typed structs, decoded and checked.

Every field that works is here, typed; unsupported_fields.py has the others. Knows no tokenizer and
no HTTP library.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from pipeinfer.gateway.json_prescan import (
    CHAT_LIMITS,
    COMPLETION_LIMITS,
    JsonLimits,
)
from pipeinfer.gateway.unsupported_fields import (
    IGNORED_FIELDS,
    REFUSED,
    Refusals,
)
from pipeinfer.json_values import JsonObject, JsonValue

INT32 = 2**31 - 1
# Seconds. The ledgers of three stages keep a request until its time is up; a day is longer than
# any answer takes, and short enough that what nobody waits for is forgotten.
MAX_TIMEOUT = 24 * 3600.0
MAX_SALT_CHARS = 1024  # letters; enough for any hash or name, and every stage copies the salt
# Chat templates go over messages one by one in an interpreter, a tenth of a millisecond each.
MAX_MESSAGES = 10_000

MAX_EFFORT_CHARS = 64  # letters: "minimal", "high" and the like

MAX_TOOLS = 128  # OpenAI's; a template writes each of them into the prompt

TokenId = Annotated[int, Meta(ge=0, le=INT32)]
Int32 = Annotated[int, Meta(ge=-INT32, le=INT32)]  # signs are checked with the other ranges
# Fields of chats and completions of which a prompt's tokens depend.
PROMPT_FIELDS = frozenset(
    (
        "messages", "prompt", "add_special_tokens", "add_generation_prompt", "tools", "tool_choice",
        "functions", "function_call", "chat_template", "chat_template_kwargs", "documents",
        "continue_final_message", "enable_thinking", "reasoning_effort", "truncate_prompt_tokens",
        "truncation_side", "skip_special_tokens",
    )
)  # fmt: skip
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: one more chunk at the end that carries the usage. continuous_usage_stats: and
    each chunk says it of what there was so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """A named schema. `strict`: it is refused where an answer cannot be held to all of it."""

    schema: JsonObject | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies; null is the same as absent.

    Class attributes:
    - unsupported_fields: names that would change an answer elsewhere, with their neutral values
    - ignored_fields: names that cannot change an answer, even if `unsupported_fields` has them
    - json_limits: of depth and size
    """

    unsupported_fields: ClassVar[Refusals] = REFUSED
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    json_limits: ClassVar[JsonLimits] = CHAT_LIMITS
    model: str | None = None


class Generation(Body, frozen=True, kw_only=True):
    """The fields that chats and completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: Int32 | None = None
    max_new_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    timeout: Annotated[float, Meta(ge=0, le=MAX_TIMEOUT)] | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    prompt_logprobs: Int32 | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    n: Int32 | None = None
    thinking_token_budget: Int32 | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: JsonObject | str | None = None
    grammar: str | None = None
    format: JsonObject | str | None = None


class Part(msgspec.Struct, frozen=True):
    """Base of what stands within a body and has fields, `unsupported`, that change an answer
    elsewhere: they may be null, false or empty."""

    unsupported: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec tells with the place."""
        for name in self.unsupported:
            if getattr(self, name):
                raise ValueError(f"{name} is not supported by this server")


class ResponseFormat(Part, frozen=True):
    """OpenAI's form of an answer. `schema`: where llama.cpp and others look for it."""

    unsupported = ("value",)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: JsonObject | bool | None = None
    value: JsonValue = None


class Structured(Part, frozen=True, forbid_unknown_fields=True):
    """vLLM's form of an answer; exactly one is given. `grammar`: Lark or GBNF."""

    unsupported = (
        "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern",
        "structural_tag",
    )  # fmt: skip
    json: JsonObject | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # to another compiler, of which there is one here
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | JsonObject | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only the types "text" and "refusal" are served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Part, frozen=True, omit_defaults=True):
    """One message of a conversation. `reasoning` and `thinking`: other servers' names of
    `reasoning_content`. `refusal`: OpenAI's place for what a model says instead of a content."""

    unsupported = ("prefix", "tools", "task", "audio")
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    function_call: JsonObject | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    phase: str | None = None
    prefix: bool | None = None
    tools: list[JsonObject] | None = None
    task: str | None = None
    audio: JsonObject | None = None


class Function(Part, frozen=True, omit_defaults=True):
    """A tool. `parameters`: the JSON schema of its arguments."""

    unsupported = ("defer_loading",)
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class GrammarFormat(msgspec.Struct, frozen=True):
    """What the input of a custom tool is: a text of this grammar."""

    syntax: Literal["lark", "regex"]
    definition: str


class InputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a custom tool: any text, or one of the `grammar`."""

    type: Literal["text", "grammar"]
    grammar: GrammarFormat | None = None


class CustomTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that takes a text."""

    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class Tool(Part, frozen=True, omit_defaults=True):
    """What a model may call. `type`: "function" or "custom", and the field of that name is given;
    tools.py refuses others by name."""

    unsupported = ("defer_loading",)
    type: str
    function: Function | None = None
    custom: CustomTool | None = None
    defer_loading: bool | None = None


class Chosen(msgspec.Struct, frozen=True):
    """The name of a tool."""

    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """A tool of the request, by its name: `type` says which field has it."""

    type: str
    function: Chosen | None = None
    custom: Chosen | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """The tools that may be called ("auto"), or of which some must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)]


class ToolChoice(msgspec.Struct, frozen=True):
    """The tool that must be called; or, with the type "allowed_tools", those that may be."""

    type: str
    function: Chosen | None = None
    custom: Chosen | None = None
    allowed_tools: AllowedTools | None = None


Choice = Literal["none", "auto", "required"] | ToolChoice


class ChatRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=MAX_EFFORT_CHARS)] | None = None
    documents: list[JsonObject] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | Chosen | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/completions; `prompt` is a text, token ids, or a list of either. `logprobs`:
    how many alternatives; false is as not given."""

    json_limits: ClassVar[JsonLimits] = COMPLETION_LIMITS
    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Int32 | bool | None = None
    echo: bool | None = None
    best_of: Int32 | None = None


# Fields of chats and completions that say how tokens are chosen and shown, and nothing of a prompt.
SAMPLING_ONLY_FIELDS = IGNORED_FIELDS | (
    frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__))
    - PROMPT_FIELDS
)


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """The body of /tokenize; either `prompt` or `messages` is given. Fields with which a chat is
    only sampled are ignored, so that a chat's body can be counted."""

    ignored_fields: ClassVar[frozenset[str]] = SAMPLING_ONLY_FIELDS
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    documents: list[JsonObject] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=MAX_EFFORT_CHARS)] | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | Chosen | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """The body of /detokenize."""

    ignored_fields: ClassVar[frozenset[str]] = SAMPLING_ONLY_FIELDS
    json_limits: ClassVar[JsonLimits] = COMPLETION_LIMITS
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
