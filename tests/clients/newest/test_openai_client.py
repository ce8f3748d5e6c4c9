"""OpenAI's own client, newest version: chats, completions and responses, whole and streamed."""

import json

import openai
import pytest
from bounded import COUNTED, KEY, MODEL, PARAMETERS, QUESTION, TOOLS, WEATHER, Person, is_weather

NAMED = {"type": "function", "function": {"name": "get_weather"}}
RESPONSE_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": PARAMETERS,
    "strict": True,
}


@pytest.fixture(scope="module")
def api(url):
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_the_model_is_listed(api):
    assert [model.id for model in api.models.list()] == [MODEL]


def test_a_chat_is_answered(api):
    choice = api.chat.completions.create(model=MODEL, messages=QUESTION).choices[0]
    assert (choice.message.content, choice.finish_reason) == (COUNTED, "stop")


def test_a_chat_is_streamed(api):
    with api.chat.completions.stream(
        model=MODEL, messages=QUESTION, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(deltas) == whole.choices[0].message.content == COUNTED
    assert len(deltas) > 3
    assert whole.usage.completion_tokens > 3


def test_a_prompt_is_continued(api):
    asked = {"model": MODEL, "prompt": "3 4 5", "max_tokens": 8, "temperature": 0}
    whole = api.completions.create(**asked).choices[0].text
    assert whole
    pieces = [chunk.choices[0].text for chunk in api.completions.create(stream=True, **asked)]
    assert "".join(pieces) == whole


def test_a_model_of_pydantic_is_parsed(api):
    found = api.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Person)
    assert isinstance(found.choices[0].message.parsed, Person)
    with api.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Person
    ) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_tools_are_called(api, choice, reason):
    asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice}
    found = api.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    [call] = found.message.tool_calls
    assert is_weather(json.loads(call.function.arguments))
    assert found.finish_reason == reason
    with api.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    said = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(e.arguments_delta for e in said) == streamed.function.arguments
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )


def test_an_answer_is_calls_or_a_model_of_pydantic(api):
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(4):
        [choice] = api.chat.completions.parse(
            model=MODEL,
            messages=QUESTION,
            tools=tools,
            response_format=Person,
            parallel_tool_calls=False,
            temperature=2,
            seed=seed,
        ).choices
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            [call] = choice.message.tool_calls
            assert is_weather(json.loads(call.function.arguments))
        else:
            assert isinstance(choice.message.parsed, Person)


def test_functions_are_called_as_they_once_were(api):
    asked = {"model": MODEL, "functions": [WEATHER], "function_call": {"name": "get_weather"}}
    message = api.chat.completions.create(**asked, messages=QUESTION).choices[0].message
    call = message.function_call
    assert is_weather(json.loads(call.arguments)) and message.tool_calls is None
    pieces = [
        chunk.choices[0].delta.function_call
        for chunk in api.chat.completions.create(**asked, messages=QUESTION, stream=True)
    ]
    assert "".join(piece.arguments for piece in pieces if piece) == call.arguments
    result = {"role": "function", "name": "get_weather", "content": "rain"}
    after = api.chat.completions.create(
        model=MODEL, functions=[WEATHER], messages=[*QUESTION, message, result, *QUESTION]
    )
    assert after.choices[0].message.content


def test_the_result_of_a_call_goes_back(api):
    asked = {"model": MODEL, "tools": TOOLS}
    message = (
        api.chat.completions.create(**asked, messages=QUESTION, tool_choice="required")
        .choices[0]
        .message
    )
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "4"} for call in message.tool_calls
    ]
    after = api.chat.completions.create(
        **asked, messages=[*QUESTION, message, *results, *QUESTION], max_tokens=20
    )
    assert after.choices[0].message.content


def test_a_response_is_made(api):
    found = api.responses.create(model=MODEL, input="Count from 3 to 9.")
    assert (found.output_text, found.status) == (COUNTED, "completed")
    again = api.responses.create(
        model=MODEL,
        input=[*QUESTION, *found.output, {"role": "user", "content": "Count from 3 to 9."}],
    )
    assert again.status == "completed"


def test_a_response_is_streamed(api):
    deltas = []
    with api.responses.stream(model=MODEL, input="Count from 3 to 9.") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == COUNTED
    events = list(api.responses.create(model=MODEL, input="Count from 3 to 9.", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == COUNTED


def test_a_response_is_parsed(api):
    found = api.responses.parse(model=MODEL, input="Count from 3 to 9.", text_format=Person)
    assert isinstance(found.output_parsed, Person)
    with api.responses.stream(
        model=MODEL, input="Count from 3 to 9.", text_format=Person
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_a_response_calls_tools(api):
    asked = {"model": MODEL, "input": "Count from 3 to 9.", "tools": [RESPONSE_TOOL]}
    found = api.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    [call] = [item for item in found.output if item.type == "function_call"]
    assert is_weather(json.loads(call.arguments))
    with api.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        [streamed] = [i for i in stream.get_final_response().output if i.type == "function_call"]
    assert streamed.arguments == call.arguments


async def _ask(url):
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


def test_the_asynchronous_client_streams(url):
    import asyncio

    assert asyncio.run(_ask(url)) == COUNTED


def test_errors_are_those_that_the_client_knows(api):
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.BadRequestError):
        api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
