"""Flags by which a command chooses the server that it talks to.

Knows no command.
"""

from __future__ import annotations

import argparse

from pipeinfer.runtime.find import running_topology
from pipeinfer.topology.topology import Topology


def add_server(made: argparse.ArgumentParser) -> None:
    """--port and --topology: of the server to talk to; without either it is the only one."""
    add = made.add_mutually_exclusive_group().add_argument
    add("--port", type=int, metavar="N", help="of the server; default: the only one that runs here")
    add("--topology", metavar="FILE", help="of the server, in place of its port")


def chosen_topology(options: argparse.Namespace) -> Topology:
    """That of the server that the flags mean. Raises ConfigurationError, which lists the servers
    if there are several."""
    return running_topology(options.topology, options.port)
