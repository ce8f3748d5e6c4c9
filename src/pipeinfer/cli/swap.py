"""`pipeinfer swap STAGE -- COMMAND...`: another process for a stage of a running server.

Knows how to ask and what to print; the supervisor of the server does it (runtime/supervisor.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.cli.running import add_server_flags, announced_topology
from pipeinfer.command_line import CommandLine
from pipeinfer.control import Swap, SwapState
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import SUPERVISOR, Topology

ANSWER_TIMEOUT = 5.0  # seconds; a supervisor sends a heartbeat twice a second


def run(arguments: Sequence[str]) -> int:
    """0 when the new process is ready; 1 if the old command is back, or nobody answers."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:end])
    topology = announced_topology(options)
    stage = chosen_stage(topology, options.stage)
    if not topology.supervisor:
        raise ConfigurationError(
            f"no supervisor answers for this topology. By hand: send {stage} the signal SIGUSR1 "
            "(kill -USR1 PID), and when it has ended start the other command in its place"
        )
    name = f"{os.getpid()}-{time.time_ns()}"
    request = Swap(name, stage, tuple(arguments[end + 1 :]), str(Path.cwd()))
    with ControlClient(topology, zmq.Context.instance()) as caller:
        return _follow(caller, request)


def chosen_stage(topology: Topology, name: str) -> str:
    """The id of the stage called `name`: an id, or a name that only one stage or group has."""
    if name in topology.ids():
        return name
    ids = topology.ids(name)
    groups = {entry.group for entry in topology.entries if entry.name == name}
    if not ids or (len(ids) > 1 and (name != "engine" or len(groups) > 1)):
        there = ", ".join(ids or topology.ids())
        raise ConfigurationError(f"which stage is {name!r}? There are {there}")
    return ids[0]


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer swap",
        usage="pipeinfer swap STAGE [--port N] [-- COMMAND ...]",
        description="Has STAGE hand over to a new process while requests go on. COMMAND is started "
        "in this folder, with the arguments of a stage after its own; without one the stage is "
        "started again as it was. All ranks of an engine's group go together.",
        epilog="Example: pipeinfer swap scheduler -- "
        "env PYTHONPATH=../other/src python -m pipeinfer.runtime",
    )
    command_line.add_argument("stage", metavar="STAGE", help="scheduler, engine-0-0 ...")
    add_server_flags(command_line)
    return command_line


def _follow(caller: ControlClient, request: Swap) -> int:
    """Asks, and prints what becomes of it."""
    caller.listen(SUPERVISOR)
    last_message, has_asked = time.monotonic(), False
    while time.monotonic() - last_message < ANSWER_TIMEOUT:
        for _, message in caller.receive(0.2):
            last_message = time.monotonic()
            if not has_asked:
                has_asked = True
                caller.send(SUPERVISOR, request)
            elif isinstance(message, SwapState) and message.swap == request.swap:
                code = _print(message)
                if code is not None:
                    return code
    print("error: the server's supervisor does not answer; does it run?", file=sys.stderr)
    return 1


def _print(state: SwapState) -> int | None:
    """The exit code, None if it goes on."""
    if state.state == "done":
        old, new = _list(state.old), _list(state.new)
        print(
            f"{state.stage}: process {old} -> {new}, a pause of {state.seconds:.2f} s", flush=True
        )
        return 0
    if state.state == "failed":
        print(f"error: {state.stage}: {state.reason}", file=sys.stderr, flush=True)
        return 1
    if state.state == "starting":
        line = f"{state.stage}: process {_list(state.old)} has left, {_list(state.new)} starts"
        print(line, file=sys.stderr, flush=True)
    return None


def _list(pids: tuple[int, ...]) -> str:
    return ", ".join(str(pid) for pid in pids)
