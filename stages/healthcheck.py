"""Says by its exit code whether a stage is well: 0 if it answers for itself within a few seconds.

For container health checks. Listens to the stage's heartbeat; sends nothing and knows no request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import zmq

from pipeinfer.bus.bus import Listener
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.runtime.entry import elected_instance
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import NAMES, Identity, Topology, deployed_topology

PATIENCE = 4.0  # seconds; heartbeats come twice a second
WELL = ("ready", "draining")


async def state_of(stage: str, topology: Topology) -> str:
    """The state in the next heartbeat of `stage`, or "silent"."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def hear(_channel: str, header: FrameHeader, message: Message) -> None:
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


def asked_stage(arguments: argparse.Namespace) -> str:
    """The id of the stage to ask: as named, or the one that was claimed here."""
    if arguments.claimed:
        return elected_instance()
    named = arguments.stage, arguments.group, arguments.rank, arguments.index
    return Identity(*named).id


def main() -> int:
    parser = argparse.ArgumentParser(description="Asks one stage how it is.")
    parser.add_argument("stage", choices=NAMES)
    parser.add_argument("--topology", metavar="FILE", help="default: PIPEINFER_STAGES says it all")
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--claimed", action="store_true", help="the one started here with --claim")
    asked = parser.parse_args()
    try:
        stage = asked_stage(asked)
        state = asyncio.run(state_of(stage, deployed_topology(asked.topology, os.environ)))
    except (OSError, ConfigurationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{stage} is {state}")
    return 0 if state in WELL else 1


if __name__ == "__main__":
    sys.exit(main())
