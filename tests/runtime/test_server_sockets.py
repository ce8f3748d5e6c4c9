"""Sockets for HTTP: opened once, handed to another process, kept while that one is replaced, and
listened on only when the supervisor says so; and what holds a port that is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pipeinfer.runtime.servers as owners
from pipeinfer import topology as topologies
from pipeinfer.runtime import servers
from pipeinfer.runtime.servers import (
    FOLDER_PREFIX,
    TOPOLOGY,
    WAIT_FLAG,
    InheritedSockets,
    ServerInfo,
    port_owner,
    publish_served_model,
    record_running,
    wait_until_listening,
)
from pipeinfer.settings import ConfigurationError, Settings
from servers import environment

ACCEPT_ONE = """
import sys
from pipeinfer.runtime import servers
[one] = servers.adopt([int(sys.argv[1])])
one.setblocking(True)
connection, _ = one.accept()
connection.sendall(sys.argv[2].encode())
"""


def accept_one(one: socket.socket, word: str) -> None:
    """A child process that accepts one connection, says `word` and ends."""
    descriptor = one.fileno()
    subprocess.run(
        [sys.executable, "-c", ACCEPT_ONE, str(descriptor), word],
        pass_fds=[descriptor], check=True, timeout=60,
    )  # fmt: skip


def test_connections_wait_from_one_process_to_the_next():
    [one] = servers.open_sockets("127.0.0.1", 0)
    with closing(one):
        clients = [socket.create_connection(one.getsockname(), timeout=60) for _ in range(2)]
        for client, word in zip(clients, ("first", "second"), strict=True):
            with closing(client):
                accept_one(one, word)
                assert client.recv(100) == word.encode()
        address = one.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_every_address_of_a_host_gets_the_same_port(host):
    opened = servers.open_sockets(host, 0)
    try:
        assert len({one.getsockname()[1] for one in opened}) == 1
        for one in opened:
            family_host = "::1" if one.family == socket.AF_INET6 else "127.0.0.1"
            socket.create_connection((family_host, one.getsockname()[1]), timeout=60).close()
    finally:
        servers.close_all(opened)


def test_a_port_in_use_is_named_with_its_flag_its_owner_and_a_free_one():
    [one] = servers.open_sockets("127.0.0.1", 0)
    with closing(one):
        port = one.getsockname()[1]
        for attempt in (servers.open_sockets, servers.check_free):
            with pytest.raises(ConfigurationError) as error:
                attempt("127.0.0.1", port)
            wanted = (
                rf"--port {port}: 127\.0\.0\.1:{port} is taken by process {os.getpid()} \(.+\); "
                r"--port (\d+) is free \(with make: PORT=\1\)"
            )
            found = re.fullmatch(wanted, str(error.value))
            assert found, error.value
            servers.check_free("127.0.0.1", int(found[1]))
    servers.check_free("127.0.0.1", port)


def test_of_an_address_that_cannot_be_had_the_host_is_named():
    for host in ("no.such.host.invalid", "203.0.113.7"):
        wanted = rf"--host {re.escape(host)}: cannot listen on {re.escape(host)}:8000: \w+"
        with pytest.raises(ConfigurationError, match=wanted):
            servers.open_sockets(host, 8000)


def test_two_who_ask_for_a_port_at_once_do_not_disturb_each_other():
    [one] = servers._open_all("127.0.0.1", 0, backlog=0)  # as far as the first has come
    with closing(one), closing(socket.socket()) as client:
        address = one.getsockname()
        servers.check_free(*address)
        assert client.connect_ex(address) == errno.ECONNREFUSED, "nobody listens meanwhile"


def test_what_is_no_listening_socket_is_not_adopted():
    with closing(socket.socket()) as plain:
        with pytest.raises(ConfigurationError, match=f"--listen-fd {plain.fileno()}: it does not"):
            servers.adopt([plain.fileno()])
        plain.detach()  # adopting took it over
    with pytest.raises(ConfigurationError, match="--listen-fd 999999"):
        servers.adopt([999999])


@pytest.fixture
def sockets():
    made = InheritedSockets()
    made.bind("127.0.0.1", 0)
    yield made
    made.close()


def port(sockets: InheritedSockets) -> int:
    with socket.socket(fileno=os.dup(sockets.descriptors[0])) as inherited:
        return inherited.getsockname()[1]


def test_nobody_can_connect_before_the_supervisor_listens(sockets):
    where = ("127.0.0.1", port(sockets))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=10)
    sockets.listen()
    socket.create_connection(where, timeout=10).close()


@pytest.mark.parametrize("listens", [True, False])
async def test_a_waiting_gateway_learns_that_the_supervisor_listens_or_never_will(sockets, listens):
    *_, pipe = sockets.descriptors
    waiting = asyncio.create_task(asyncio.to_thread(wait_until_listening, os.dup(pipe)))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    (sockets.listen if listens else sockets.close)()
    assert await asyncio.wait_for(waiting, 10) == listens


def test_a_process_is_told_what_it_inherits_and_waits_only_until_the_supervisor_listens(sockets):
    listens, pipe = sockets.descriptors
    assert sockets.arguments == ["--listen-fd", str(listens), WAIT_FLAG, str(pipe)]
    sockets.listen()
    assert sockets.descriptors == [listens]
    assert sockets.arguments == ["--listen-fd", str(listens)]


def test_of_two_supervisors_at_one_address_one_listens(sockets):
    other = InheritedSockets()
    other.bind("127.0.0.1", port(sockets))
    sockets.listen()
    with pytest.raises(ConfigurationError, match="is taken by process"):
        other.listen()
    other.close()
    with pytest.raises(ConfigurationError, match="is taken by process"):
        other.bind("127.0.0.1", port(sockets))


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
    file = tmp_path / f"{FOLDER_PREFIX}one" / TOPOLOGY
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
    for _ in range(5):  # another test may have taken the port before
        if (said := said_of_taken(tmp_path, offset))[0].split(" is taken")[0] == said[1]:
            break
    told, address, process, code = said
    assert told == f"{address} is taken by process {process} (python web.py)\n"
    assert code == 1


def said_of_taken(folder, offset) -> tuple[str, str, int, int]:
    """What a scheduler says where a process listens at its address or one of the next two, what it
    says first if it is that one, the process, and its own code."""
    with listener(folder / "web.py", "127.0.0.1") as (process, port):
        file = folder / "pipeinfer.toml"
        others = topologies.local(Settings(), "ipc:///tmp/none/").to_toml()
        ours = f"tcp://127.0.0.1:{port - offset}"
        file.write_text(others.replace("ipc:///tmp/none/scheduler-0", ours))
        done = subprocess.run(
            [sys.executable, "-m", "pipeinfer.runtime", "scheduler", "--topology", str(file)],
            env=environment(), stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        address = f"error: scheduler-0: tcp://127.0.0.1:{port}"
        return done.stderr, address, process.pid, done.returncode
