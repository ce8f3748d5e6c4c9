"""Listening sockets: opened once, handed to another process, kept while that one is replaced."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from pipeinfer.runtime import servers
from pipeinfer.settings import ConfigurationError

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
    [one] = servers._opened("127.0.0.1", 0, backlog=0)  # as far as the first has come
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
