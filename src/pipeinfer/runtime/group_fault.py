"""Ends an engine that nobody supervises when its group is stuck, or another rank was replaced.

Under a supervisor that one kills all ranks. Started by hand or by a container's restart policy, an
engine must see to it itself: a step that hangs never ends, and a rank that was started again waits
for all others to meet it. Knows no step and no plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import zmq

from pipeinfer.bus.bus import Listener
from pipeinfer.bus.frames import Header
from pipeinfer.messages import GroupFault, Message, RankStatus
from pipeinfer.topology.topology import Identity, Topology

log = logging.getLogger(__name__)

FAILED = 1
JOINED = ("waiting", "ready")  # states of a rank that has met the others


def end_on_group_fault(
    topology: Topology,
    engine: Identity,
    incarnation: int,
    context: zmq.Context[zmq.Socket[bytes]],
    formed: Callable[[], bool],
    end: Callable[[int], object] = os._exit,
) -> Listener:
    """Ends this process at once, with code 1, when the group of `engine` is given up while it is
    process `incarnation`, or when a rank that it has met is another process now. `formed()`:
    whether the ranks have met.

    Call it on the running loop, and close the listener at the end.
    """
    scheduler = Identity("scheduler", group=engine.group).id
    met: dict[int, int] = {}  # incarnations of the other ranks since the group was formed

    def give_up(reason: str) -> None:
        log.error("%s; this process ends to be started again", reason)
        end(FAILED)  # not in order: the thread of a step that hangs would be waited for

    def hear(_channel: str, _header: Header, message: Message) -> None:
        if isinstance(message, GroupFault):
            if message.group == engine.group and incarnation in message.incarnations:
                give_up(f"{scheduler}: {message.reason}")
        elif isinstance(message, RankStatus) and message.group == engine.group:
            if message.incarnation > met.get(message.rank, message.incarnation):
                give_up(f"rank {message.rank} was started again")
            elif formed() and message.state in JOINED:
                met[message.rank] = message.incarnation

    listener = Listener(topology, context)
    listener.listen(scheduler, "group")
    for rank in range(topology.ranks(engine.group)):
        if rank != engine.rank:
            listener.listen(Identity("engine", engine.group, rank).id, "group")
    listener.start(hear)
    return listener
