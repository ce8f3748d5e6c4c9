"""What of a prompt is computed only once: the prefix cache by what usage says and answers show."""

from __future__ import annotations

import random

import openai
import pytest
from asked import CONTEXT, MODEL

PAGE = 16  # tokens; only whole pages are found again
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture
def ask(api):
    def ask(prompt, salt=None, **more):
        usual = {"model": MODEL, "temperature": 0, "max_tokens": 8}
        extra = IDS if salt is None else {**IDS, "cache_salt": salt}
        return api.completions.create(prompt=prompt, extra_body=extra, **(usual | more))

    return ask


def drawn(seed: str, length: int) -> list[int]:
    """Ids of letters and signs that no other test has in this order."""
    return random.Random(seed).choices(range(32, 127), k=length)


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def logprobs_of(answer) -> list[float]:
    return answer.choices[0].logprobs.token_logprobs


def test_each_turn_finds_the_turns_before_it_and_answers_as_without_them(ask):
    for client in range(2):
        prompt, known = drawn(f"client {client}", 70), 0
        for turn in range(3):
            answer = ask(prompt, logprobs=0)
            assert known // PAGE * PAGE <= cached(answer) < len(prompt)
            assert cached(answer) == 0 or turn, "nobody asked this before"
            ids = answer.choices[0].token_ids
            alone = ask(prompt, salt=f"{client} {turn}", logprobs=0)
            assert (cached(alone), alone.choices[0].token_ids) == (0, ids)
            assert logprobs_of(alone) == pytest.approx(logprobs_of(answer), abs=1e-3)
            known = len(prompt) + len(ids) - 1  # no step computes the last token's keys and values
            prompt = [*prompt, *ids, *drawn(f"client {client}, turn {turn}", 30)]


def test_a_turn_that_is_left_or_refused_leaves_the_conversation_as_it_was(ask):
    prompt = drawn("conversation", 70)
    prompt += ask(prompt).choices[0].token_ids
    stream = ask([*prompt, *drawn("left", 40)], max_tokens=1_000, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.BadRequestError):
        ask([*prompt, *[97] * CONTEXT])
    prompt, known = [*prompt, *drawn("after", 30)], len(prompt) - 1
    answer, alone = ask(prompt), ask(prompt, salt="alone")
    assert known // PAGE * PAGE <= cached(answer) < len(prompt)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].token_ids == alone.choices[0].token_ids


def test_prompts_that_branch_share_what_they_begin_with(ask):
    trunk = drawn("trunk", 4 * PAGE + 5)
    first, *others = [
        cached(ask([*trunk, *drawn(f"branch {name}", 40)], max_tokens=1)) for name in "abc"
    ]
    assert first == 0
    assert all(4 * PAGE <= found <= len(trunk) for found in others)


def test_a_tree_of_prompts_at_a_time_is_answered_as_each_alone(ask):
    rng, tree = random.Random("tree"), [drawn("root", 20)]
    for node in range(11):
        tree.append([*rng.choice(tree), *drawn(f"node {node}", rng.randrange(1, 60))])
    rng.shuffle(tree)
    together = ask(tree, max_tokens=4)
    alone = [ask(prompt, salt=str(at), max_tokens=4) for at, prompt in enumerate(tree)]
    assert [choice.token_ids for choice in together.choices] == [
        answer.choices[0].token_ids for answer in alone
    ]
    assert together.usage.prompt_tokens == sum(map(len, tree))
    assert cached(together) < together.usage.prompt_tokens


def test_a_salt_has_a_cache_of_its_own_also_in_streams(ask):
    prompt = drawn("salted", 100)
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    assert cached(ask(prompt)) == 0
    for salt in ("one", "two"):
        first, again = [cached(list(ask(prompt, salt=salt, **asked))[-1]) for _ in range(2)]
        assert first == 0
        assert (len(prompt) - 1) // PAGE * PAGE <= again < len(prompt)
