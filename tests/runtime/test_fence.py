"""What a process sent before another took over its stage is not heard any more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq

from pipeinfer.bus.bus import Bus
from pipeinfer.bus.frames import Header
from pipeinfer.bus.listener import Listener
from pipeinfer.core import Send
from pipeinfer.messages import PROTOCOL, Abort, Heartbeat, Message, Recover
from pipeinfer.runtime.fence import Fence
from pipeinfer.runtime.shell import Shell
from pipeinfer.runtime.stage import Stage
from pipeinfer.settings import Settings
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import Identity
from waiting import until


@dataclass
class Heard:
    """A core that only listens."""

    messages: list[Message] = field(default_factory=list)

    def handle(self, event, now):
        if isinstance(event, Abort | Recover):
            self.messages.append(event)
        return []

    def state(self):
        return "ready", ""

    def stats(self):
        return {}

    def idle(self):
        return True


async def test_frames_of_a_replaced_process_are_dropped_and_counted(short_path):
    topology = topologies.local(Settings(), f"ipc://{short_path}/")
    core = Heard()
    beats: list[Heartbeat] = []
    with zmq.Context() as context:
        shell = Shell(
            Settings(), topology, Identity("scheduler"), context, lambda _: Stage(core, tick=0.01)
        )
        listener = Listener(topology, context)
        listener.listen("scheduler-0")
        listener.start(lambda _channel, _header, message: beats.append(message))
        old, new = (Bus(Identity("tokenizer"), lives, topology, context) for lives in (1, 2))
        other = Bus(Identity("detokenizer"), 1, topology, context)
        task = asyncio.create_task(shell.run())

        def said(bus: Bus, message: Message, channel: str = "work") -> None:
            bus.send(Send(channel, "scheduler-0", message))

        said(old, Abort("before", 1))
        await until(lambda: core.messages)
        said(new, Recover("tokenizer-0", 2), "recovery")
        await until(lambda: len(core.messages) == 2)
        said(old, Abort("late", 1))
        await until(lambda: beats and beats[-1].stats.get("fenced") == 1)
        said(other, Abort("of somebody else", 1))
        said(new, Abort("after", 1))
        await until(lambda: len(core.messages) == 4)
        names = {m.request_id for m in core.messages if isinstance(m, Abort)}
        assert names == {"before", "of somebody else", "after"}
        assert beats[-1].stats["bad_frames"] == 0
        shell.stop()
        await task
        for bus in (old, new, other):
            bus.close()
        listener.close()


def test_the_newest_process_passes_whatever_its_number_and_whoever_else_is_newer():
    fence = Fence()

    def passes(sender: str, incarnation: int) -> bool:
        return fence.passes(Header(PROTOCOL, sender, incarnation, 0, 0.0))

    assert passes("tokenizer-0", 0) and passes("tokenizer-0", 0)
    assert passes("tokenizer-0", 5) and passes("tokenizer-0", 5)
    assert not passes("tokenizer-0", 4) and passes("tokenizer-1", 4)
    assert passes("tokenizer-0", 5) and fence.dropped == 1
