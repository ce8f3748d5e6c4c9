"""Custom tools and allowed tools over HTTP, through the official client: in chats and responses,
whole and streamed, and as parts of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_pipeline import Gateway, StartGateway

TEMPLATE = """{%- if tools %}{{ tools | tojson }} <tool_call>{"name": "f"}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}answer:{% endif %}"""
# The pipeline of these tests says again what it is asked.
TEXT = "SELECT \"a\",\n\t'é' -- \\ \U0001f600"
CALL = f"<tool_call> {json.dumps({'name': 'query', 'arguments': {'input': TEXT}})} </tool_call>"
OTHER = '<tool_call> {"name": "now", "arguments": {"a": 1}} </tool_call>'
BOTH = f"I look. {CALL} {OTHER} {CALL}"
# The pipeline cuts at spaces, and says one behind each word.
SAID = TEXT
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
QUERY: Any = {"type": "custom", "custom": {"name": "query", "description": "Asks a database."}}
FLAT_NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}}
FLAT_QUERY: Any = {"type": "custom", "name": "query", "description": "Asks a database."}
LARK = 'start: "SELECT " NAME ("," NAME)*\nNAME: /[a-z]+/'


@pytest.fixture
async def calling(start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    """A gateway whose model calls tools."""
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return await start_gateway(chat_template=str(path))


def user(content: str) -> Any:
    return [{"role": "user", "content": content}]


async def ask(gateway: Gateway, text: str, **more: Any) -> Any:
    return await gateway.client().chat.completions.create(model="test", messages=user(text), **more)


def with_grammar(syntax: str, definition: str) -> Any:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "query", "format": grammar}}


async def test_calls_of_custom_tools_have_their_input_as_text(calling: Gateway) -> None:
    choice = (await ask(calling, BOTH, tools=[NOW, QUERY])).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls = choice.message.tool_calls
    assert [call.type for call in calls] == ["custom", "function", "custom"]
    assert (calls[0].custom.name, calls[0].custom.input) == ("query", SAID)
    assert json.loads(calls[1].function.arguments) == {"a": 1}
    assert len({call.id for call in calls}) == 3


async def test_a_stream_says_the_same_piece_by_piece(calling: Gateway) -> None:
    calls: list[Any] = []
    inputs: list[str] = []
    stream = await ask(calling, BOTH, tools=[NOW, QUERY], stream=True)
    finish = None
    async for chunk in stream:
        [choice] = chunk.choices
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append(call)
                assert call.type == "function" or call.custom == {"name": "query", "input": ""}
            elif calls[call.index].type == "custom":
                inputs.append(call.custom["input"])
                assert call.function is None and call.type is None
    assert [call.type for call in calls] == ["custom", "function", "custom"]
    assert ("".join(inputs), finish) == (SAID * 2, "tool_calls")
    assert len(inputs) > 6, "it goes on as it comes"


async def test_the_client_s_own_stream_adds_the_calls_up(calling: Gateway) -> None:
    async with calling.client().chat.completions.stream(
        model="test", messages=user(BOTH), tools=[NOW, QUERY]
    ) as stream:
        async for _ in stream:
            continue
        snapshot = stream.current_completion_snapshot
    calls: Any = snapshot.choices[0].message.tool_calls
    assert [call.type for call in calls] == ["custom", "function", "custom"]
    custom = calls[0].custom
    assert (custom if isinstance(custom, dict) else custom.model_dump())["input"] == SAID


async def test_templates_see_a_custom_tool_as_a_function_of_one_text(calling: Gateway) -> None:
    messages: Any = [
        *user("hi"),
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "custom", "custom": {"name": "query", "input": TEXT}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3 rows"},
        *user("go on"),
    ]  # fmt: skip
    tools: Any = [NOW, with_grammar("lark", LARK)]
    await calling.client().chat.completions.create(model="test", messages=messages, tools=tools)
    chat = calling.pipeline.submits[-1]
    shown = chat.template_arguments["tools"]
    assert isinstance(shown, list) and shown[0] == NOW
    told = "A text of this Lark grammar:\n" + LARK
    assert shown[1] == {"type": "function", "function": {"name": "query", "parameters": {
        "type": "object", "properties": {"input": {"type": "string", "description": told}},
        "required": ["input"], "additionalProperties": False}}}  # fmt: skip
    assert chat.chat is not None and chat.chat[1]["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "query", "arguments": {"input": TEXT}},
        }
    ]
    items: Any = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "query", "input": TEXT},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "3 rows"},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": LARK}
    await calling.client().responses.create(
        model="test", input=items, tools=[FLAT_NOW, {**FLAT_QUERY, "description": None,
                                                     "format": grammar}]
    )  # fmt: skip
    again = calling.pipeline.submits[-1]
    assert again.chat == chat.chat
    assert again.params.structured_outputs == chat.params.structured_outputs is not None
    assert again.template_arguments["tools"] == shown


async def test_responses_have_items_of_custom_calls_and_take_them_back(calling: Gateway) -> None:
    client, asked = calling.client(), {"tools": [FLAT_NOW, FLAT_QUERY], "input": BOTH}
    whole: Any = await client.responses.create(model="test", **asked)
    kinds = ["message", "custom_tool_call", "function_call", "custom_tool_call"]
    assert [item.type for item in whole.output] == kinds
    item = whole.output[1]
    assert (item.name, item.input, item.status) == ("query", SAID, "completed")
    assert whole.tools[1].type == "custom" and whole.tools[1].format.type == "text"
    async with client.responses.stream(model="test", **asked) as stream:
        events = [event async for event in stream]
        final: Any = await stream.get_final_response()
    assert [item.type for item in final.output] == kinds and final.output[1].input == SAID
    name = "response.custom_tool_call_input"
    deltas = [e for e in events if e.type == f"{name}.delta" and e.output_index == 1]
    assert "".join(e.delta for e in deltas) == SAID and len(deltas) > 3
    [done] = [e for e in events if e.type == f"{name}.done" and e.output_index == 1]
    assert done.input == SAID and done.item_id == final.output[1].id == deltas[0].item_id
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "3 rows"}
    back: Any = [{"role": "user", "content": "x"}, *whole.output, result]
    await client.responses.create(model="test", input=back)
    chat = calling.pipeline.submits[-1].chat
    assert chat is not None and len(chat[1]["tool_calls"]) == 3  # type: ignore[arg-type]
    assert chat[2] == {"role": "tool", "tool_call_id": item.call_id, "content": "3 rows"}


@pytest.mark.parametrize("kind", ["custom", "function"])
async def test_the_tool_that_the_client_chose_is_called(calling: Gateway, kind: str) -> None:
    name = {"custom": "query", "function": "now"}[kind]
    choice: Any = {"type": kind, kind: {"name": name}}
    tools = [NOW, QUERY]
    made = (await ask(calling, CALL, tools=tools, tool_choice=choice)).choices[0]
    assert made.finish_reason == "stop"
    first = calling.pipeline.submits[-1]
    held = first.params.structured_outputs
    other = {"query": "now", "now": "query"}[name]
    assert held and name in (held.grammar or "") and other not in (held.grammar or "")
    whole: Any = await calling.client().responses.create(
        model="test", input=CALL, tools=[FLAT_NOW, FLAT_QUERY],
        tool_choice={"type": kind, "name": name},  # type: ignore[arg-type]
    )  # fmt: skip
    second = calling.pipeline.submits[-1]
    assert second.params.structured_outputs == held
    assert whole.tool_choice.type == kind and whole.tool_choice.name == name
    assert second.template_arguments["tools"] == first.template_arguments["tools"]


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_change_what_may_be_called_and_not_the_prompt(
    calling: Gateway, mode: Any
) -> None:
    await ask(calling, CALL, tools=[NOW, QUERY])
    free = calling.pipeline.submits[-1]
    assert free.params.structured_outputs is None
    allowed = {"mode": mode, "tools": [{"type": "custom", "custom": {"name": "query"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    made = (await ask(calling, CALL, tools=[NOW, QUERY], tool_choice=choice)).choices[0]
    assert made.message.tool_calls[0].custom.input == SAID and made.finish_reason == "tool_calls"
    held = calling.pipeline.submits[-1]
    grammar = held.params.structured_outputs
    assert grammar and "query" in (grammar.grammar or "") and "now" not in (grammar.grammar or "")
    assert (held.chat, held.template_arguments) == (free.chat, free.template_arguments)
    flat: Any = {"type": "allowed_tools", "mode": mode, "tools": [
        {"type": "custom", "name": "query"}]}  # fmt: skip
    whole = await calling.client().responses.create(
        model="test", input=CALL, tools=[FLAT_NOW, FLAT_QUERY], tool_choice=flat
    )
    assert whole.tool_choice.model_dump(exclude_none=True) == flat  # type: ignore[union-attr]
    assert calling.pipeline.submits[-1].params.structured_outputs == grammar
    every = {"mode": "auto", "tools": [*allowed["tools"], NOW]}
    await ask(calling, CALL, tools=[NOW, QUERY],
              tool_choice={"type": "allowed_tools", "allowed_tools": every})  # fmt: skip
    assert calling.pipeline.submits[-1].params.structured_outputs is None, "all of them are"
    body = {"messages": user("x"), "tools": [NOW, QUERY]}
    async with httpx.AsyncClient() as client:
        for more in ({}, {"tool_choice": choice}):
            await client.post(f"{calling.url}/tokenize", json={**body, **more})
    first, second = calling.pipeline.submits[-2:]
    assert first.template_arguments == second.template_arguments


async def test_a_request_that_allows_no_call_shows_no_custom_tool(calling: Gateway) -> None:
    choice = (await ask(calling, CALL, tools=[QUERY], tool_choice="none")).choices[0]
    assert choice.message.tool_calls is None
    assert "tools" not in calling.pipeline.submits[-1].template_arguments


def allowed(*tools: Any, mode: str = "auto") -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


NESTED = 'start: "(" start ")" | /[^()]/'
TOOLS = {"tools": [NOW, QUERY]}
WHERE = "tool_choice.allowed_tools.tools"
CHATS: list[tuple[Any, str]] = [
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    ({"tools": [NOW, {"type": "custom", "custom": {"name": "now"}}]}, "tools[1].custom.name"),
    ({"tools": [with_grammar("peg", "x")]}, "tools[0].custom.format.grammar.syntax"),
    ({"tools": [{"type": "custom", "custom": {"name": "q", "format": {"type": "grammar"}}}]},
     "tools[0].custom.format.grammar"),
    ({"tools": [NOW, with_grammar("lark", NESTED)]}, "tools[1].custom.format"),
    ({"tools": [NOW, with_grammar("lark", "start: unknown")]}, "tools[1].custom.format"),
    ({"tools": [{"type": "custom", "custom": {**with_grammar("lark", "x" * 40_000)["custom"],
                                              "name": name}} for name in "ab"]}, "tools"),
    ({**TOOLS, "tool_choice": allowed()}, WHERE),
    ({**TOOLS, "tool_choice": allowed({"type": "function", "function": {"name": "nobody"}})},
     f"{WHERE}[0].function.name"),
    ({**TOOLS, "tool_choice": allowed(NOW, {"type": "function", "function": {"name": "query"}})},
     f"{WHERE}[1].function.name"),
    ({**TOOLS, "tool_choice": allowed({"type": "mcp", "server_label": "x"})}, f"{WHERE}[0].type"),
    ({**TOOLS, "tool_choice": allowed(NOW, mode="any")}, "tool_choice.allowed_tools.mode"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({**TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
    ({**TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "now"}}}, "tool_choice"),
    ({**TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
]  # fmt: skip
KINDS = ("web_search", "mcp", "code_interpreter", "namespace", "file_search", "image_generation")
CHATS += [({"tools": [NOW, {"type": kind, "name": "a b"}]}, "tools[1].type") for kind in KINDS]


@pytest.mark.parametrize(("more", "param"), CHATS)
async def test_what_is_not_served_of_tools_is_refused_by_name(
    calling: Gateway, more: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(calling, "hello", **more)
    assert refusal.value.param == param and param in refusal.value.message
    if param.endswith(".type"):
        assert any(repr(kind) in refusal.value.message for kind in KINDS)
        assert refusal.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "nobody"}]}}, "tool_choice.tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
         "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [FLAT_NOW]}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
         "tool_choice.tools[0].type"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "custom", "name": "nobody"}}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.name"),
        ({"tools": [{**FLAT_QUERY, "format": {"type": "grammar", "syntax": "lark"}}]},
         "tools[0].format.definition"),
        ({"tools": [{**FLAT_QUERY, "format": {"type": "grammar", "definition": "x"}}]},
         "tools[0].format.syntax"),
        ({"tools": [{**FLAT_QUERY, "format": {
            "type": "grammar", "syntax": "lark", "definition": NESTED}}]}, "tools[0].format"),
        ({"tools": [FLAT_NOW, {**FLAT_QUERY, "name": "now"}]}, "tools[1].name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "q"}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "output": "x"}]}, "input[0].call_id"),
        *(({"tools": [FLAT_NOW, {"type": kind}]}, "tools[1].type") for kind in KINDS),
    ],
)  # fmt: skip
async def test_responses_refuse_the_same_under_their_names(
    calling: Gateway, more: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await calling.client().responses.create(
            **{"model": "test", "input": "x", "tools": [FLAT_NOW, FLAT_QUERY], **more}
        )
    assert refusal.value.param == param and param in refusal.value.message
    if param.endswith(".type"):
        assert any(repr(kind) in refusal.value.message for kind in KINDS)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"type": "custom", "custom": {"name": "query"}}, "custom"),
        ({"type": "custom"}, "custom"),
        ({"type": "web_search_call"}, "type"),
    ],
)
async def test_former_calls_that_no_template_can_write_are_refused(
    calling: Gateway, call: Any, param: str
) -> None:
    messages: Any = [*user("x"), {"role": "assistant", "tool_calls": [{"id": "c", **call}]}]
    with pytest.raises(openai.BadRequestError) as refusal:
        await calling.client().chat.completions.create(model="test", messages=messages)
    assert refusal.value.param == f"messages[1].tool_calls[0].{param}"
