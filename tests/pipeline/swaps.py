"""`pipeinfer swap` of a running server's stages."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from pipeinfer.cli.main import main
from pipeinfer.runtime.servers import running_servers
from servers import Server, environment


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def topology_of(server: Server) -> str:
    return str(next(s.file for s in running_servers() if s.pid == server.process.pid))


def swap(server: Server, stage: str, *command: str) -> Ended:
    """By the command's function, in this process."""
    after = ["--", *command] if command else []
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as failed:
        code = main(["swap", stage, "--topology", topology_of(server), *after])
    return Ended(code, said.getvalue(), failed.getvalue())


def begun_swap(server: Server, stage: str) -> subprocess.Popen[str]:
    """The command as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipeinfer", "swap", stage, "--topology", topology_of(server)],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
