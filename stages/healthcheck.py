"""Says by its exit code whether a stage is well: 0 if it answers for itself within a few seconds.

For container health checks. Listens to the stage's heartbeat; sends nothing and knows no request.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import zmq

from pipeinfer.bus.frames import Header
from pipeinfer.bus.listener import Listener
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.runtime import topology as topologies
from pipeinfer.runtime.topology import NAMES, Identity

PATIENCE = 4.0  # seconds; heartbeats come twice a second
WELL = ("ready", "draining")


async def state_of(stage: str, topology: topologies.Topology) -> str:
    """The state in the next heartbeat of `stage`, or "silent"."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def hear(_channel: str, header: Header, message: Message) -> None:
        if isinstance(message, Heartbeat) and header.sender == stage and not heard.done():
            heard.set_result(message.state)

    listener = Listener(topology, zmq.Context.instance())
    listener.listen(stage)
    listener.start(hear)
    try:
        return await asyncio.wait_for(heard, PATIENCE)
    except TimeoutError:
        return "silent"
    finally:
        listener.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Asks one stage how it is.")
    parser.add_argument("stage", choices=NAMES)
    parser.add_argument("--topology", required=True, metavar="FILE")
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--index", type=int, default=0)
    asked = parser.parse_args()
    stage = Identity(asked.stage, asked.group, asked.rank, asked.index).id
    state = asyncio.run(state_of(stage, topologies.load(asked.topology)))
    print(f"{stage} is {state}")
    return 0 if state in WELL else 1


if __name__ == "__main__":
    sys.exit(main())
