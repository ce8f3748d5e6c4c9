"""One stage as a process: `python -m pipeinfer.runtime STAGE --topology FILE [--group D] ...`.

The supervisor and the scripts in stages/ both come here. Knows every stage by name only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import uvloop
import zmq

from pipeinfer import settings as config
from pipeinfer.bus.curve import keyring
from pipeinfer.bus.sockets import AddressTaken, raise_socket_limits
from pipeinfer.command_line import CommandLine
from pipeinfer.runtime.claim import ElectedInstance, elect_instance
from pipeinfer.runtime.deployment import deployed
from pipeinfer.runtime.door import WAIT_FLAG, wait_until_listening
from pipeinfer.runtime.exit_codes import FAILED, MISCONFIGURED, ORDERLY
from pipeinfer.runtime.fence import FencedOut
from pipeinfer.runtime.group_fault import end_on_group_fault
from pipeinfer.runtime.hangup import add_reload_handler
from pipeinfer.runtime.heap import map_large_allocations
from pipeinfer.runtime.incarnations import INCARNATION_VARIABLE, incarnation_after, own_incarnation
from pipeinfer.runtime.logs import report_error, set_up_logging
from pipeinfer.runtime.parent import ParentWatch
from pipeinfer.runtime.port_owner import port_owner
from pipeinfer.runtime.report import StatusWriter, inherited_status_writer
from pipeinfer.runtime.shell import ProcessOptions, Shell, StoppedWhileBuilding
from pipeinfer.runtime.stage import Stage, StageContext, builder
from pipeinfer.runtime.status_line import StatusLine, show_until_ready
from pipeinfer.runtime.terminal import open_streams
from pipeinfer.runtime.wakefulness import busy_poll_seconds
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import Identity, Topology

# Messages and requests form no cycles. With the default threshold the collector walks all of them
# many times a second, which at 1,024 requests more than doubles a step of the scheduler.
COLLECTIONS = (100_000, 20, 100)
# Nor do connections that end as they should. One that ends in some other way may, of some twenty
# objects and a few KiB: tens of MiB would lie about.
OF_CONNECTIONS = (5_000, 20, 100)


def main(arguments: Sequence[str] | None = None, stage: str | None = None) -> int:
    """Runs a stage until it stops; returns the exit code. `stage`: given by a script in stages/."""
    open_streams()
    made = parser(stage)
    options, rest = made.parse_known_args(arguments)
    try:
        file = options.topology or os.environ.get(f"{config.PREFIX}TOPOLOGY")
        topology = deployed(file, os.environ)
        settings = stage_settings(topology, config.parse_flags(rest), os.environ)
        claimed = _claim(topology, stage or options.stage, options)
        identity = claimed.identity if claimed is not None else _asked(stage, options)
        topology.address(identity.id)
        if topology.has_tcp():
            keyring(topology, identity.id)  # a missing key ends it here, with one line
        rest = rest[1:] if rest[:1] == [stage] else rest  # `swap` names the stage for a script too
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISCONFIGURED
    set_up_logging(settings, identity.id)
    incarnation = own_incarnation(os.environ)
    told = inherited_status_writer(os.environ, incarnation)
    watch = ParentWatch(-1 if told is None else told.sink) if options.child else None
    if identity.name != "engine":  # it makes large arrays all the time
        map_large_allocations()
    if options.wait_fd is not None:
        builder(identity.name)  # its modules are loaded meanwhile
        if not wait_until_listening(options.wait_fd):
            return ORDERLY
    gc.set_threshold(*(OF_CONNECTIONS if identity.name == "gateway" else COLLECTIONS))
    ties = ParentTies(incarnation, told, watch)
    try:
        return uvloop.run(_run(settings, topology, identity, options, ties))
    except FencedOut as error:
        if told is not None:
            told.write("failed", str(error), error.newest)  # the next process gets a greater number
            return FAILED
        return FAILED if error.superseded else _begin_anew(error.newest)


def _asked(stage: str | None, options: argparse.Namespace) -> Identity:
    return Identity(stage or options.stage, options.group, options.rank, options.index)


def _claim(topology: Topology, name: str, options: argparse.Namespace) -> ElectedInstance | None:
    """To be kept as long as the stage runs."""
    return (
        elect_instance(topology, name, options.on, Path(options.claim)) if options.claim else None
    )


def stage_settings(
    topology: Topology, flags: dict[str, object], environ: dict[str, str] | os._Environ[str]
) -> Settings:
    """Settings of one stage: flags over environment over the topology's [settings]."""
    named = {**topology.defaults(), **config.from_environment(environ), **flags}
    return topologies.fitting(config.build(named), topology)


def parser(stage: str | None) -> CommandLine:
    """The words of the command line; without a `stage` its name is one of them."""
    made = CommandLine(
        prog=f"stages/{stage}.py" if stage else "python -m pipeinfer.runtime",
        description="Runs one stage. Further flags are those of `pipeinfer serve`.",
    )
    if stage is None:
        made.add_argument("stage", choices=topologies.NAMES)
    made.add_argument("--topology", metavar="FILE", help="default: PIPEINFER_STAGES says it all")
    made.add_argument("--group", type=int, default=0)
    made.add_argument("--rank", type=int, default=0)
    made.add_argument("--index", type=int, default=0)
    made.add_argument(
        "--claim",
        metavar="DIR",
        default="",
        help="be the first stage of this name that no other process of this host is; DIR is theirs "
        "in common",
    )
    made.add_argument("--on", metavar="HOST", default="", help="claim a stage of this host only")
    made.add_argument("--child", action="store_true", help="stop when the parent process is gone")
    made.add_argument(
        "--listen-fd",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="a listening socket of the parent process, instead of --host and --port",
    )
    made.add_argument(
        WAIT_FLAG,
        type=int,
        metavar="N",
        help="begin when the parent process writes into this pipe, and end when it closes it",
    )
    return made


@dataclass(frozen=True)
class ParentTies:
    """To who started this process: the number that it gave or else the clock, who hears reports,
    and who watches whether it is there."""

    incarnation: int
    status: StatusWriter | None
    watch: ParentWatch | None


def _begin_anew(newest: int) -> NoReturn:
    """As the process after `newest`: nobody else knows that number, and this stage may be half
    known to others by the one that it had."""
    os.environ[INCARNATION_VARIABLE] = str(incarnation_after(newest, time.time_ns()))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


async def _run(
    settings: Settings,
    topology: Topology,
    identity: Identity,
    options: argparse.Namespace,
    ties: ParentTies,
) -> int:
    def build(context: StageContext) -> Stage:
        stage = builder(identity.name)(replace(context, listen_fds=tuple(options.listen_fd)))
        gc.collect()
        gc.freeze()  # modules and weights stay: no collection looks at them again
        return stage

    context = zmq.Context.instance()
    raise_socket_limits(context, topology)
    process = ProcessOptions(
        ties.incarnation,
        busy_poll_seconds(settings, topology, identity),
        forks=identity.name != "engine",  # which uses a GPU, or holds the weights
    )
    shell = Shell(settings, topology, identity, context, build, process)
    if ties.status is not None:
        shell.on_state_change = ties.status.write
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, shell.drain)
    loop.add_signal_handler(signal.SIGUSR1, shell.leave)
    add_reload_handler(loop, shell.reload, shell.drain)
    if ties.watch is not None:
        ties.watch.set_stop(lambda: loop.call_soon_threadsafe(shell.stop))
    else:
        loop.add_signal_handler(signal.SIGINT, shell.drain)
        if identity.name == "engine":
            end_on_group_fault(topology, identity, shell.incarnation, context, lambda: shell.built)
    if options.child:  # whoever started it says so for all
        return await run_shell(shell)
    line = StatusLine(settings.log_format == "text")
    starting = asyncio.create_task(show_until_ready(lambda: {identity.id: shell.state()}, line))
    try:
        return await run_shell(shell)
    finally:
        starting.cancel()
        line.clear()


async def run_shell(shell: Shell) -> int:
    """The shell's exit code; what it could not do is said on stderr in one line."""
    try:
        await shell.run()
        return ORDERLY
    except StoppedWhileBuilding:
        return ORDERLY
    except FencedOut:
        raise
    except ConfigurationError as error:
        report_error(shell.settings, str(error))
        return MISCONFIGURED
    except AddressTaken as error:  # by the process before perhaps, so that this one may come again
        host, _, port = error.endpoint.removeprefix("tcp://").rpartition(":")
        whose = port_owner(host.strip("[]*"), int(port))
        report_error(shell.settings, f"{shell.identity.id}: {error}{whose and ' '}{whose}")
        return FAILED
    except zmq.ZMQError as error:
        report_error(shell.settings, f"{shell.identity.id}: {error}")
        return FAILED
    except Exception:
        logging.getLogger(__name__).exception("%s stopped", shell.identity.id)
        return FAILED
