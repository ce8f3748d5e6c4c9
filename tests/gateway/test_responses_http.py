"""/v1/responses through the official client: streams and whole answers agree, and say what fits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.params import StructuredOutputs

TEMPLATE = """{%- if tools %}{{ tools | tojson }} <tool_call>{"name": "f"}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}answer:{% if enable_thinking is false %}<think></think>{% endif %}
{%- endif %}"""
# The pipeline of these tests says again what it is asked.
SAID = json.dumps({"name": "get_weather", "arguments": {"city": "Wien"}})
CALL = f"<tool_call> {SAID} </tool_call>"
ALL = f"<think> hm hm </think> I look. {CALL} {CALL}"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture
async def calling(start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    """A gateway whose model calls tools, and thinks."""
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return await start_gateway(chat_template=str(path))


async def raw(gateway: Gateway, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{gateway.url}/v1/responses", json=body)


async def test_a_text_is_answered_with_its_usage(gateway: Gateway) -> None:
    made = await gateway.client().responses.create(model="test", input="one two", temperature=0.5)
    assert made.output_text == "one two " and made.status == "completed"
    assert made.id.startswith("resp_") and made.object == "response" and made.store is False
    assert made.temperature == 0.5 and made.tool_choice == "auto" and made.error is None
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (2, 2)
    assert made.usage.input_tokens_details.cached_tokens == 2 and made.usage.total_tokens == 4
    [message] = made.output
    assert message.type == "message" and message.status == "completed"


async def test_an_answer_says_the_request_again_and_when_it_was_complete(gateway: Gateway) -> None:
    echoed = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "safety_identifier": "u",
        "prompt_cache_key": "k",
    }
    made = (await raw(gateway, input="one two", **echoed, service_tier="flex")).json()
    assert {name: made[name] for name in echoed} == echoed
    assert (made["service_tier"], made["max_tool_calls"]) == ("default", None)
    assert made["created_at"] <= made["completed_at"] <= made["created_at"] + 60
    params = gateway.pipeline.submits[-1].params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    cut = (await raw(gateway, input="one two three", max_output_tokens=2)).json()
    assert (cut["status"], cut["completed_at"], cut["prompt_cache_key"]) == (
        "incomplete",
        None,
        None,
    )
    assert (cut["presence_penalty"], cut["frequency_penalty"]) == (0.0, 0.0)


async def test_a_stream_says_when_it_was_complete_in_its_last_event(gateway: Gateway) -> None:
    lines = (await raw(gateway, input="one", stream=True)).text.splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    told = [event["response"]["completed_at"] for event in data if "response" in event]
    assert told[:-1] == [None, None] and told[-1] >= data[0]["response"]["created_at"]


async def test_a_stream_tells_every_part_once_and_in_order(gateway: Gateway) -> None:
    stream = await gateway.client().responses.create(model="test", input="one two", stream=True)
    events = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == "one two " and last.response.usage.output_tokens == 2


async def test_thoughts_texts_and_calls_are_items_and_a_stream_adds_up_to_the_whole(
    calling: Gateway,
) -> None:
    ask: Any = {"model": "test", "input": ALL, "tools": [WEATHER]}
    client = calling.client()
    whole = await client.responses.create(**ask)
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = whole.output
    assert reasoning.type == "reasoning" and reasoning.content
    assert reasoning.content[0].text == "hm hm"
    assert message.type == "message" and whole.output_text.strip() == "I look."
    assert first.type == second.type == "function_call"
    assert json.loads(first.arguments) == {"city": "Wien"} and first.name == "get_weather"
    assert first.call_id != second.call_id and first.id != second.id
    assert whole.usage and whole.usage.output_tokens_details.reasoning_tokens == 2
    async with client.responses.stream(**ask) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    names = {event.type for event in events}
    assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= names
    assert "response.function_call_arguments.done" in names

    def shown(made: Any) -> Any:
        ids = {"id", "call_id", "parsed_arguments", "parsed"}
        items = [item.model_dump(exclude_none=True) for item in made.output]
        return [{k: v for k, v in item.items() if k not in ids} for item in items]

    assert [item["type"] for item in shown(final)] == kinds
    assert final.output_text == whole.output_text
    assert final.output[3].arguments == second.arguments


async def test_max_tool_calls_counts_no_functions_and_comes_back(calling: Gateway) -> None:
    client = calling.client()
    ask: Any = {"model": "test", "input": ALL, "tools": [WEATHER], "max_tool_calls": 1}
    made = await client.responses.create(**ask)
    assert made.max_tool_calls == 1
    assert [item.type for item in made.output].count("function_call") == 2
    stream = await client.responses.create(**ask, stream=True)
    events: list[Any] = [event async for event in stream]
    told = [event.response.max_tool_calls for event in events if hasattr(event, "response")]
    assert told == [1, 1, 1]
    calls = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert len(calls) == 2


async def test_parameters_of_chats_work_here_too(gateway: Gateway) -> None:
    fields: Any = {
        "min_p": 0.1, "repetition_penalty": 1.5, "logit_bias": {"7": 1.0}, "stop": "zz",
        "stop_token_ids": [9], "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    answer = await raw(gateway, input="x", extra_key="k", cache_salt="s", **fields)
    assert answer.status_code == 200, answer.text
    submit = gateway.pipeline.submits[-1]
    expected = {**fields, "logit_bias": {7: 1.0}, "stop": ("zz",), "stop_token_ids": (9,)}
    del expected["structured_outputs"]
    assert {name: getattr(submit.params, name) for name in expected} == expected
    assert submit.params.structured_outputs == StructuredOutputs(regex="a+")
    assert submit.cache_salt not in ("", "k", "s")


async def test_thoughts_are_left_out_where_nobody_wants_them(calling: Gateway) -> None:
    answer = await raw(calling, input=ALL, tools=[WEATHER], include_reasoning=False)
    kinds = [item["type"] for item in answer.json()["output"]]
    assert "reasoning" not in kinds and "message" in kinds


async def test_ids_of_a_chat_are_those_that_its_answer_would_begin_with(calling: Gateway) -> None:
    """/tokenize takes what a template is given, as vLLM's and SGLang's do."""
    function = {key: WEATHER[key] for key in WEATHER if key != "type"}
    chat = {
        "messages": [{"role": "user", "content": "hi"}], "documents": [{"a": 1}],
        "tools": [{"type": "function", "function": function}], "enable_thinking": False,
        "reasoning_effort": "low", "chat_template": "x", "chat_template_kwargs": {"b": 2},
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=calling.url, timeout=30) as client:
        for path in ("/v1/chat/completions", "/tokenize"):
            assert (await client.post(path, json=chat)).status_code == 200
    first, second = calling.pipeline.submits[-2:]
    assert second.only_encode and not first.only_encode
    assert first.template_arguments["tools"]
    assert first.template_arguments == second.template_arguments
    assert first.chat == second.chat


async def test_a_conversation_with_calls_reaches_the_template_as_a_chats(calling: Gateway) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    items: Any = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "I ask.", "annotations": []}], "phase": "commentary"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    await calling.client().responses.create(
        model="test", instructions="be kind", input=items, reasoning={"effort": "none"}
    )
    submit = calling.pipeline.submits[-1]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert submit.chat == [
        {"role": "system", "content": "be kind\n\nbe short"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": "I ask.", "reasoning_content": "hm",
            "phase": "commentary",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    assert submit.template_arguments == {"enable_thinking": False}


async def test_what_was_answered_can_be_sent_back_as_it_is(calling: Gateway) -> None:
    client = calling.client()
    made = await client.responses.create(model="test", input=ALL, tools=[WEATHER])
    back: Any = [{"role": "user", "content": "x"}, *made.output, {"role": "user", "content": "y"}]
    await client.responses.create(model="test", input=back)
    chat = calling.pipeline.submits[-1].chat
    assert chat is not None and [m["role"] for m in chat] == ["user", "assistant", "user"]
    assert chat[1]["reasoning_content"] == "hm hm" and len(chat[1]["tool_calls"]) == 2  # type: ignore


class City(pydantic.BaseModel):
    """What an answer is to be."""

    city: str


async def test_an_answer_of_a_form_is_parsed_by_the_client(gateway: Gateway) -> None:
    made = await gateway.client().responses.parse(
        model="test", input='{"city":"Wien"}', text_format=City
    )
    assert made.output_parsed == City(city="Wien")
    wanted = gateway.pipeline.submits[-1].params.structured_outputs
    assert wanted is not None and wanted.json is not None
    assert json.loads(wanted.json)["properties"]["city"]["type"] == "string"


async def test_a_cut_answer_is_incomplete(gateway: Gateway) -> None:
    made = await gateway.client().responses.create(
        model="test", input="one two three", max_output_tokens=2
    )
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.max_output_tokens == 2 and made.output[0].status == "incomplete"  # type: ignore


async def test_wherever_an_answer_is_cut_its_items_are_complete_or_not_in_all_that_say_so(
    calling: Gateway,
) -> None:
    create, found = calling.client().responses.create, set[tuple[str, ...]]()
    for most in range(1, len(ALL.split()) + 1):
        ask: Any = {"model": "test", "input": ALL, "tools": [WEATHER], "max_output_tokens": most}
        whole = await create(**ask)
        events: list[Any] = [event async for event in await create(**ask, stream=True)]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert events[-1].response.output == done
        statuses = tuple(str(item.status) for item in done)
        assert statuses == tuple(item.status for item in whole.output)
        assert set(statuses[:-1]) <= {"completed"}, "what something follows is complete"
        found.add(statuses)
    assert {("incomplete",), ("completed", "incomplete")} < found


async def test_a_stream_that_breaks_ends_with_response_failed(gateway: Gateway) -> None:
    stream = await gateway.client().responses.create(model="test", input="break it", stream=True)
    last: Any = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed" and "on fire" in last.response.error.message


async def test_a_refusal_before_the_first_token_is_a_plain_error(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client().responses.create(model="test", input="refuse it", stream=True)
    assert caught.value.code == "length"


@pytest.mark.parametrize("path", ["responses", "messages", "messages/count_tokens"])
async def test_bounds_of_bodies_are_those_of_chats(gateway: Gateway, path: str) -> None:
    deep = '{"input": "x", "max_tokens": 1, "messages": [], "metadata": ' + '{"a":' * 70
    many = '{"input": "x", "metadata": {"a": [' + "0," * 100_000 + "0]}}"
    async with httpx.AsyncClient() as client:
        for body, word in ((deep + "1" + "}" * 71, "deeper"), (many, "more than 100000 values")):
            answer = await client.post(f"{gateway.url}/v1/{path}", content=body)
            assert answer.status_code == 400 and word in answer.json()["error"]["message"]
    assert not gateway.pipeline.submits


@pytest.mark.parametrize("path", ["responses", "messages"])
async def test_a_client_that_leaves_ends_its_request(gateway: Gateway, path: str) -> None:
    turns = [{"role": "user", "content": "pause it"}]
    asked = {
        "responses": {"input": "pause it"}, "messages": {"messages": turns, "max_tokens": 9},
    }  # fmt: skip
    body = {**asked[path], "stream": True}
    url = f"{gateway.url}/v1/{path}"
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if "pause" in line:
                break
    abort = await asyncio.wait_for(gateway.pipeline.aborts.get(), 30)
    assert abort.request_id == gateway.pipeline.submits[-1].request_id


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", None),
        ({"input": "x", "conversation": "c"}, "conversation", None),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", None),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type", None),
        ({"input": "x", "include": ["file_search_call.results"]}, "include[0]", None),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}},
         "text.format", "invalid_value"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]},
         "input[0].call_id", "invalid_value"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "x", "max_tool_calls": 0}, "max_tool_calls", "invalid_type"),
        ({"input": "x", "max_tool_calls": 2**31}, "max_tool_calls", "invalid_type"),
        ({"input": "x", "max_tool_calls": "1"}, "max_tool_calls", "invalid_type"),
        ({}, "input", "invalid_type"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(
    calling: Gateway, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = await raw(calling, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["code"] == (code or "unsupported_parameter")
    assert param in error["message"] and "function" not in str(error["param"])


LONG: Any = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a b c d"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"role": "user", "content": "e f g"},
    {"type": "function_call_output", "call_id": "c", "output": "h i"},
    {"role": "assistant", "content": "j"},
    {"role": "developer", "content": "k"},
    {"role": "user", "content": "l m"},
]


@pytest.mark.parametrize(
    ("context", "kept"),
    [
        (20, ["s", "a b c d", None, "e f g", "h i", "j", "k", "l m"]),
        (16, ["s", "a b c d", None, "e f g", "h i", "j", "k", "l m"]),
        (15, ["s", "e f g", "j", "k", "l m"]),
        (9, ["s", "e f g", "j", "k", "l m"]),
        (8, ["s\n\nk", "l m"]),
        (5, ["s\n\nk", "l m"]),
        (4, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_of_what_does_not_fit_the_first_turns_are_left_out_if_asked(
    gateway: Gateway, context: int, kept: list[str | None] | None, stream: bool
) -> None:
    """One token is for the answer. What system and developer say stays, and the last turn."""
    gateway.pipeline.context = context
    body: Any = {"input": LONG, "max_output_tokens": 1, "stream": stream}
    url = f"{gateway.url}/v1/responses"
    made = await gateway.http().post(url, json={**body, "truncation": "auto"})
    if kept is None:
        assert made.json()["error"]["code"] == "context_length_exceeded"
        assert made.json()["error"]["param"] == "input"
    else:
        assert made.status_code == 200, made.text
        assert '"truncation":"auto"' in made.text
        chat = gateway.pipeline.submits[-1].chat or []
        assert [turn["content"] for turn in chat] == kept
        assert not gateway.pipeline.submits[-1].only_encode
        said = len(" ".join(str(turn["content"]) for turn in chat).split())
        assert said + 1 <= context
        counted = {"input": LONG, "truncation": "auto"}
        await gateway.http().post(f"{url}/input_tokens", json=counted)
        chat = gateway.pipeline.submits[-1].chat or []
        assert [turn["content"] for turn in chat] == kept
    for truncation in ({}, {"truncation": "disabled"}, {"truncation": None}):
        made = await gateway.http().post(url, json={**body, **truncation})
        fits = kept is not None and len(kept) == 8
        assert made.status_code == (200 if fits else 400)


async def test_another_refusal_leaves_nothing_out(gateway: Gateway) -> None:
    items = [{"role": "user", "content": "x"}, {"role": "user", "content": "refuse it"}]
    body = {"input": items, "truncation": "auto"}
    made = await gateway.http().post(f"{gateway.url}/v1/responses", json=body)
    assert made.status_code == 400 and len(gateway.pipeline.submits) == 1


async def test_tokens_of_a_response_are_counted_by_the_official_client(calling: Gateway) -> None:
    """Of the prompt that the response gets."""
    client = calling.client()
    asked: Any = {
        "model": "test",
        "input": [{"role": "user", "content": "one two three"}],
        "instructions": "be short",
        "tools": [WEATHER],
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "disabled",
    }
    found = await client.responses.input_tokens.count(**asked)
    assert (found.object, found.input_tokens) == ("response.input_tokens", 3)
    counted = calling.pipeline.submits[-1]
    whole = await client.responses.create(**asked, max_output_tokens=9, temperature=0.5)
    answered = calling.pipeline.submits[-1]
    assert counted.only_encode and not answered.only_encode
    assert (counted.chat, counted.template_arguments) == (
        answered.chat,
        answered.template_arguments,
    )
    assert whole.text is not None and whole.text.verbosity == "low"
    extra: Any = {**asked, "extra_body": {"max_output_tokens": 9, "stream": True, "store": False}}
    assert (await client.responses.input_tokens.count(**extra)).input_tokens == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "maybe"}, "truncation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
async def test_what_cannot_be_counted_is_refused_by_name(
    gateway: Gateway, body: Any, param: str
) -> None:
    made = await gateway.http().post(f"{gateway.url}/v1/responses/input_tokens", json=body)
    assert made.status_code == 400 and made.json()["error"]["param"] == param, made.text


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_what_a_model_refused_to_say_is_said_again(gateway: Gateway, path: str) -> None:
    """In OpenAI's place of a message, or as its part; also beside an empty content."""
    part = [{"type": "refusal", "refusal": "I will not."}]
    said: list[Any] = [{"content": part}]
    if path.endswith("completions"):
        said += [{"content": content, "refusal": "I will not."} for content in (None, "", [])]
    for message in said:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", **message},
                 {"role": "user", "content": "y"}]  # fmt: skip
        body = {"input": turns} if path.endswith("responses") else {"messages": turns}
        made = await gateway.http().post(gateway.url + path, json=body)
        assert made.status_code == 200, made.text
        content: Any = (gateway.pipeline.submits[-1].chat or [])[1]["content"]
        assert content in ("I will not.", [{"type": "text", "text": "I will not."}])
