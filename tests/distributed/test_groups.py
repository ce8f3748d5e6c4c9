"""Several groups behind one door: all are used, one that is down gets nothing until it is back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from functools import partial

import psutil
import pytest
import pytest_asyncio
from chat_streams import questions

import waiting
from child_processes import children_with
from pipeinfer import LLM, AsyncLLM, SamplingParams

SMALL = {"threads": 1, "kv_pages": 400, "log_level": "warning"}
PATIENCE = 90.0
until = partial(waiting.until, patience=PATIENCE, every=0.05)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def engine(group: int) -> psutil.Process:
    """The process of rank 0 of a group, a child of this one."""
    for child in reversed(children_with("engine")):  # an older LLM may run, which tests share
        words = child.cmdline()
        if words[words.index("--group") + 1] == str(group):
            return child
    raise AssertionError(f"group {group} has no engine")


def finished(llm: AsyncLLM) -> list[float]:
    stats = llm.stats()
    return [stats[f"scheduler-{group}"]["finished_total"] for group in range(2)]


def groups_up(llm: AsyncLLM) -> float:
    return llm.stats()["tokenizer-0"]["groups_up"]


class Streams:
    """Requests under way; `begun` is set for each when its first token is there."""

    def __init__(self, llm: AsyncLLM, prompts: list[str], tokens: int) -> None:
        self.begun = [asyncio.Event() for _ in prompts]
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._tasks = [
            asyncio.create_task(self._one(llm, prompt, tokens, number))
            for number, prompt in enumerate(prompts)
        ]

    async def _one(self, llm: AsyncLLM, prompt: str, tokens: int, number: int) -> list[int]:
        async for delta in llm.generate(prompt, greedy(tokens)):
            self._ids[number] += delta.token_ids
            self.begun[number].set()
        return self._ids[number]

    def received(self) -> list[int]:
        """Tokens of each so far."""
        return [len(ids) for ids in self._ids]

    def moved_since(self, before: list[int]) -> bool:
        """Whether each has more tokens than it had, or has ended."""
        now = zip(before, self.received(), self._tasks, strict=True)
        return all(more > had or task.done() for had, more, task in now)

    async def all_begun(self) -> None:
        async with asyncio.timeout(PATIENCE):
            for begun in self.begun:
                await begun.wait()

    def __await__(self):
        return asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE).__await__()


async def both_work(llm: AsyncLLM, prompts: list[str]) -> list[list[int]]:
    """The outputs of a round in which both groups finish requests: the first, on an idle machine.

    Where heartbeats are seconds late a group counts as down for a while, as it should.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            before = finished(llm)
            outputs = await Streams(llm, prompts, 150)
            await until(lambda: sum(finished(llm)) - sum(before) >= len(prompts))  # noqa: B023
            if all(now > then for now, then in zip(finished(llm), before, strict=True)):
                return outputs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm():
    async with AsyncLLM(dp=2, routing="least-loaded", **SMALL) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_a_group_that_is_down_gets_nothing_and_is_used_again_when_it_is_back(llm):
    prompts = questions(8)
    expected = await both_work(llm, prompts)
    await disturb(llm, prompts, expected)
    assert await both_work(llm, prompts) == expected


async def disturb(llm: AsyncLLM, prompts: list[str], expected: list[list[int]]) -> None:
    """One group's engine hangs, then dies and comes back, with streams in both groups."""
    streams = Streams(llm, prompts, 150)
    await streams.all_begun()
    victim = engine(1)
    victim.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: groups_up(llm) == 1)
        before = finished(llm)
        fresh: list[Awaitable[list[list[int]]]] = [Streams(llm, prompts[:2], 20) for _ in range(3)]
        for answers in fresh:
            assert await answers == [ids[:20] for ids in expected[:2]]
        assert finished(llm)[1] == before[1], "nothing new went to the group that is down"
    finally:
        victim.send_signal(signal.SIGKILL)
    await until(lambda: groups_up(llm) == 2)
    assert await streams == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_of_a_group_that_lost_its_engine_go_on_in_the_other_one(llm):
    """Before it is back: an engine starts for seconds, and all that they need is a prefill."""
    prompts = questions(8, seed=3)
    expected = await both_work(llm, prompts)
    moved = llm.stats()["tokenizer-0"]["moved_total"]
    streams = Streams(llm, prompts, 150)
    await streams.all_begun()
    engine(1).kill()
    await until(lambda: groups_up(llm) == 1)
    before = streams.received()
    await until(lambda: streams.moved_since(before))
    assert groups_up(llm) == 1, "all have moved, and the engine is not back"
    assert await streams == expected
    await until(lambda: llm.stats()["tokenizer-0"]["moved_total"] > moved)
    await until(lambda: groups_up(llm) == 2)


@pytest.mark.parametrize("shape", [{"tp": 2, "dp": 2}], ids=["2x2"])
def test_groups_of_several_ranks_give_the_same_tokens(shape):
    prompts = questions(6, seed=9)

    def tokens(**settings: int) -> list[list[int]]:
        with LLM(**SMALL, **settings) as llm:
            results = llm.generate(prompts, greedy(24), use_tqdm=False)
            ranks = [name for name in llm.stats() if name.startswith("engine")]
            assert len(ranks) == settings.get("tp", 1) * settings.get("dp", 1)
        return [list(result.outputs[0].token_ids) for result in results]

    assert tokens(**shape) == tokens(in_process=True)
