"""Calls of several tools, in several choices, with the log-probs of their tokens."""

from __future__ import annotations

import json

import pytest
from asked import MODEL, NAMED, TOOL, USER

VALUES = {"f": "a", "g": 1}
FINISH = {"required": "tool_calls", "f": "stop", "g": "stop"}


def tool(name: str) -> dict:
    """Its definition of `Data` is another than that of the other tool."""
    data = {"type": "object", "properties": {"value": {"enum": [VALUES[name]]}}}
    parameters = {
        "type": "object",
        "properties": {"data": {"$ref": "#/$defs/Data"}},
        "required": ["data"],
        "additionalProperties": False,
        "$defs": {"Data": {**data, "required": ["value"], "additionalProperties": False}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool(name) for name in VALUES]


@pytest.fixture
def ask(api):
    def ask(**more):
        usual = {"model": MODEL, "messages": USER, "max_completion_tokens": 150}
        return api.chat.completions.create(parallel_tool_calls=False, **(usual | more))

    return ask


@pytest.mark.parametrize("choice", FINISH)
def test_each_tool_keeps_its_own_definitions_in_each_of_several_choices(ask, choice):
    named = {"type": "function", "function": {"name": choice}}
    asked = {"tools": TOOLS, "tool_choice": choice if choice == "required" else named, "n": 2}
    asked |= {"temperature": 1, "seed": 4}
    whole = ask(**asked).choices
    found = []
    for made in whole:
        (call,) = made.message.tool_calls
        name = call.function.name
        assert name in ([choice] if choice in VALUES else VALUES)
        assert json.loads(call.function.arguments) == {"data": {"value": VALUES[name]}}
        assert made.finish_reason == FINISH[choice] and not made.message.content
        found.append((name, call.function.arguments))
    assert len({made.message.tool_calls[0].id for made in whole}) == 2
    chunks = [chunk.choices[0] for chunk in ask(**asked, stream=True)]
    for index, (name, arguments) in enumerate(found):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [c.finish_reason for c in mine if c.finish_reason] == [FINISH[choice]]
        first, *more = [call for c in mine for call in c.delta.tool_calls or ()]
        assert first.id and (first.type, first.function.name) == ("function", name)
        assert all(call.id is None and call.function.name is None for call in more)
        assert {call.index for call in (first, *more)} == {0}
        told = "".join(call.function.arguments or "" for call in (first, *more))
        assert told == arguments


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tokens_that_are_no_content_have_their_log_probs_too(ask, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2}
    answer = ask(**asked)
    tokens = answer.choices[0].logprobs.content
    assert '"a"' in "".join(token.token for token in tokens)
    assert answer.usage.completion_tokens - len(tokens) in (0, 1), "the end has no text"
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    told = [chunk.choices[0].logprobs for chunk in ask(**asked, stream=True)]
    assert [token for logprobs in told if logprobs for token in logprobs.content] == tokens
