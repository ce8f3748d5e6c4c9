"""Several choices of a prompt over HTTP: how many, their index, what they count for, the best."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from gateway_pipeline import Gateway, StartGateway
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.ledger import OutputDelta
from pipeinfer.gateway.requests import ParsedRequest, RequestDefaults, parse_chat, parse_completion
from pipeinfer.gateway.response_encoders import BestOf
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest
from pipeinfer.gateway.serving import decode
from pipeinfer.messages import LogprobTexts
from pipeinfer.params import MAX_CHOICES, RequestParams
from pipeinfer.wire import pack

HELLO = [{"role": "user", "content": "a"}]
TERMS = RequestDefaults(RequestParams(max_tokens=None), 200)


def entry(logprob: float) -> bytes:
    """A token's log-prob record, without alternatives."""
    return np.array([logprob], "<f4").tobytes() + pack([1])


def job(**fields: Any) -> ParsedRequest:
    kind = ChatRequest if "messages" in fields else CompletionRequest
    body = decode(json.dumps(fields).encode(), kind, lambda names: None)
    make: Any = parse_chat if kind is ChatRequest else parse_completion
    return make(body, "id", TERMS, "")


@pytest.mark.parametrize("prompt", [{"prompt": "a"}, {"messages": HELLO}])
@pytest.mark.parametrize(
    ("n", "said"),
    [(0, "n is 0, which asks for no choice"), (-1, "from 1 to 128"), (129, "from 1 to 128")],
)
def test_a_number_of_choices_out_of_range_is_refused_in_words(prompt, n, said):
    with pytest.raises(ApiError, match=said) as error:
        job(**prompt, n=n)
    assert (error.value.status, error.value.param) == (400, "n")


def test_a_call_has_all_choices_of_its_prompt():
    made = job(prompt=["a", "b"], n=3, seed=5)
    calls = list(made.calls)
    assert [(call.request_id, call.params.n, call.params.seed) for call in calls] == [
        ("id-0", 3, 5), ("id-1", 3, 5),
    ]  # fmt: skip
    assert (made.choices, made.prompts, made.best_of) == (6, 2, 0)
    assert job(messages=HELLO, n=MAX_CHOICES).choices == 128
    assert job(prompt="a", n=None).choices == 1


def test_choices_count_as_prompts_do():
    assert job(prompt=["a"] * 50, n=4).choices == 200
    with pytest.raises(ApiError, match="at most 200 choices a request, not 4 of 51 prompts"):
        job(prompt=["a"] * 51, n=4)
    with pytest.raises(ApiError, match="not 5 of 51 prompts") as error:
        job(prompt=["a"] * 51, n=2, best_of=5)
    assert error.value.param == "best_of"


def test_the_best_need_log_probs_although_nobody_shows_them():
    made = job(prompt="a", n=2, best_of=5)
    (call,) = made.calls
    assert (call.params.n, call.params.logprobs, made.best_of) == (5, 0, 2)
    assert made.output_options.logprobs is None
    (call,) = job(prompt="a", best_of=5, logprobs=3).calls
    assert (call.params.n, call.params.logprobs) == (5, 3)
    same = job(prompt="a", n=2, best_of=2, stream=True)
    (call,) = same.calls
    assert (call.params.n, call.params.logprobs, same.best_of) == (2, None, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"best_of": 1, "n": 2}, "best_of is 1, but n is 2"),
        ({"best_of": 2, "stream": True}, "not allowed with stream"),
        ({"best_of": 0}, "best_of is 0"),
        ({"best_of": 129}, "best_of must be from 1 to 128"),
    ],
)
def test_a_best_of_that_makes_no_sense_is_refused(fields, said):
    with pytest.raises(ApiError, match=said) as error:
        job(prompt="a", **fields)
    assert (error.value.status, error.value.param) == (400, "best_of")


@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_the_best_have_the_highest_mean(data, prompts, made):
    shown = data.draw(st.integers(1, made))
    logprob = st.integers(-8, 0).map(float)
    each = [data.draw(st.lists(logprob, max_size=4)) for _ in range(prompts * made)]
    best = BestOf(len(each), made, shown, with_logprobs=False)
    for index, logprobs in enumerate(each):
        for at, value in enumerate(logprobs):
            texts = LogprobTexts(entry(value), (b"x",), pack([at]))
            delta = OutputDelta("r", "x", pack([7]), at, at, logprobs=texts)
            assert best.add(index, delta).logprobs is None
    means = [sum(logprobs) / len(logprobs) if logprobs else float("-inf") for logprobs in each]
    chosen = best.best_choices()
    assert len(chosen) == prompts * shown
    for prompt in range(prompts):
        mine = chosen[prompt * shown : (prompt + 1) * shown]
        own = range(prompt * made, (prompt + 1) * made)
        assert sorted(own, key=lambda n: (-means[n], n))[:shown] == mine


async def test_choices_of_several_prompts_are_numbered_through(gateway: Gateway) -> None:
    client = gateway.client()
    asked: dict[str, Any] = {"model": "test", "prompt": ["x y", "z"], "n": 3}
    whole = await client.completions.create(**asked)
    expected = ["x y ", "x y 1 ", "x y 2 ", "z ", "z 1 ", "z 2 "]
    assert [(c.index, c.text) for c in whole.choices] == list(enumerate(expected))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3, "each prompt once"
    assert whole.usage.completion_tokens == 2 + 3 + 3 + 1 + 2 + 2
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2 + 2, "those of the first choices"
    stream = await client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    texts, usage, order = [""] * 6, None, list[int]()
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            order.append(choice.index)
    assert texts == expected and usage == whole.usage
    assert order != sorted(order), "side by side"
    assert len(gateway.pipeline.submits) == 4, "one for each prompt"
    assert gateway.core.idle()


async def test_each_choice_of_a_chat_begins_with_its_role(gateway: Gateway) -> None:
    stream = await gateway.client().chat.completions.create(
        model="test", messages=[{"role": "user", "content": "a b"}], n=2, stream=True
    )
    roles, texts = ["", ""], ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            roles[choice.index] += choice.delta.role or ""
            texts[choice.index] += choice.delta.content or ""
    assert roles == ["assistant", "assistant"] and texts == ["a b ", "a b 1 "]


async def test_a_client_that_leaves_ends_all_choices(gateway: Gateway) -> None:
    stream = await gateway.client().completions.create(
        model="test", prompt="pause now", n=3, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    gone = {(await gateway.pipeline.aborts.get()).request_id for _ in range(3)}
    base = gateway.pipeline.submits[0].request_id
    assert gone == {base, f"{base}/1", f"{base}/2"}
    assert gateway.core.idle()


async def test_one_that_is_refused_is_one_error(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="too long"):
        await gateway.client().completions.create(model="test", prompt="refuse me", n=4)
    assert gateway.core.idle()


async def test_the_queue_counts_every_choice(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_queue=5)
    client = gateway.client()
    await client.completions.create(model="test", prompt="a", n=5)
    with pytest.raises(openai.APIStatusError) as error:
        await client.completions.create(model="test", prompt="a", n=6)
    assert error.value.status_code == 400, "as of prompts: so many never fit"
    waiting = asyncio.create_task(client.completions.create(model="test", prompt="hang", n=3))
    while gateway.core.stats()["waiting"] < 3:
        await asyncio.sleep(0.01)
    with pytest.raises(openai.RateLimitError, match="3 requests are waiting"):
        await client.completions.create(model="test", prompt="a", n=3)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def test_a_key_runs_so_many_choices_at_a_time_and_counts_a_request_a_minute_for_them(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(key_concurrent=4, key_requests_per_minute=3)
    bodies = (
        {"prompt": "a b", "n": 4, "max_tokens": 9},
        {"prompt": "a b", "n": 5},
        {"prompt": "a b", "n": 2, "best_of": 5},
        {"prompt": ["a", "b"], "n": 3},
        {"prompt": ["a", "b"], "n": 2},
        {"prompt": "a"},
    )
    async with httpx.AsyncClient() as http:
        answers = [await http.post(f"{gateway.url}/v1/completions", json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [200, 429, 429, 429, 200, 429]
    assert answers[0].json()["usage"]["total_tokens"] == 2 + 2 + 3 * 3
    assert "retry-after" not in answers[1].headers, "five never may"
    said = answers[-1].json()["error"]["message"]
    assert "3 requests a minute" in said, "one, and one for each of two prompts"
