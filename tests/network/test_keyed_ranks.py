"""Ranks of a group find each other on tcp with keys, and strangers find nobody."""

from __future__ import annotations

import pytest
import zmq

from pipeinfer.bus import curve
from pipeinfer.bus.bus import SocketFactory
from pipeinfer.collectives import RendezvousError, _query_store, rendezvous
from pipeinfer.topology import StageEntry, Topology, socket_address
from port_rows import port_row


@pytest.fixture
def topology(tmp_path):
    port = port_row(8)
    curve.create_key_pair(tmp_path / "ours", curve.DEFAULT_KEY)
    curve.create_key_pair(tmp_path / "theirs", curve.DEFAULT_KEY)
    ranks = (
        StageEntry("engine", f"tcp://127.0.0.1:{port}"),
        StageEntry("engine", f"tcp://127.0.0.1:{port + 4}", rank=1),
    )
    return Topology(ranks, keys=str(tmp_path / "ours"))


def test_ranks_meet_with_keys_and_nobody_else_does(topology, tmp_path):
    address = topology.address("engine-0-0")
    context = zmq.Context.instance()
    first, second = (
        SocketFactory(topology, context, "engine-0-0"),
        SocketFactory(topology, context, "engine-0-1"),
    )
    wrong = SocketFactory(
        Topology(topology.entries, keys=str(tmp_path / "theirs")), context, "engine-0-1"
    )
    first.load_keys()
    try:
        for other in (second, wrong):
            other.load_keys(authenticate=False)
        store = rendezvous(address, 0, 2, 30, first)
        store.set("key", "value")
        for stranger in (wrong, None):
            with pytest.raises(RendezvousError, match="did not answer"):
                rendezvous(address, 1, 2, 1.0, stranger)
        assert rendezvous(address, 1, 2, 30, second).get("key") == b"value"
    finally:
        first.close()


def test_garbage_does_not_end_the_meeting(short_path):
    """On ipc, where there are no keys."""
    address = f"ipc://{short_path}/engine-0-0"
    store = rendezvous(address, 0, 2, 30)
    store.set("key", "value")
    with zmq.Context() as context, context.socket(zmq.REQ) as raw:
        raw.linger = 0
        raw.connect(socket_address(address, "group"))
        raw.send(b"\xc1garbage")
        assert raw.poll(20_000)
        assert b"no question" in raw.recv()
    assert rendezvous(address, 1, 2, 30).get("key") == b"value"


def test_a_connection_that_ends_before_a_question_is_sent_is_waited_for_until_the_timeout(
    monkeypatch,
):
    """As with a stranger's: there was one when it was polled, and none when it is used."""
    monkeypatch.setattr(zmq.Socket, "poll", lambda *_: zmq.POLLOUT)

    def without_connection(socket: zmq.Socket[bytes]) -> None:
        socket.immediate = True  # none before somebody listens

    nobody = f"tcp://127.0.0.1:{port_row(1)}"
    with pytest.raises(RendezvousError, match="did not answer"):
        _query_store(nobody, 1, 2, 0.2, without_connection)
