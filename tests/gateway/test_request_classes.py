"""Every field of the request classes of vLLM and SGLang is honoured, refused by name, or cannot
change an answer. The lists in request_classes/ are read from their wheels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.gateway import anthropic, responses_api
from pipeinfer.gateway.anthropic import CountRequest, MessagesRequest
from pipeinfer.gateway.errors import IGNORED, REFUSED, ApiError
from pipeinfer.gateway.responses_api import InputTokensRequest, ResponsesRequest
from pipeinfer.gateway.schema import (
    Body,
    ChatMessage,
    ChatRequest,
    Chosen,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    Function,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    Structured,
    TokenizeRequest,
    Tool,
    ToolChoice,
)
from pipeinfer.gateway.serving import decode
from pipeinfer.params import RequestParams

LISTS = {
    path.stem: json.loads(path.read_text())["classes"]
    for path in sorted(Path(__file__).with_name("request_classes").glob("*.json"))
}
# SGLang's /generate is no path here; clients send its fields to /v1/completions.
BODIES: dict[str, type[Body]] = {
    "ChatCompletionRequest": ChatRequest,
    "CompletionRequest": CompletionRequest,
    "ResponsesRequest": ResponsesRequest,
    "AnthropicMessagesRequest": MessagesRequest,
    "AnthropicCountTokensRequest": CountRequest,
    "TokenizeRequest": TokenizeRequest,
    "TokenizeChatRequest": TokenizeRequest,
    "TokenizeCompletionRequest": TokenizeRequest,
    "DetokenizeRequest": DetokenizeRequest,
    "GenerateReqInput": CompletionRequest,
    "SamplingParams": CompletionRequest,
}
# Those servers compute them; no client has them to send.
INTERNAL = frozenset(
    (
        "http_worker_ipc", "is_normalized", "received_time", "skip_clone", "stop_regex_max_len",
        "stop_regex_strs", "stop_str_max_len", "stop_strs",
    )
)  # fmt: skip
WITHIN: dict[str, type[Any]] = {
    "AnthropicContentBlock": anthropic.MessageBlock,
    "AnthropicCustomTool": anthropic.InputTool,
    "AnthropicJSONOutputFormat": anthropic.OutputFormat,
    "AnthropicJsonOutputFormat": anthropic.OutputFormat,
    "AnthropicMessage": anthropic.InputMessage,
    "AnthropicOutputConfig": anthropic.OutputConfig,
    "AnthropicThinkingConfigAdaptive": anthropic.ThinkingOptions,
    "AnthropicThinkingConfigDisabled": anthropic.ThinkingOptions,
    "AnthropicThinkingConfigEnabled": anthropic.ThinkingOptions,
    "AnthropicThinkingParam": anthropic.ThinkingOptions,
    "AnthropicTool": anthropic.InputTool,
    "AnthropicToolChoice": anthropic.MessagesToolChoice,
    "ChatCompletionMessageContentTextPart": ContentPart,
    "ChatCompletionMessageGenericParam": ChatMessage,
    "ChatCompletionMessageUserParam": ChatMessage,
    "ChatCompletionNamedFunction": Chosen,
    "ChatCompletionNamedToolChoiceParam": ToolChoice,
    "ChatCompletionToolsParam": Tool,
    "CustomChatCompletionMessageParam": ChatMessage,
    "Function": Function,
    "FunctionDefinition": Function,
    "JsonSchemaResponseFormat": JsonSchema,
    "RedactedThinkingBlock": anthropic.MessageBlock,
    "ResponseFormat": ResponseFormat,
    "ResponseFunctionCallInputParam": responses_api.InputItem,
    "ResponseInputMessageParam": responses_api.InputItem,
    "ResponseOutputMessage": responses_api.InputItem,
    "ResponseReasoningParam": responses_api.Reasoning,
    "ResponseTool": responses_api.ResponsesTool,
    "StreamOptions": StreamOptions,
    "StructuredOutputsParams": Structured,  # which refuses what it does not have
    "TextBlock": anthropic.MessageBlock,
    "ThinkingBlock": anthropic.MessageBlock,
    "Tool": Tool,
    "ToolChoice": ToolChoice,
    "ToolChoiceFuncName": Chosen,
    "ToolResultBlock": anthropic.MessageBlock,
    "ToolUseBlock": anthropic.MessageBlock,
}
# Fields of those that may be ignored, and why.
IGNORED_WITHIN = {
    "AnthropicContentBlock.data": "of reasoning that another server has encrypted",
    "RedactedThinkingBlock.data": "of reasoning that another server has encrypted",
    "AnthropicContentBlock.signature": "proves to another server who wrote a thought",
    "ThinkingBlock.signature": "proves to another server who wrote a thought",
    "AnthropicContentBlock.tool": "of a tool_reference, whose type is refused",
    "AnthropicContentBlock.tool_name": "of a tool_reference, whose type is refused",
    "Function.key_order": "the order of keys, which is kept",
    "ResponseFunctionCallInputParam.namespace": "of a tool of type namespace, which is refused",
    "ResponseTool.tools": "of a tool of type namespace, which is refused",
    "ToolResultBlock.id": "a result is known by its tool_use_id",
}
HAVE_A_TYPE_THAT_IS_REFUSED = frozenset(
    (
        "AnthropicBashTool", "AnthropicComputerTool", "AnthropicTextEditorTool",
        "AnthropicWebSearchTool", "ChatCompletionContentPartAudioEmbedsParam",
        "ChatCompletionContentPartAudioParam", "ChatCompletionContentPartImageEmbedsParam",
        "ChatCompletionContentPartPromptEmbedsParam", "ChatCompletionContentPartVideoEmbedsParam",
        "ChatCompletionContentPartVideoParam", "ChatCompletionMessageContentAudioInlinePart",
        "ChatCompletionMessageContentAudioURL", "ChatCompletionMessageContentAudioURLPart",
        "ChatCompletionMessageContentImagePart", "ChatCompletionMessageContentImageURL",
        "ChatCompletionMessageContentInputAudio", "ChatCompletionMessageContentThinkingPart",
        "ChatCompletionMessageContentToolReferenceBlock", "ChatCompletionMessageContentVideoPart",
        "ChatCompletionMessageContentVideoURL", "CustomChatCompletionContentToolReferenceParam",
        "CustomThinkCompletionContentParam", "ImageBlock", "LegacyStructuralTag",
        "LegacyStructuralTagResponseFormat", "SearchResultBlock", "StructuralTagResponseFormat",
        "StructuresResponseFormat", "ToolReferenceBlock",
    )
)  # fmt: skip
# Parts of a field that is refused or ignored as a whole, or handed to the template as a whole;
# parts of a message without a type, which they must have; and a class without fields.
AS_A_WHOLE = frozenset(
    (
        "AnthropicTaskBudget", "AudioURL", "CustomChatCompletionContentPILImageParam",
        "CustomChatCompletionContentSimpleAudioParam",
        "CustomChatCompletionContentSimpleImageParam",
        "CustomChatCompletionContentSimpleVideoParam", "FunctionResponse", "PILImage",
        "PromptCacheOptionsParam", "RepetitionDetectionParams", "RequestOutputKind", "ToolCall",
        "VideoURL",
    )
)  # fmt: skip
LEAST: dict[type[Body], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
    InputTokensRequest: {"input": "a"},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    CountRequest: {"messages": [{"role": "user", "content": "a"}]},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}
GENERATING = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)


def fields_of_bodies() -> Iterator[tuple[str, type[Body], str]]:
    for server, classes in LISTS.items():
        for name, fields in classes.items():
            if name in BODIES:
                for field in fields.split():
                    if field not in INTERNAL:
                        yield f"{server}'s {name}.{field}", BODIES[name], field


def read(kind: type[Body], **fields: Any) -> Body:
    unknown: list[str] = []
    body = decode(json.dumps({**LEAST[kind], **fields}).encode(), kind, unknown.extend)
    assert not unknown, unknown
    return body


def is_refused_by_name(kind: type[Body], name: str) -> bool:
    """ApiError of 400 whatever is asked for; false where it is taken."""
    try:
        read(kind, **{name: ["anything", {"but": "nothing"}]})
    except ApiError as error:
        return (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    return False


def test_every_field_of_every_body_is_honoured_refused_by_name_or_cannot_change_an_answer() -> None:
    wrong: list[str] = []
    for what, kind, name in fields_of_bodies():
        honoured = name in kind.__struct_fields__
        ignored = name in kind.ignored_fields and not honoured
        if [honoured, ignored, is_refused_by_name(kind, name)].count(True) != 1:
            wrong.append(what)
    assert not wrong


def test_every_field_within_a_body_is_known_too() -> None:
    unknown: list[str] = []
    for server, classes in LISTS.items():
        for name, fields in classes.items():
            if name in WITHIN and WITHIN[name] is not Structured:
                here = f"{server}'s {name}"
                unknown += [
                    f"{here}.{field}"
                    for field in fields.split()
                    if field not in WITHIN[name].__struct_fields__
                    and f"{name}.{field}" not in IGNORED_WITHIN
                ]
            elif name not in {*WITHIN, *BODIES, *HAVE_A_TYPE_THAT_IS_REFUSED, *AS_A_WHOLE}:
                unknown.append(f"{server}'s {name}")
    assert not unknown


def test_a_field_that_works_at_another_endpoint_is_never_silently_ignored() -> None:
    for kind in GENERATING:
        for name in {name for other in GENERATING for name in other.__struct_fields__}:
            if name not in kind.__struct_fields__ and name not in kind.ignored_fields:
                assert is_refused_by_name(kind, name), (kind, name)


@pytest.mark.parametrize(
    "name",
    [
        "logprob_token_ids",
        "repetition_detection",
        "return_token_offsets",
        "session_id",
        "watermarking",
        "sampling_logprobs_mode",
    ],
)
def test_what_changes_an_answer_elsewhere_and_is_not_built_is_refused(name: str) -> None:
    for kind in GENERATING:
        assert is_refused_by_name(kind, name)


def test_no_field_is_refused_and_ignored_and_each_is_ignored_for_one_reason() -> None:
    names = [name for those in IGNORED.values() for name in those]
    assert len(names) == len(set(names))
    assert not set(names) & REFUSED.keys()


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a", "prefix": True}]}, "prefix"),
        (ChatRequest, {"messages": [{"role": "system", "content": "", "tools": [{}]}]}, "tools"),
        (ChatRequest, {"messages": [{"role": "user", "content": "a", "task": "query"}]}, "task"),
        (
            ChatRequest,
            {"tools": [{"type": "function", "function": {"name": "a"}, "defer_loading": True}]},
            "defer_loading",
        ),
        (
            ChatRequest,
            {"tools": [{"type": "function", "function": {"name": "a", "defer_loading": True}}]},
            "defer_loading",
        ),
        (
            ResponsesRequest,
            {"tools": [{"type": "function", "name": "a", "defer_loading": True}]},
            "defer_loading",
        ),
        (MessagesRequest, {"tools": [{"name": "a", "defer_loading": True}]}, "defer_loading"),
        (MessagesRequest, {"output_config": {"task_budget": {"total": 9}}}, "task_budget"),
    ],
)
def test_a_field_within_a_body_that_is_not_built_is_refused_by_name(
    kind: type[Body], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(kind, **fields)
    error = caught.value
    assert (error.status, error.code) == (400, "unsupported_parameter")
    assert error.param is not None and error.param.endswith(f".{param}")
    assert f"{param} is not supported" in error.message
    neutral = json.loads(
        json.dumps(fields).replace("true", "false").replace("[{}]", "[]")
        .replace('{"total": 9}', "null").replace('"query"', "null")
    )  # fmt: skip
    assert read(kind, **neutral)


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": {"type": "content", "content": "def f():\n    return 1\n"}},
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
        *({"verbosity": verbosity} for verbosity in ("low", "medium", "high")),
    ],
)
def test_what_only_expects_something_of_an_answer_is_ignored(fields: dict[str, Any]) -> None:
    for kind in LEAST:
        assert read(kind, **fields) == read(kind)


@pytest.mark.parametrize("verbosity", ["low", "medium", "high", None])
@pytest.mark.parametrize("kind", [ResponsesRequest, InputTokensRequest])
def test_a_responses_verbosity_is_ignored(kind: type[Body], verbosity: str | None) -> None:
    assert read(kind, text={"verbosity": verbosity}, truncation="auto", input="a")


def test_offline_parameters_that_are_not_built_are_refused_by_name() -> None:
    for server, classes in LISTS.items():
        for name in classes["SamplingParams"].split():
            if name not in RequestParams.__struct_fields__:
                with pytest.raises(TypeError, match=f"'{name}'"):
                    RequestParams(**{name: None})
        assert len(classes["SamplingParams"].split()) > 20, server
