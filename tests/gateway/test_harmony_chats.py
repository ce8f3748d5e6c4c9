"""Conversations reach a harmony template whole: what it would leave out, misname or refuse is told
in messages that it shows. What it shows as it is comes as transformers renders it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from harmony_tokens import MARKERS, tokenizer
from pipeinfer.gateway import anthropic, responses_api
from pipeinfer.gateway.decoding import decode
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Call
from pipeinfer.gateway.requests import RequestDefaults, parse_chat
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.tool_parsers.harmony import harmony_messages
from pipeinfer.gateway.tool_parsers.registry import choose_parsers
from pipeinfer.params import SamplingParams
from pipeinfer.tokenizer.chats import Chats
from pipeinfer.tokenizer.templates import ChatTemplates
from template_families import HERE

TEMPLATE = (HERE / "published" / "gpt-oss.jinja").read_text()
TERMS = RequestDefaults(SamplingParams(), parsers=choose_parsers("auto", "auto", TEMPLATE))
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
SYSTEM: Any = {"role": "system", "content": "Be brief."}
USER: Any = {"role": "user", "content": "And in Wien & <Rom>?"}
ANSWER: Any = {"role": "assistant", "content": "Fine.", "reasoning_content": "Old thoughts."}
RESULT: Any = {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "ü"}'}


def called(*names: str, **more: Any) -> Any:
    function = [{"name": name, "arguments": json.dumps({"city": name})} for name in names]
    calls = [{"id": f"c{i + 1}", "type": "function", "function": f} for i, f in enumerate(function)]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def now(text: str) -> str:
    return datetime.now().strftime(text)


def rendered(call: Call) -> str:
    assert call.chat is not None
    chats = Chats(MARKERS, ChatTemplates({"default": TEMPLATE}, {}, now))
    return chats.render(call.chat, call.template_arguments).text


def prompt(**fields: Any) -> str:
    """Of a chat, as the tokenizer renders what the gateway sends."""
    request = decode(json.dumps(fields).encode(), ChatRequest, lambda _: None)
    [call] = parse_chat(request, "r", TERMS, "").calls
    return rendered(call)


def of_transformers(messages: list[Any], **fields: Any) -> str:
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=TEMPLATE)
    text = reference.apply_chat_template(
        messages, tokenize=False, **({"add_generation_prompt": True} | fields)
    )
    return str(text)


CHATS: dict[str, list[Any]] = {
    "plain": [USER],
    "system": [SYSTEM, USER],
    "answer": [SYSTEM, USER, ANSWER, USER],
    "call that waits": [USER, called("weather", reasoning_content="I look."), RESULT],
    "call with a preamble": [USER, called("weather", content="I look."), RESULT],
    "call that was answered": [
        USER, called("weather", reasoning_content="I look."), RESULT, ANSWER, USER
    ],
    "calls in turn": [USER, called("weather"), RESULT, called("now"), RESULT],
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER]}, {"reasoning_effort": "high"}])
def test_what_the_template_shows_is_rendered_as_transformers_does(name: str, fields: Any) -> None:
    """There, thoughts are called `thinking`, calls have objects, and what is null is left out."""
    theirs: list[Any] = []
    for message in CHATS[name]:
        plain = {key: value for key, value in message.items() if value is not None}
        if "reasoning_content" in plain:
            plain["thinking"] = plain.pop("reasoning_content")
        if "tool_calls" in plain:
            [call] = plain["tool_calls"]
            function = call["function"]
            function = {**function, "arguments": json.loads(function["arguments"])}
            plain["tool_calls"] = [{**call, "function": function}]
        theirs.append(plain)
    assert prompt(messages=CHATS[name], **fields) == of_transformers(theirs, **fields)


def behind_system(text: str) -> str:
    return text[text.index("<|start|>user") :]


def test_thoughts_and_a_preamble_beside_a_call_are_both_shown() -> None:
    """The template refuses both; an answer of ours has them, and comes back."""
    call = called("weather", reasoning_content="Thought.", content="I look.")
    assert behind_system(prompt(messages=[USER, call, RESULT])).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Thought.\nI look.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "weather"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '"{\\"sky\\": \\"ü\\"}"<|end|><|start|>assistant'
    )


def test_each_of_several_calls_is_shown_with_its_result() -> None:
    """The template shows the first alone, and names results after it."""
    second = {**RESULT, "tool_call_id": "c2", "content": "12:00"}
    call = called("weather", "now", reasoning_content="Thought.")
    for results in ([RESULT, second], [second, RESULT]):
        text = behind_system(prompt(messages=[USER, call, *results]))
        assert text.count("Thought.") == 1
        parts = text.split("<|start|>")[2:-1]
        assert [part.partition("<|")[0] for part in parts] == [
            "assistant",
            "assistant to=functions.weather",
            "functions.weather to=assistant",
            "assistant to=functions.now",
            "functions.now to=assistant",
        ]
        assert "sky" in parts[2] and "12:00" in parts[4]


def test_no_result_is_lost_whatever_its_call_is_named() -> None:
    stray = {**RESULT, "tool_call_id": "c9", "content": "stray"}
    same = {**RESULT, "content": "again"}
    text = prompt(messages=[USER, called("weather", "now"), stray, RESULT, same])
    assert [text.count(said) for said in ("stray", "sky", "again")] == [1, 1, 1]


def test_all_that_the_system_says_is_shown() -> None:
    """The template shows the first message of it alone."""
    developer = {"role": "developer", "content": [{"type": "text", "text": "No lists."}]}
    for messages in ([SYSTEM, developer, USER, USER], [SYSTEM, USER, developer, USER]):
        text = prompt(messages=messages)
        assert "# Instructions\n\nBe brief.\n\nNo lists.\n\n<|end|><|start|>user" in text
        assert text.count("<|start|>user") == 2


def test_tools_need_no_description() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    text = prompt(messages=[USER], tools=[bare])
    assert "// \ntype now = () => any;" in text


def test_a_final_message_goes_on_where_it_ends() -> None:
    goes_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    text = prompt(messages=[USER, {"role": "assistant", "content": "It is"}], **goes_on)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>It is")
    with pytest.raises(ApiError, match="calls tools does not go on"):
        prompt(messages=[USER, called("weather", content="It is")], **goes_on)


def test_a_chat_without_calls_stays_as_it_is() -> None:
    chat: list[Any] = [SYSTEM, USER, ANSWER, USER]
    assert harmony_messages(chat) == chat
    assert harmony_messages([USER, {**ANSWER, "tool_calls": []}]) == [USER, ANSWER]


def of_message(**fields: Any) -> str:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = decode(json.dumps(body).encode(), anthropic.MessagesRequest, lambda _: None)
    [call] = parse_chat(anthropic.to_chat(request, True, True), "r", TERMS, "").calls
    return rendered(call)


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "high"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "high"),
    ],
)
def test_messages_ask_for_an_effort_by_name_or_by_budget(fields: Any, effort: str) -> None:
    assert f"Reasoning: {effort}\n" in of_message(**fields)


def test_responses_ask_for_an_effort_that_there_is() -> None:
    def of_response(effort: str) -> str:
        body = {"input": "Hi", "reasoning": {"effort": effort}}
        kind = responses_api.ResponsesRequest
        request = decode(json.dumps(body).encode(), kind, lambda _: None)
        [call] = parse_chat(responses_api.to_chat(request), "r", TERMS, "").calls
        return rendered(call)

    for effort in ("low", "medium", "high"):
        assert f"Reasoning: {effort}\n" in of_response(effort)
    for effort in ("minimal", "xhigh"):
        with pytest.raises(ApiError, match="must be one of low, medium, high"):
            of_response(effort)
