"""That large pieces of memory lie apart where a stage computes nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import servers
from pipeinfer.settings import Settings
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import NAMES

# Starts a stage up to its loop. Then a piece of 20 MiB is made and given back: what glibc takes as
# a sign that pieces up to its size belong among the small ones. A piece of 1 MiB shows.
STAGE = """
import ctypes, sys
from pipeinfer.runtime import entry

class Pieces(ctypes.Structure):  # struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena free fast mapped".split()]
    _fields_ += [("rest", ctypes.c_size_t * 6)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Pieces

def run(stage):
    stage.close()
    bytearray(20 << 20)
    before = libc.mallinfo2().mapped
    piece = bytearray(1 << 20)
    print(libc.mallinfo2().mapped - before)
    return 0

entry.uvloop.run = run
sys.exit(entry.main(sys.argv[1:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("name", NAMES)
def test_large_pieces_lie_apart_where_a_stage_seldom_makes_one(
    tmp_path: Path, short_path: Path, name: str
):
    file = tmp_path / "pipeinfer.toml"
    file.write_text(topologies.local(Settings(), f"ipc://{short_path}/").to_toml())
    ran = subprocess.run(
        [sys.executable, "-c", STAGE, name, "--topology", str(file)],
        env=servers.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == (0 if name == "engine" else 1)


# Large pieces among small ones that stay, the last of which is at the heap's end; then all large
# ones are free. What a process has of them still is told, before and after a look.
HOLES = """
import ctypes, time
from pipeinfer.runtime.heap import give_back_regularly

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallopt(-3, 1 << 30)  # nothing is mapped for itself

def resident():
    status = open("/proc/self/status").read()
    return int(status.partition("RssAnon:")[2].split()[0]) >> 10

large, small = [], []
for _ in range(100):
    large.append(libc.malloc(1 << 20))
    ctypes.memset(large[-1], 1, 1 << 20)
    small.append(libc.malloc(100))
full = resident()
for piece in large:
    libc.free(piece)
kept = full - resident()
ended = give_back_regularly(0.01)
began = time.monotonic()
while full - resident() < 80 and time.monotonic() - began < 30:
    time.sleep(0.01)
ended.set()
print(kept, full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_holes_between_small_pieces_are_given_back():
    ran = subprocess.run(
        [sys.executable, "-c", HOLES], env=servers.environment(), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    before, after = map(int, ran.stdout.split())
    assert before < 20 and after >= 80
