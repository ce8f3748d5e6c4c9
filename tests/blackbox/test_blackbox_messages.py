"""Messages by Anthropic's client and plain HTTP: blocks, streams, tools, ends, counts."""

from __future__ import annotations

import json

import pytest
from asked import COUNTED, MODEL, ONE, QUESTION, USER, said, system, text, user

TOOL = {"name": "f", "description": "Does.", "input_schema": ONE}
ANY = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture
def ask(claude):
    def ask(messages=USER, **more):
        usual = {"model": MODEL, "max_tokens": 40}
        extra = {"temperature": 0, **more.pop("extra_body", {})}
        return claude.messages.create(messages=messages, extra_body=extra, **(usual | more))

    return ask


def test_every_way_of_asking_is_one_conversation(ask):
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "zz"}
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    cached = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    ways = [
        {"messages": USER},
        {"messages": [user([text(QUESTION)])]},
        {"messages": [user([cached])]},
        {"system": "Be short."},
        {"system": [text("Be short."), {**cached, "text": "Or long."}]},
        {"messages": [user("a"), system("Be short."), *USER]},
        {"messages": [user("a"), system([text("Be short.")]), *USER], "system": "Hi."},
        {"messages": [user("a"), said("Hello!"), *USER]},
        {"messages": [user("a"), said([thought, hidden, text("Hi!")]), *USER]},
        {"messages": [user("a"), said([thought]), *USER]},
        {"messages": [user("a"), said([thought, called]), user([result, text(QUESTION)])]},
        {"messages": [user("a"), said([text("I call."), called]),
                      user([{**result, "content": "20", "is_error": True}]), *USER]},
        {"messages": [user("a"), said([called]), user([{**result, "content": [text("20")]}]),
                      *USER], "tools": [TOOL]},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"extra_body": {"thinking": {"type": "adaptive", "display": "summarized"}}},
        {"extra_body": {"output_config": {"effort": "xhigh"}, "cache_salt": "tenant"}},
        {"extra_body": {"betas": ["b"], "service_tier": "auto", "future": {"a": 1},
                        "kv_transfer_params": None, "mcp_servers": []}},
        {"metadata": {"user_id": "u"}, "extra_body": {"top_p": 0.9, "top_k": 40}},
    ]  # fmt: skip
    for way in ways:
        found = ask(**way, max_tokens=5)
        assert (found.type, found.role, found.model) == ("message", "assistant", MODEL)
        assert found.id.startswith("msg_")
        assert [block.text for block in found.content] == [COUNTED[:5]], way
        assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
        usage = found.usage
        assert usage.input_tokens + usage.cache_read_input_tokens > 30
        assert usage.cache_creation_input_tokens == 0 < usage.output_tokens


def test_why_an_answer_ended_is_told_whole_and_in_a_stream(ask):
    call = {"tools": [TOOL], "tool_choice": ANY, "max_tokens": 100}
    ends = [
        ({}, "end_turn", None),
        ({"max_tokens": 5}, "max_tokens", None),
        ({"stop_sequences": ["7"]}, "stop_sequence", "7"),
        ({"stop_sequences": ["\n", "9"]}, "stop_sequence", "9"),
        ({"stop_sequences": ["3"]}, "stop_sequence", "3"),
        (call, "tool_use", None),
        ({**call, "max_tokens": 12}, "max_tokens", None),
        ({**call, "max_tokens": 40}, "max_tokens", None),
    ]
    for asked, reason, sequence in ends:
        found = ask(**asked)
        assert (found.stop_reason, found.stop_sequence) == (reason, sequence), asked
        assert found.content, "clients take the first block without a look"
        events = list(ask(**asked, stream=True))
        (end,) = [event for event in events if event.type == "message_delta"]
        assert (end.delta.stop_reason, end.delta.stop_sequence) == (reason, sequence)
        assert end.usage.output_tokens == found.usage.output_tokens
    assert ask(stop_sequences=["3"]).content[0].text == ""


def test_events_come_in_order_and_add_up(http, ask):
    raw = http.client.post(
        "/v1/messages", json={"messages": USER, "max_tokens": 40, "temperature": 0, "stream": True}
    )
    assert raw.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in raw.text.strip().split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    kinds = [event["type"] for event in told if event["type"] != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start = told[0]["message"]
    assert (start["type"], start["role"], start["content"]) == ("message", "assistant", [])
    assert start["usage"]["input_tokens"] > 5 and start["usage"]["output_tokens"] == 0
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == COUNTED
    asked = {"tools": [TOOL], "tool_choice": ANY, "max_tokens": 100}
    events = list(ask(**asked, stream=True))
    (begun,) = [event.content_block for event in events if event.type == "content_block_start"]
    assert (begun.type, begun.name, begun.input) == ("tool_use", "f", {})
    parts = [e.delta.partial_json for e in events if e.type == "content_block_delta"]
    assert json.loads("".join(parts)) == {"a": 1}
    (call,) = ask(**asked).content
    assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": 1})
    assert call.id.startswith("toolu_")
    named = {"type": "tool", "name": "f"}
    assert ask(**asked | {"tool_choice": named}).content[0].input == {"a": 1}


def test_usage_of_a_stream_tells_what_the_cache_had(ask):
    long = [user("Cache coverage sentinel. " * 20 + QUESTION)]
    cached = []
    for _ in range(2):
        events = list(ask(long, max_tokens=1, stream=True))
        (usage,) = [event.usage for event in events if event.type == "message_delta"]
        total = events[0].message.usage.input_tokens
        read = usage.cache_read_input_tokens
        assert total == usage.input_tokens + read + usage.cache_creation_input_tokens
        cached.append(read)
    assert cached[0] < 100 < 500 < cached[1] + 100


def test_an_answer_has_the_form_that_is_asked_for(ask):
    form = {"type": "json_schema", "schema": ONE}
    found = ask(extra_body={"output_config": {"format": form}})
    assert json.loads(found.content[0].text) == {"a": 1}


def test_a_count_is_what_a_message_would_take(claude, ask):
    def count(**asked) -> int:
        return claude.messages.count_tokens(
            **({"model": MODEL, "messages": USER} | asked)
        ).input_tokens

    many = [
        {},
        {"system": "A longer prompt that adds tokens."},
        {"tools": [TOOL]},
        {"thinking": {"type": "disabled"}},
        {"messages": [user("a"), said("Hello!"), *USER]},
        {"messages": [*USER, said("3 4")]},
    ]
    counts = [count(**asked) for asked in many]
    for asked, counted in zip(many, counts, strict=True):
        usage = ask(**asked, max_tokens=1).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert counts[0] < min(counts[1], counts[2], counts[4], counts[5])
    assert counts[0] == counts[3]
    assert count(messages=[user("a" * 5_000)]) > 5_000, "also of what does not fit"
