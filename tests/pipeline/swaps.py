"""`pipeinfer swap` of a running server's stages."""

from __future__ import annotations

import subprocess
import sys

from pipeinfer.runtime.servers import running_servers
from servers import Server, environment


def topology_of(server: Server) -> str:
    return str(next(s.file for s in running_servers() if s.pid == server.process.pid))


def swap(server: Server, stage: str, *command: str) -> subprocess.CompletedProcess[str]:
    after = ["--", *command] if command else []
    return subprocess.run(
        [sys.executable, "-m", "pipeinfer", "swap", stage, "--topology", topology_of(server),
         *after],
        capture_output=True, text=True, env=environment(), timeout=240, check=False,
    )  # fmt: skip
