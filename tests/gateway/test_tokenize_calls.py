"""/tokenize and counts of tokens ask for the prompt that a chat of the same body gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeinfer.gateway.anthropic import (
    CountRequest,
    MessagesRequest,
    to_chat,
    to_prompt_chat,
)
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import Call
from pipeinfer.gateway.requests import RequestDefaults, parse_chat
from pipeinfer.gateway.schema import PROMPT_FIELDS, ChatRequest, TokenizeRequest
from pipeinfer.gateway.serving import CHAT_FIELDS, decode, prompt_call, tokenize_call
from pipeinfer.gateway.tool_parsers.registry import NO_PARSERS, OutputParsers
from pipeinfer.params import SamplingParams

CALLING = RequestDefaults(
    SamplingParams(), parsers=OutputParsers(tool_parser_name="hermes", template_has_tools=True)
)
MUTE = RequestDefaults(SamplingParams(), parsers=NO_PARSERS)
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "thinking": "t", "function_call": {"name": "f"}},
    {"role": "function", "name": "f", "content": "c"},
    {"role": "assistant", "content": "x "},
]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
# Fields that say which ids of a prompt are kept or shown, and are refused by name.
OF_IDS = {"prompt", "truncate_prompt_tokens", "truncation_side", "skip_special_tokens"}
BODIES: list[dict[str, Any]] = [
    {},
    {"messages": HISTORY},
    {"messages": HISTORY, **OPEN},
    {"add_generation_prompt": False},
    {"add_special_tokens": True},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [FUNCTION]},
    {"functions": [FUNCTION], "function_call": "none"},
    {"functions": [FUNCTION], "function_call": {"name": "f"}},
    {"chat_template": "x", "documents": [{"text": "d"}], "enable_thinking": False},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True, "x": [1]}},
]


def tokenized(body: dict[str, Any], terms: RequestDefaults = CALLING) -> Call:
    raw = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    return tokenize_call(decode(raw, TokenizeRequest, print), "t", terms)


def asked(body: dict[str, Any]) -> Call:
    raw = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    [call] = parse_chat(decode(raw, ChatRequest, print), "c", CALLING, "").calls
    return call


def prompt(call: Call) -> tuple[object, ...]:
    return call.chat, call.template_arguments, call.add_special_tokens


def test_every_field_of_which_a_chats_prompt_depends_is_one_of_tokenize() -> None:
    assert PROMPT_FIELDS & set(ChatRequest.__struct_fields__) - OF_IDS <= CHAT_FIELDS
    for name in OF_IDS - {"prompt"}:
        with pytest.raises(ApiError, match=f"^{name} is not supported"):
            tokenized({name: 1})


def test_bodies_here_have_every_field_that_is_shared() -> None:
    assert {name for body in BODIES for name in body} == CHAT_FIELDS - {"model"}


@pytest.mark.parametrize("body", BODIES)
def test_a_chat_is_tokenized_as_it_is_answered(body: dict[str, Any]) -> None:
    call = tokenized(body)
    assert prompt(call) == prompt(asked(body))
    assert call.only_encode and call.return_prompt_ids


@pytest.mark.parametrize("body", [{"tools": [TOOL]}, {"functions": [FUNCTION]}])
def test_tools_are_counted_where_nobody_would_read_calls(body: dict[str, Any]) -> None:
    assert tokenized(body, MUTE).template_arguments == {"tools": [TOOL]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions[1].name"),
        ({"functions": [FUNCTION], "tools": [TOOL]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_a_chat_refuses_is_refused_here_by_the_same_name(
    body: dict[str, Any], param: str
) -> None:
    for ask in (tokenized, asked):
        with pytest.raises(ApiError) as caught:
            ask(body)
        assert caught.value.param == param


MESSAGES: list[dict[str, Any]] = [
    {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    {"tools": [{"name": "f"}], "tool_choice": {"type": "none"}},
    {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x "}]},
    {"chat_template_kwargs": {"x": 1}},
]


@pytest.mark.parametrize("body", MESSAGES)
def test_messages_are_counted_as_they_are_answered(body: dict[str, Any]) -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], **body}
    counted = decode(json.dumps(fields).encode(), CountRequest, print)
    answered = decode(json.dumps({"max_tokens": 1, **fields}).encode(), MessagesRequest, print)
    [call] = parse_chat(to_chat(answered, True), "c", CALLING, "").calls
    assert prompt(prompt_call(to_prompt_chat(counted), "t", CALLING)) == prompt(call)
