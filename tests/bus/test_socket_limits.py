"""A process has room for a socket to every stage of its deployment."""

from __future__ import annotations

import subprocess
import sys

# With a soft limit of 256 descriptors, as a process may find it.
PROGRAM = """
import resource, sys, zmq
from pipeinfer.bus.sockets import raise_socket_limits
from pipeinfer.settings import Settings
from pipeinfer import topology
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
place = topology.local(Settings(dp=150, tp=8), "ipc:///tmp/nowhere/")
context = zmq.Context()
if sys.argv[1] == "room":
    raise_socket_limits(context, place)
sockets = []
for entry in place.entries:
    socket = context.socket(zmq.SUB)
    socket.connect(entry.address)
    sockets.append(socket)
print(len(sockets))
context.destroy(linger=0)
"""


def run(word: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=False
    )


def test_there_may_be_more_sockets_than_zeromq_and_the_system_allow_at_first():
    assert "Too many open files" in run("none").stderr
    made = run("room")
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) == 150 * 9 + 3
