"""That large pieces of memory lie apart where a stage computes nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import servers
from pipeinfer import topology as topologies
from pipeinfer.settings import Settings
from pipeinfer.topology import NAMES

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
