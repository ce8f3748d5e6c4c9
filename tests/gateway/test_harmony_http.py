"""Harmony answers over HTTP: chats, responses and messages tell the same thoughts, content and
calls, whole and streamed, wherever the text was cut."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.gateway.tool_parsers.harmony import MARKERS
from template_families import HERE

TEMPLATE = str(HERE / "published" / "gpt-oss.jinja")
THOUGHT = "<|channel|>analysis<|message|>They want {weather}.\n\nI call.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
BEFORE = " to=functions.now<|channel|>commentary json<|message|>"
FINAL = "<|channel|>final<|message|>"
WIEN = {"city": 'W"ien <|x|> ü😀', "days": [1, 2]}
ARGUMENTS = json.dumps(WIEN, ensure_ascii=False)
THINKS, LOOKS = "They want {weather}.\n\nI call.", "I look it up."
CALL, NOW = ("weather", WIEN), ("now", {})

Blocks = list[tuple[str, Any]]
# What a model says, and the blocks that it consists of.
TEXTS: list[tuple[str, Blocks]] = [
    (FINAL + "Fine.\n\n- today ", [("content", "Fine.\n\n- today ")]),
    (FINAL + "Fine.<|return|>", [("content", "Fine.")]),
    (THOUGHT + FINAL + "Fine.", [("reasoning", THINKS), ("content", "Fine.")]),
    (THOUGHT + FINAL + ARGUMENTS, [("reasoning", THINKS), ("content", ARGUMENTS)]),
    (THOUGHT + HEAD + ARGUMENTS, [("reasoning", THINKS), ("call", CALL)]),
    (THOUGHT + BEFORE + "{}", [("reasoning", THINKS), ("call", NOW)]),
    (BEFORE + "", [("call", NOW)]),
    (HEAD + ARGUMENTS + "<|call|>", [("call", CALL)]),
    (THOUGHT + PREAMBLE + HEAD + ARGUMENTS,
     [("reasoning", THINKS), ("content", LOOKS), ("call", CALL)]),
    (PREAMBLE + FINAL + "Fine.", [("content", LOOKS), ("content", "Fine.")]),
    (THOUGHT + THOUGHT + FINAL + "Fine.",
     [("reasoning", THINKS), ("reasoning", THINKS), ("content", "Fine.")]),
    (THOUGHT + PREAMBLE + THOUGHT + HEAD + ARGUMENTS,
     [("reasoning", THINKS), ("content", LOOKS), ("reasoning", THINKS), ("call", CALL)]),
    (HEAD + ARGUMENTS + "<|call|><|start|>assistant" + BEFORE + "{}<|call|>",
     [("call", CALL), ("call", NOW)]),
    (THOUGHT + "<|channel|>analysis to=python code<|message|>print(1)",
     [("reasoning", THINKS), ("reasoning", "print(1)")]),
    ("No header at all.", [("content", "No header at all.")]),
    (THOUGHT.replace("<|end|><|start|>assistant", "") + FINAL + "Fine.",
     [("reasoning", THINKS), ("content", "Fine.")]),
    (FINAL + "a <|im_end|> <think>b</think> <tool_call>",
     [("content", "a <|im_end|> <think>b</think> <tool_call>")]),
]  # fmt: skip
ONE_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


def as_tokens(text: str) -> list[str]:
    """Markers whole, all else by three letters."""
    return re.findall(ONE_MARKER.pattern + r"|(?s:(?:(?!<\|).){1,3}|.)", text)


def somewhere(text: str) -> list[str]:
    drawn = random.Random(len(text))
    ends = sorted(drawn.sample(range(1, len(text)), min(6, len(text) - 1)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True)]


def amid_markers(text: str) -> list[str]:
    return re.split(r"(?<=<\|)|(?=\|>)", text)


CUTS: list[Callable[[str], list[str]]] = [
    lambda text: [text],
    list,
    as_tokens,
    amid_markers,
    somewhere,
]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("weather", "now")


@pytest.fixture
async def speaking(start_gateway: StartGateway) -> Gateway:
    return await start_gateway(chat_template=TEMPLATE)


async def post(gateway: Gateway, path: str, body: Any) -> str:
    answer = await gateway.http().post(f"{gateway.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.text


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def of_chat(gateway: Gateway, text: str, stream: bool) -> tuple[str, str, list[Any], str]:
    tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES]
    body = {"messages": [{"role": "user", "content": text}], "tools": tools, "stream": stream}
    said = await post(gateway, "/v1/chat/completions", body)
    if not stream:
        [choice] = json.loads(said)["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        found = [(call["name"], json.loads(call["arguments"])) for call in calls]
        reasoning = message.get("reasoning_content") or ""
        return message["content"] or "", reasoning, found, choice["finish_reason"]
    content, reasoning, made, finish = "", "", list[list[str]](), ""
    for chunk in events(said):
        [choice] = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(made)
                made.append([call["function"]["name"], ""])
            made[call["index"]][1] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return content, reasoning, [(name, json.loads(text)) for name, text in made], finish


def items(output: list[Any]) -> Blocks:
    found: Blocks = []
    for item in output:
        if item["type"] == "function_call":
            found.append(("call", (item["name"], json.loads(item["arguments"]))))
        else:
            kind = {"reasoning": "reasoning", "message": "content"}[item["type"]]
            found.append((kind, "".join(part["text"] for part in item["content"])))
    return found


async def of_response(gateway: Gateway, text: str, stream: bool) -> Blocks:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
    said = await post(gateway, "/v1/responses", {"input": text, "tools": tools, "stream": stream})
    if not stream:
        return items(json.loads(said)["output"])
    told, deltas, done = events(said), dict[int, str](), list[Any]()
    for event in told:
        index = event.get("output_index")
        if event["type"] == "response.output_item.added":
            assert index == len(deltas) == len(done), "one item is open at a time"
            deltas[index] = ""
        elif event["type"].endswith(".delta"):
            deltas[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            whole = item.get("arguments") or "".join(p["text"] for p in item.get("content", ()))
            assert deltas[index] == whole
            done.append(item)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["response"]["output"] == done
    return items(done)


def blocks(content: list[Any]) -> Blocks:
    names = {"text": ("content", "text"), "thinking": ("reasoning", "thinking")}
    return [
        ("call", (block["name"], block["input"]))
        if block["type"] == "tool_use"
        else (names[block["type"]][0], block[names[block["type"]][1]])
        for block in content
    ]


async def of_message(gateway: Gateway, text: str, stream: bool) -> tuple[Blocks, str]:
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    messages = [{"role": "user", "content": text}]
    body = {"max_tokens": 2000, "messages": messages, "tools": tools, "stream": stream}
    said = await post(gateway, "/v1/messages", body)
    if not stream:
        made = json.loads(said)
        return blocks(made["content"]), made["stop_reason"]
    content, reason = list[Any](), ""
    for event in events(said):
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            name = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"][:-6])
            where = "json" if name == "partial_json" else name
            block[where] += delta[name]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return blocks(content), reason


@pytest.mark.parametrize("cut", range(len(CUTS)))
async def test_answers_are_told_alike_by_all_whole_and_streamed(
    speaking: Gateway, cut: int
) -> None:
    assert len({text for text, _ in TEXTS}) == 17
    speaking.pipeline.cut = lambda submit: CUTS[cut](str((submit.chat or [])[-1]["content"]))

    async def check(text: str, expected: Blocks) -> None:
        calls = [what for kind, what in expected if kind == "call"]
        content, reasoning = (
            "\n".join(what for kind, what in expected if kind == wanted)
            for wanted in ("content", "reasoning")
        )
        finish = "tool_calls" if calls else "stop"
        for stream in (False, True):
            chat = await of_chat(speaking, text, stream)
            assert chat == (content, reasoning, calls, finish)
            assert await of_response(speaking, text, stream) == expected, text
            reason = "tool_use" if calls else "end_turn"
            assert await of_message(speaking, text, stream) == (expected, reason), text

    await asyncio.gather(*(check(text, expected) for text, expected in TEXTS))


async def test_markers_reach_the_reader_and_no_client(speaking: Gateway) -> None:
    """Also where there are no tools, and whatever a client says of special tokens."""
    client = speaking.client()
    speaking.pipeline.cut = lambda submit: as_tokens(str((submit.chat or [])[-1]["content"]))
    for more in ({}, {"extra_body": {"skip_special_tokens": False}}):
        made = await client.chat.completions.create(
            model="test", messages=[{"role": "user", "content": TEXTS[3][0]}], **more
        )
        message: Any = made.choices[0].message
        assert (message.reasoning_content, message.content) == (THINKS, ARGUMENTS)
        assert speaking.pipeline.submits[-1].params.skip_special_tokens is False


async def test_thoughts_are_left_out_where_nobody_wants_them(speaking: Gateway) -> None:
    speaking.pipeline.cut = lambda submit: as_tokens(str((submit.chat or [])[-1]["content"]))
    body: Any = {"messages": [{"role": "user", "content": TEXTS[11][0]}]}
    said = await post(speaking, "/v1/chat/completions", {**body, "include_reasoning": False})
    [choice] = json.loads(said)["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"].startswith(LOOKS)


async def test_a_call_of_nobodys_tool_is_content(speaking: Gateway) -> None:
    """Without tools nothing is read as a call."""
    speaking.pipeline.cut = lambda submit: as_tokens(str((submit.chat or [])[-1]["content"]))
    body: Any = {"messages": [{"role": "user", "content": HEAD + ARGUMENTS}]}
    [choice] = json.loads(await post(speaking, "/v1/chat/completions", body))["choices"]
    assert choice["message"]["content"] == ARGUMENTS and choice["finish_reason"] == "stop"


async def test_the_official_client_parses_a_streamed_response(speaking: Gateway) -> None:
    text, expected = TEXTS[8]
    speaking.pipeline.cut = lambda submit: as_tokens(text)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    responses = speaking.client().responses
    async with responses.stream(model="test", input="Hi", tools=[tool]) as stream:
        made = await stream.get_final_response()
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output_text == LOOKS
    assert items([item.model_dump() for item in made.output]) == expected


async def test_an_effort_that_the_model_does_not_know_is_refused_by_its_name(
    speaking: Gateway,
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
    response = {"input": "Hi", "reasoning": {"effort": "minimal"}}
    for path, body, param in (
        ("/v1/chat/completions", chat, "reasoning_effort"),
        ("/v1/responses", response, "reasoning.effort"),
    ):
        answer = await speaking.http().post(f"{speaking.url}{path}", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param} must be one of low, medium, high")
