"""`pipeinfer serve [MODEL]`: the whole pipeline on this host, as child processes.

Knows how to begin and how to stop; what happens between is the supervisor's and the stages'.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
import zmq

from pipeinfer import settings as config
from pipeinfer.models.source import resolve_model
from pipeinfer.runtime import topology as topologies
from pipeinfer.runtime.entry import set_up_logging
from pipeinfer.runtime.inprocess import InProcess
from pipeinfer.runtime.supervisor import Supervisor
from pipeinfer.settings import DEMO, Settings


def run(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    settings = prepare(_flags(arguments))
    set_up_logging(settings, "pipeinfer")
    if settings.in_process:
        return uvloop.run(_run(InProcess(settings, *_local(settings, "inproc://"), _context())))
    folder = tempfile.mkdtemp(prefix="pipeinfer-")
    try:
        topology, identities = _local(settings, f"ipc://{folder}/")
        file = Path(folder, "pipeinfer.toml")
        file.write_text(topology.to_toml())
        return uvloop.run(_run(Supervisor(settings, topology, str(file), identities, _context())))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare(flags: dict[str, object]) -> Settings:
    """Settings from flags over the environment, with the model as a local folder.

    A hub id is downloaded here, once, and not by every stage. Raises ConfigurationError.
    """
    settings = config.build({**config.from_environment(os.environ), **flags})
    if settings.model in ("", DEMO):
        print(f"no model given: serving the bundled demo model {DEMO!r}", file=sys.stderr)
    folder = resolve_model(
        settings.model, settings.revision, lambda text: print(text, file=sys.stderr)
    )
    return msgspec.structs.replace(
        settings, served_model_name=settings.model_name, model=str(folder), revision=""
    )


def _flags(arguments: Sequence[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        prog="pipeinfer serve",
        description="Serves MODEL (a folder, a hub id, or nothing for the demo) over HTTP.",
        epilog="Every flag is also an environment variable: --kv-pages is PIPEINFER_KV_PAGES.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS)
    config.add_flags(parser)
    return vars(parser.parse_args(arguments))


def _local(
    settings: Settings, prefix: str
) -> tuple[topologies.Topology, list[topologies.Identity]]:
    if settings.topology:
        topology = topologies.load(settings.topology)
    else:
        topology = topologies.local(settings, prefix)
    return topology, [entry.identity for entry in topology.entries]


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context.instance()


async def _run(service: Supervisor | InProcess) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    return await service.run()
