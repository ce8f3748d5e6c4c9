"""litellm, which proxies and frameworks build on: as `openai/`, `hosted_vllm/`, `text-completion`
and `anthropic/` servers of one's own."""

import json

import litellm
import pytest
from bounded import COUNTED, KEY, MODEL, QUESTION, TOOLS, Person, is_weather

PROVIDERS = ["openai", "hosted_vllm"]


def ask(url, provider, **more):
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=url,
        api_key=KEY,
        messages=QUESTION,
        num_retries=0,
        **more,
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_completion(url, provider):
    found = ask(url, provider)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (COUNTED, "stop")
    assert found.usage.completion_tokens > 3


@pytest.mark.parametrize("provider", PROVIDERS)
def test_streaming(url, provider):
    chunks = list(ask(url, provider, stream=True, stream_options={"include_usage": True}))
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == COUNTED
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == COUNTED


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools_are_called(url, provider):
    """For hosted_vllm, litellm takes `additionalProperties` out of schemas, so that arguments could
    go on for ever: a bias against the comma ends them."""
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    if provider == "hosted_vllm":
        asked["logit_bias"] = {str(ord(",")): -100}  # the demo model's ids are bytes
    [call] = ask(url, provider, **asked).choices[0].message.tool_calls
    assert is_weather(json.loads(call.function.arguments))
    whole = litellm.stream_chunk_builder(list(ask(url, provider, stream=True, **asked)))
    [streamed] = whole.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_form_of_an_answer(url, provider):
    found = ask(url, provider, response_format=Person).choices[0].message.content
    assert isinstance(Person.model_validate_json(found), Person)
    streamed = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(url, provider, response_format=Person, stream=True)
    ]
    assert "".join(streamed) == found


def test_a_text_completion(url):
    found = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=url,
        api_key=KEY,
        prompt="3 4 5",
        max_tokens=8,
    )
    assert found.choices[0].text


def test_as_a_server_of_anthropics_api(server):
    asked = {
        "model": f"anthropic/{MODEL}",
        "api_base": server.url,
        "api_key": KEY,
        "messages": QUESTION,
        "max_tokens": 50,
    }
    assert litellm.completion(**asked).choices[0].message.content == COUNTED
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == COUNTED
