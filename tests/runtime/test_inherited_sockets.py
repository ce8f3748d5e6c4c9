"""Inherited sockets for HTTP: nobody connects before the supervisor listens, and gateways wait."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from pipeinfer.runtime.servers import WAIT_FLAG, InheritedSockets, wait_until_listening
from pipeinfer.settings import ConfigurationError


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
