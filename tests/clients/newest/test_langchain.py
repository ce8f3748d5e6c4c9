"""LangChain's ChatOpenAI, and an agent of LangGraph, as their users write them."""

import json

import pytest
from bounded import COUNTED, KEY, MODEL, Anything, Person
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

ASKED = "Count from 3 to 9."
# Without `strict`, LangChain leaves out what forbids further arguments.
FORCED = {"tool_choice": "required", "strict": True, "parallel_tool_calls": False}
COPIED = 'Copy: {"a": 7}'


@tool(args_schema=Person)
def greet(name: str, age: int, mood: str) -> str:
    """Greets somebody."""
    return f"{name} {age} {mood}"


def model(url, **more):
    return ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, max_retries=0, **more)


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def llm(url, request):
    return model(url, use_responses_api=request.param)


def test_invoke(llm):
    found = llm.invoke(ASKED)
    assert found.text == COUNTED
    assert found.usage_metadata["output_tokens"] > 3


def test_stream(llm):
    pieces = list(llm.stream(ASKED))
    assert "".join(piece.text for piece in pieces) == COUNTED
    assert len(pieces) > 3


def test_batch(llm):
    assert [found.text for found in llm.batch([ASKED, ASKED])] == [COUNTED, COUNTED]


def test_tools_are_called(llm):
    bound = llm.bind_tools([greet], **FORCED)
    [call] = bound.invoke(ASKED).tool_calls
    assert isinstance(Person(**call["args"]), Person)
    whole = None
    for piece in bound.stream(ASKED):
        whole = piece if whole is None else whole + piece
    [streamed] = whole.tool_calls
    assert streamed["args"] == call["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm, method):
    bound = llm.with_structured_output(Person, method=method)
    assert isinstance(bound.invoke(ASKED), Person)
    assert isinstance(list(bound.stream(ASKED))[-1], Person)


def test_structured_output_of_any_json(llm):
    bound = llm.with_structured_output(Anything, method="json_mode", include_raw=True)
    found = bound.invoke(COPIED)
    assert found["parsed"].model_dump() == json.loads(found["raw"].text)


def test_an_agent_calls_its_tool_and_goes_on(url):
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    def once(request, handler):
        """The demo model never calls a tool of its own will."""
        if any(message.type == "tool" for message in request.messages):
            return handler(request.override(tool_choice="none"))
        return handler(request.override(tool_choice="required", model_settings={"strict": True}))

    agent = create_agent(model(url), tools=[greet], middleware=[once])
    messages = agent.invoke({"messages": [{"role": "user", "content": ASKED}]})["messages"]
    kinds = [message.type for message in messages]
    assert kinds[:3] == ["human", "ai", "tool"]
    assert kinds[-1] == "ai"
    assert messages[2].content == greet.invoke(messages[1].tool_calls[0]["args"])
