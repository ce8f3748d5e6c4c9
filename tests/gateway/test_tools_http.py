"""Tools and thoughts over HTTP, through the official client: whole answers and streams agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.params import ReasoningState

TEMPLATE = """{%- if tools %}{{ tools | tojson }} <tool_call>{"name": "f"}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}answer:{% if enable_thinking is false %}<think></think>{% endif %}
{%- endif %}"""
SPECIAL = "{{ tools }}[TOOL_CALLS]{{ messages }}"
# The pipeline of these tests says again what it is asked.
ARGUMENTS = {"city": "Wien", "days": [1, 2]}
SAID = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
CALL = f"<tool_call> {SAID} </tool_call>"
TWO = f"I look. {CALL} {CALL}"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def user(content: str) -> Any:
    return [{"role": "user", "content": content}]


@pytest.fixture
async def calling(start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    """A gateway whose model calls tools, and thinks."""
    return await with_template(start_gateway, tmp_path, TEMPLATE)


async def with_template(start: StartGateway, folder: Path, text: str, **more: Any) -> Gateway:
    path = folder / "chat.jinja"
    path.write_text(text)
    return await start(chat_template=str(path), **more)


async def ask(gateway: Gateway, text: str, **more: Any) -> Any:
    client = gateway.client()
    return (
        await client.chat.completions.create(model="test", messages=user(text), **more)
    ).choices[0]


async def streamed(gateway: Gateway, text: str, **more: Any) -> dict[str, Any]:
    """The sum of a stream's deltas."""
    stream = await gateway.client().chat.completions.create(
        model="test", messages=user(text), stream=True, **more
    )
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    async for chunk in stream:
        [choice] = chunk.choices
        found["content"] += choice.delta.content or ""
        found["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for call in choice.delta.tool_calls or ():
            if call.id is not None:  # the first delta of a call says all but its arguments
                assert call.index == len(found["calls"])
                assert (call.type, call.function.arguments) == ("function", "")
                found["calls"].append([call.id, call.function.name, ""])
            else:
                found["calls"][call.index][2] += call.function.arguments
        found["finish"] = found["finish"] or choice.finish_reason
    return found


async def test_calls_are_told_whole_and_in_deltas_that_add_up(calling: Gateway) -> None:
    choice = await ask(calling, TWO, tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    found = await streamed(calling, TWO, tools=[WEATHER], tool_choice="auto")
    assert (found["content"], found["finish"]) == ("I look.", "tool_calls")
    whole = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert whole == [(name, arguments) for _, name, arguments in found["calls"]]
    assert [json.loads(arguments) for _, arguments in whole] == [ARGUMENTS, ARGUMENTS]
    ids = [call.id for call in choice.message.tool_calls]
    assert len({*ids, *(call_id for call_id, *_ in found["calls"])}) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


async def test_an_answer_that_is_only_a_call_has_no_content(calling: Gateway) -> None:
    choice = await ask(calling, CALL, tools=[WEATHER])
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


async def test_an_answer_cut_in_a_call_ends_by_length(calling: Gateway) -> None:
    choice = await ask(calling, CALL, tools=[WEATHER], max_tokens=5)
    assert choice.finish_reason == "length"
    found = await streamed(calling, CALL, tools=[WEATHER], max_tokens=5)
    assert found["finish"] == "length"


async def test_only_one_call_where_parallel_ones_are_not_wanted(calling: Gateway) -> None:
    more: Any = {"tools": [WEATHER], "parallel_tool_calls": False}
    assert len((await ask(calling, TWO, **more)).message.tool_calls) == 1
    assert len((await streamed(calling, TWO, **more))["calls"]) == 1


async def test_without_tools_nothing_is_read_as_a_call(calling: Gateway) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        choice = await ask(calling, CALL, **more)
        assert (choice.message.content, choice.message.tool_calls) == (CALL + " ", None)
        assert "tools" not in calling.pipeline.submits[-1].template_arguments


async def test_tools_go_to_the_tokenizer_as_objects_and_arguments_of_calls_as_they_came(
    calling: Gateway,
) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}  # fmt: skip
    odd = {"id": "call_2", "type": "function", "function": {"name": "x", "arguments": "no JSON"}}
    deep = {"id": "c", "type": "function", "function": {"name": "x", "arguments": "[" * 5000}}
    await calling.client().chat.completions.create(
        model="test",
        tools=[WEATHER],
        messages=[
            *user("hello"),
            {"role": "assistant", "tool_calls": [call, odd, deep]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            *user("and now?"),
        ],
    )
    submit = calling.pipeline.submits[-1]
    assert submit.template_arguments["tools"] == [WEATHER]
    chat: Any = submit.chat
    first, second, third = (one["function"]["arguments"] for one in chat[1]["tool_calls"])
    assert (first, second, third) == (json.dumps(ARGUMENTS), "no JSON", "[" * 5000)
    assert chat[2] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


async def test_special_tokens_are_kept_where_calls_are_told_by_them(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = await with_template(start_gateway, tmp_path, SPECIAL)
    text = "[TOOL_CALLS] get_weather [ARGS] " + json.dumps(ARGUMENTS)
    choice = await ask(gateway, text, tools=[WEATHER])
    [call] = choice.message.tool_calls
    assert len(call.id) == 9 and call.id.isalnum()
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert not gateway.pipeline.submits[-1].params.skip_special_tokens
    await ask(gateway, text)
    assert gateway.pipeline.submits[-1].params.skip_special_tokens


async def test_thoughts_stand_beside_the_content(calling: Gateway) -> None:
    text = "<think> so and so </think> Yes, indeed."
    choice = await ask(calling, text)
    assert choice.message.content == "Yes, indeed. "
    assert choice.message.model_extra["reasoning_content"] == "so and so"
    found = await streamed(calling, text)
    assert (found["reasoning"], found["content"]) == ("so and so", "Yes, indeed. ")
    choice = await ask(calling, f"<think> hm </think> {CALL}", tools=[WEATHER])
    assert choice.message.content is None
    assert choice.message.model_extra["reasoning_content"] == "hm"
    assert choice.message.tool_calls[0].function.name == "get_weather"


async def test_thoughts_can_be_left_out(calling: Gateway) -> None:
    text, more = "<think> so </think> Yes.", {"extra_body": {"include_reasoning": False}}
    choice = await ask(calling, text, **more)
    assert choice.message.content == "Yes. "
    assert "reasoning_content" not in choice.message.model_extra
    assert (await streamed(calling, text, **more))["reasoning"] == ""


async def test_an_answer_is_read_from_where_its_prompt_leaves_the_thoughts(
    calling: Gateway,
) -> None:
    """As the tokenizer says of each prompt; whole and streamed."""
    form = {"extra_body": {"guided_regex": "a+"}}
    read: list[tuple[ReasoningState, str, str | None, str]] = [
        ("before", "hm </think> Yes.", None, "hm </think> Yes. "),
        ("before", "<think> hm </think> Yes.", "hm", "Yes. "),
        ("open", "hm </think> Yes.", "hm", "Yes. "),
        ("over", "<think> Yes.", None, "<think> Yes. "),
    ]
    for left, text, reasoning, content in read:
        calling.pipeline.left = left
        message = (await ask(calling, text, **form)).message
        assert message.content == content
        assert message.model_extra.get("reasoning_content") == reasoning
        found = await streamed(calling, text)
        assert (found["reasoning"], found["content"]) == (reasoning or "", content)
    params = calling.pipeline.submits[-2].params
    assert params.structured_outputs is not None and not params.structured_outputs.after


async def test_thoughts_of_the_last_message_have_no_budget(calling: Gateway) -> None:
    async def going_on(text: str) -> Any:
        last: Any = [*user("hello"), {"role": "assistant", "content": text}]
        body = {"continue_final_message": True, "add_generation_prompt": False}
        body |= {"thinking_token_budget": 9}
        client = calling.client()
        return await client.chat.completions.create(model="test", messages=last, extra_body=body)

    await going_on("<think> hm </think> So")
    with pytest.raises(openai.BadRequestError) as refusal:
        await going_on("<think> hm")
    assert refusal.value.param == "thinking_token_budget"


async def test_settings_can_turn_reading_off(start_gateway: StartGateway, tmp_path: Path) -> None:
    more: Any = {"tool_parser": "none", "reasoning_parser": "none"}
    gateway = await with_template(start_gateway, tmp_path, TEMPLATE, **more)
    text = "<think> so </think> Yes. "
    assert (await ask(gateway, text)).message.content == text
    with pytest.raises(openai.BadRequestError, match="cannot call tools"):
        await ask(gateway, CALL, tools=[WEATHER])


def tool(**changes: Any) -> Any:
    return {"type": "function", "function": {"name": "f", **changes}}


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
async def test_a_call_that_must_be_made_ends_as_with_openai(
    calling: Gateway, choice: Any, finish: str
) -> None:
    more: Any = {"tools": [WEATHER], "tool_choice": choice}
    whole = await ask(calling, CALL, **more)
    assert (len(whole.message.tool_calls), whole.finish_reason) == (1, finish)
    assert (await streamed(calling, CALL, **more))["finish"] == finish


REFUSED = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
     "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"x": 2**70})]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param"), REFUSED)
async def test_what_cannot_be_kept_is_refused_by_name(
    calling: Gateway, more: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(calling, "hello", **more)
    assert refusal.value.param == param


async def test_a_model_whose_template_knows_no_tools_refuses_them(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot call tools") as refusal:
        await ask(gateway, "hello", tools=[WEATHER])
    assert refusal.value.param == "tools"


async def test_arguments_of_former_calls_are_bounded(calling: Gateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": "a" * 2**20}}
    with pytest.raises(openai.BadRequestError, match="longer than 1048576 characters"):
        await calling.client().chat.completions.create(
            model="test",
            messages=[{"role": "assistant", "tool_calls": [call, call]}],  # type: ignore[list-item]
        )


async def test_each_of_several_choices_is_read_by_itself(calling: Gateway) -> None:
    found = await calling.client().chat.completions.create(
        model="test", messages=user(TWO), tools=[WEATHER], n=3
    )
    assert all((choice.message.content or "").startswith("I look.") for choice in found.choices)
    ids = [call.id for choice in found.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 6


UNKNOWN = "{{ tools | tojson }}<|tool_call>call:f{a:1}<tool_call|>{{ messages }}"


async def test_tools_in_an_unknown_form_are_refused_by_name_unless_a_call_is_demanded(
    start_gateway: StartGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await with_template(start_gateway, tmp_path, UNKNOWN)
    said = "calls in gemma4, a form that no --tool-parser knows: hermes, "
    assert said in caplog.text
    with pytest.raises(openai.BadRequestError, match=said):
        await ask(gateway, "hello", tools=[WEATHER])
    listed = json.dumps([{"name": "get_weather", "parameters": ARGUMENTS}])
    choice = await ask(gateway, listed, tools=[WEATHER], tool_choice="required")
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    named = await with_template(start_gateway, tmp_path, UNKNOWN, tool_parser="hermes")
    assert (await ask(named, CALL, tools=[WEATHER])).message.tool_calls


KIMI = "{{ tools }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ messages }}"


async def test_ids_of_calls_are_those_that_the_model_s_own_form_would_count(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    """Templates of Kimi-K2 write them into prompts, with the number among all calls."""
    gateway = await with_template(start_gateway, tmp_path, KIMI)
    one = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|> {{}} <|tool_call_end|>"
    text = one.format("get_weather") + one.format("now")
    first = await ask(gateway, text, tools=[WEATHER])
    ids = [call.id for call in first.message.tool_calls]
    assert ids == ["functions.get_weather:0", "functions.now:1"]
    found = await streamed(gateway, text, tools=[WEATHER])
    assert [call_id for call_id, *_ in found["calls"]] == ids
    again = await gateway.client().chat.completions.create(
        model="test", messages=[first.message, *user(text)], tools=[WEATHER]
    )
    calls = again.choices[0].message.tool_calls or ()
    assert [call.id for call in calls] == ["functions.get_weather:2", "functions.now:3"]
