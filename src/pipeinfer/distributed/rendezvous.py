"""How the ranks of a group find each other: rank 0 opens a store and says where it is.

A rank that was started again asks again, and is answered by a rank 0 that was started again too:
groups start and stop as a whole. Knows addresses and sockets, no collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Store

from pipeinfer.bus.frames import DECODE_ERRORS
from pipeinfer.bus.sockets import SocketFactory
from pipeinfer.topology import listen_host, socket_address

ASK_AGAIN = 0.5  # seconds
QUESTION_BYTES = 1_024  # two numbers; whoever sends more is disconnected

Ready = Callable[[zmq.Socket[bytes]], None]  # binds a socket, or gives it its keys


class Asks(msgspec.Struct, frozen=True, array_like=True):
    """A rank looks for the store of its group."""

    rank: int
    size: int


class Answers(msgspec.Struct, frozen=True, array_like=True):
    """Where the store lies; `refusal` says why it cannot be had."""

    port: int = 0
    refusal: str = ""


class RendezvousError(RuntimeError):
    """The ranks of a group did not come together."""


def meet(
    address: str,
    rank: int,
    size: int,
    timeout: float,
    wires: SocketFactory | None = None,
    formed: threading.Event | None = None,
) -> Store:
    """The store that all `size` ranks share. `address`: that of rank 0, see topology.py.

    wires: of this process, for its keys, and for where it listens if that is not its address.
    formed: to be set when the group stands; until then, or the timeout, rank 0 answers. Blocks
    until rank 0 is there. Raises RendezvousError after `timeout` seconds, or at once when rank 0
    expects another number of ranks.
    """
    host = listen_host(address)
    endpoint = socket_address(address, "group")

    def secure(socket: zmq.Socket[bytes]) -> None:
        if wires is not None:
            wires.secure(socket, address)

    def listen(socket: zmq.Socket[bytes]) -> None:
        if wires is not None:
            wires.bind(socket, "group")
        else:
            socket.bind(endpoint)

    if rank:
        return TCPStore(
            host, _ask(endpoint, rank, size, timeout, secure), size, wait_for_workers=False
        )
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    _serve(listen, size, store.port, timeout, formed or threading.Event())
    return store


def _ask(endpoint: str, rank: int, size: int, timeout: float, secure: Ready) -> int:
    deadline = time.monotonic() + timeout
    question = msgspec.msgpack.encode(Asks(rank, size))
    with zmq.Context.instance().socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.REQ_RELAXED, 1)  # may ask again: an old rank 0 may have died
        socket.setsockopt(zmq.REQ_CORRELATE, 1)
        socket.linger, socket.ipv6 = 0, True
        secure(socket)
        socket.connect(endpoint)
        while time.monotonic() < deadline:
            if not socket.poll(int(1000 * ASK_AGAIN), zmq.POLLOUT):
                continue  # it speaks no CURVE, or we do not; the deadline ends it
            socket.send(question)
            if socket.poll(int(1000 * ASK_AGAIN)):
                try:
                    answer = msgspec.msgpack.decode(b"".join(socket.recv_multipart()), type=Answers)
                except DECODE_ERRORS:
                    continue  # not of our rank 0, which may still answer
                if answer.refusal:
                    raise RendezvousError(answer.refusal)
                return answer.port
    raise RendezvousError(f"rank 0 at {endpoint} did not answer rank {rank} in {timeout:g} s")


def _serve(listen: Ready, size: int, port: int, timeout: float, formed: threading.Event) -> None:
    """Answers in a thread until the group is formed; binds before it returns.

    A rank that was told may ask again: it did not wait for an answer that came late.
    """
    socket = zmq.Context.instance().socket(zmq.REP)
    socket.linger, socket.ipv6, socket.maxmsgsize = 1000, True, QUESTION_BYTES
    listen(socket)

    def answer() -> None:
        deadline = time.monotonic() + timeout
        with socket:
            while not formed.is_set() and time.monotonic() < deadline:
                if not socket.poll(int(1000 * ASK_AGAIN)):
                    continue
                try:
                    # All parts of it, or no answer can be sent; more than one are no question.
                    asks = msgspec.msgpack.decode(b"".join(socket.recv_multipart()), type=Asks)
                except DECODE_ERRORS as error:
                    socket.send(msgspec.msgpack.encode(Answers(refusal=f"no question: {error}")))
                    continue
                if asks.size != size or not 0 < asks.rank < size:
                    text = f"rank {asks.rank} of {asks.size} does not belong to a group of {size}"
                    socket.send(msgspec.msgpack.encode(Answers(refusal=text)))
                    continue
                socket.send(msgspec.msgpack.encode(Answers(port)))

    threading.Thread(target=answer, name="rendezvous", daemon=True).start()
