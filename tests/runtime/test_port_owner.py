"""Whose a port is: a process and its program, whatever the address; of our servers the model."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeinfer.runtime.servers as owners
from pipeinfer import topology as topologies
from pipeinfer.runtime.servers import (
    PREFIX,
    TOPOLOGY,
    ServerInfo,
    port_owner,
    publish_served_model,
    record_running,
)
from pipeinfer.settings import Settings
from servers import environment

LISTENER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
one = socket.create_server((sys.argv[1], 0), family=family)
print(one.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listener(script: Path, host: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that listens on `host`, and its port."""
    script.write_text(LISTENER)
    words = [sys.executable, "-X", "dev", "-u", str(script), host, "--password=hidden", *more]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        ("127.0.0.1", ["127.0.0.1", "0.0.0.0", ""]),
        ("0.0.0.0", ["127.0.0.1", "127.0.0.2"]),
        ("::", ["127.0.0.1", "::1"]),
        ("::1", ["::1", "::"]),
    ],
)
def test_a_process_is_named_with_its_script_and_without_its_arguments(tmp_path, listens, asked):
    with listener(tmp_path / "web.py", listens) as (process, port):
        for host in asked:
            assert port_owner(host, port) == f"by process {process.pid} (python web.py)"


def test_an_argument_of_a_script_is_no_module(tmp_path):
    with listener(tmp_path / "web.py", "127.0.0.1", "-m", "hidden") as (process, port):
        assert port_owner("127.0.0.1", port) == f"by process {process.pid} (python web.py)"


def test_who_listens_elsewhere_is_not_meant(tmp_path):
    with listener(tmp_path / "web.py", "127.0.0.1") as (_, port):
        assert port_owner("127.0.0.2", port) == port_owner("::1", port) == ""
        assert port_owner("127.0.0.1", port + 1) == ""


def test_a_process_that_cannot_be_seen_is_said_to_be_there(tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    for table in ("tcp", "tcp6"):
        text = Path("/proc/net", table).read_text()
        (tmp_path / "net" / table).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        (tmp_path / "net/tcp").write_text(Path("/proc/net/tcp").read_text())
        monkeypatch.setattr(owners, "PROC", tmp_path)
        assert port_owner("127.0.0.1", port) == "by a process that this user cannot see"
    monkeypatch.setattr(owners, "PROC", tmp_path / "nothing")
    assert port_owner("127.0.0.1", port) == ""


def test_a_server_of_ours_is_named_with_its_model_even_before_it_listens(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / f"{PREFIX}one" / TOPOLOGY
    file.parent.mkdir()
    file.write_text(topologies.local(Settings(), "ipc://one/").to_toml())
    with socket.create_server(("127.0.0.1", 0)) as ours, record_running(file):
        port = ours.getsockname()[1]
        publish_served_model(file, ServerInfo(f"http://127.0.0.1:{port}", "tiny", "/models/tiny"))
        wanted = f"by process {os.getpid()} (pipeinfer serve, model tiny)"
        assert port_owner("127.0.0.1", port) == wanted
        ours.close()
        assert port_owner("127.0.0.1", port) == wanted


@pytest.mark.parametrize("offset", [0, 1, 2], ids=["inbox", "telemetry", "plan"])
def test_a_stage_whose_address_is_taken_says_by_whom_in_one_line(tmp_path, offset):
    """Code 1, not 2: it may be the process before, which still ends."""
    with listener(tmp_path / "web.py", "127.0.0.1") as (process, port):
        file = tmp_path / "pipeinfer.toml"
        others = topologies.local(Settings(), "ipc:///tmp/none/").to_toml()
        ours = f"tcp://127.0.0.1:{port - offset}"
        file.write_text(others.replace("ipc:///tmp/none/scheduler-0", ours))
        done = subprocess.run(
            [sys.executable, "-m", "pipeinfer.runtime", "scheduler", "--topology", str(file)],
            env=environment(), stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        assert done.stderr == (
            f"error: scheduler-0: tcp://127.0.0.1:{port} is taken by process {process.pid} "
            "(python web.py)\n"
        )
        assert done.returncode == 1
