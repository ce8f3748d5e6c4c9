"""An engine that nobody supervises ends when its group is given up, so that it is started again."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import zmq

from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus, Handler, Listener
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import GroupFault, Message, RankStatus, State
from pipeinfer.runtime import entry
from pipeinfer.runtime.entry import FAILED, end_on_group_fault
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, Topology
from servers import environment
from waiting import until


@pytest.fixture
def topology(short_path):
    return topologies.local(Settings(), f"ipc://{short_path}/")


@pytest.fixture
def scheduler(topology):
    """A scheduler's sockets."""
    with zmq.Context() as context:
        bus = Bus(Identity("scheduler"), 1, topology, context)
        bus.bind()
        yield bus
        bus.close()


def say(scheduler: Bus, group: int, reason: str, incarnation: int) -> None:
    scheduler.send(Send("group", EVERYONE, GroupFault(group, reason, (incarnation,))))


class NotedListener(Listener):
    """Notes in `heard` each message that its handler has had."""

    heard: list[Message]

    def start(self, handler: Handler) -> None:
        def noting(channel: str, header: FrameHeader, message: Message) -> None:
            handler(channel, header, message)
            self.heard.append(message)

        self.heard = []
        super().start(noting)


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    monkeypatch.setattr(entry, "Listener", NotedListener)


NOBODY = 9  # a group that there is not: what is said of it shows only that it was heard


async def hears(listener: NotedListener, sender: Bus, *messages: Message) -> None:
    """Publishes the messages, once `listener` has subscribed, and waits until it has had all."""

    def has_subscribed() -> bool:
        sender.send(Send("group", EVERYONE, RankStatus(NOBODY, 0, 1, "ready")))
        return bool(listener.heard)

    await until(has_subscribed)
    for message in messages:
        sender.send(Send("group", EVERYONE, message))
    await until(lambda: messages[-1] in listener.heard)


async def test_only_the_fault_of_its_own_group_ends_an_engine(topology, scheduler):
    ends: list[int] = []
    with zmq.Context() as context:
        listener = end_on_group_fault(
            topology, Identity("engine"), 7, context, lambda: True, ends.append
        )
        others = GroupFault(1, "somebody else's", (7,)), GroupFault(0, "of the one before", (6,))
        await hears(listener, scheduler, *others)
        assert ends == []
        await hears(listener, scheduler, GroupFault(0, "no result for 2 s", (7,)))
        listener.close()
    assert ends == [FAILED]


def beat(incarnation: int, state: State) -> RankStatus:
    return RankStatus(0, 1, incarnation, state)


async def test_a_rank_ends_when_one_that_it_has_met_is_another_process(short_path):
    """It would wait for this one where ranks meet, and this one for it inside a collective."""
    topology = topologies.local(Settings(tp=2), f"ipc://{short_path}/")
    ends, formed = [], [False]
    with zmq.Context() as context:
        peer = Bus(Identity("engine", rank=1), 1, topology, context)
        peer.bind()
        listener = end_on_group_fault(
            topology, Identity("engine"), 1, context, lambda: formed[0], ends.append
        )

        await hears(listener, peer, beat(5, "ready"), beat(6, "starting"), beat(7, "ready"))
        assert ends == [], "the group is not formed yet: others may come and go"
        formed[0] = True
        await hears(listener, peer, beat(8, "starting"), beat(9, "loading"))
        assert ends == [], "it has not met these"
        await hears(listener, peer, beat(10, "waiting"))
        assert ends == []
        await hears(listener, peer, beat(11, "starting"))
        listener.close()
        peer.close()
    assert ends == [FAILED]


async def test_an_engine_started_by_hand_ends_with_code_1(tmp_path, topology, scheduler):
    file = tmp_path / "pipeinfer.toml"
    file.write_text(Topology(topology.entries, {"kv_pages": 50}).to_toml())

    def hear(_channel: str, _header: FrameHeader, message: Message) -> None:
        if isinstance(message, RankStatus):
            say(scheduler, 0, "no result for 2 s", message.incarnation)

    with zmq.Context() as context:
        listener = Listener(topology, context)
        listener.listen("engine-0-0", "group")
        listener.start(hear)
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pipeinfer.runtime", "engine", "--topology", str(file),
            env=environment(), stderr=subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(120):
            _, said = await engine.communicate()
        listener.close()
    assert engine.returncode == 1
    assert "scheduler-0: no result for 2 s; this process ends" in said.decode()
