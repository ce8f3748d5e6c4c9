"""Anthropic's own client, newest version: messages, streams, tools, and counted tokens."""

import anthropic
import pytest
from bounded import COUNTED, KEY, MODEL, PARAMETERS, QUESTION, Person, is_weather

TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}]
ASKED = {"model": MODEL, "max_tokens": 300, "messages": QUESTION}


@pytest.fixture(scope="module")
def api(server):
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message_is_answered(api):
    found = api.messages.create(**ASKED, system="Be short.")
    assert [block.type for block in found.content] == ["text"]
    found = api.messages.create(**ASKED)
    assert (found.content[0].text, found.stop_reason) == (COUNTED, "end_turn")


def test_a_message_is_streamed(api):
    with api.messages.stream(**ASKED) as stream:
        texts = list(stream.text_stream)
        whole = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text == COUNTED
    assert len(texts) > 3
    assert whole.usage.output_tokens > 3


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"]
)
def test_tools_are_called(api, choice):
    asked = {**ASKED, "tools": TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    found = api.messages.create(**asked)
    [call] = [block for block in found.content if block.type == "tool_use"]
    assert is_weather(call.input)
    assert found.stop_reason == "tool_use"
    with api.messages.stream(**asked) as stream:
        [streamed] = [b for b in stream.get_final_message().content if b.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Count from 3 to 9."}]},
    ]
    assert api.messages.create(**{**ASKED, "messages": turns, "tools": TOOLS}).content


def test_a_model_of_pydantic_is_parsed(api):
    found = api.messages.parse(**ASKED, output_format=Person)
    assert isinstance(found.parsed_output, Person)


def test_a_last_turn_of_the_assistant_goes_on(api):
    turns = [*QUESTION, {"role": "assistant", "content": COUNTED[:5]}]
    found = api.messages.create(**{**ASKED, "messages": turns})
    assert COUNTED[:5] + found.content[0].text == COUNTED


def test_tokens_are_counted(api):
    counted = api.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = api.messages.create(**ASKED).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_those_that_the_client_knows(api):
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(**{**ASKED, "model": "another"})
