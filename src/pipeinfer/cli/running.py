"""How a command chooses the running server that it talks to: by flags, or by the model.

Knows no command.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pipeinfer.runtime.find import (
    RunningServer,
    ServerInfo,
    running_server,
    running_servers,
    running_topology,
)
from pipeinfer.topology import Topology


def add_server_flags(command_line: argparse.ArgumentParser) -> None:
    """--port and --topology: of the server to talk to; without either it is the only one."""
    add = command_line.add_mutually_exclusive_group().add_argument
    add("--port", type=int, metavar="N", help="of the server; default: the only one that runs here")
    add("--topology", metavar="FILE", help="of the server, in place of its port")


def chosen_topology(options: argparse.Namespace) -> Topology:
    """That of the server that the flags mean. Raises ConfigurationError, which lists the servers
    if there are several."""
    return running_topology(options.topology, options.port)


def announced_topology(options: argparse.Namespace) -> Topology:
    """As `chosen_topology`, for commands that change a server: before anything is done to it, says
    on stderr which one was found, unless --topology names it."""
    if options.topology:
        return chosen_topology(options)
    server = running_server(options.port)
    where = f"without HTTP here, of {server.file}"
    if server.served is not None:
        where = f"at port {server.served.port}, which serves {server.served.model}"
    print(f"the server {where} (process {server.pid})", file=sys.stderr, flush=True)
    return server.topology


def servers_of(model: str = "") -> list[tuple[RunningServer, ServerInfo]]:
    """The servers of this user on this host that serve `model`, by its name there or by its folder
    or file, the newest first; without `model` all. The folder of a GGUF file is that file's too.

    A server that is reached by https alone is none: its certificate names it otherwise.
    """
    servers = [(one, one.served) for one in reversed(running_servers()) if one.served is not None]
    path = os.path.realpath(os.path.expanduser(model))  # noqa: PTH111 (no user need be called so)
    return [
        (server, served)
        for server, served in servers
        if served.url.startswith("http:")
        and (not model or model == served.model or path in _paths(served))
    ]


def _paths(served: ServerInfo) -> tuple[str, ...]:
    """What means the served folder or file."""
    file = Path(served.path)
    alone = file.suffix.lower() == ".gguf" and not (file.parent / "config.json").exists()
    return (served.path, str(file.parent)) if alone else (served.path,)
