"""Stages killed under running streams: every stream completes with its own text, in one piece."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from dataclasses import dataclass, field

import openai
import pytest
from leftovers import leftovers

from pipeinfer.demo import copy_task
from servers import Server

STREAMS = 12
TRIES = 5
VICTIMS = (
    ("scheduler",),
    ("tokenizer",),
    ("detokenizer",),
    ("tokenizer", "detokenizer"),
    ("scheduler", "detokenizer"),
)


class Streams:
    """Requests that stream at the same time; `texts` is filled as the chunks come."""

    def __init__(self, server: Server, questions: list[str]) -> None:
        self._server, self._questions = server, questions
        self.texts = [""] * len(questions)
        self.finished: list[str | None] = [None] * len(questions)

    async def run(self, disturb=None) -> list[str]:
        """The texts; `disturb()` runs in a thread when every stream has begun.

        A machine that stalls this process for a second lets the streams end first: then again.
        """
        async with openai.AsyncOpenAI(
            base_url=f"{self._server.url}/v1", api_key="none", timeout=240, max_retries=0
        ) as api:
            for _ in range(TRIES):
                self.texts = [""] * len(self._questions)
                self.finished = [None] * len(self._questions)
                tasks = [asyncio.create_task(self._ask(api, i)) for i in range(len(self.texts))]
                while not all(self.texts) and not any(task.done() for task in tasks):
                    await asyncio.sleep(0.01)
                under_way = self.finished.count(None)
                disturbed = disturb is not None and under_way > STREAMS / 2
                if disturbed:
                    await asyncio.to_thread(disturb)
                await asyncio.gather(*tasks)
                assert all(finish in ("stop", "length") for finish in self.finished)
                if disturbed or disturb is None:
                    return self.texts
        raise AssertionError(f"in none of {TRIES} tries were enough streams left to disturb")

    async def _ask(self, api: openai.AsyncOpenAI, index: int) -> None:
        stop = {"stop": ["zz"]} if index % 3 else {}
        async for chunk in await api.chat.completions.create(
            model="pipeinfer-demo",
            messages=[{"role": "user", "content": self._questions[index]}],
            temperature=0.0 if index % 2 else 0.8,
            seed=index,
            max_tokens=160,
            stream=True,
            extra_body={"ignore_eos": True},
            **stop,
        ):
            self.texts[index] += chunk.choices[0].delta.content or ""
            self.finished[index] = chunk.choices[0].finish_reason or self.finished[index]


@pytest.fixture(scope="module")
def server():
    with Server("--kv-pages", "400") as running:
        yield running


@pytest.fixture(scope="module")
def questions() -> list[str]:
    rng = random.Random(5)
    return [copy_task(rng, rng.randint(10, 40))[0] for _ in range(STREAMS)]


@pytest.fixture(scope="module")
def undisturbed(server: Server, questions: list[str]) -> list[str]:
    return asyncio.run(Streams(server, questions).run())


def pids(server: Server, names: tuple[str, ...]) -> dict[str, int]:
    stages = {stage["name"]: stage["pid"] for stage in server.health()["stages"]}
    return {name: stages[name] for name in names}


def kill(server: Server, names: tuple[str, ...]) -> None:
    """-9 for all of them at once; returns when others are in their places and ready."""
    victims = pids(server, names)
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        now = pids(server, names)
        changed = all(now[name] != victims[name] for name in names)
        return changed and server.health()["status"] == "ready"

    server.wait(back, f"{names} came back")


@pytest.mark.parametrize("names", VICTIMS, ids="+".join)
def test_streams_survive_the_loss_of(server, questions, undisturbed, names):
    streams = Streams(server, questions)
    texts = asyncio.run(streams.run(lambda: kill(server, names)))
    assert texts == undisturbed
    server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "nothing runs")


def test_requests_that_come_while_a_stage_is_away_are_answered(server, questions, undisturbed):
    """They wait in the pipeline: nothing is refused, and the first text is the only sign."""

    async def ask_at_once(names: tuple[str, ...]) -> list[str]:
        for pid in pids(server, names).values():
            os.kill(pid, signal.SIGKILL)
        return await Streams(server, questions).run()

    assert asyncio.run(ask_at_once(("tokenizer", "scheduler", "detokenizer"))) == undisturbed


@dataclass
class Choice:
    """What came of one: its text, its tokens, and their log-probs with those of alternatives."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


class Choices:
    """Seeded streams of four choices each, and one whose grammar bounds it; all with log-probs."""

    QUESTIONS, MANY = 3, 4
    LETTERS = "[a-z ]{150}"

    def __init__(self, server: Server, questions: list[str]) -> None:
        self._server, self._questions = server, questions[: self.QUESTIONS]
        self.made: list[Choice] = []

    async def run(self, disturb=None) -> list[Choice]:
        """As Streams.run."""
        async with openai.AsyncOpenAI(
            base_url=f"{self._server.url}/v1", api_key="none", timeout=240, max_retries=0
        ) as api:
            for _ in range(TRIES):
                self.made = [Choice() for _ in range(self.QUESTIONS * self.MANY + 1)]
                asked = [self._free(api, number) for number in range(self.QUESTIONS)]
                tasks = [asyncio.create_task(one) for one in (*asked, self._bounded(api))]
                while not all(one.text for one in self.made):
                    assert not any(task.done() and task.exception() for task in tasks)
                    await asyncio.sleep(0.01)
                disturbed = disturb is not None and self._under_way()
                if disturbed:
                    await asyncio.to_thread(disturb)
                await asyncio.gather(*tasks)
                if disturbed or disturb is None:
                    return self.made
        raise AssertionError(f"in none of {TRIES} tries were enough choices left to disturb")

    def _under_way(self) -> bool:
        """The bounded one, and most of the others."""
        left = [one.finish is None for one in self.made]
        return left[-1] and sum(left) > len(left) / 2

    async def _free(self, api: openai.AsyncOpenAI, number: int) -> None:
        mine = self.made[number * self.MANY :][: self.MANY]
        extra = {"ignore_eos": True}
        await self._read(api, mine, self._questions[number], 100 * number, extra)

    async def _bounded(self, api: openai.AsyncOpenAI) -> None:
        await self._read(api, self.made[-1:], "Go on.", 7, {"guided_regex": self.LETTERS})

    async def _read(self, api, mine: list[Choice], question: str, seed: int, extra: dict) -> None:
        async for chunk in await api.chat.completions.create(
            model="pipeinfer-demo",
            messages=[{"role": "user", "content": question}],
            temperature=0.9, seed=seed, n=len(mine), max_tokens=160, logprobs=True, top_logprobs=2,
            stream=True, extra_body=extra,
        ):  # fmt: skip
            for said in chunk.choices:
                one = mine[said.index]
                assert one.finish is None
                one.text += said.delta.content or ""
                one.finish = said.finish_reason
                for token in said.logprobs.content if said.logprobs else ():
                    one.tokens.append(token.token)
                    one.logprobs += [t.logprob for t in (token, *token.top_logprobs)]


@pytest.fixture(scope="module")
def whole_choices(server: Server, questions: list[str]) -> list[Choice]:
    made = asyncio.run(Choices(server, questions).run())
    assert len({one.text for one in made}) == len(made), "each has a seed of its own"
    assert re.fullmatch(Choices.LETTERS, made[-1].text)
    assert [one.finish for one in made] == ["length"] * (len(made) - 1) + ["stop"]
    assert all(len(one.logprobs) == 3 * len(one.tokens) >= 3 * 40 for one in made)
    return made


@pytest.mark.parametrize("name", ["tokenizer", "scheduler", "engine", "detokenizer"])
def test_every_choice_and_its_log_probs_survive_the_loss_of(server, questions, whole_choices, name):
    choices = Choices(server, questions)
    for found, whole in zip(
        asyncio.run(choices.run(lambda: kill(server, (name,)))), whole_choices, strict=True
    ):
        assert (found.text, found.finish) == (whole.text, whole.finish)
        assert found.tokens == whole.tokens
        assert found.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "nothing runs")


async def _end_early(api: openai.AsyncOpenAI, question: str, index: int) -> str:
    """How a request ended that does not run to its length: each fourth in another way."""
    how = index % 4
    stream = await api.chat.completions.create(
        model="pipeinfer-demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=3 if how == 3 else 400,
        stop=["a", "e", "o", "1", "2", "3"] if how == 2 else None,
        stream=True,
        extra_body={"ignore_eos": True, "timeout": 2.0 if how == 1 else None},
    )
    chunks = 0
    async for chunk in stream:
        chunks += 1
        if how == 0 and chunks == 1 + index // 2:
            await stream.close()
            return "gone"
        if chunk.choices[0].finish_reason is not None:
            return chunk.choices[0].finish_reason
    raise AssertionError("it ended without a reason")


def test_nothing_is_left_of_requests_that_end_while_stages_die(server, questions):
    """Clients that leave, timeouts, stop strings and limits, beside streams that are disturbed."""

    async def everybody() -> list[str | BaseException]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
        ) as api:
            asked = [_end_early(api, question, n) for n, question in enumerate(questions)]
            early = asyncio.gather(*asked, return_exceptions=True)
            for names in (("scheduler",), ("tokenizer", "engine"), ("detokenizer", "scheduler")):
                await asyncio.sleep(0.3)
                for pid in (await asyncio.to_thread(pids, server, names)).values():
                    with contextlib.suppress(ProcessLookupError):  # it is being started
                        os.kill(pid, signal.SIGKILL)
            return await early

    ends = asyncio.run(everybody())
    for index, end in enumerate(ends):
        if isinstance(end, openai.APIStatusError):
            assert index % 4 == 1 and end.status_code == 408, end
        else:
            assert end in ({"gone"}, {"abort"}, {"stop", "length"}, {"length"})[index % 4], end
    assert leftovers(server) == {}
