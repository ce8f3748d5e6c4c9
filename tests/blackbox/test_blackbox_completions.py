"""Completions by OpenAI's client: every way of asking in one matrix, prompts, and log-probs."""

from __future__ import annotations

import asyncio
import itertools

import openai
import pytest
from asked import CONTEXT, MODEL

PROMPT = "3 4 5"
IDS = list(PROMPT.encode())
USAGE = {"include_usage": True}


@pytest.fixture
def ask(api):
    def ask(prompt=PROMPT, extra=None, **more):
        usual = {"model": MODEL, "temperature": 0, "max_tokens": 4}
        return api.completions.create(prompt=prompt, extra_body=extra, **(usual | more))

    return ask


@pytest.mark.parametrize(("echo", "logprobs"), [(False, None), (True, 5), (False, 5)])
def test_every_way_of_asking_gives_the_same_whole_and_in_a_stream(ask, echo, logprobs):
    for listed, n, ids in itertools.product((False, True), (1, 2), (False, True)):
        prompt = IDS if ids else PROMPT
        asked = {"echo": echo, "logprobs": logprobs, "n": n}
        whole = ask([prompt, prompt] if listed else prompt, **asked)
        many = n * (1 + listed)
        assert [choice.index for choice in whole.choices] == list(range(many))
        assert len({choice.text for choice in whole.choices}) == 1, "all are greedy"
        assert whole.usage.prompt_tokens == len(IDS) * (1 + listed)
        assert whole.usage.completion_tokens == 4 * many
        assert whole.choices[0].text.startswith(PROMPT) == echo
        assert whole.id and whole.created and whole.object == "text_completion"
        for choice in whole.choices:
            _check_logprobs(choice, logprobs, echo)
        chunks = list(
            ask(
                [prompt, prompt] if listed else prompt,
                **asked,
                stream=True,
                stream_options=USAGE,
            )
        )
        *told, last = chunks
        assert not last.choices and last.usage.completion_tokens == 4 * many
        for index in range(many):
            mine = [c.choices[0] for c in told if c.choices[0].index == index]
            assert "".join(c.text for c in mine) == whole.choices[index].text
            assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
            if logprobs is not None:
                parts = [c.logprobs for c in mine if c.logprobs]
                found = whole.choices[index].logprobs
                assert [t for part in parts for t in part.tokens] == found.tokens
                assert [n for part in parts for n in part.text_offset] == found.text_offset
                tops = [top for part in parts for top in part.top_logprobs]
                assert list(map(_names, tops)) == list(map(_names, found.top_logprobs))
                streamed = [logprob for part in parts for logprob in part.token_logprobs]
                assert streamed[echo:] == pytest.approx(found.token_logprobs[echo:], abs=1e-3)


def _names(top: dict | None) -> set[str]:
    return set(top or ())


def _check_logprobs(choice, logprobs: int | None, echo: bool) -> None:
    if logprobs is None:
        assert choice.logprobs is None
        return
    found, many = choice.logprobs, 4 + echo * len(IDS)
    assert "".join(found.tokens) == choice.text
    starts = [0, *itertools.accumulate(map(len, found.tokens))]
    assert found.text_offset == starts[:-1] and len(found.tokens) == many
    first = found.token_logprobs[0] is None, found.top_logprobs[0] is None
    assert first == (echo, echo), "nothing comes before a prompt's first token"
    for token, top in list(zip(found.tokens, found.top_logprobs, strict=True))[echo:]:
        assert logprobs <= len(top) <= logprobs + 1 and token in top


def test_log_probs_have_so_many_alternatives(ask):
    assert ask(logprobs=None).choices[0].logprobs is None
    for most in (0, 1, 5, 20):
        found = ask(IDS, logprobs=most).choices[0].logprobs
        assert all(max(most, 1) <= len(top) <= most + 1 for top in found.top_logprobs)
    found = ask(IDS, logprobs=3, extra={"allowed_token_ids": [42]}).choices[0].logprobs
    assert found.tokens == ["*"] * 4
    assert all(len(top) in (3, 4) and "*" in top for top in found.top_logprobs)
    for most in (0, 1):
        prompts = ["A robot may not", [77, 121]]
        for prompt in prompts:
            (choice,) = ask([prompt], extra={"prompt_logprobs": most}).choices
            assert choice.prompt_logprobs[0] is None
            assert len(choice.prompt_logprobs) == len(prompt)
    both = ask(["ab", "cde"], extra={"prompt_logprobs": 1}).choices
    assert [len(choice.prompt_logprobs) for choice in both] == [2, 3]
    assert "prompt_logprobs" not in ask().choices[0].model_dump()


def test_what_was_sampled_has_the_same_log_probs_as_a_prompt(ask):
    """Decoding and prefilling know one distribution, of the token and of its alternatives."""
    for prompt, heat in (("The capital is ", 1), (PROMPT, 0)):
        extra = {"ignore_eos": True, "return_token_ids": True}
        made = ask(
            prompt, extra=extra, temperature=heat, seed=5, logprobs=5, max_tokens=24
        ).choices[0]
        ids = [*made.prompt_token_ids, *made.token_ids]
        of_prompt = ask(ids, echo=True, logprobs=5, max_tokens=0).choices[0].logprobs
        start = len(made.prompt_token_ids)
        assert of_prompt.tokens[start:] == made.logprobs.tokens
        pairs = zip(made.logprobs.top_logprobs, of_prompt.top_logprobs[start:], strict=True)
        for sampled, again in pairs:
            assert sampled.keys() == again.keys()
            assert all(abs(sampled[token] - again[token]) < 1e-3 for token in sampled)


def test_prompts_and_their_ends(ask):
    assert ask([97] * (CONTEXT - 1), max_tokens=1).usage.total_tokens == CONTEXT
    ids = list(range(100, 108))
    for side, kept in (("right", ids[:4]), ("left", ids[-4:]), (None, ids[-4:])):
        extra = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        assert ask(ids, extra=extra).choices[0].prompt_token_ids == kept
    extra = {"truncate_prompt_tokens": -1}
    assert ask("a" * 3_000, extra=extra).usage.prompt_tokens == CONTEXT - 4
    texts = ["3 4 5", "5 6 7", "9 8 7"]
    batch = ask(texts, n=2)
    alone = [ask(prompt).choices[0].text for prompt in texts]
    assert [c.text for c in batch.choices] == [t for t in alone for _ in range(2)]
    assert ask("abc", echo=True, max_tokens=0).choices[0].text == "abc"
    assert ask("abc", extra={"suffix": ""}).choices[0].text == ask("abc").choices[0].text


@pytest.mark.parametrize(
    "prompts", [["ab", "cde"], [[97, 98], [99, 100, 101]]], ids=["texts", "ids"]
)
def test_each_of_several_prompts_is_said_again_before_its_own_answer(ask, prompts):
    asked = {"echo": True, "n": 2, "temperature": 1, "seed": 9}
    whole = ask(prompts, **asked).choices
    begins = ["ab", "ab", "cde", "cde"]
    alone = [choice.text for prompt in prompts for choice in ask(prompt, **asked).choices]
    for choice, begin, text in zip(whole, begins, alone, strict=True):
        assert choice.text.startswith(begin)
        assert choice.text == text
    told = [""] * 4
    for chunk in ask(prompts, **asked, stream=True):
        told[chunk.choices[0].index] += chunk.choices[0].text
    assert told == [choice.text for choice in whole]


def test_the_best_of_many_are_likelier_than_all(ask):
    asked = {"temperature": 2, "seed": 7, "logprobs": 0, "max_tokens": 5}
    every = ask(n=6, **asked).choices
    best = ask(n=2, best_of=6, **asked)

    def mean(choice) -> float:
        logprobs = choice.logprobs.token_logprobs
        return sum(logprobs) / len(logprobs)

    ranked = sorted(map(mean, every), reverse=True)
    assert list(map(mean, best.choices)) == pytest.approx(ranked[:2])
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in every)


def test_requests_of_all_kinds_at_a_time_disturb_nobody(server, ask):
    """Forms, log-probs of different widths, penalties and plain ones, in one batch."""
    kinds = [
        {},
        {"logprobs": 1},
        {"logprobs": 5, "echo": True},
        {"extra_body": {"prompt_logprobs": 2}},
        {"extra_body": {"regex": "[a-f]{6}"}, "max_tokens": 10},
        {"extra_body": {"json_schema": {"enum": [[1, 2], "b"]}}, "max_tokens": 12},
        {"frequency_penalty": 1.5, "presence_penalty": -1.5},
        {"n": 3, "temperature": 1, "seed": 3},
        {"logit_bias": {"122": 50}},
        {"prompt": "a" * 900},
    ]

    async def one(client, kind):
        usual = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
        answer = await client.completions.create(**(usual | kind))
        return [(choice.text, choice.finish_reason) for choice in answer.choices]

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
        ) as client:
            alone = [await one(client, kind) for kind in kinds]
            return alone, await asyncio.gather(*(one(client, kind) for kind in kinds * 4))

    alone, together = asyncio.run(all_of_them())
    assert together == alone * 4
