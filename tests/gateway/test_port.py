"""Calls of one request go into the pipeline a few at a time, and none is forgotten there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from pipeinfer.gateway.events import Call, Delta, Failed, Hangup, Started
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.port import SLICE, Port
from pipeinfer.messages import Message
from pipeinfer.params import SamplingParams

PROMPTS = 10 * SLICE


class Fed:
    """A port's core: remembers what it was fed, and refuses what it is told to."""

    def __init__(self) -> None:
        self.port = Port(Metrics(Health([])))
        self.port.bind(self.take)
        self.calls: list[str] = []
        self.hung_up: list[str] = []
        self.built = 0
        self.refuse = ""

    def take(self, message: Message) -> None:
        if isinstance(message, Hangup):
            self.hung_up.append(message.request_id)
            return
        assert isinstance(message, Call)
        self.calls.append(message.request_id)
        if message.request_id == self.refuse:
            self.port.deliver(Failed(message.request_id, 429, "full", code="queue_full"))

    def requests(self) -> Iterator[Call]:
        for i in range(PROMPTS):
            self.built += 1
            yield Call(str(i), SamplingParams(), text="x")


class Errors:
    """A sink that remembers failures."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, int]] = []

    def started(self, index: int, started: Started) -> None: ...

    def delta(self, index: int, delta: Delta) -> None: ...

    def failed(self, index: int, failed: Failed) -> None:
        self.failures.append((index, failed.status))


async def begun(fed: Fed, sink: Errors, turns: int) -> asyncio.Task[None]:
    """A handler that opens all calls and waits for ever, after so many turns of the loop."""

    async def handler() -> None:
        async with fed.port.opened(fed.requests(), sink):
            await asyncio.Event().wait()

    task = asyncio.create_task(handler())
    for _ in range(turns):
        await asyncio.sleep(0)
    return task


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_turn_of_the_loop_takes_a_slice_of_the_calls() -> None:
    fed = Fed()
    task = await begun(fed, Errors(), 0)
    for _ in range(20):
        before = len(fed.calls)
        await asyncio.sleep(0)
        assert len(fed.calls) - before <= SLICE
    assert fed.calls == [str(i) for i in range(PROMPTS)]
    await cancelled(task)
    assert fed.hung_up == fed.calls


async def test_a_client_that_leaves_amid_its_calls_leaves_none_behind() -> None:
    fed = Fed()
    task = await begun(fed, Errors(), 3)
    assert 0 < len(fed.calls) < PROMPTS
    fed.port.deliver(Delta("1", "x", b"", 0, 0, "stop"))
    await cancelled(task)
    assert fed.hung_up == [name for name in fed.calls if name != "1"]
    assert fed.built == len(fed.calls) < PROMPTS


def refused_at_once(fed: Fed) -> None:
    fed.refuse = str(5 * SLICE + 3)


def refused_later(fed: Fed) -> None:
    fed.port.deliver(Failed("1", 400, "too long"))


def server_ends(fed: Fed) -> None:
    fed.port.fail_all(503, "the server is shutting down")


@pytest.mark.parametrize("happen", [refused_at_once, refused_later, server_ends])
async def test_after_a_failure_no_more_calls_are_built(happen: Callable[[Fed], None]) -> None:
    fed, sink = Fed(), Errors()
    task = await begun(fed, sink, 3)
    assert 0 < len(fed.calls) < PROMPTS
    happen(fed)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fed.calls) < PROMPTS
    assert fed.built == len(fed.calls)
    assert sink.failures
    await cancelled(task)
    failed = {str(index) for index, _ in sink.failures}
    assert fed.hung_up == [name for name in fed.calls if name not in failed]


async def test_calls_that_are_done_early_do_not_stop_the_others() -> None:
    fed, sink = Fed(), Errors()
    task = await begun(fed, sink, 2)
    for name in list(fed.calls):
        fed.port.deliver(Delta(name, "x", b"", 0, 0, "stop"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fed.calls) == PROMPTS and not sink.failures
    await cancelled(task)
