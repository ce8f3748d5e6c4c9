"""A door for HTTP: nobody comes in before it is open, and who waits there is told when it is."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from pipeinfer.runtime.listening import WAIT_FLAG, InheritedSockets, wait_until_listening
from pipeinfer.settings import ConfigurationError


@pytest.fixture
def door():
    made = InheritedSockets()
    made.bind("127.0.0.1", 0)
    yield made
    made.close()


def port(door: InheritedSockets) -> int:
    with socket.socket(fileno=os.dup(door.descriptors[0])) as inherited:
        return inherited.getsockname()[1]


def test_nobody_can_connect_before_a_door_is_open(door):
    where = ("127.0.0.1", port(door))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=10)
    door.open()
    socket.create_connection(where, timeout=10).close()


@pytest.mark.parametrize("opens", [True, False])
async def test_who_waits_hears_that_it_opens_or_never_will(door, opens):
    *_, pipe = door.descriptors
    waiting = asyncio.create_task(asyncio.to_thread(wait_until_listening, os.dup(pipe)))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    (door.open if opens else door.close)()
    assert await asyncio.wait_for(waiting, 10) == opens


def test_a_process_is_told_what_it_inherits_and_waits_only_at_a_door_that_is_shut(door):
    listens, pipe = door.descriptors
    assert door.arguments == ["--listen-fd", str(listens), WAIT_FLAG, str(pipe)]
    door.open()
    assert door.descriptors == [listens]
    assert door.arguments == ["--listen-fd", str(listens)]


def test_of_two_doors_at_one_address_one_opens(door):
    other = InheritedSockets()
    other.bind("127.0.0.1", port(door))
    door.open()
    with pytest.raises(ConfigurationError, match="is taken by process"):
        other.listen()
    other.close()
    with pytest.raises(ConfigurationError, match="is taken by process"):
        other.bind("127.0.0.1", port(door))
