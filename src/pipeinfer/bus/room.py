"""Room for as many sockets as a deployment has stages: ZeroMQ's limit, and the process's.

ZeroMQ allows 1,023 sockets, and a process often has 1,024 descriptors. A gateway listens to every
stage. Opens nothing.
"""

from __future__ import annotations

import resource

import zmq

from pipeinfer.topology.topology import Topology

SOCKETS = 4  # of a stage for each other one: to send, to listen, and with keys to watch both
DESCRIPTORS = 3  # of a socket: its mailbox, its connection, and the next one while it reconnects
OWN = 1_024  # of both, for everything else


def make_room(context: zmq.Context[zmq.Socket[bytes]], topology: Topology) -> None:
    """Before the first socket of `context`. The soft limit of descriptors is raised as far as is
    needed and the hard one allows; a process that may have too few learns it when it needs them."""
    stages = len(topology.entries)
    context.set(zmq.MAX_SOCKETS, OWN + SOCKETS * stages)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OWN + SOCKETS * DESCRIPTORS * stages
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
