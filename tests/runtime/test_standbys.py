"""When an engine has a standby: rules without processes, in any order of what happens."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.runtime.child import FAILED, MAX_DEATHS, MISCONFIGURED, Child, Command
from pipeinfer.runtime.standby import SETTLED_SECONDS, Standbys
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
    """An engine, and the processes that were started as its standbys."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[tuple[Child, Process]] = []
        self.engine = Child(Identity("engine"))
        self.standbys = Standbys(self.start, lambda: self.now)

    async def start(self, standby: Child) -> Process:
        process = Process()
        standby.process = process
        standby.status = "starting", ""
        standby.kill = lambda: process.end(-9)
        self.begun.append((standby, process))
        await asyncio.sleep(0)
        return process

    @property
    def running(self) -> list[tuple[Child, Process]]:
        return [one for one in self.begun if one[1].returncode is None]

    async def is_in(self, state: str, seconds: float = 0.0) -> None:
        self.engine.status = state, ""
        self.now += seconds
        self.standbys.on_status(self.engine)
        await settle()

    def report(self, state: str) -> None:
        for standby, _ in self.running:
            standby.status = state, "a standby"
            standby.on_report()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def serving() -> World:
    world = World()
    await world.is_in("ready")
    assert not world.begun
    await world.is_in("ready", SETTLED_SECONDS)
    assert len(world.running) == 1
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
    assert world.standbys.take(world.engine) is None
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
    assert world.standbys.take(world.engine) is None
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
        assert (world.standbys.take(world.engine) is not None) == succeeds


EVENTS = st.lists(
    st.sampled_from(
        ["ready", "asleep", "waiting", "reports", "dies", "fails", "takes", "renews", "stops"]
    ),
    max_size=40,
)


@settings(deadline=None)
@given(EVENTS)
def test_there_is_never_more_than_one_and_none_asleep_or_at_the_end(events):
    asyncio.run(_happens(events))


async def _happens(events: list[str]) -> None:
    world, promoted, stopped, tasks = World(), [], False, []
    for event in events:
        if event in ("ready", "asleep", "waiting"):
            await world.is_in(event, SETTLED_SECONDS)
        elif event == "reports":
            world.report("ready")
        elif event in ("dies", "fails"):
            for _, process in world.running:
                if process not in promoted:
                    process.end(-9 if event == "dies" else MISCONFIGURED)
        elif event == "takes":
            standby = world.standbys.take(world.engine)
            if standby is not None:
                assert standby.command == world.engine.command and not stopped
                promoted.append(standby.process)
        elif event == "renews":
            tasks.append(asyncio.ensure_future(world.standbys.renew(world.engine)))
        else:
            world.standbys.stop()
            stopped = True
        await settle()
        waiting = [process for _, process in world.running if process not in promoted]
        assert len(waiting) <= (0 if stopped or event == "asleep" else 1)
        assert world.standbys.ready <= len(waiting)
    for process in promoted:
        process.end(0)
    await world.standbys.close()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            task.cancel()
            await task
    assert not world.running
