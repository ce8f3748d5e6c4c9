"""OpenAI's older `functions` over HTTP, through the official client: calls as `function_call`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_pipeline import Gateway, StartGateway

TEMPLATE = "{%- if tools %}{{ tools | tojson }} <tool_call>{'name': f}{% endif %}{{ messages }}"
# The pipeline of these tests says again what it is asked.
ARGUMENTS = {"city": "Wien", "days": [1, 2]}
CALL = f"<tool_call> {json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS})} </tool_call>"
TWO = f"I look. {CALL} {CALL}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}


@pytest.fixture
async def calling(start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    """A gateway whose model calls tools."""
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return await start_gateway(chat_template=str(path))


async def ask(gateway: Gateway, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    made = await gateway.client().chat.completions.create(model="test", messages=messages, **more)
    return made if more.get("stream") else made.choices[0]


async def test_the_one_call_is_told_whole_and_in_deltas_that_add_up(calling: Gateway) -> None:
    choice = await ask(calling, TWO, functions=[WEATHER])
    assert (choice.finish_reason, choice.message.content) == ("function_call", "I look.")
    assert choice.message.tool_calls is None
    call = choice.message.function_call
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    names: list[str] = []
    content, arguments, finish = "", "", None
    async for chunk in await ask(calling, TWO, functions=[WEATHER], stream=True):
        [said] = chunk.choices
        content += said.delta.content or ""
        finish = said.finish_reason or finish
        assert said.delta.tool_calls is None
        if said.delta.function_call is not None:
            names += [said.delta.function_call.name] if said.delta.function_call.name else []
            arguments += said.delta.function_call.arguments
    assert (names, content, finish) == (["get_weather"], "I look.", "function_call")
    assert arguments == call.arguments


async def test_functions_are_shown_to_templates_as_tools(calling: Gateway) -> None:
    await ask(calling, "hello", functions=[WEATHER])
    submit = calling.pipeline.submits[-1]
    assert submit.template_arguments["tools"] == [{"type": "function", "function": WEATHER}]
    await ask(calling, CALL, functions=[WEATHER], function_call="none")
    assert "tools" not in calling.pipeline.submits[-1].template_arguments


async def test_a_function_that_must_be_called_is(calling: Gateway) -> None:
    choice = await ask(calling, CALL, functions=[WEATHER], function_call={"name": "get_weather"})
    assert (choice.message.function_call.name, choice.finish_reason) == ("get_weather", "stop")
    form = calling.pipeline.submits[-1].params.structured_outputs
    assert form is not None and "get_weather" in (form.grammar or "")


async def test_former_calls_and_results_reach_templates_as_those_of_tools(calling: Gateway) -> None:
    called = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    messages: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "get_weather", "content": "rain"},
        {"role": "function", "name": "nobody", "content": None},
        {"role": "user", "content": "and now?"},
    ]
    await calling.client().chat.completions.create(model="test", messages=messages)
    chat: Any = calling.pipeline.submits[-1].chat
    [call] = chat[1]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    assert len(call["id"]) == 9 and call["id"].isalnum()
    said = {"role": "tool", "name": "get_weather", "content": "rain", "tool_call_id": call["id"]}
    assert "function_call" not in chat[1] and chat[2] == said
    assert (chat[3]["role"], chat[3]["content"]) == ("tool", "")
    assert chat[3]["tool_call_id"] != call["id"]


REFUSED: Any = [
    ({"function_call": {"name": "get_weather"}}, "function_call"),
    ({"functions": [WEATHER], "function_call": {"name": "nobody"}}, "function_call"),
    ({"functions": [WEATHER], "function_call": "required"}, "function_call"),
    ({"functions": [WEATHER, WEATHER]}, "functions[1].name"),
    ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [{"name": "a", "parameters": {"x": 2**70}}]}, "functions"),
    ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "tools"),
    ({"functions": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
async def test_what_cannot_be_kept_is_refused_by_name(
    calling: Gateway, more: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(calling, "hello", **more)
    assert refusal.value.param == param
    assert param in refusal.value.message


async def test_a_message_calls_in_one_way(calling: Gateway) -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    message: Any = {"role": "assistant", "tool_calls": [call], "function_call": function}
    with pytest.raises(openai.BadRequestError) as refusal:
        await calling.client().chat.completions.create(model="test", messages=[message])
    assert refusal.value.param == "messages[0].function_call"


async def test_no_functions_are_as_none_given(gateway: Gateway) -> None:
    for more in ({"functions": []}, {"function_call": "none"}, {"function_call": "auto"}):
        choice = await ask(gateway, "hello", extra_body=more)
        assert (choice.message.content, choice.finish_reason) == ("hello ", "stop")


async def test_a_model_that_knows_no_tools_refuses_functions(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot call") as refusal:
        await ask(gateway, "hello", functions=[WEATHER])
    assert refusal.value.param == "functions"
