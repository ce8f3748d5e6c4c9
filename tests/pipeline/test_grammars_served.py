"""Answers of a given form, asked for in every way, by the official client: whole and streamed, with
choices, through the loss of an engine, and beside grammars that nobody can compile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import openai
import pytest

from held_processes import HeldProcesses
from servers import Server

MODEL = "pipeinfer-demo"
QUESTION = [{"role": "user", "content": "Count from 3 to 9."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MANY_KEYS = {
    "type": "object",
    "properties": {f"k{n}": {"type": "integer"} for n in range(400)},
}

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def strict(schema):
    named = {"name": "asked", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


GBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'
LARK = 'start: "<" /[a-c]{2,4}/ ">"'


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
    ) as client:
        yield client


def chat(api, temperature=1.0, **more):
    usual = {"max_tokens": 120, "temperature": temperature, "seed": 5}
    return api.chat.completions.create(model=MODEL, messages=QUESTION, **(usual | more))


def said(api, **more) -> str:
    choice = chat(api, **more).choices[0]
    assert choice.finish_reason == "stop"
    return choice.message.content


def test_a_schema_holds_whole_streamed_and_for_every_choice(api):
    answers = [choice.message.content for choice in chat(api, n=3, response_format=FORMAT).choices]
    for text in answers:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(answers)) > 1
    chunks = [c.choices[0] for c in chat(api, stream=True, response_format=FORMAT) if c.choices]
    streamed = "".join(chunk.delta.content or "" for chunk in chunks)
    assert streamed == answers[0], "choice 0 has the same seed"


def test_the_clients_own_parsing_takes_it(api):
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    parsed = api.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Person, max_tokens=300, temperature=0
    )
    found = parsed.choices[0]
    assert found.finish_reason == "length" or isinstance(found.message.parsed, Person)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{3,9}-[0-9]{2}"}}, "[a-f]{3,9}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["apples", "pears"]}}, "apples|pears"),
        ({"structured_outputs": {"grammar": LARK}}, "<[a-c]{2,4}>"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
        ({"guided_choice": ["x1", "x2"]}, "x[12]"),
        ({"guided_regex": "[xyz]{4}"}, "[xyz]{4}"),
        ({"guided_json": {"enum": [1, 22]}}, "1|22"),
        ({"guided_grammar": LARK}, "<[a-c]{2,4}>"),
        ({"regex": "[xyz]{4}"}, "[xyz]{4}"),
        ({"ebnf": GBNF}, "yes|no[0-9]"),
        ({"grammar": GBNF}, "yes|no[0-9]"),
        ({"json_schema": '{"enum": ["q"]}'}, '"q"'),
        ({"format": {"enum": ["q"]}}, '"q"'),
    ],
)
def test_every_way_to_ask_is_understood(api, body, pattern):
    assert re.fullmatch(pattern, said(api, extra_body=body))


def test_any_json_object_ends_or_is_cut(api):
    for body in ({"response_format": {"type": "json_object"}}, {"extra_body": {"format": "json"}}):
        choice = chat(api, temperature=0.5, **body).choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_completions_have_forms_too(api):
    made = api.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=20, extra_body={"guided_regex": "[ab]{3}"}
    )
    assert [bool(re.fullmatch("[ab]{3}", choice.text)) for choice in made.choices] == [True] * 2


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a", "regex": "b"}, "regex", "one form"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "and"),
        ({"structured_outputs": {"structural_tag": "x"}}, None, "structural_tag"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "must be an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be given"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"guided_json": {"type": "nobody"}}, "guided_json", "type: this is no JSON Schema"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "70000 bytes"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"response_format": strict(MANY_KEYS)}, "response_format", "items"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens", "not allowed"),
        ({"format": "yaml"}, "format", "must be"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "<think>"),
    ],
)
def test_what_is_no_form_is_the_clients_error(api, body, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        chat(api, extra_body=body)
    assert param is None or caught.value.param == param


SETS = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True,
                 "maxItems": 2},
        "colors": {"type": "array", "items": {"enum": ["red", "blue"]}, "uniqueItems": True},
    },
    "required": ["tags", "colors"],
}  # fmt: skip


def raw(api, **more):
    usual = {"max_tokens": 120, "temperature": 1.0, "seed": 5}
    create = api.chat.completions.with_raw_response.create
    return create(model=MODEL, messages=QUESTION, **(usual | more))


def test_what_no_grammar_holds_is_left_out_and_said_in_a_header_unless_it_is_strict(api):
    """Objects have no other properties than those that are named, though the schema allows any."""
    asked = {"type": "json_schema", "json_schema": {"name": "sets", "schema": SETS}}
    answer = raw(api, response_format=asked)
    assert answer.headers["x-schema-left-out"] == "uniqueItems at properties.tags"
    made = json.loads(answer.parse().choices[0].message.content)
    assert set(made) == {"tags", "colors"} and len(set(made["colors"])) == len(made["colors"])
    assert "x-schema-left-out" not in raw(api, response_format=FORMAT).headers
    asked["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"uniqueItems at properties\.tags") as refused:
        raw(api, response_format=asked)
    assert refused.value.param == "response_format"


def test_tools_that_are_not_strict_are_called_whatever_their_schema_asks_for(api):
    schema = {**SETS, "properties": {**SETS["properties"], "id": {"const": 2**53 + 1}}}
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    answer = raw(api, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    left_out = answer.headers["x-schema-left-out"]
    assert left_out == "uniqueItems at properties.tags of paint; const at properties.id of paint"
    [call] = answer.parse().choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) <= {"tags", "colors", "id"}
    tool["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="paint: strict: true") as refused:
        raw(api, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"


NOBODY_HOLDS = {
    "nsatisfiable": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    "optional keys": MANY_KEYS,
    "disjoint": {"type": "object", "patternProperties": {"^a": {"type": "null"}, "^ab": {}}},
}


@pytest.mark.parametrize("schema", NOBODY_HOLDS.values(), ids=NOBODY_HOLDS)
def test_a_schema_that_nobody_can_compile_is_refused_where_it_is_strict_and_else_left_out(
    api, schema
):
    """All of it: arguments are any object then, and answers any JSON of its type."""
    function = {"name": "paint", "parameters": schema}
    tool = {"type": "function", "function": function}
    named = {"type": "json_schema", "json_schema": {"name": "asked", "schema": schema}}
    called = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    for stream in (True, False):
        answer = raw(api, max_tokens=8, stream=stream, **called)
        assert answer.headers["x-schema-left-out"].startswith("parameters of paint: ")
        answer = raw(api, max_tokens=8, n=2, stream=stream, response_format=named)
        assert answer.headers["x-schema-left-out"].startswith("schema: ")
    assert len(answer.parse().choices) == 2
    function["strict"] = named["json_schema"]["strict"] = True
    for asked in (called, {"response_format": named}):
        with pytest.raises(openai.BadRequestError) as refused:
            raw(api, **asked)
        assert refused.value.param in ("tools", "response_format")


MESSAGES = {"messages": QUESTION, "max_tokens": 8}
NAMED_FORM = {"type": "json_schema", "name": "asked", "schema": NOBODY_HOLDS["disjoint"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 16, "text": {"format": NAMED_FORM}}),
        ("/v1/messages", {**MESSAGES, "output_config": {"format": NAMED_FORM}}),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "max_tokens": 8, "guided_json": NAMED_FORM["schema"]},
        ),
        (
            "/v1/chat/completions",
            {**MESSAGES, "structured_outputs": {"json": NAMED_FORM["schema"]}},
        ),
        ("/v1/chat/completions", {**MESSAGES, "json_schema": json.dumps(NAMED_FORM["schema"])}),
        ("/v1/chat/completions", {**MESSAGES, "format": NAMED_FORM["schema"]}),
    ],
)
def test_what_is_left_out_is_said_however_the_schema_came(server, path, body):
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.headers["x-schema-left-out"].startswith("schema: ")
    connection.close()


def test_errors_show_no_grammar_that_the_client_did_not_write(api):
    function = {"name": "f", "parameters": {"enum": []}, "strict": True}
    tool = {"type": "function", "function": function}
    with pytest.raises(openai.BadRequestError, match="nsatisfiable") as refused:
        raw(api, tools=[tool], tool_choice="required")
    assert "start:" not in str(refused.value) and "x-guidance" not in str(refused.value)
    assert refused.value.param == "tools"


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def slow_trial(server: Server) -> int:
    """The process that tries a grammar which takes long; 0 if there is none. It is nicer than the
    tokenizer, and a fork of a child of it."""
    tokenizer = server.pid("tokenizer")
    niceness = int(stat(tokenizer)[16])
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            fields = stat(int(folder.name))
            if int(fields[16]) > niceness and int(stat(int(fields[1]))[1]) == tokenizer:
                return int(folder.name)
    return 0


def test_nobody_waits_for_grammars_that_take_long(server, api):
    """On more connections than there are processes that try them, and none is ever used again."""
    address = urlsplit(server.url)
    connections = [HTTPConnection(address.hostname, address.port, timeout=60) for _ in range(6)]
    for n, connection in enumerate(connections):
        schema = {"type": "integer", "multipleOf": 999983 - 2 * n}
        body = {"messages": QUESTION, "guided_json": schema}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    try:
        # One is tried at a time. It stands still, else a busy machine may end it in the meantime.
        with HeldProcesses(server.wait(lambda: slow_trial(server), "one is tried that takes long")):
            sockets = [one.sock for one in connections]
            before, _, _ = select.select(sockets, [], [], 0)
            for served in range(5):
                said(api, extra_body={"guided_regex": f"x{{{served + 1}}}"})
            answered, _, _ = select.select(sockets, [], [], 0)
        assert answered == before and len(answered) < len(sockets)
    finally:
        for connection in connections:
            connection.close()


def test_a_killed_engine_changes_no_answer(server, api):
    wanted = {n: said(api, response_format=FORMAT, seed=n) for n in range(4)}

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
        ) as client:
            streams = [
                await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, max_tokens=120, temperature=1.0, seed=seed,
                    response_format=FORMAT, stream=True,
                )
                for seed in wanted
            ]  # fmt: skip
            texts = ["" for _ in wanted]
            killed = False
            for at, stream in enumerate(streams):
                async for chunk in stream:
                    texts[at] += chunk.choices[0].delta.content or "" if chunk.choices else ""
                    if not killed and len(texts[at]) > 4:
                        killed = True
                        os.kill(server.pid("engine"), signal.SIGKILL)
            return texts

    assert asyncio.run(all_of_them()) == list(wanted.values())


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Wien", "Graz"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CHOSEN = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "finish"), [("required", "tool_calls"), (CHOSEN, "stop")], ids=["any", "named"]
)
def test_calls_that_must_be_made_are_made(api, choice, finish):
    more = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    whole = chat(api, **more).choices[0]
    [call] = whole.message.tool_calls
    assert (call.function.name, whole.finish_reason) == ("weather", finish)
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    chunks = [c.choices[0] for c in chat(api, stream=True, **more) if c.choices]
    parts = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert "".join(one.function.arguments for one in parts) == call.function.arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [finish]


SHOW = {"type": "function", "function": {"name": "show", "parameters": {"type": "object"}}}
EDIT = 'start: "say " NAME ("\\n" NAME)~0..2\nNAME: /[a-c"]{2,4}/'


def custom(syntax, definition):
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "edit", "format": grammar}}


@pytest.mark.parametrize(
    ("syntax", "definition"), [("lark", EDIT), ("regex", r'say [a-c"]{2,4}(\n[a-c"]{2,4}){0,2}')]
)
def test_the_input_of_a_custom_tool_is_held_to_its_grammar(api, syntax, definition):
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "edit"}}]}
    more = {"tools": [SHOW, custom(syntax, definition)], "parallel_tool_calls": False,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}  # fmt: skip
    whole = chat(api, **more).choices[0]
    [call] = whole.message.tool_calls
    assert (call.type, call.custom.name, whole.finish_reason) == ("custom", "edit", "tool_calls")
    assert re.fullmatch(r'say [a-c"]{2,4}(\n[a-c"]{2,4}){0,2}', call.custom.input)
    chunks = [c.choices[0] for c in chat(api, stream=True, **more) if c.choices]
    parts = [one.custom["input"] for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert "".join(parts) == call.custom.input and len(parts) > 2
    grammar = more["tools"][1]["custom"]["format"]["grammar"]
    made = api.responses.create(
        model=MODEL, input=QUESTION, extra_body={"seed": 5}, tool_choice="required",
        tools=[{"type": "custom", "name": "edit", "format": {"type": "grammar", **grammar}}],
        parallel_tool_calls=False,
    )  # fmt: skip
    [item] = [one for one in made.output if one.type == "custom_tool_call"]
    assert re.fullmatch(r'say [a-c"]{2,4}(\n[a-c"]{2,4}){0,2}', item.input)


def test_allowed_tools_alone_are_called(api):
    for name in ("show", "weather"):
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        calls = chat(api, tools=[SHOW, WEATHER], tool_choice=choice).choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {name}


def test_a_grammar_that_does_not_compile_is_named_where_it_stands(api):
    tool = custom("regex", "(")
    with pytest.raises(openai.BadRequestError, match="regex parse error") as refused:
        chat(api, tools=[SHOW, tool], tool_choice={"type": "custom", "custom": {"name": "edit"}})
    assert refused.value.param == "tools[1].custom.format"
    flat = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "regex",
                                                         "definition": "("}}  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="regex parse error") as refused:
        api.responses.create(model=MODEL, input="x", tools=[flat], tool_choice="required")
    assert refused.value.param == "tools[0].format" and "start:" not in str(refused.value)
