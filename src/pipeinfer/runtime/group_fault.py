"""Ends an engine that nobody supervises when its scheduler says that its group is stuck.

Under a supervisor that one kills all ranks. Started by hand or by a container's restart policy, an
engine must see to it itself: a step that hangs never ends. Knows no step and no plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import zmq

from pipeinfer.bus.frames import Header
from pipeinfer.bus.listener import Listener
from pipeinfer.messages import GroupFault, Message
from pipeinfer.runtime.topology import Identity, Topology

log = logging.getLogger(__name__)

FAILED = 1


def end_on_group_fault(
    topology: Topology,
    engine: Identity,
    context: zmq.Context[zmq.Socket[bytes]],
    end: Callable[[int], object] = os._exit,
) -> Listener:
    """Ends this process at once, with code 1, when the group of `engine` is given up.

    Call it on the running loop, and close the listener at the end.
    """
    scheduler = Identity("scheduler", group=engine.group).id

    def hear(_channel: str, header: Header, message: Message) -> None:
        if isinstance(message, GroupFault) and message.group == engine.group:
            log.error("%s: %s; this process ends to be started again", scheduler, message.reason)
            end(FAILED)  # not in order: the thread of a step that hangs would be waited for

    listener = Listener(topology, context)
    listener.listen(scheduler)
    listener.start(hear)
    return listener
