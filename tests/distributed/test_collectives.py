"""Ranks find each other at the address of rank 0, in any order, and strangers are refused;
all ranks of a group add up in the same way."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import zmq
from torch.distributed.distributed_c10d import Store

from pipeinfer.bus.bus import SocketFactory
from pipeinfer.collectives import RendezvousError, disable_multicast, rendezvous
from pipeinfer.topology import StageEntry, Topology, socket_address
from port_rows import port_row


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_share_one_store_in_any_order(short_path, order):
    address = f"ipc://{short_path}/engine-0-0"
    gates = [Event() for _ in order]
    gates[0].set()

    def one(rank: int) -> Store:
        nth = order.index(rank)
        gates[nth].wait(10)
        if nth + 1 < len(gates):
            gates[nth + 1].set()
        store = rendezvous(address, rank, 3, timeout=20)
        store.set(str(rank), f"here is {rank}")
        return store

    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(one, range(3)))
    for store in stores:
        assert [store.get(str(rank)) for rank in range(3)] == [
            b"here is 0",
            b"here is 1",
            b"here is 2",
        ]


def test_a_rank_of_a_group_of_another_size_is_refused(short_path):
    address = f"ipc://{short_path}/engine-0-0"
    store = rendezvous(address, 0, 2, timeout=20)
    with pytest.raises(RendezvousError, match="rank 3 of 4 does not belong to a group of 2"):
        rendezvous(address, 3, 4, timeout=20)
    store.set("key", "value")
    assert rendezvous(address, 1, 2, timeout=20).get("key") == b"value"


def test_rank_0_listens_where_its_topology_says_though_others_know_it_elsewhere():
    port = port_row(4)
    entry = StageEntry("engine", f"tcp://127.0.0.2:{port}", bind="127.0.0.3")
    wires, formed = SocketFactory(Topology((entry,)), zmq.Context.instance(), "engine-0-0"), Event()
    rendezvous(entry.address, 0, 2, timeout=20, sockets=wires, formed=formed)
    with socket.create_connection(("127.0.0.3", port + 3), timeout=10) as line:
        assert line.recv(1) == b"\xff", "ZeroMQ greets"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port + 3), timeout=10)
    formed.set()


def test_a_rank_is_answered_again_until_the_group_is_formed(short_path):
    """On a busy machine an answer may come after the question was given up and asked anew."""
    address, formed = f"ipc://{short_path}/engine-0-0", Event()
    store = rendezvous(address, 0, 2, timeout=60, formed=formed)
    store.set("key", "value")
    for _ in range(2):
        assert rendezvous(address, 1, 2, timeout=20).get("key") == b"value"
    formed.set()

    def silent() -> bool:
        try:
            rendezvous(address, 1, 2, timeout=1)
        except RendezvousError:
            return True
        return False

    assert any(silent() for _ in range(20))


def test_a_missing_rank_0_is_an_error_that_names_its_address(short_path):
    with pytest.raises(RendezvousError, match=r"rank 0 at ipc://.*engine-0-0\.group .* in 1 s"):
        rendezvous(f"ipc://{short_path}/engine-0-0", 1, 2, timeout=1)


def test_questions_that_are_none_end_neither_rank(short_path):
    address = f"ipc://{short_path}/engine-0-0"
    store = rendezvous(address, 0, 2, timeout=60)
    store.set("key", "value")
    with zmq.Context() as context:
        for question in ([b"\x91" * 900], [b"\xff"], [b"\x92\x01\x02", b"another part"], [b""]):
            with context.socket(zmq.REQ) as asker:
                asker.linger, asker.rcvtimeo = 0, 10_000
                asker.connect(socket_address(address, "group"))
                asker.send_multipart(question)
                assert b"no question" in asker.recv()
    assert rendezvous(address, 1, 2, timeout=20).get("key") == b"value"


def test_ranks_add_up_in_order_and_all_do_without_what_one_cannot_do_or_finds_wrong(short_path):
    """Sums of rows alone have the same bits as beside others."""
    script = Path(__file__).with_name("agreeing_rank_process.py")
    done = subprocess.run(
        [sys.executable, script, f"ipc://{short_path}/rank-0"],
        stderr=subprocess.PIPE, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("apart: another rank cannot do otherwise\n") == 2
    assert done.stderr.count("apart: no access to the other's memory\n") == 1, "the reason, a line"
    assert done.stderr.count("differs from NCCL's") == 3


def test_gpus_talk_without_multicast_unless_the_user_wants_it():
    environ = {"NCCL_NVLS_ENABLE": "1"}
    disable_multicast(environ)
    assert environ == {"NCCL_NVLS_ENABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
