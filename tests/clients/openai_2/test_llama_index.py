"""LlamaIndex' OpenAILike, which is what its users take for a server of their own."""

import pytest
from bounded import COUNTED, KEY, MODEL, Person, is_weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

ASKED = [ChatMessage(role="user", content="Count from 3 to 9.")]


@pytest.fixture(scope="module")
def llm(url):
    return OpenAILike(
        model=MODEL,
        api_base=url,
        api_key=KEY,
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=300,
        max_retries=0,
    )


def test_chat(llm):
    assert llm.chat(ASKED).message.content == COUNTED


def test_stream(llm):
    pieces = list(llm.stream_chat(ASKED))
    assert "".join(piece.delta or "" for piece in pieces) == COUNTED
    assert pieces[-1].message.content == COUNTED


def test_completions(url):
    llm = OpenAILike(
        model=MODEL, api_base=url, api_key=KEY, context_window=2048, max_tokens=8, max_retries=0
    )
    whole = llm.complete("3 4 5").text
    assert whole
    assert list(llm.stream_complete("3 4 5"))[-1].text == whole


def test_structured_output(llm):
    bound = llm.as_structured_llm(Person)
    assert isinstance(bound.chat(ASKED).raw, Person)
    assert isinstance(list(bound.stream_chat(ASKED))[-1].raw, Person)


def get_weather(city: str, days: int) -> str:
    """The weather."""
    return f"{city} {days}"


def test_tools_are_called(llm):
    from pydantic import BaseModel, Field

    class Where(BaseModel):
        city: str = Field(max_length=8)
        days: int = Field(ge=1, le=7)

    tool = FunctionTool.from_defaults(get_weather, fn_schema=Where)
    found = llm.chat_with_tools([tool], chat_history=ASKED, tool_required=True)
    [call] = llm.get_tool_calls_from_response(found)
    assert is_weather(call.tool_kwargs)
    last = list(llm.stream_chat_with_tools([tool], chat_history=ASKED, tool_required=True))[-1]
    [streamed] = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs
