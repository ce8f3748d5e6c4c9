"""The shell around a core: heartbeats, ticks, drain, and an end with a reason when a core fails."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
import zmq

from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Listener
from pipeinfer.core import Drain, Leave, Send, Tick
from pipeinfer.messages import Abort, Heartbeat
from pipeinfer.runtime.shell import ProcessOptions, Shell, StoppedWhileBuilding
from pipeinfer.runtime.stage import Stage
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity
from waiting import until


@dataclass
class EchoCore:
    """Passes aborts on to the scheduler; is busy until `finished`."""

    seen: list = field(default_factory=list)
    finished: bool = True
    broken: bool = False

    def handle(self, event, now):
        self.seen.append(event)
        if isinstance(event, Abort):
            if self.broken:
                raise RuntimeError("a broken invariant")
            return [Send("work", "scheduler-0", event)]
        return []

    def state(self):
        return "ready", ""

    def stats(self):
        return {"seen": float(len(self.seen))}

    def idle(self):
        return self.finished


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def topology():
    return topologies.local(Settings(), "inproc://shell-")


def shell(topology, context, core, settings=None, name="tokenizer") -> Shell:
    def build(_context):
        if isinstance(core, Exception):
            raise core
        return Stage(core, tick=0.01)

    return Shell(settings or Settings(), topology, Identity(name), context, build)


async def test_messages_pass_through_core_and_heartbeats_tell_its_state(topology, context):
    first, second = EchoCore(), EchoCore()
    tokenizer = shell(topology, context, first)
    scheduler = shell(topology, context, second, name="scheduler")
    beats: list[Heartbeat] = []
    listener = Listener(topology, context)
    listener.listen("tokenizer-0")
    listener.start(lambda _channel, _header, message: beats.append(message))
    tasks = [asyncio.create_task(one.run()) for one in (tokenizer, scheduler)]
    await until(lambda: first.seen)
    sender = shell(topology, context, EchoCore(), name="gateway")
    sender.bus.send(Send("requests", "tokenizer-0", Abort("r", 1)))
    sender.bus.send(Send("stops", "tokenizer-0", Abort("wrong channel", 1)))
    await until(lambda: Abort("r", 1) in second.seen)
    await until(lambda: beats and beats[-1].stats.get("bad_frames") == 1)
    assert beats[-1].state == "ready"
    assert beats[-1].stats["seen"] > 0
    assert sum(isinstance(event, Tick) for event in first.seen) > 0
    for one in (tokenizer, scheduler):
        one.stop()
    await asyncio.gather(*tasks)
    sender.bus.close()
    listener.close()


async def test_a_shell_with_patience_stays_awake_while_frames_come(topology, context):
    core = EchoCore()
    one = Shell(
        Settings(), topology, Identity("tokenizer"), context,
        lambda _context: Stage(core, tick=0.01), ProcessOptions(busy_poll=60.0),
    )  # fmt: skip
    task = asyncio.create_task(one.run())
    sender = shell(topology, context, EchoCore(), name="gateway")
    for name in ("a", "b"):
        sender.bus.send(Send("requests", "tokenizer-0", Abort(name, 1)))
    await until(lambda: Abort("b", 1) in core.seen)
    assert one.bus.reader.busy_polling
    one.stop()
    await task
    sender.bus.close()


async def test_drain_waits_for_the_core_to_be_idle(topology, context):
    core = EchoCore(finished=False)
    one = shell(topology, context, core)
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.drain()
    ticks = len(core.seen)
    await until(lambda: len(core.seen) > ticks + 3)
    assert Drain() in core.seen and not task.done()
    core.finished = True
    await asyncio.wait_for(task, 20)


async def test_a_stage_says_what_it_waits_for_where_that_is_more_than_a_last_step(
    topology, context, caplog
):
    caplog.set_level("INFO", "pipeinfer.runtime.shell")
    core = EchoCore(finished=False)
    one = shell(topology, context, core)
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.drain()
    assert "stopping" not in caplog.text
    await until(lambda: "stopping: waits for what runs, at most 30 s more" in caplog.text)
    core.finished = True
    await asyncio.wait_for(task, 20)


async def test_drain_is_bounded(topology, context):
    core = EchoCore(finished=False)
    one = shell(topology, context, core, Settings(drain_timeout=0.05))
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.drain()
    await asyncio.wait_for(task, 20)


async def test_leave_waits_for_the_core_to_hand_on_what_is_in_hand(topology, context):
    core = EchoCore(finished=False)
    one = shell(topology, context, core)
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.leave()
    one.leave()
    await until(lambda: Leave() in core.seen)
    one.handle(Abort("still handled", 1))
    assert not task.done() and core.seen.count(Leave()) == 1
    core.finished = True
    await asyncio.wait_for(task, 20)


async def test_leave_is_bounded(topology, context, monkeypatch):
    monkeypatch.setattr("pipeinfer.runtime.shell.LEAVE_TIMEOUT", 0.05)
    core = EchoCore(finished=False)
    one = shell(topology, context, core)
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.leave()
    await asyncio.wait_for(task, 20)


async def test_what_runs_beside_the_core_ends_before_the_core_leaves(topology, context):
    core, ended = EchoCore(), asyncio.Event()
    one = Shell(
        Settings(), topology, Identity("tokenizer"), context,
        lambda _: Stage(core, tick=0.01, before_leave=lambda: ended.wait()),
    )  # fmt: skip
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.leave()
    ticks = len(core.seen)
    await until(lambda: len(core.seen) > ticks + 3)
    assert Leave() not in core.seen
    ended.set()
    await asyncio.wait_for(task, 20)
    assert Leave() in core.seen


async def test_a_core_that_cannot_leave_ends_its_stage_with_the_reason(topology, context):
    def break_down():
        raise RuntimeError("no way out")

    core = EchoCore()
    one = Shell(
        Settings(), topology, Identity("tokenizer"), context,
        lambda _: Stage(core, tick=0.01, before_leave=break_down),
    )  # fmt: skip
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.leave()
    with pytest.raises(RuntimeError, match="no way out"):
        await asyncio.wait_for(task, 20)


async def test_a_core_that_raises_ends_its_stage_with_the_reason(topology, context):
    core = EchoCore(broken=True)
    one = shell(topology, context, core)
    task = asyncio.create_task(one.run())
    await until(lambda: core.seen)
    one.handle(Abort("r", 1))
    with pytest.raises(RuntimeError, match="broken invariant"):
        await asyncio.wait_for(task, 20)


async def test_a_builder_that_raises_ends_the_start(topology, context):
    one = shell(topology, context, ConfigurationError("no such model"))
    with pytest.raises(ConfigurationError, match="no such model"):
        await asyncio.wait_for(one.run(), 20)


async def test_a_stage_told_to_stop_does_not_wait_for_its_builder(topology, context):
    release = threading.Event()
    one = Shell(Settings(), topology, Identity("tokenizer"), context, lambda _: release.wait(60))
    task = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    one.drain()
    with pytest.raises(StoppedWhileBuilding):
        await asyncio.wait_for(task, 20)
    release.set()


async def test_sighup_has_a_stage_read_again_and_one_that_cannot_ignores_it(
    topology, context, caplog
):
    read: list[str] = []

    def broken() -> None:
        read.append("again")
        raise OSError("the file is gone")

    builds = {
        "gateway": lambda _: Stage(EchoCore(), tick=0.01, reload=lambda: read.append("gateway")),
        "tokenizer": lambda _: Stage(EchoCore(), tick=0.01),
        "detokenizer": lambda _: Stage(EchoCore(), tick=0.01, reload=broken),
    }
    shells = [
        Shell(Settings(), topology, Identity(name), context, build)
        for name, build in builds.items()
    ]
    tasks = [asyncio.create_task(one.run()) for one in shells]
    await until(lambda: all(one.built for one in shells))
    for one in shells:
        one.reload()
    assert read == ["gateway", "again"] and "could not read anew" in caplog.text
    assert not any(task.done() for task in tasks)
    for one in shells:
        one.stop()
    await asyncio.gather(*tasks)


async def test_a_stage_told_to_reload_while_it_is_built_reads_once_more(topology, context):
    read, go = [], threading.Event()

    def build(_context):
        go.wait(30)
        return Stage(EchoCore(), tick=0.01, reload=lambda: read.append("again"))

    one = Shell(Settings(), topology, Identity("gateway"), context, build)
    task = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    one.reload()
    assert not read
    go.set()
    await until(lambda: read == ["again"])
    one.stop()
    await task
