"""`pipeinfer serve [MODEL]`: the whole pipeline on this host, as child processes.

Knows how to begin and how to stop; what happens between is the supervisor's and the stages'.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeinfer import settings as config
from pipeinfer.command_line import CommandLine

if TYPE_CHECKING:
    from pipeinfer.runtime.entry import InProcess
    from pipeinfer.runtime.supervisor import Supervisor
    from pipeinfer.runtime.terminal import StatusLine

log = logging.getLogger(__name__)

# Flags that `--help` shows, of serve and of doctor.
ESSENTIAL = (
    "--host", "--port", "--served-model-name", "--api-key", "--device", "--dtype", "--tp", "--dp",
    "--max-model-len", "--memory-fraction", "--log-level",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; SIGHUP has the gateway read its keys again. Returns the exit
    code."""
    flags = vars(parser().parse_args(arguments))
    on = str(flags.pop("on"))

    import uvloop
    import zmq

    from pipeinfer.runtime.local import check_port, local_stages, prepare
    from pipeinfer.runtime.logs import set_up_logging
    from pipeinfer.runtime.terminal import StatusLine

    def known(settings: config.Settings) -> None:
        set_up_logging(settings, "pipeinfer")
        check_port(settings, on)

    settings = prepare(flags, log.info, known)
    with local_stages(settings, zmq.Context.instance(), on=on) as stages:
        return uvloop.run(_run(stages.service, StatusLine(settings.log_format == "text")))


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer serve",
        description="Serves MODEL (a folder, a hub id, or nothing for the demo) over HTTP.",
        epilog="Every flag is also an environment variable: --kv-pages is PIPEINFER_KV_PAGES. "
        "Names of vLLM and SGLang, such as --tensor-parallel-size, are understood as well.",
        essential=ESSENTIAL,
    )
    add_model(command_line)
    command_line.add_argument(
        "--on", metavar="HOST", default="", help="only the stages with this `host` in the topology"
    )
    command_line.add_argument(
        "-v", "--verbose", dest="log_level", action="store_const", const="debug",
        default=argparse.SUPPRESS, help="log the details: --log-level debug",
    )  # fmt: skip
    config.add_flags(command_line)
    return command_line


def add_model(command_line: argparse.ArgumentParser) -> None:
    """MODEL, with a flag before it or without: other servers want the one or the other."""
    help_text = "a folder, a GGUF file or a hub id; default: the demo"
    command_line.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help_text
    )
    also = ("--model", "--model-path")
    command_line.add_argument(
        *also, dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


async def _run(service: Supervisor | InProcess, line: StatusLine) -> int:
    from pipeinfer.runtime.entry import add_reload_handler
    from pipeinfer.runtime.terminal import show_until_ready

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    add_reload_handler(loop, service.reload, service.stop)
    starting = asyncio.create_task(show_until_ready(service.states, line))
    try:
        return await service.run()
    finally:
        starting.cancel()
        line.clear()
