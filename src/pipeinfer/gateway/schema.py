"""The bodies of all endpoints as typed structs, and what a body may hold.

Every field that works is here, typed; errors.py has the others. JsonPrescan counts how
deep a body is nested and how many values it holds, before anything is built of it: the raw bytes
are scanned slice by slice, so that an event loop may run between two slices, and the JSON itself is
left to the decoder. Knows no tokenizer and no HTTP library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from pipeinfer.gateway.errors import (
    IGNORED_FIELDS,
    POOLING,
    REFUSED,
    Refusals,
)
from pipeinfer.params import JsonObject, JsonValue

INT32 = 2**31 - 1
# Seconds. The ledgers of three stages keep a request until its time is up; a day is longer than
# any answer takes, and short enough that abandoned requests are forgotten.
MAX_TIMEOUT = 24 * 3600.0
MAX_SALT_CHARS = 1024  # characters; enough for any hash or name, and every stage copies the salt
# Chat templates interpret one message after the other, a tenth of a millisecond each.
MAX_MESSAGES = 10_000

MAX_EFFORT_CHARS = 64  # characters: "minimal", "high" and the like

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

# Deep enough for any conversation and any schema of a tool; far from what recursive decoders,
# encoders and chat templates can take. They fail at about a thousand.
MAX_DEPTH = 64
# Token ids of several prompts of 100,000 each fit; decoding that many takes some 40 ms, in which
# nothing else runs.
MAX_VALUES = 1_000_000
# Lists and objects cost ten times as much as an id.
MAX_CONTAINERS = 100_000
# A member of an object is a key and a value, and five times as much as an id.
MAX_MEMBERS = 100_000
# Chats carry texts. What is free-form in them (arguments of templates, tool calls) is built value
# by value in this stage and again in the next.
MAX_CHAT_VALUES = 100_000


class JsonLimits(NamedTuple):
    """The most that a body may hold.

    Attributes:
    - depth: levels of nesting
    - values: values of any kind
    - containers: lists and objects
    - members: of all objects
    """

    depth: int = MAX_DEPTH
    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS
    members: int = MAX_MEMBERS


CHAT_LIMITS = JsonLimits(values=MAX_CHAT_VALUES)
COMPLETION_LIMITS = JsonLimits()


def about(text: str) -> Meta:
    """The description of a field in the reference and in /openapi.json: Markdown, without links."""
    return Meta(description=text)


# fmt: off
# Fields of several bodies, with what the reference and /openapi.json say of them.
Stream = Annotated[bool | None, about(
    "Whether the answer comes as server-sent events. Default: false.")]
Temperature = Annotated[float | None, about(
    "How even the choice among tokens is. 0 is greedy. At most 100. Default: the checkpoint's "
    "generation_config.json, else 1.0.")]
TopP = Annotated[float | None, about(
    "The likeliest tokens are kept whose probabilities add up to this. Default: the checkpoint's, "
    "else 1.0.")]
TopK = Annotated[Int32 | None, about(
    "So many of the likeliest tokens are kept. 0 or -1 keeps all. Default: the checkpoint's, else "
    "0.")]
MinP = Annotated[float | None, about(
    "Tokens are kept that are at least this share as likely as the likeliest. Default: the "
    "checkpoint's, else 0.0.")]
RepetitionPenalty = Annotated[float | None, about(
    "In [0.01, 100]. The logit of what prompt or output hold is divided by it where the logit is "
    "positive, else multiplied. Default: the checkpoint's, else 1.0.")]
PresencePenalty = Annotated[float | None, about(
    "In [-2, 2]. Taken once off the logit of every token that the output holds. Default: 0.0.")]
FrequencyPenalty = Annotated[float | None, about(
    "In [-2, 2]. Taken off the logit of a token as often as the output holds it. Default: 0.0.")]
Seed = Annotated[int | None, about(
    "Any 64-bit integer. The same seed gives the same noise at each position. Choice `i` has `seed "
    "+ i`. Default: drawn by the server.")]
Stop = Annotated[str | list[str] | None, about(
    "A text, or up to 16 of at most 1,024 characters each, that ends the answer. It is not part of "
    "the answer. Default: none.")]
StopTokenIds = Annotated[list[TokenId] | None, about(
    "Up to 1,024 ids that end the answer, beside the model's own. Default: none.")]
LogitBias = Annotated[dict[TokenId, float] | None, about(
    "At most 1,024 token ids, each with a number in [-100, 100] that is added to its logit before "
    "penalties and temperature. What `min_tokens` holds back stays held back. Default: none.")]
IgnoreEos = Annotated[bool | None, about(
    "The model's own end does not end the answer. Default: false.")]
SkipSpecialTokens = Annotated[bool | None, about("Special tokens have no text. Default: true.")]
IncludeStopStrInOutput = Annotated[bool | None, about(
    "The stop string belongs to the answer. Default: false.")]
Priority = Annotated[Int32 | None, about(
    "Requests with lower numbers are served earlier. Default: 0.")]
Timeout = Annotated[Annotated[float, Meta(ge=0, le=MAX_TIMEOUT)] | None, about(
    "Seconds after which the request ends. More than 0 and at most a day. Default: "
    "`--request-timeout`.")]
CacheSalt = Annotated[Salt | None, about(
    "The request shares cached prefixes only with requests of the same salt. At most 1,024 "
    "characters. Default: empty.")]
ExtraKey = Annotated[Salt | None, about(
    "SGLang's second salt. With both, requests share prefixes only where both are the same. "
    "Default: empty.")]
AddSpecialTokens = Annotated[bool | None, about(
    "Lets the tokenizer add BOS and the like. Default: true.")]
TruncatePromptTokens = Annotated[Int32 | None, about(
    "So many of the prompt's last tokens are kept. -1 keeps as many as leave room for "
    "`max_tokens`, or for one token. Default: all are kept.")]
TruncationSide = Annotated[Literal["left", "right"] | None, about(
    "With `right`, `truncate_prompt_tokens` keeps the first tokens instead. Default: "
    "`left`.")]
ChatTemplateKwargs = Annotated[JsonObject | None, about(
    'Further variables of the chat template, for example `{"enable_thinking": false}`. Default: '
    "none.")]
AddGenerationPrompt = Annotated[bool | None, about(
    "Whether the template opens the assistant's turn. Default: true.")]
ParallelToolCalls = Annotated[bool | None, about(
    "With false, only the first call is returned. Default: true.")]
IncludeReasoning = Annotated[bool | None, about(
    "With false, reasoning is left out. Default: true.")]
EnableThinking = Annotated[bool | None, about(
    "Given to the chat template under this name. `chat_template_kwargs` goes before it. Default: "
    "none.")]
ReasoningEffort = Annotated[Annotated[str, Meta(max_length=MAX_EFFORT_CHARS)] | None, about(
    "Given to the chat template under this name. `none` also says `enable_thinking: false`. At "
    "most 64 characters. gpt-oss knows `low`, `medium` and `high`, and refuses others. Default: "
    "none.")]
Documents = Annotated[list[JsonObject] | None, about(
    "Objects that the chat template is given. Some templates show them to the model. Default: "
    "none.")]
ChatTemplate = Annotated[str | None, about(
    "A Jinja template of at most 65,536 letters, in place of the model's. Refused without "
    "`--trust-request-chat-template`. Default: the model's.")]
ContinueFinalMessage = Annotated[bool | None, about(
    "The last message, an assistant's, is left open and goes on. Only with `add_generation_prompt: "
    "false`. The answer has what is new. Default: false.")]
# fmt: on
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
    # fmt: off
    model: Annotated[str | None, about(
        "The name of the model. Another name than the served one gets 404.")] = None
    # fmt: on


class PoolingBody(Body, frozen=True, kw_only=True):
    """Base of bodies whose answer is no text."""

    unsupported_fields: ClassVar[Refusals] = POOLING
    json_limits: ClassVar[JsonLimits] = COMPLETION_LIMITS
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None


class Generation(Body, frozen=True, kw_only=True):
    """The fields that chats and completions share."""

    # fmt: off
    stream: Stream = None
    stream_options: Annotated[StreamOptions | None, about(
        "Only with `stream`. `include_usage`: one more event has the usage. "
        "`continuous_usage_stats`: every event has the usage so far, without what the cache had. "
        "Default: none.")] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    max_tokens: Annotated[Int32 | None, about(
        "The most output tokens. Default: 16 for completions; as many as fit for chats.")] = None
    max_new_tokens: Annotated[Int32 | None, about(
        "The same, as SGLang calls it. `max_tokens` goes before it.")] = None
    min_tokens: Annotated[Int32 | None, about(
        "No stop token is sampled, and no stop string counts, before so many output tokens. "
        "Default: 0.")] = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    logit_bias: LogitBias = None
    allowed_token_ids: Annotated[list[TokenId] | None, about(
        "Up to 1,024 ids. No other is sampled, not even an id that ends the answer. Default: all "
        "ids.")] = None
    bad_words: Annotated[list[str] | None, about(
        "Up to 128 texts of at most 64 letters that the answer must not have. Each is tokenized as "
        "it is and with a space before it. A word that is spelled with other tokens, or that "
        "begins amid a token, is not found. Default: none.")] = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: TruncationSide = None
    ignore_eos: IgnoreEos = None
    skip_special_tokens: SkipSpecialTokens = None
    include_stop_str_in_output: IncludeStopStrInOutput = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    extra_key: ExtraKey = None
    prompt_logprobs: Annotated[Int32 | None, about(
        "Log-probs of the prompt's tokens with so many alternatives, 0 to 20, in vLLM's form. Not "
        "with `stream`. Default: none.")] = None
    add_special_tokens: Annotated[bool | None, about(
        "Lets the tokenizer add BOS and the like. In chats the template has written them. Default: "
        "true for completions.")] = None
    return_token_ids: Annotated[bool | None, about(
        "Choices have the ids of the output as `token_ids`, and answers those of the prompt as "
        "`prompt_token_ids`. The token that ended the answer is not among them. Default: "
        "false.")] = None
    n: Annotated[Int32 | None, about(
        "Choices of each prompt, at most 128; of a body at most `--max-prompts`. Default: "
        "1.")] = None
    thinking_token_budget: Annotated[Int32 | None, about(
        "The most tokens of reasoning, between `<think>` and `</think>` or the model's own tags. "
        "Then the model is made to go on with its answer. Not with `allowed_token_ids` or "
        "`bad_words`, and not where `continue_final_message` goes on amid reasoning. -1 is none. "
        "Default: without limit.")] = None
    response_format: Annotated[ResponseFormat | None, about(
        'The form of the answer: `{"type": "json_object"}`, or `{"type": "json_schema", '
        '"json_schema": {"schema": {...}}}`. A `schema` may also stand beside either `type`. '
        "Default: text.")] = None
    structured_outputs: StructuredField = None
    guided_json: Annotated[JsonObject | str | None, about(
        "The form of the answer, as older vLLM says it: a JSON schema. Default: none.")] = None
    guided_regex: Annotated[str | None, about(
        "The form of the answer, as older vLLM says it: a regular expression. Default: "
        "none.")] = None
    guided_choice: Annotated[list[str] | None, about(
        "The form of the answer, as older vLLM says it: one of these texts. Default: none.")] = None
    guided_grammar: Annotated[str | None, about(
        "The form of the answer, as older vLLM says it: a grammar in Lark or GBNF. Default: "
        "none.")] = None
    regex: Annotated[str | None, about(
        "The form of the answer, as SGLang says it: a regular expression. Default: none.")] = None
    ebnf: Annotated[str | None, about(
        "The form of the answer, as SGLang says it: a grammar in GBNF. Default: none.")] = None
    json_schema: Annotated[JsonObject | str | None, about(
        "The form of the answer, as SGLang says it: a JSON schema. Default: none.")] = None
    grammar: Annotated[str | None, about(
        "The form of the answer, as llama.cpp says it: a grammar in GBNF. Default: none.")] = None
    format: Annotated[JsonObject | str | None, about(
        'The form of the answer, as Ollama says it: `"json"`, or a schema. Default: '
        "none.")] = None
    # fmt: on


class Part(msgspec.Struct, frozen=True):
    """Base of structs within a body. `unsupported`: fields that change an answer elsewhere, which
    may only be null, false or empty."""

    unsupported: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, to which msgspec adds the place."""
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
    """A message of a conversation. `reasoning` and `thinking`: other servers' names of
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
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


class InputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a custom tool's input: any text, or a text of the `grammar`."""

    type: Literal["text", "grammar"]
    grammar: GrammarFormat | None = None


class CustomTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that takes a text."""

    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class Tool(Part, frozen=True, omit_defaults=True):
    """A function or custom tool that a model may call. `type`: "function" or "custom", and the
    field of that name is given; tools.py refuses others by name."""

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
# fmt: off
StructuredField = Annotated[Structured | None, about(
    "The form of the answer, as vLLM says it: an object with one of `json`, `json_object`, "
    "`regex`, `choice`, `grammar`. Default: none.")]
ChatTools = Annotated[Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None, about(
    'Up to 128 tools that the model may call. Functions: `{"type": "function", "function": '
    '{"name", "description", "parameters"}}`. Custom tools, which take a text: `{"type": '
    '"custom", "custom": {"name", "description", "format"}}`, with a format `{"type": '
    '"text"}` or `{"type": "grammar", "grammar": {"syntax", "definition"}}` of the '
    "syntax `lark` or `regex`. Other types are refused. Default: none.")]
ChatToolChoice = Annotated[Choice | None, about(
    "`auto`: the model is free. `none`: the model is not shown any. `required`: it calls at least "
    'one. `{"type": "function", "function": {"name": "..."}}`, or the same with '
    '`custom`: it calls that one, once. `{"type": "allowed_tools", "allowed_tools": '
    '{"mode": "auto" or "required", "tools": [{"type": "function", "function": '
    '{"name": "..."}}]}}`: it is shown all tools and calls those alone. Default: `auto` with '
    "`tools`.")]
Functions = Annotated[Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None, about(
    "OpenAI's older way of saying `tools`: a list of `name`, `description`, `parameters`. Refused "
    "beside `tools` and `tool_choice`. Default: none.")]
FunctionCall = Annotated[Literal["none", "auto"] | Chosen | None, about(
    'The same for `tool_choice`: `none`, `auto` or `{"name": "..."}`. Default: `auto`.')]
# fmt: on


class ChatRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    # fmt: off
    messages: Annotated[list[ChatMessage], about(
        "The conversation. Roles are `system`, `developer` (becomes `system`), `user`, "
        "`assistant`, `tool` and `function`. Content is a text, or a list of parts of type `text` "
        "or `refusal`. Reasoning is `reasoning_content`, `reasoning` or `thinking`. Required.")]
    logprobs: Annotated[bool | None, about(
        "The log-prob of each output token. Default: false.")] = None
    top_logprobs: Annotated[Int32 | None, about(
        "So many of the likeliest tokens at each position, 0 to 20. Only with `logprobs`. Default: "
        "0.")] = None
    max_completion_tokens: Annotated[Int32 | None, about(
        "The most output tokens. Goes before `max_tokens`.")] = None
    chat_template_kwargs: ChatTemplateKwargs = None
    add_generation_prompt: AddGenerationPrompt = None
    tools: ChatTools = None
    tool_choice: ChatToolChoice = None
    parallel_tool_calls: ParallelToolCalls = None
    include_reasoning: IncludeReasoning = None
    enable_thinking: EnableThinking = None
    reasoning_effort: ReasoningEffort = None
    documents: Documents = None
    chat_template: ChatTemplate = None
    continue_final_message: ContinueFinalMessage = None
    functions: Functions = None
    function_call: FunctionCall = None
    # fmt: on


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """The body of /v1/completions; `prompt` is a text, token ids, or a list of either. `logprobs`:
    how many alternatives; false is as not given."""

    json_limits: ClassVar[JsonLimits] = COMPLETION_LIMITS
    # fmt: off
    prompt: Annotated[str | list[TokenId | str | list[TokenId]], about(
        "A text, a list of token ids, or a list of at most `--max-prompts` of either. Each prompt "
        "gives `n` choices, one prompt after the other. Required.")]
    logprobs: Annotated[Int32 | bool | None, about(
        "The log-prob of each token, with so many alternatives, 0 to 20. False is as not given. "
        "Default: none.")] = None
    echo: Annotated[bool | None, about(
        "The prompt comes before the output, and its log-probs before those of the output. With it "
        "`max_tokens` may be 0. Default: false.")] = None
    best_of: Annotated[Int32 | None, about(
        "So many choices are made, and the `n` best of them shown: those with the highest mean "
        "log-prob of a token. Above `n` not with `stream`. Default: `n`.")] = None
    # fmt: on


# Fields of chats and completions that say how tokens are chosen and shown, and nothing of a prompt.
SAMPLING_ONLY_FIELDS = IGNORED_FIELDS | (
    frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__))
    - PROMPT_FIELDS
)


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """The body of /tokenize; either `prompt` or `messages` is given. Fields with which a chat is
    only sampled are ignored, so that a chat's body can be counted."""

    ignored_fields: ClassVar[frozenset[str]] = SAMPLING_ONLY_FIELDS
    # fmt: off
    prompt: Annotated[str | None, about("A text. Either it or `messages` is given.")] = None
    messages: Annotated[list[ChatMessage] | None, about(
        "A chat, rendered by the chat template.")] = None
    return_token_strs: Annotated[bool | None, about(
        "`token_strs` has the tokens as the vocabulary writes them. Default: false.")] = None
    add_special_tokens: Annotated[bool | None, about(
        "Lets the tokenizer add BOS and the like. Default: true for a `prompt`.")] = None
    add_generation_prompt: AddGenerationPrompt = None
    chat_template_kwargs: ChatTemplateKwargs = None
    tools: ChatTools = None
    tool_choice: ChatToolChoice = None
    chat_template: ChatTemplate = None
    continue_final_message: ContinueFinalMessage = None
    documents: Documents = None
    enable_thinking: EnableThinking = None
    reasoning_effort: ReasoningEffort = None
    functions: Functions = None
    function_call: FunctionCall = None
    # fmt: on


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """The body of /detokenize."""

    ignored_fields: ClassVar[frozenset[str]] = SAMPLING_ONLY_FIELDS
    json_limits: ClassVar[JsonLimits] = COMPLETION_LIMITS
    # fmt: off
    tokens: Annotated[list[TokenId], about("Token ids; as many as the body can hold. Required.")]
    skip_special_tokens: Annotated[bool | None, about(
        "Special tokens have no text. Default: false.")] = None
    # fmt: on


# ------------------------------------------------------------------------------- the JSON pre-scan

SLICE_BYTES = 128 * 1024  # bytes between two iterations of the loop; the worst take 5 ms

MAX_BRACKETS_ONE_BY_ONE = 32  # brackets that are looked at one by one: most bodies have a handful

_OPENING, _CLOSING = b"[{", b"]}"
_NOT_STRUCTURE = bytes(c for c in range(256) if c not in b"[]{},:")
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(_OPENING)], _STEPS[list(_CLOSING)] = 1, -1


class JsonLimitExceeded(ValueError):
    """A limit is exceeded; the message says which, for the client."""


class JsonPrescan:
    """The counts so far. In invalid JSON they are what brackets, commas and colons outside of
    strings amount to.

    Attributes:
    - depth: deepest level of nesting
    - containers: lists and objects that were opened
    - values: 1, and 1 more for each comma and each container; so an empty list counts twice
    - members: of all objects
    """

    def __init__(self, bounds: JsonLimits) -> None:
        self._bounds = bounds
        self.depth = self.containers = self.members = 0
        self.values = 1
        self._level = 0
        self._in_string = False
        self._escaping = False  # the last byte was a backslash that escapes the next one

    def feed(self, chunk: bytes) -> None:
        """Scans the next bytes, cut anywhere. JsonLimitExceeded at the first limit exceeded."""
        structure = self._structure(chunk)
        commas = structure.count(b",")
        brackets = structure.translate(None, b",:")
        self.values += commas
        self.members += structure.count(b":")
        if brackets:
            opened = brackets.count(b"[") + brackets.count(b"{")
            self._nest(brackets)
            self.containers += opened
            self.values += opened
        self._check()

    def _nest(self, brackets: bytes) -> None:
        if len(brackets) <= MAX_BRACKETS_ONE_BY_ONE:
            for bracket in brackets:
                self._level += 1 if bracket in _OPENING else -1
                self.depth = max(self.depth, self._level)
            return
        levels = np.cumsum(_STEPS[np.frombuffer(brackets, np.uint8)], dtype=np.int64)
        self.depth = max(self.depth, self._level + int(levels.max()))
        self._level += int(levels[-1])

    def _check(self) -> None:
        bounds = self._bounds
        if self.depth > bounds.depth:
            raise JsonLimitExceeded(f"the body is nested deeper than {bounds.depth} levels")
        if self.containers > bounds.containers:
            raise JsonLimitExceeded(
                f"the body holds more than {bounds.containers} lists and objects"
            )
        if self.values > bounds.values:
            raise JsonLimitExceeded(f"the body holds more than {bounds.values} values")
        if self.members > bounds.members:
            raise JsonLimitExceeded(f"the body holds more than {bounds.members} members of objects")

    def _structure(self, chunk: bytes) -> bytes:
        """The brackets, commas and colons of `chunk` that are outside of strings."""
        if self._escaping:
            chunk = b"\\" + chunk
            self._escaping = False
        if b"\\" in chunk:  # outside of strings it is an error, which the decoder finds
            chunk = chunk.replace(b"\\\\", b"")
            self._escaping = chunk.endswith(b"\\")
            chunk = chunk.replace(b'\\"', b"")
        if b'"' not in chunk:
            return b"" if self._in_string else chunk.translate(None, _NOT_STRUCTURE)
        parts = chunk.split(b'"')  # by turns outside and inside
        outside = parts[1::2] if self._in_string else parts[::2]
        self._in_string ^= len(parts) % 2 == 0
        return b"".join(outside).translate(None, _NOT_STRUCTURE)


def prescan(body: bytes | bytearray, bounds: JsonLimits) -> Iterator[None]:
    """Scans all of `body`, one slice each time it is asked to go on. Raises JsonLimitExceeded."""
    scan = JsonPrescan(bounds)
    for start in range(0, len(body), SLICE_BYTES):
        scan.feed(bytes(body[start : start + SLICE_BYTES]))
        if start + SLICE_BYTES < len(body):
            yield
