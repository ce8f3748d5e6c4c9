"""Several choices of a real model, as OpenAI's client reads them: each is what its seed gives."""

from __future__ import annotations

import openai
import pytest

QUESTION = [{"role": "user", "content": "Count from 3 to 9. " * 12}]
MODEL = "pipeinfer-demo"
SEED = 2**62


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
        yield client


def chat(api: openai.OpenAI, seed: int = SEED, **more):
    usual = {"temperature": 1.5, "max_tokens": 12, "seed": seed}
    return api.chat.completions.create(model=MODEL, messages=QUESTION, **(usual | more))


def complete(api: openai.OpenAI, **more):
    usual = {"prompt": ["one two", "three"], "temperature": 1.5, "max_tokens": 8, "seed": SEED}
    return api.completions.create(model=MODEL, **(usual | more))


@pytest.fixture(scope="module")
def singles(api) -> list[str]:
    return [chat(api, SEED + n).choices[0].message.content for n in range(4)]


def test_choices_of_a_chat_are_those_of_single_requests(api, singles):
    whole = chat(api, n=4)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.message.content for choice in whole.choices] == singles
    one = chat(api).usage
    assert whole.usage.prompt_tokens == one.prompt_tokens
    assert whole.usage.completion_tokens > 3 * one.completion_tokens / 2
    cached = whole.usage.prompt_tokens_details.cached_tokens
    assert cached == one.prompt_tokens_details.cached_tokens < one.prompt_tokens


def test_a_stream_brings_them_side_by_side(api, singles):
    texts, ends, order, usage = [""] * 4, [0] * 4, [], None
    for chunk in chat(api, n=4, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
            order.append(choice.index)
    assert texts == singles and ends == [1] * 4
    assert sorted(order) != order
    assert usage.completion_tokens == chat(api, n=4).usage.completion_tokens


def test_each_choice_stops_where_its_own_text_says(api, singles):
    stop = singles[2][2:4]
    choices = chat(api, n=4, stop=stop).choices
    assert [one.message.content for one in choices] == [one.partition(stop)[0] for one in singles]


def test_log_probs_belong_to_their_choice(api, singles):
    for choice, text in zip(chat(api, n=4, logprobs=True).choices, singles, strict=True):
        assert "".join(token.token for token in choice.logprobs.content) == text


def test_echo_comes_before_each_choice_of_each_prompt(api):
    plain = complete(api, n=2)
    echoed = complete(api, n=2, echo=True, logprobs=1)
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    prompts = ["one two", "one two", "three", "three"]
    for before, choice, after in zip(prompts, plain.choices, echoed.choices, strict=True):
        assert after.text == before + choice.text
        assert "".join(after.logprobs.tokens) == after.text
    assert plain.usage.prompt_tokens == echoed.usage.prompt_tokens


def test_the_best_of_many_are_the_likeliest(api):
    every = complete(api, n=6, logprobs=0)
    means = [
        sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in every.choices
    ]
    best = complete(api, n=2, best_of=6)
    for prompt in range(2):
        own = range(6 * prompt, 6 * prompt + 6)
        first, second = sorted(own, key=lambda n: -means[n])[:2]
        shown = best.choices[2 * prompt : 2 * prompt + 2]
        assert [one.text for one in shown] == [every.choices[n].text for n in (first, second)]
        assert all(one.logprobs is None for one in shown)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage == every.usage, "all that were made count"
