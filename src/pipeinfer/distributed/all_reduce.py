"""All-reduce between GPUs that have mapped each other's memory, in place of NCCL's.

Two kinds, each with a rule, the same on all ranks, for which messages it is used:

- `CustomAllReduce`: the sum alone, by torch's kernels over its symmetric memory
  (torch.ops.symm_mem).
- `AllReduceNorm`: the sum, the residual addition and RMSNorm in one kernel of this project
  (kernels/elementwise.py, which needs Triton).

Both work in one shot (every rank reads the messages of all others) or in two (every rank adds up
its share, then all collect the shares). Nothing here uses NVLink multicast. Knows no layer and no
model.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# Bytes that the kernels load at a time: messages begin and end at multiples.
ALIGNMENT = 16
# Bytes of the largest message. Larger ones are NCCL's: there bandwidth alone counts.
MAX_MESSAGE_BYTES = 16 * 2**20

# CustomAllReduce, by the number of ranks: bytes up to which one shot is the fastest, ...
ONE_SHOT_MAX_BYTES = {2: 16 * 2**10, 4: 384 * 2**10, 8: 256 * 2**10}
# ... and bytes from which two shots are. Between them NCCL is.
TWO_SHOT_MIN_BYTES = {2: 1536 * 2**10, 4: 1024 * 2**10, 8: 256 * 2**10}

# AllReduceNorm, by the number of ranks: bytes up to which one shot is the faster one. There every
# rank reads the messages of all others; in two shots it reads its share of them and writes as much,
# but waits twice. For two ranks both move as many bytes. Measured for 2 and 4 H200.
FUSED_ONE_SHOT_MAX_BYTES = {2: MAX_MESSAGE_BYTES, 4: 256 * 2**10, 8: 128 * 2**10}

# Region of a rank for AllReduceNorm, in bytes:
# [ messages, even calls | messages, odd calls | norms of two shots | arrivals ]
#   0                      MAX_MESSAGE_BYTES     NORMS_OFFSET         ARRIVALS_OFFSET
NORMS_OFFSET = 2 * MAX_MESSAGE_BYTES
ARRIVALS_OFFSET = 3 * MAX_MESSAGE_BYTES

Algorithm = Literal["one-shot", "two-shot", "nccl"]
Shots = Literal[0, 1, 2]


def choose_algorithm(nbytes: int, ranks: int) -> Algorithm:
    """How `ranks` ranks add up a message of `nbytes` bytes: the same on all of them."""
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
        ranks: of the group.
        dtype: of the messages.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """All ranks of `group` must be here.

        Raises RuntimeError if the GPUs cannot map each other's memory.
        """
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

        force: an algorithm, to measure it.
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
    """In how many shots [rows, ...] is added up and normed, the same on all ranks; 0: not here."""
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
        shared: the regions of all ranks, as the kernel takes them.
        ranks: how many.
        dtype: of messages, residuals and weights.
    """

    def __init__(
        self, region: torch.Tensor, addresses: tuple[int, ...], rank: int, dtype: torch.dtype
    ) -> None:
        """region: uint8 [region_bytes()] of this rank, zero at first. addresses: of every rank's
        region, in the order of ranks."""
        from pipeinfer.kernels import elementwise as kernel

        self._kernel = kernel
        counts = torch.zeros(kernel.MAX_PROGRAMS, dtype=torch.int32, device=region.device)
        self.shared = kernel.SymmetricMemory(addresses, rank, ARRIVALS_OFFSET, counts)
        self.ranks = len(addresses)
        self.dtype = dtype
        self._region = region
        self._odd_call = False

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        """[rows, size], not filled, for this rank's message in the next call; None if messages of
        that shape are not for this kernel."""
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
        """(norm of the sum of `partial` over ranks plus `residual`; that sum, where the residual
        was).

        In two shots, rank r has that sum only in rows t with t % ranks == r, and the norm holds
        until the next call.

        Args:
            partial: the last `buffer` [rows, size], filled. RuntimeError if it is another tensor.
            residual: [rows, size], the same on all ranks.
            weight: [size], of the norm.
            eps: of the norm.
            force: a number of shots, to measure it.
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
        """Compiles for vectors of that size. Ranks that wait inside a kernel can wait for long."""
        vectors = torch.empty(2, size, dtype=self.dtype, device=self._region.device)
        for norms in (None, NORMS_OFFSET):
            self._kernel.compile_all_reduce_norm(self.shared, vectors, norms)

    def _view(self, offset: int, rows: int, size: int) -> torch.Tensor:
        nbytes = rows * size * self.dtype.itemsize
        return self._region[offset : offset + nbytes].view(self.dtype).view(rows, size)


def create_all_reduce_norm(
    group: ProcessGroup, device: torch.device, dtype: torch.dtype
) -> AllReduceNorm:
    """Over the ranks of `group`; all of them must be here, and meet again before the first call.

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
    offset = region.data_ptr() - bases[rank]  # torch may have cut it out of something larger
    mine = torch.tensor([offset], device=device)
    offsets = [torch.empty_like(mine) for _ in bases]
    dist.all_gather(offsets, mine, group=group)
    differ = any(int(other) != offset for other in offsets)
    if differ or offset < 0 or any((base + offset) % ALIGNMENT for base in bases):
        raise RuntimeError(f"rank {rank}'s region begins at byte {offset} of what is mapped")
    return AllReduceNorm(region, tuple(base + offset for base in bases), rank, dtype)
