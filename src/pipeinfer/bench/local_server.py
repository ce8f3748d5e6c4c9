"""A server of ours in a process of its own: started on a free port, waited for, and ended.

Knows the line that a server prints when it is ready. What it is asked is somebody else's business.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from pipeinfer import settings as config

READY = "ready "


class ServerNotReady(RuntimeError):
    """A server ended before it was ready; its own words are on stderr."""


def flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of the command line of `pipeinfer serve`."""
    known = config.settings_help()
    words = [str(settings["model"])] if settings.get("model") else []
    for name, value in settings.items():
        if name == "model":
            continue
        flag = "--" + name.replace("_", "-")
        words += ([flag] if value else []) if known[name].kind is bool else [flag, str(value)]
    return words


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL in the ready line of a process whose stdout is a pipe. Raises ServerNotReady."""
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise ServerNotReady(f"the server ended with code {process.wait()}")


class LocalServer:
    """`pipeinfer serve` on a free port, as a context manager; `url` is set when it is ready.

    All its graphs are captured by then, unless `settings` say otherwise. `log`: an open file for
    what it says on stderr, else that is this process's."""

    def __init__(self, settings: Mapping[str, object], log: IO[str] | None = None) -> None:
        usual = {"log_level": "warning", "all_graphs_first": True}
        words = flags({**usual, **settings, "port": 0})
        command = [sys.executable, "-m", "pipeinfer", "serve", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = ""

    def __enter__(self) -> LocalServer:
        try:
            self.url = wait_ready(self.process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)


def stop(process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """SIGTERM, and SIGKILL for a process that does not end."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
