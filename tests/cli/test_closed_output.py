"""Commands whose output nobody reads to its end, as before `| head`: no traceback, code 141."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from pipeinfer.runtime.servers import running_servers
from servers import environment

PROGRAM = [sys.executable, "-m", "pipeinfer"]


def nobody_reads() -> int:
    """A pipe's end to write into, whose other end is closed."""
    source, sink = os.pipe()
    os.close(source)
    return sink


@pytest.mark.parametrize(
    "words", ["doctor --port 0", "topology check FILE", "--help", "keys --out FOLDER"]
)
def test_a_command_ends_as_by_sigpipe(tmp_path, words):
    file = tmp_path / "pipeinfer.toml"
    stages = [("scheduler", 4), ("engine", 5), ("gateway", 1), ("tokenizer", 2), ("detokenizer", 3)]
    file.write_text(
        "\n".join(f'[[stage]]\nname = "{n}"\naddress = "ipc:///tmp/no/{k}"' for n, k in stages)
    )
    sink = nobody_reads()
    done = subprocess.run(
        [*PROGRAM, *words.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)).split()],
        env={**environment(), "PYTHONUNBUFFERED": ""}, stdout=sink, stderr=subprocess.PIPE,
        text=True, timeout=300,
    )  # fmt: skip
    os.close(sink)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_server_serves_although_nobody_reads_what_it_says():
    sink = nobody_reads()
    process = subprocess.Popen(
        [*PROGRAM, "serve", "--port", "0", "--kv-pages", "300"],
        env=environment(), stdout=sink, stderr=sink,
    )  # fmt: skip
    os.close(sink)
    try:
        deadline = time.monotonic() + 300
        status = ""
        while status != "ready":
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
            for server in running_servers():
                if server.pid == process.pid and server.served is not None:
                    status = health(server.served.url)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def health(url: str) -> str:
    """The server's status; "" while nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=300) as answer:
            return json.load(answer)["status"]
    except OSError:
        return ""
