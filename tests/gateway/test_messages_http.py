"""/v1/messages through Anthropic's own client: streams and whole answers agree, errors fit it.

The client takes two seconds to import, so who only collects these tests does not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.gateway.anthropic import error_object
from pipeinfer.gateway.errors import ApiError

if TYPE_CHECKING:
    import anthropic

TEMPLATE = """{%- if tools %}{{ tools | tojson }} <tool_call>{"name": "f"}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}answer:{% if enable_thinking is false %}<think></think>{% endif %}
{%- endif %}"""
# The pipeline of these tests says again what it is asked.
SAID = json.dumps({"name": "get_weather", "arguments": {"city": "Wien"}})
CALL = f"<tool_call> {SAID} </tool_call>"
ALL = f"<think> hm hm </think> I look. {CALL} {CALL}"
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def calling(start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    """A gateway whose model calls tools, and thinks."""
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return await start_gateway(chat_template=str(path))


USER = {"role": "user", "content": "x"}


class Clients:
    """Anthropic's clients of gateways."""

    def __init__(self) -> None:
        self.made: list[anthropic.AsyncAnthropic] = []

    def __call__(self, gateway: Gateway, api_key: str = "none") -> anthropic.AsyncAnthropic:
        import anthropic

        client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=api_key, max_retries=0)
        self.made.append(client)
        return client


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    made = Clients()
    yield made
    for client in made.made:
        await client.close()


def said(text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return {"model": "test", "max_tokens": 100, "messages": messages, **more}


async def raw(gateway: Gateway, path: str = "", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{gateway.url}/v1/messages{path}", json=body)


async def test_a_message_is_answered_with_its_usage(gateway: Gateway, clients: Clients) -> None:
    made = await clients(gateway).messages.create(
        **said("one two"),
        system="be short",
        stop_sequences=["zzz"],
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    assert made.id.startswith("msg_") and made.role == "assistant" and made.type == "message"
    [text] = made.content
    assert text.type == "text" and text.text == "one two "
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    usage = made.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (0, 2, 2)
    submit = gateway.pipeline.submits[-1]
    assert submit.params.top_k == 3 and submit.params.temperature == 0.5
    assert [*submit.params.stop] == ["zzz"]
    assert submit.chat and submit.chat[0] == {"role": "system", "content": "be short"}


async def test_what_there_is_nothing_to_say_about_is_null(gateway: Gateway) -> None:
    whole = (await raw(gateway, **said("one two"))).json()
    assert whole["content"] == [{"type": "text", "text": "one two ", "citations": None}]
    nothing = {"stop_details": None, "container": None}
    assert {name: whole[name] for name in nothing} == nothing
    assert whole["usage"] == {
        "input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
        "output_tokens": 2, "output_tokens_details": {"thinking_tokens": 0},
        "server_tool_use": None, "cache_creation": None, "inference_geo": None,
        "service_tier": None,
    }  # fmt: skip
    lines = (await raw(gateway, **said("one two"), stream=True)).text.splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    begun, delta = data[0]["message"], data[-2]
    assert set(begun) == set(whole) and set(begun["usage"]) == set(whole["usage"])
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None, **nothing}
    once = {"cache_creation", "inference_geo", "service_tier"}
    assert set(delta["usage"]) == set(whole["usage"]) - once


async def test_events_of_a_stream_come_in_order(gateway: Gateway) -> None:
    answer = await raw(gateway, **said("one two"), stream=True)
    lines = answer.text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [
        "message_start", "ping", "content_block_start", "content_block_delta",
        "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [one["type"] for one in data] == names
    assert data[0]["message"]["usage"]["input_tokens"] == 2
    assert data[-2]["usage"]["output_tokens"] == 2
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_thoughts_texts_and_calls_are_blocks_and_a_stream_adds_up_to_the_whole(
    calling: Gateway, clients: Clients
) -> None:
    ask, client = said(ALL, tools=[WEATHER]), clients(calling)
    whole = await client.messages.create(**ask)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    reasoning, text, first, second = whole.content
    assert reasoning.type == "thinking" and reasoning.thinking == "hm hm"
    assert text.type == "text" and text.text.strip() == "I look."
    assert first.type == second.type == "tool_use" and first.input == {"city": "Wien"}
    assert first.name == "get_weather" and first.id != second.id
    assert first.caller is not None and first.caller.type == "direct"
    assert whole.usage.model_dump()["output_tokens_details"]["thinking_tokens"] == 2
    assert whole.stop_reason == "tool_use"
    async with client.messages.stream(**ask) as stream:
        final = await stream.get_final_message()

    def shown(made: Any) -> Any:
        blocks = [block.model_dump() for block in made.content]
        return [{k: v for k, v in block.items() if k != "id"} for block in blocks]

    def plain(made: Any) -> Any:
        keep = ("type", "text", "thinking", "name", "input")
        return [{k: block[k] for k in keep if k in block} for block in shown(made)]

    assert plain(final) == plain(whole) and final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_thoughts_that_are_omitted_leave_empty_blocks(
    calling: Gateway, clients: Clients
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    ask, client = said("<think> hm hm </think> Yes.", thinking=thinking), clients(calling)
    whole = await client.messages.create(**ask)
    reasoning, text = whole.content
    assert reasoning.type == "thinking" and (reasoning.thinking, reasoning.signature) == ("", "")
    assert text.type == "text" and text.text == "Yes. "
    assert whole.usage.model_dump()["output_tokens_details"]["thinking_tokens"] == 2
    async with client.messages.stream(**ask) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].type == "thinking" and final.content[0].thinking == ""
    answer = await raw(calling, **said("x", thinking={"type": "enabled", "display": "all"}))
    assert answer.status_code == 400


async def test_a_conversation_with_calls_reaches_the_template_as_a_chats(
    calling: Gateway, clients: Clients
) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1",
             "content": [{"type": "text", "text": "42"}]},
            {"type": "text", "text": "thanks"},
        ]},
    ]  # fmt: skip
    system: Any = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    await clients(calling).messages.create(
        model="test", max_tokens=9, system=system, messages=messages, thinking={"type": "disabled"}
    )
    submit = calling.pipeline.submits[-1]
    function = {"name": "f", "arguments": '{"a":1}'}
    assert submit.chat == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": "I ask.", "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    assert submit.template_arguments == {"enable_thinking": False}
    assert submit.params.max_tokens == 9


async def test_what_was_answered_can_be_sent_back_as_it_is(
    calling: Gateway, clients: Clients
) -> None:
    client = clients(calling)
    made = await client.messages.create(**said(ALL, tools=[WEATHER]))
    back = [block.model_dump() for block in made.content]
    calls = [block for block in back if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "x"} for c in calls]
    messages: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": back},
        {"role": "user", "content": results},
    ]
    await client.messages.create(model="test", max_tokens=9, messages=messages)
    chat = calling.pipeline.submits[-1].chat
    assert chat and [m["role"] for m in chat] == ["user", "assistant", "tool", "tool"]


async def test_a_form_is_handed_over_as_a_chats(gateway: Gateway) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    answer = await raw(gateway, **said("x"), output_config={"format": form, "effort": "low"})
    submit = gateway.pipeline.submits[-1]
    assert answer.status_code == 200 and submit.params.structured_outputs is not None
    assert submit.params.structured_outputs.json == '{"type":"object"}'
    assert submit.template_arguments == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    "content",
    [
        "The answer is (",
        [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "The answer is ("},
        ],
    ],
    ids=["text", "blocks"],
)
async def test_a_last_turn_of_the_assistant_goes_on(calling: Gateway, content: Any) -> None:
    turns = [USER, {"role": "assistant", "content": content}]
    made = (await raw(calling, **{**said(""), "messages": turns})).json()
    assert made["content"][0]["text"] == "The answer is ( "  # the pipeline says it again
    submit = calling.pipeline.submits[-1]
    assert submit.chat and submit.chat[-1]["content"] == "The answer is ("
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert submit.template_arguments == goes_on
    counted = await raw(calling, "/count_tokens", messages=turns)
    assert counted.status_code == 200
    assert calling.pipeline.submits[-1].template_arguments == goes_on


async def test_a_budget_of_thoughts_holds_for_models_that_think(
    calling: Gateway, gateway: Gateway
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for server, budget in ((calling, 1024), (gateway, None)):
        answer = await raw(server, **said("x"), thinking=thinking)
        assert answer.status_code == 200
        submit = server.pipeline.submits[-1]
        assert submit.params.thinking_token_budget == budget
        assert submit.template_arguments == {"enable_thinking": True}
    for other in ({"type": "adaptive"}, {"type": "disabled"}):
        await raw(calling, **said("x"), thinking=other)
        assert calling.pipeline.submits[-1].params.thinking_token_budget is None


async def test_ends_are_told_apart(gateway: Gateway, clients: Clients) -> None:
    cut = await clients(gateway).messages.create(**{**said("one two three"), "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"


async def test_a_call_without_whole_arguments_hides_nothing(
    calling: Gateway, clients: Clients
) -> None:
    text = '<tool_call> {"name": "get_weather", "arguments": {"city": '
    made = await clients(calling).messages.create(**said(text, tools=[WEATHER]))
    [call] = made.content
    assert call.type == "tool_use" and list(call.input) == ["invalid_json"]


async def test_tokens_of_a_conversation_are_counted(calling: Gateway, clients: Clients) -> None:
    counted = await clients(calling).messages.count_tokens(
        model="test", messages=[{"role": "user", "content": "one"}], tools=[WEATHER]
    )
    assert counted.input_tokens == 1
    submit = calling.pipeline.submits[-1]
    assert submit.only_encode and "tools" in submit.template_arguments


async def test_a_stream_that_breaks_ends_with_an_error(gateway: Gateway, clients: Clients) -> None:
    import anthropic

    stream = await clients(gateway).messages.create(**said("break it"), stream=True)
    with pytest.raises(anthropic.APIStatusError, match="on fire") as caught:
        async for _ in stream:
            pass
    assert caught.value.body["type"] == "error"  # type: ignore


async def test_errors_are_in_anthropics_form(start_gateway: StartGateway, clients: Clients) -> None:
    import anthropic

    gateway = await start_gateway(api_key="secret")
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await clients(gateway, "wrong").messages.create(**said("x"))
    assert caught.value.body == {  # type: ignore
        "type": "error",
        "error": {"type": "authentication_error", "message": "wrong or missing API key"},
        "request_id": caught.value.request_id,
    }
    client = clients(gateway, "secret")
    assert (await client.messages.create(**said("one"))).stop_reason == "end_turn"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**said("x", model="other"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        await client.messages.create(**said("refuse it"))
    async with httpx.AsyncClient(headers={"x-api-key": "secret"}) as http:
        wrong = await http.get(f"{gateway.url}/v1/messages")
        assert wrong.status_code == 405 and wrong.json()["type"] == "error"
        other = await http.get(f"{gateway.url}/v1/models/other")
        assert other.json()["error"]["code"] == "model_not_found"


class Told(NamedTuple):
    """An error below /v1/messages: how it comes about, its status, its type, the client's class."""

    method: str
    path: str
    body: Any
    status: int
    kind: str
    raised: str
    settings: dict[str, Any] = {}
    ready: bool = True


INVALID = "invalid_request_error"
LARGE = '{"messages": "%s"}' % ("x" * (1 << 20))
TOLD = [
    *(
        Told(method, path, {}, 404, "not_found_error", "NotFoundError")
        for method, path in (
            ("POST", "/batches"), ("GET", "/batches/b_1/results"), ("POST", "/"), ("GET", "/a%2Fb"),
            ("DELETE", "/batches/b"), ("POST", "/count_tokens/x"), ("POST", "//nothing"),
        )
    ),
    *(
        Told(method, path, {}, 405, INVALID, "APIStatusError")
        for method, path in (("GET", ""), ("PUT", ""), ("GET", "/count_tokens"))
    ),
    *(
        told
        for path in ("", "/count_tokens")
        for told in (
            Told("POST", path, '{"messages": [', 400, INVALID, "BadRequestError"),
            Told("POST", path, b"\xff\xfe", 400, INVALID, "BadRequestError"),
            Told("POST", path, "", 400, INVALID, "BadRequestError"),
            Told("POST", path, "[]", 400, INVALID, "BadRequestError"),
            Told("POST", path, said("x", messages=[]), 400, INVALID, "BadRequestError"),
            Told("POST", path, said("x", model="y"), 404, "not_found_error",
                 "NotFoundError"),
            Told("POST", path, LARGE, 413, "request_too_large", "ContentTooLargeError",
                 {"max_body_mib": 1}),
            Told("POST", path, said("x"), 401, "authentication_error",
                 "AuthenticationError", {"api_key": "other"}),
            Told("POST", path, said("x"), 529, "overloaded_error", "OverloadedError",
                 {}, False),
        )
    ),
    Told("POST", "/batches", {}, 401, "authentication_error", "AuthenticationError",
         {"api_key": "other"}),
]  # fmt: skip


async def test_every_error_below_messages_is_in_anthropics_form(
    start_gateway: StartGateway, clients: Clients
) -> None:
    """As the official client reads it, with the id of its request."""
    import anthropic
    from anthropic.types import ErrorResponse

    servers: dict[str, Gateway] = {}
    for told in TOLD:
        key = f"{told.settings}{told.ready}"
        if key not in servers:
            servers[key] = await start_gateway(told.ready, **told.settings)
        gateway = servers[key]
        body = json.dumps(told.body) if isinstance(told.body, dict) else told.body
        head = {"content-type": "application/json", "x-api-key": "none"}
        made = await gateway.http().request(
            told.method, f"{gateway.url}/v1/messages{told.path}", content=body, headers=head
        )
        assert made.status_code == told.status, (told, made.text)
        client = clients(gateway)
        error = client._make_status_error(  # pyright: ignore[reportPrivateUsage]
            "x", body=made.json(), response=made
        )
        assert type(error) is getattr(anthropic, told.raised) and error.type in (told.kind, None), (
            told
        )
        read = ErrorResponse.model_validate(made.json()) if told.status != 413 else None
        assert made.json()["error"]["type"] == told.kind and made.json()["type"] == "error"
        assert read is None or read.request_id == error.request_id
        assert made.json()["request_id"] == error.request_id == made.headers["x-request-id"]


async def test_an_error_amid_a_stream_names_its_request(gateway: Gateway) -> None:
    body = {**said("break it"), "stream": True}
    made = await gateway.http().post(f"{gateway.url}/v1/messages", json=body)
    last = json.loads(made.text.rstrip().rpartition("data: ")[2])
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert last["request_id"] == made.headers["request-id"]


PLAIN = {"type": "text", "media_type": "text/plain", "data": "Rome is warm."}


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"source": PLAIN}, "Rome is warm."),
        ({"source": {"type": "text", "data": ""}}, ""),
        ({"source": {"type": "content", "content": "Oslo."}}, "Oslo."),
        ({"source": {"type": "content", "content": [
            {"type": "text", "text": "Oslo"}, {"type": "text", "text": "is cold."}]}},
         "Oslo\n\nis cold."),
        ({"source": PLAIN, "title": "Cities", "context": "of 2024",
          "citations": {"enabled": False}, "cache_control": {"type": "ephemeral"}},
         "<title>Cities</title>\n<context>of 2024</context>\nRome is warm."),
        ({"source": PLAIN, "title": None, "context": None, "citations": None}, "Rome is warm."),
    ],
)  # fmt: skip
async def test_a_document_of_plain_text_is_shown_to_the_model(
    gateway: Gateway, clients: Clients, block: Any, shown: str
) -> None:
    document = {"type": "document", **block}
    asked: Any = [document, {"type": "text", "text": "And Oslo?"}]
    seen = f"<document>\n{shown}\n</document>\n"
    client = clients(gateway)
    await client.messages.create(**said("", messages=[{"role": "user", "content": asked}]))
    [turn] = gateway.pipeline.submits[-1].chat or []
    parts: Any = turn["content"]
    assert [part["text"] for part in parts] == [seen, "And Oslo?"]
    counted: Any = {"model": "test", "messages": [{"role": "user", "content": asked}]}
    assert (await client.messages.count_tokens(**counted)).input_tokens > 0
    result: Any = [{"type": "tool_result", "tool_use_id": "c", "content": [document]}]
    call = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    turns = [USER, {"role": "assistant", "content": call}, {"role": "user", "content": result}]
    await client.messages.create(**said("", messages=turns))
    assert (gateway.pipeline.submits[-1].chat or [])[-1]["content"] == seen


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"source": PLAIN, "citations": {"enabled": True}}, "citations"),
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}},
         "source.type"),
        ({"source": {"type": "url", "url": "http://a/b.pdf"}}, "source.type"),
        ({"source": {"type": "file", "file_id": "f"}}, "source.type"),
        ({"source": {**PLAIN, "media_type": "text/html"}}, "source.media_type"),
        ({"source": {"type": "text", "media_type": "text/plain"}}, "source.data"),
        ({"source": {"type": "content"}}, "source.content"),
        ({"source": {"type": "content", "content": [{"type": "image"}]}},
         "source.content[0].type"),
        ({}, "source"),
    ],
)  # fmt: skip
async def test_other_documents_are_refused_by_name(
    gateway: Gateway, block: Any, named: str
) -> None:
    user = {"role": "user", "content": [{"type": "document", **block}]}
    answer = await raw(gateway, **said("", messages=[user]))
    assert answer.status_code == 400
    assert f"messages[0].content[0].{named}" in answer.json()["error"]["message"]


async def test_a_server_that_starts_is_overloaded(
    start_gateway: StartGateway, clients: Clients
) -> None:
    import anthropic

    gateway = await start_gateway(ready=False)
    with pytest.raises(anthropic.APIStatusError) as caught:
        await clients(gateway).messages.create(**said("x"))
    assert caught.value.status_code == 529 and caught.value.response.headers["retry-after"]
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore


async def test_the_limit_of_a_key_is_429_here_as_well(
    start_gateway: StartGateway, clients: Clients
) -> None:
    import anthropic

    gateway = await start_gateway(key_requests_per_minute=1)
    client = clients(gateway)
    await client.messages.create(**said("one"))
    with pytest.raises(anthropic.RateLimitError):
        await client.messages.create(**said("one"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (408, "timeout_error"), (413, "request_too_large"),
     (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_kinds_of_errors(status: int, kind: str) -> None:
    assert error_object(ApiError(status, "x"))["error"] == {"type": kind, "message": "x"}


@pytest.mark.parametrize("kind", ["auto", "any", "tool", "none"])
@pytest.mark.parametrize("alone", [False, True])
async def test_a_choice_of_tools_is_kept(
    calling: Gateway, clients: Clients, kind: str, alone: bool
) -> None:
    now = {"name": "now", "type": "custom", "input_schema": {"type": "object"}}
    choice: Any = {"type": kind} if kind == "none" else {
        "type": kind, "disable_parallel_tool_use": alone}  # fmt: skip
    if kind == "tool":
        choice["name"] = "get_weather"
    tools: Any = [WEATHER, now]
    made = await clients(calling).messages.create(**said(ALL, tools=tools, tool_choice=choice))
    calls = [block for block in made.content if block.type == "tool_use"]
    assert len(calls) == {"none": 0}.get(kind, 1 if alone else 2)
    submit = calling.pipeline.submits[-1]
    assert ("tools" in submit.template_arguments) is (kind != "none")
    held = submit.params.structured_outputs
    if kind in ("auto", "none"):
        assert held is None
    else:
        assert held is not None and held.grammar is not None
        assert ("now" in held.grammar, "get_weather" in held.grammar) == (kind == "any", True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "assistant", "content": [
            {"type": "text", "text": "x"}, {"type": "tool_use", "id": "c", "name": "f"}]}]},
         "messages[1].content"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}],
          "output_config": {"format": {"type": "json_schema", "schema": {}}}},
         "output_config.format"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: 'bash_20250124'"),
        ({"tools": [WEATHER, {"type": "mcp_toolset", "mcp_server_name": "x"}]},
         "tools[1].type: 'mcp_toolset'"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 2**20}}}},
         "output_config.format"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(
    calling: Gateway, body: dict[str, Any], named: str
) -> None:
    answer = await raw(calling, **{**said("x"), **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and named in error["message"], error
