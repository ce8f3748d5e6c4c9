"""Two groups of two ranks behind one door: both are used, one that is down gets nothing until it is
back, and no stream is another one, whatever happens to a group.
"""

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
HOST_LOSS = 3.0  # seconds of silence
PATIENCE = 90.0
TRIES = 5  # of what halts may undo: streams are over before anybody disturbs them
until = partial(waiting.until, patience=PATIENCE, every=0.05)
PROMPTS, TOKENS = questions(6), 40

pytestmark = pytest.mark.asyncio(loop_scope="module")


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def process(stage: str, group: int = 0, rank: int = 0) -> psutil.Process:
    """Of a stage."""
    for child in children_with(stage):
        words = child.cmdline()
        if [words[words.index(flag) + 1] for flag in ("--group", "--rank")] == [
            f"{group}",
            f"{rank}",
        ]:
            return child
    raise AssertionError(f"group {group} has no {stage} {rank}")


def finished(llm: AsyncLLM) -> list[float]:
    stats = llm.stats()
    return [stats[f"scheduler-{group}"]["finished_total"] for group in range(2)]


def groups_up(llm: AsyncLLM) -> float:
    return llm.stats()["tokenizer-0"]["groups_up"]


def moved_total(llm: AsyncLLM) -> float:
    return llm.stats()["tokenizer-0"]["moved_total"]


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

    def done(self) -> list[bool]:
        return [task.done() for task in self._tasks]

    def moved_since(self, before: list[int]) -> bool:
        """Whether each has more tokens than it had, or has ended."""
        now = zip(before, self.received(), self.done(), strict=True)
        return all(more > had or done for had, more, done in now)

    async def all_begun(self) -> None:
        async with asyncio.timeout(PATIENCE):
            for begun in self.begun:
                await begun.wait()

    def __await__(self):
        return asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE).__await__()


async def both_work(llm: AsyncLLM) -> list[list[int]]:
    """The outputs of a round in which both groups finish requests: the first, on an idle machine.

    Where heartbeats are seconds late a group counts as down for a while, as it should.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            before = finished(llm)
            outputs = await Streams(llm, PROMPTS, TOKENS)
            await until(lambda: sum(finished(llm)) - sum(before) >= len(PROMPTS))  # noqa: B023
            if all(now > then for now, then in zip(finished(llm), before, strict=True)):
                return outputs


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one rank alone gives."""
    with LLM(**SMALL, in_process=True) as llm:
        results = llm.generate(PROMPTS, greedy(TOKENS), use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm():
    shape = {"tp": 2, "dp": 2, "routing": "least-loaded", "host_loss": HOST_LOSS}
    async with AsyncLLM(**shape, **SMALL) as running:
        yield running


async def test_groups_of_several_ranks_give_the_same_tokens(llm, expected):
    assert sum(name.startswith("engine") for name in llm.stats()) == 4
    assert await both_work(llm) == expected


async def test_a_group_that_is_down_gets_nothing_and_is_used_again_when_it_is_back(llm, expected):
    """One of its ranks hangs, with streams in both groups: it is started anew, and before it is
    back its streams have gone on in the other group."""
    for _ in range(TRIES):
        moved, hangs = moved_total(llm), process("engine", 1, rank=1)
        streams = Streams(llm, PROMPTS, TOKENS)
        await streams.all_begun()
        hangs.send_signal(signal.SIGSTOP)
        await until(lambda: groups_up(llm) == 1)
        before, received = finished(llm), streams.received()
        fresh: list[Awaitable[list[list[int]]]] = [Streams(llm, PROMPTS[:2], 20) for _ in range(3)]
        await until(lambda: streams.moved_since(received))  # noqa: B023
        still_down = groups_up(llm) == 1
        for answers in fresh:
            assert await answers == [ids[:20] for ids in expected[:2]]
        if still_down:
            assert finished(llm)[1] == before[1], "nothing new went to the group that is down"
        assert await streams == expected
        await until(lambda: groups_up(llm) == 2)
        assert await both_work(llm) == expected
        if still_down and moved_total(llm) > moved:
            return
    raise AssertionError("never have streams left the group before it was back")


async def test_streams_of_a_lost_host_go_on_at_another_and_its_late_words_do_no_harm(llm, expected):
    """A group falls silent, and the detokenizer dies with it: the one that is started elsewhere has
    never heard what that group said."""
    silent, dies = [process(stage, 1) for stage in ("scheduler", "engine")], process("detokenizer")
    streams = Streams(llm, PROMPTS, TOKENS)
    await streams.all_begun()
    for one in silent:
        one.send_signal(signal.SIGSTOP)
    dies.kill()
    try:
        assert await streams == expected
    finally:
        for one in silent:
            one.send_signal(signal.SIGCONT)
    await until(lambda: groups_up(llm) == 2)
    assert await Streams(llm, PROMPTS, 20) == [ids[:20] for ids in expected]


async def test_streams_go_on_after_a_sleep_of_all_groups_in_their_midst(llm, expected):
    for _ in range(TRIES):
        streams = Streams(llm, PROMPTS, TOKENS)
        await streams.all_begun()
        await llm.sleep(level=2, mode="keep")
        disturbed = not all(streams.done())
        await llm.wake_up()
        assert await streams == expected
        if disturbed:
            return
    raise AssertionError("nobody was ever disturbed")
