"""When an engine has a standby: rules without processes, in any order of what happens."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.runtime.child import (
    FAILED,
    MAX_DEATHS,
    MISCONFIGURED,
    SETTLED_SECONDS,
    Child,
    Command,
    Standbys,
)
from pipeinfer.topology import Identity


class Process:
    """A child process that does nothing."""

    pid = 1 << 30  # nobody's

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode or 0


class World:
    """A group's engines, of which the first is `engine`, and the processes that were started as
    their standbys."""

    def __init__(self, ranks: int = 1) -> None:
        self.now = 0.0
        self.begun: list[tuple[Child, Process]] = []
        self.engines = [Child(Identity("engine", 0, rank)) for rank in range(ranks)]
        self.engine = self.engines[0]
        self.standbys = Standbys(self.start, lambda: self.now)

    async def start(self, standby: Child) -> Process:
        process = Process()
        standby.process = process
        standby.status = "starting", ""
        standby.kill = lambda: standby.process.end(-9)
        self.begun.append((standby, process))
        await asyncio.sleep(0)
        return process

    @property
    def running(self) -> list[tuple[Child, Process]]:
        return [one for one in self.begun if one[1].returncode is None]

    async def is_in(self, state: str, seconds: float = 0.0) -> None:
        self.now += seconds
        for engine in self.engines:
            engine.status = state, ""
            self.standbys.on_status(engine)
        await settle()

    def take(self, rank: int = 0) -> Child | None:
        return self.standbys.take(self.engines[rank], self.engines)

    def report(self, state: str) -> None:
        for standby, _ in self.running:
            standby.status = state, "a standby"
            standby.on_report()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def serving(ranks: int = 1) -> World:
    world = World(ranks)
    await world.is_in("ready")
    assert not world.begun
    await world.is_in("ready", SETTLED_SECONDS)
    assert len(world.running) == ranks
    return world


async def test_a_standby_is_begun_when_its_engine_has_served_for_a_while():
    world = World()
    for state in ("starting", "loading", "waiting", "ready", "waiting", "ready"):
        await world.is_in(state, SETTLED_SECONDS - 0.1)
        assert not world.begun
    await world.is_in("ready", 0.2)
    await world.is_in("ready", 100)
    assert len(world.begun) == 1


async def test_a_standby_of_another_command_is_not_promoted():
    world = await serving()
    world.engine.command = Command(("another",))
    assert world.take() is None
    await settle()
    assert not world.running and world.standbys.ready == 0


async def test_one_that_cannot_start_is_given_up_until_the_next_engine():
    world = await serving()
    for _ in range(MAX_DEATHS + 1):
        world.running[0][1].end(FAILED)
        await settle()
    assert not world.running and len(world.begun) == MAX_DEATHS + 1
    await world.is_in("ready", 100)
    assert not world.running
    assert world.take() is None
    await world.is_in("ready")
    await world.is_in("ready", SETTLED_SECONDS)
    world.running[0][1].end(MISCONFIGURED)
    await settle()
    assert not world.running


async def test_renewal_waits_until_the_new_one_is_ready_or_given_up():
    for succeeds in (True, False):
        world = await serving()
        [(_, before)] = world.running
        renewal = asyncio.ensure_future(world.standbys.renew(world.engine))
        await settle()
        assert before.returncode is not None and not renewal.done()
        if succeeds:
            world.report("ready")
        else:
            world.running[0][1].end(MISCONFIGURED)
        await settle()
        assert renewal.done()
        assert (world.take() is not None) == succeeds


async def test_where_the_standby_of_one_rank_ends_those_of_all_begin_again():
    world = await serving(2)
    world.report("ready")
    assert world.standbys.ready == 1
    before = [process for _, process in world.running]
    before[1].end(-9)
    await settle()
    assert all(process.returncode is not None for process in before)
    assert len(world.running) == 2 and world.standbys.ready == 0
    world.running[0][1].end(MISCONFIGURED)
    await settle()
    assert not world.running and world.take(1) is world.take(0) is None
    await world.is_in("waiting")
    await world.is_in("ready")
    await world.is_in("ready", SETTLED_SECONDS)
    assert len(world.running) == 2


async def test_ranks_are_promoted_together_or_not_at_all():
    """What ends between two promotions is promoted all the same: as any engine that ends, it takes
    its group with it."""
    world = await serving(2)
    first, second = (standby for standby, _ in world.running)
    assert world.take(1) is second
    first.process.end(-9)
    await settle()
    assert len(world.begun) == 2, "another one would know nothing of the second"
    assert world.take(0) is first
    await world.is_in("waiting")
    await world.is_in("ready")
    await world.is_in("ready", SETTLED_SECONDS)
    assert len(world.begun) == 4
    world.engines[1].command = Command(("another",))
    assert world.take(0) is None and world.take(1) is None
    await settle()
    assert [process for _, process in world.running] == [second.process]


EVENTS = st.lists(
    st.sampled_from(
        ["ready", "asleep", "waiting", "reports", "dies", "fails", "takes", "renews", "stops"]
    ),
    max_size=40,
)


@settings(deadline=None)
@given(st.integers(1, 3), EVENTS)
def test_there_is_never_more_than_one_and_none_asleep_or_at_the_end(ranks, events):
    asyncio.run(_happens(ranks, events))


async def _happens(ranks: int, events: list[str]) -> None:
    world, promoted, stopped, tasks = World(ranks), [], False, []
    for event in events:
        if event in ("ready", "asleep", "waiting"):
            await world.is_in(event, SETTLED_SECONDS)
        elif event == "reports":
            world.report("ready")
        elif event in ("dies", "fails"):
            waiting = [process for _, process in world.running if process not in promoted]
            for process in waiting[-1:]:
                process.end(-9 if event == "dies" else MISCONFIGURED)
            await settle()
            assert all(process.returncode is not None for process in waiting), "all begin again"
        elif event == "takes":
            taken = [world.take(rank) for rank in reversed(range(ranks))]
            assert len({standby is None for standby in taken}) == 1
            for standby in taken:
                if standby is not None:
                    assert standby.command == world.engine.command and not stopped
                    promoted.append(standby.process)
        elif event == "renews":
            tasks += [asyncio.ensure_future(world.standbys.renew(one)) for one in world.engines]
        else:
            world.standbys.stop()
            stopped = True
        await settle()
        waiting = [process for _, process in world.running if process not in promoted]
        assert len(waiting) <= (0 if stopped or event == "asleep" else ranks)
        assert world.standbys.ready <= len(waiting)
    for process in promoted:
        process.end(0)
    await world.standbys.close()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            task.cancel()
            await task
    assert not world.running
