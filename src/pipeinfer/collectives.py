"""The ranks of one tensor-parallel group: how they find each other, and how they exchange data.

- `join_group` meets the other ranks (`rendezvous`: rank 0 opens a store and answers queries for its
  port) and returns the collectives, over torch.distributed (`TorchCollectives`). All ranks call the
  same collectives in the same order; a rank that dies makes the others raise, one that hangs makes
  them wait, which the scheduler's watchdog ends. Groups start and stop as a whole: a rank that was
  started again asks again, and is answered by a rank 0 that was started again too.
- `CustomAllReduce`: between GPUs that have mapped each other's memory, in place of NCCL's, the sum
  alone, by torch's kernels over its symmetric memory (torch.ops.symm_mem).
- `AllReduceNorm`: the sum, the residual addition and RMSNorm in one kernel of this project
  (kernels/elementwise.py, which needs Triton).

Fixed rules, the same on all ranks, choose the messages for the last two. Both work in one shot
(every rank reads the messages of all others) or in two (every rank adds up its share, then all
collect the shares). Nothing here uses NVLink multicast. Knows no layer and no model.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Literal, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zmq
from torch.distributed import (
    ProcessGroup,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.distributed_c10d import Store

from pipeinfer.bus.bus import SocketFactory
from pipeinfer.bus.frames import DECODE_ERRORS
from pipeinfer.step import PeerLost
from pipeinfer.topology import is_loopback, listen_host, socket_address

# Bytes that the kernels load at a time: messages begin and end at multiples of it.
ALIGNMENT = 16
# Bytes of the largest message here. Larger ones are NCCL's, because their time depends on bandwidth
# alone.
MAX_MESSAGE_BYTES = 16 * 2**20

# CustomAllReduce, by the number of ranks: bytes up to which one shot is the fastest, ...
ONE_SHOT_MAX_BYTES = {2: 16 * 2**10, 4: 384 * 2**10, 8: 256 * 2**10}
# ... and bytes from which two shots are. Between them NCCL is.
TWO_SHOT_MIN_BYTES = {2: 1536 * 2**10, 4: 1024 * 2**10, 8: 256 * 2**10}

# AllReduceNorm, by the number of ranks: bytes up to which one shot is faster than two. In one shot
# every rank reads the messages of all others; in two shots it reads its share of them and writes as
# much, but waits twice. For two ranks both move as many bytes. Measured for 2 and 4 H200.
FUSED_ONE_SHOT_MAX_BYTES = {2: MAX_MESSAGE_BYTES, 4: 256 * 2**10, 8: 128 * 2**10}

# Region of a rank for AllReduceNorm, in bytes:
# [ messages, even calls | messages, odd calls | norms of two shots | arrivals ]
#   0                      MAX_MESSAGE_BYTES     NORMS_OFFSET         ARRIVALS_OFFSET
NORMS_OFFSET = 2 * MAX_MESSAGE_BYTES
ARRIVALS_OFFSET = 3 * MAX_MESSAGE_BYTES

Algorithm = Literal["one-shot", "two-shot", "nccl"]
Shots = Literal[0, 1, 2]


def choose_algorithm(nbytes: int, ranks: int) -> Algorithm:
    """The algorithm by which `ranks` ranks add up a message of `nbytes` bytes: the same on all of
    them."""
    if ranks not in ONE_SHOT_MAX_BYTES or nbytes > MAX_MESSAGE_BYTES or not nbytes:
        return "nccl"
    if nbytes <= ONE_SHOT_MAX_BYTES[ranks] and nbytes % ALIGNMENT == 0:
        return "one-shot"
    if nbytes >= TWO_SHOT_MIN_BYTES[ranks] and nbytes % (ALIGNMENT * ranks) == 0:
        return "two-shot"
    return "nccl"


class CustomAllReduce:
    """All-reduce of small and middling messages over the ranks of a group. Works in CUDA graphs.

    Calls are ordered by the stream that they are on, which must be one at a time: there is one
    buffer.

    Attributes:
    - ranks: ranks of the group
    - dtype: dtype of the messages
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Meets all other ranks of `group`. Raises RuntimeError if the GPUs cannot map each other's
        memory."""
        from torch.distributed import _symmetric_memory as symmetric

        self.ranks = group.size()
        self.dtype = dtype
        self._name = group.group_name
        elements = MAX_MESSAGE_BYTES // dtype.itemsize
        self._buffer = symmetric.empty(elements, dtype=dtype, device=device)
        symmetric.rendezvous(self._buffer, group=group)

    def supports(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` is for this message; the same on all ranks."""
        return self._algorithm(x) != "nccl"

    def all_reduce(self, x: torch.Tensor, force: Algorithm | None = None) -> torch.Tensor:
        """The sum of `x` over the ranks, bit by bit the same on all; `x` may be overwritten.

        - force: an algorithm, to measure it
        """
        shared = self._buffer[: x.numel()].view(x.shape)
        x = x.contiguous()
        if (force or self._algorithm(x)) == "one-shot":
            out = torch.empty_like(x)
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, out)
            return out
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)
        return x

    def _algorithm(self, x: torch.Tensor) -> Algorithm:
        if x.dtype != self.dtype:
            return "nccl"
        return choose_algorithm(x.numel() * x.element_size(), self.ranks)


def choose_shots(rows: int, row_bytes: int, ranks: int) -> Shots:
    """The number of shots in which messages [rows, ...] of `row_bytes` bytes a row are added up and
    normed, the same on all ranks; 0: not by AllReduceNorm."""
    nbytes = rows * row_bytes
    if ranks not in FUSED_ONE_SHOT_MAX_BYTES or not 0 < nbytes <= MAX_MESSAGE_BYTES:
        return 0
    if row_bytes % ALIGNMENT:
        return 0
    return 1 if nbytes <= FUSED_ONE_SHOT_MAX_BYTES[ranks] else 2


def region_bytes() -> int:
    """Bytes of a rank's region for AllReduceNorm; needs Triton."""
    from pipeinfer.kernels.elementwise import SIGNAL_BYTES

    return ARRIVALS_OFFSET + SIGNAL_BYTES


class AllReduceNorm:
    """An all-reduce fusion (see AllReduceFusion in layers/placement.py). Works in CUDA graphs.

    Calls are ordered by the stream that they are on. Two calls in a row never use the same buffer:
    within a forward pass they take turns, two a layer, and between two passes lies the embedding's
    sum, which no rank has before all have ended the last pass.

    Attributes:
    - shared: the regions of all ranks, as the kernel takes them
    - ranks: number of ranks
    - dtype: dtype of messages, residuals and weights
    """

    def __init__(
        self, region: torch.Tensor, addresses: tuple[int, ...], rank: int, dtype: torch.dtype
    ) -> None:
        """Takes the mapped regions.

        - region: uint8 [region_bytes()] of this rank, zero at first
        - addresses: of every rank's region, in the order of ranks
        """
        from pipeinfer.kernels import elementwise as kernel

        self._kernel = kernel
        counts = torch.zeros(kernel.MAX_PROGRAMS, dtype=torch.int32, device=region.device)
        self.shared = kernel.SymmetricMemory(addresses, rank, ARRIVALS_OFFSET, counts)
        self.ranks = len(addresses)
        self.dtype = dtype
        self._region = region
        self._odd_call = False

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        """A tensor [rows, size], not filled, for this rank's message in the next call; None if
        messages of that shape are not for this kernel."""
        if not choose_shots(rows, size * self.dtype.itemsize, self.ranks):
            return None
        return self._view(self._odd_call * MAX_MESSAGE_BYTES, rows, size)

    def add_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        force: Shots = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of the sum of `partial` over ranks plus `residual`; that sum, in place of
        the residual).

        In two shots, rank r has that sum only in rows t with t % ranks == r, and the norm holds
        until the next call.

        Arguments:
        - partial: the last `buffer` [rows, size], filled. RuntimeError if it is another tensor
        - residual: [rows, size], the same on all ranks
        - weight: [size], of the norm
        - eps: of the norm
        - force: a number of shots, to measure it
        """
        rows, size = residual.shape
        offset, self._odd_call = self._odd_call * MAX_MESSAGE_BYTES, not self._odd_call
        if partial.data_ptr() != self._region.data_ptr() + offset:
            raise RuntimeError("the sum to be made is not in the buffer whose turn it is")
        if (force or choose_shots(rows, size * self.dtype.itemsize, self.ranks)) == 1:
            out, norms = torch.empty_like(residual), None
        else:
            out, norms = self._view(NORMS_OFFSET, rows, size), NORMS_OFFSET
        self._kernel.all_reduce_norm(self.shared, offset, out, residual, weight, eps, norms)
        return out, residual

    def compile(self, size: int) -> None:
        """Compiles the kernel for vectors of `size` values, before the first call: ranks that wait
        inside a kernel for one that compiles can wait for long."""
        vectors = torch.empty(2, size, dtype=self.dtype, device=self._region.device)
        for norms in (None, NORMS_OFFSET):
            self._kernel.compile_all_reduce_norm(self.shared, vectors, norms)

    def _view(self, offset: int, rows: int, size: int) -> torch.Tensor:
        nbytes = rows * size * self.dtype.itemsize
        return self._region[offset : offset + nbytes].view(self.dtype).view(rows, size)


def create_all_reduce_norm(
    group: ProcessGroup, device: torch.device, dtype: torch.dtype
) -> AllReduceNorm:
    """Makes an AllReduceNorm over the ranks of `group`; all of them must call this, and meet again
    before the first call.

    Raises RuntimeError if the GPUs cannot map each other's memory, or are not 2, 4 or 8;
    ImportError without Triton.
    """
    if group.size() not in FUSED_ONE_SHOT_MAX_BYTES:
        raise RuntimeError(f"there is no kernel for {group.size()} ranks")
    from torch.distributed import _symmetric_memory as symmetric

    region = symmetric.empty(region_bytes(), dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(region, group=group)
    region.zero_()
    bases, rank = list(handle.buffer_ptrs), group.rank()
    offset = region.data_ptr() - bases[rank]  # the region may be a part of a larger mapping
    mine = torch.tensor([offset], device=device)
    offsets = [torch.empty_like(mine) for _ in bases]
    dist.all_gather(offsets, mine, group=group)
    differ = any(int(other) != offset for other in offsets)
    if differ or offset < 0 or any((base + offset) % ALIGNMENT for base in bases):
        raise RuntimeError(f"rank {rank}'s region begins at byte {offset} of what is mapped")
    return AllReduceNorm(region, tuple(base + offset for base in bases), rank, dtype)


log = logging.getLogger(__name__)

# torch 2.13 names it all_gather_single and warns of the only name that 2.11 has.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Elements of the messages whose custom all-reduce is compared with NCCL's when a group starts.
CHECKED_ELEMENTS = (ALIGNMENT // 2, 4096, 65536, MAX_MESSAGE_BYTES // 4)
# Rows of the messages whose fused all-reduce is compared with the reference.
CHECKED_ROWS = (1, 5, 160)
# Share of the largest sum that rounding each addition to bfloat16 may cost.
TOLERANCE = 0.05

Method = TypeVar("Method")  # a method of adding up


class TorchCollectives:
    """Collectives of one rank of a group: by gloo between CPUs, NCCL between GPUs.

    Attributes:
    - rank: of this process in the group, 0 .. size - 1
    - size: ranks of the group
    - custom: adds up the messages that it supports, in place of NCCL; None: NCCL adds up all
    - fusion: adds up messages, adds the residual and norms, in one kernel; None: separate kernels
      do
    - in_order: sums are made in the order of ranks, whatever the size of the message
    """

    in_order = False

    def __init__(
        self, store: Store, rank: int, size: int, backend: str, timeout: float, ordinal: int = 0
    ) -> None:
        """Forms the group; returns when all ranks are there.

        - store: store of the group (see `rendezvous`)
        - rank: of this process
        - size: ranks of the group
        - backend: "gloo" or "nccl"
        - timeout: seconds, to form the group and of every collective
        - ordinal: of this rank's GPU on its host
        """
        self.rank = rank
        self.size = size
        self.custom: CustomAllReduce | None = None
        self.fusion: AllReduceNorm | None = None
        gpu = torch.device("cuda", ordinal) if backend == "nccl" else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=gpu,
        )
        self._device = gpu or torch.device("cpu")

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape; the argument may be overwritten. Raises PeerLost."""
        if self.in_order:
            parts = self.all_gather_stacked(partial)
            total = parts[0].float()
            for part in parts[1:]:
                total += part.float()
            return total.to(partial.dtype)
        if self.custom is not None and self.custom.supports(partial):
            return self.custom.all_reduce(partial)
        with _peers():
            dist.all_reduce(partial)
        return partial

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """The tensors [..., n] of every rank, side by side in the order of ranks: [..., n *
        size]."""
        parts = self.all_gather_stacked(partial)
        return parts.movedim(0, -2).reshape(*partial.shape[:-1], -1)

    def all_gather_stacked(self, partial: torch.Tensor) -> torch.Tensor:
        """The tensors `partial` of every rank, in the order of ranks: [size, ...]."""
        flat = partial.contiguous().view(-1)
        parts = flat.new_empty(self.size * len(flat))
        with _peers():
            _gather_into(parts, flat)
        return parts.view(self.size, *partial.shape)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Copies `values` of rank 0 into `values` of every rank, in place, and returns them."""
        with _peers():
            dist.broadcast(values, 0)
        return values

    def all_gather_host(self, values: np.ndarray) -> np.ndarray:
        """The arrays `values` of every rank, in the order of ranks: [size, ...]."""
        return self.all_gather_stacked(torch.from_numpy(values).to(self._device)).cpu().numpy()

    def all_reduce_min(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        mine = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        return int(mine.item())

    def enable_custom_all_reduce(self, dtype: torch.dtype, hidden: int) -> bool:
        """Lets GPUs that map each other's memory add up messages of `dtype` by themselves, and norm
        vectors of `hidden` values in the same kernel if a norm comes next.

        All ranks must call it. False, with the reason in the log, if they cannot or if the sums are
        wrong: then NCCL adds up everything.
        """
        world = dist.group.WORLD
        assert world is not None

        def fused() -> AllReduceNorm:
            fusion = create_all_reduce_norm(world, self._device, dtype)
            fusion.compile(hidden)
            return fusion

        without = "NCCL adds up all messages between ranks"
        self.custom = self._enable_on_all_ranks(
            lambda: self._create_custom(world, dtype), self._sums_as_nccl, without
        )
        if self.custom is not None:
            without = "sums over ranks are made and normed one after the other"
            self.fusion = self._enable_on_all_ranks(
                fused, partial(self._norms_as_reference, hidden), without
            )
        return self.custom is not None

    def _enable_on_all_ranks(
        self, make: Callable[[], Method], is_correct: Callable[[Method], bool], without: str
    ) -> Method | None:
        """The result of `make`, if every rank can make it and finds it correct; else None, and
        `without` and the reason are logged."""
        made, trouble = None, "another rank cannot do otherwise"
        try:
            made = make()
        except (RuntimeError, ImportError, AttributeError) as error:
            trouble = str(error).strip().splitlines()[0]
        if not self.all_reduce_min(made is not None):
            log.warning("%s: %s", without, trouble)
            return None
        assert made is not None
        if not self.all_reduce_min(is_correct(made)):
            log.warning("%s: what came out otherwise differs from NCCL's", without)
            return None
        return made

    def _create_custom(self, world: dist.ProcessGroup, dtype: torch.dtype) -> CustomAllReduce:
        here = torch.cuda.device_count()
        blocked = [
            peer
            for peer in range(here)
            if peer != self._device.index
            and not torch.cuda.can_device_access_peer(self._device.index, peer)
        ]
        if here < self.size or blocked:
            raise RuntimeError(f"{here} GPUs are visible, and no access to {blocked} of them")
        return CustomAllReduce(world, self._device, dtype)

    def _sums_as_nccl(self, custom: CustomAllReduce) -> bool:
        """Whether `custom` gives NCCL's sums, up to rounding, for messages of each algorithm."""
        good = True
        for count in CHECKED_ELEMENTS:
            torch.manual_seed(count + self.rank)
            mine = torch.randn(count, dtype=custom.dtype, device=self._device)
            expected = mine.clone().float()
            dist.all_reduce(expected)
            if custom.supports(mine):
                good &= _is_close(custom.all_reduce(mine), expected)
        return good

    def _norms_as_reference(self, hidden: int, fusion: AllReduceNorm) -> bool:
        """Whether `fusion` gives the reference's norms and sums, up to rounding, in one shot and in
        two."""
        from pipeinfer.kernels.elementwise import all_reduce_norm_reference

        good = True
        make = partial(torch.randn, dtype=fusion.dtype, device=self._device)
        for rows, shots in product(CHECKED_ROWS, (1, 2)):
            torch.manual_seed(rows)  # equal on all ranks
            residual, weight = make(rows, hidden), make(hidden)
            torch.manual_seed(rows + shots + self.rank)
            mine = make(rows, hidden)
            expected = all_reduce_norm_reference(
                self.all_gather_stacked(mine), residual, weight, 1e-6
            )
            buffer = fusion.buffer(rows, hidden)
            if buffer is not None:
                normed, total = fusion.add_norm(buffer.copy_(mine), residual, weight, 1e-6, shots)
                own = slice(self.rank, None, self.size) if shots == 2 else slice(None)
                good &= _is_close(normed, expected[0]) and _is_close(total[own], expected[1][own])
        return good

    def close(self) -> None:
        """Leaves the group; this object must not be used afterwards."""
        self.custom = self.fusion = None
        dist.destroy_process_group()


@contextmanager
def _peers() -> Generator[None]:
    """Wraps a collective: its errors are raised as PeerLost."""
    try:
        yield
    except RuntimeError as error:  # whatever a backend raises: torch's errors are all of that kind
        raise PeerLost(str(error)) from error


def _is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (got.float() - expected.float()).abs()
    return not error.numel() or bool(error.max() <= TOLERANCE * expected.float().abs().max())


def disable_multicast(environ: MutableMapping[str, str]) -> None:
    """Has NCCL and torch leave NVLink multicast (NVLS) alone, unless `environ` sets it.

    No code here needs it, and ranks fail or hang if the links of a host are not set up for it.
    """
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def join_group(
    address: str,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    ordinal: int | None = None,
    sockets: SocketFactory | None = None,
) -> TorchCollectives:
    """Meets the other ranks and forms the group with them.

    - address: of rank 0 (topology.py)
    - rank: of this process
    - size: ranks of the group
    - device: "cuda" or "cpu"
    - timeout: seconds to meet, to form the group, and of every collective
    - ordinal: of this rank's GPU on its host; None: `rank`
    - sockets: see `rendezvous`

    Raises RendezvousError if the ranks do not come together in time.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl":
        disable_multicast(os.environ)
    if backend == "gloo" and is_loopback(listen_host(address)):
        # Otherwise gloo resolves this host's name, which need not have an address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    formed = threading.Event()
    try:
        store = rendezvous(address, rank, size, timeout, sockets, formed)
        return TorchCollectives(
            store, rank, size, backend, timeout, rank if ordinal is None else ordinal
        )
    finally:
        formed.set()


# Seconds that a rank waits for a reply before it asks again.
RETRY_SECONDS = 0.5
# Most bytes of a query, which is two numbers: a peer that sends more is disconnected.
MAX_QUERY_BYTES = 1_024

# Binds a socket, or gives it its keys.
PrepareSocket = Callable[[zmq.Socket[bytes]], None]


class StoreQuery(msgspec.Struct, frozen=True, array_like=True):
    """A rank's question for the store of its group.

    Attributes:
    - rank: of the rank that asks
    - size: ranks of the group that it belongs to
    """

    rank: int
    size: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a StoreQuery.

    Attributes:
    - port: of the store, on rank 0's host
    - refusal: why the rank that asks cannot have it; "": it can
    """

    port: int = 0
    refusal: str = ""


class RendezvousError(RuntimeError):
    """The ranks of a group did not come together."""


def rendezvous(
    address: str,
    rank: int,
    size: int,
    timeout: float,
    sockets: SocketFactory | None = None,
    formed: threading.Event | None = None,
) -> Store:
    """The store that all ranks of a group share. Blocks until rank 0 is there.

    - address: of rank 0 (topology.py)
    - rank: of this process
    - size: ranks of the group
    - timeout: seconds
    - sockets: of this process, for its keys, and for the host to listen on if that is not its
      address
    - formed: to be set when the group is formed; until then, or the timeout, rank 0 replies

    Raises RendezvousError after `timeout`, or at once when rank 0 expects another number of ranks.
    """
    host = listen_host(address)
    endpoint = socket_address(address, "group")

    def secure(socket: zmq.Socket[bytes]) -> None:
        if sockets is not None:
            sockets.secure(socket, address)

    def listen(socket: zmq.Socket[bytes]) -> None:
        if sockets is not None:
            sockets.bind(socket, "group")
        else:
            socket.bind(endpoint)

    if rank:
        return TCPStore(
            host, _query_store(endpoint, rank, size, timeout, secure), size, wait_for_workers=False
        )
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    _answer_queries(listen, size, store.port, timeout, formed or threading.Event())
    return store


def _query_store(endpoint: str, rank: int, size: int, timeout: float, secure: PrepareSocket) -> int:
    deadline = time.monotonic() + timeout
    query = msgspec.msgpack.encode(StoreQuery(rank, size))
    with zmq.Context.instance().socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.REQ_RELAXED, 1)  # may ask again: an old rank 0 may have died
        socket.setsockopt(zmq.REQ_CORRELATE, 1)
        socket.linger, socket.ipv6 = 0, True
        secure(socket)
        socket.connect(endpoint)
        while time.monotonic() < deadline:
            if not socket.poll(int(1000 * RETRY_SECONDS), zmq.POLLOUT):
                continue  # one of both ends has no CURVE keys; the deadline ends it
            try:
                socket.send(query, zmq.NOBLOCK)
            except zmq.Again:
                continue  # the connection has ended since
            if socket.poll(int(1000 * RETRY_SECONDS)):
                try:
                    reply = msgspec.msgpack.decode(
                        b"".join(socket.recv_multipart()), type=StoreReply
                    )
                except DECODE_ERRORS:
                    continue  # not from the right rank 0, which may still answer
                if reply.refusal:
                    raise RendezvousError(reply.refusal)
                return reply.port
    raise RendezvousError(f"rank 0 at {endpoint} did not answer rank {rank} in {timeout:g} s")


def _answer_queries(
    listen: PrepareSocket, size: int, port: int, timeout: float, formed: threading.Event
) -> None:
    """Replies to queries in a thread until the group is formed; binds before it returns.

    A rank that had a reply may ask again, if it no longer waited when the reply came.
    """
    socket = zmq.Context.instance().socket(zmq.REP)
    socket.linger, socket.ipv6, socket.maxmsgsize = 1000, True, MAX_QUERY_BYTES
    listen(socket)

    def reply_to_ranks() -> None:
        deadline = time.monotonic() + timeout
        with socket:
            while not formed.is_set() and time.monotonic() < deadline:
                if not socket.poll(int(1000 * RETRY_SECONDS)):
                    continue
                try:
                    # All parts are read, or no reply can be sent; more than one part is no query.
                    query = msgspec.msgpack.decode(
                        b"".join(socket.recv_multipart()), type=StoreQuery
                    )
                except DECODE_ERRORS as error:
                    socket.send(msgspec.msgpack.encode(StoreReply(refusal=f"no question: {error}")))
                    continue
                if query.size != size or not 0 < query.rank < size:
                    text = f"rank {query.rank} of {query.size} does not belong to a group of {size}"
                    socket.send(msgspec.msgpack.encode(StoreReply(refusal=text)))
                    continue
                socket.send(msgspec.msgpack.encode(StoreReply(port)))

    threading.Thread(target=reply_to_ranks, name="rendezvous", daemon=True).start()
