"""All-reduce, residual addition and RMSNorm in one kernel, where GPUs map each other's memory.

Says which messages it takes, in how many shots, and where its buffers lie; the kernel is
kernels/norm.py. Knows no layer and no model.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pipeinfer.distributed.custom_all_reduce import ALIGNED, MOST_BYTES
from pipeinfer.kernels import norm as kernel

Shots = Literal[0, 1, 2]

# By the number of ranks: bytes up to which one shot is the faster. There every rank reads the
# parts of all others; in two it reads its share of them and writes as much, but waits twice. For
# two ranks both move as many bytes. Measured for 2 and 4 H200.
ONE_SHOT = {2: MOST_BYTES, 4: 256 * 2**10, 8: 128 * 2**10}

# In every rank's region: [ parts, even calls | parts, odd calls | norms of two shots | arrivals ]
RESULTS = 2 * MOST_BYTES
ARRIVALS = 3 * MOST_BYTES
REGION_BYTES = ARRIVALS + kernel.SIGNAL_BYTES


def shots(rows: int, row_bytes: int, ranks: int) -> Shots:
    """In how many shots [rows, ...] is added up and normed, the same on all ranks; 0: not here."""
    nbytes = rows * row_bytes
    if ranks not in ONE_SHOT or not 0 < nbytes <= MOST_BYTES or row_bytes % ALIGNED:
        return 0
    return 1 if nbytes <= ONE_SHOT[ranks] else 2


class AllReduceNorm:
    """A Fusion (partial_sum.py) over `region`: uint8 [REGION_BYTES] of this rank, zero at first.

    addresses: of every rank's region, in the order of ranks. Works inside CUDA graphs. Calls are
    ordered by the stream that they are on. Two calls in a row never use the same buffer: within a
    forward pass they take turns, two a layer, and between two passes lies the embedding's sum,
    which no rank has before all have ended the last pass.
    """

    def __init__(
        self, region: torch.Tensor, addresses: tuple[int, ...], rank: int, dtype: torch.dtype
    ) -> None:
        counts = torch.zeros(kernel.MAX_PROGRAMS, dtype=torch.int32, device=region.device)
        self.shared = kernel.SymmetricMemory(addresses, rank, ARRIVALS, counts)
        self.ranks = len(addresses)
        self.dtype = dtype
        self._region = region
        self._odd = False

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        """[rows, size] for this rank's part of the next call; None if that is not taken."""
        if not shots(rows, size * self.dtype.itemsize, self.ranks):
            return None
        return self._at(self._odd * MOST_BYTES, rows, size)

    def add_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        force: Shots = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum of `partial`, the last `buffer`, over ranks plus residual; that sum).

        In two shots, rank r's residual is the sum in rows t with t % ranks == r alone, and the norm
        holds until the next call. `force`: a number of shots, to measure it.
        """
        rows, size = residual.shape
        begins, self._odd = self._odd * MOST_BYTES, not self._odd
        if partial.data_ptr() != self._region.data_ptr() + begins:
            raise RuntimeError("the sum to be made is not in the buffer whose turn it is")
        if (force or shots(rows, size * self.dtype.itemsize, self.ranks)) == 1:
            out, results = torch.empty_like(residual), None
        else:
            out, results = self._at(RESULTS, rows, size), RESULTS
        kernel.all_reduce_norm(self.shared, begins, out, residual, weight, eps, results)
        return out, residual

    def compile(self, size: int) -> None:
        """Compiles for vectors of that size. Ranks that wait inside a kernel can wait for long."""
        vectors = torch.empty(2, size, dtype=self.dtype, device=self._region.device)
        for results in (None, RESULTS):
            kernel.compile_all_reduce_norm(self.shared, vectors, results)

    def _at(self, begins: int, rows: int, size: int) -> torch.Tensor:
        nbytes = rows * size * self.dtype.itemsize
        return self._region[begins : begins + nbytes].view(self.dtype).view(rows, size)


def mapped_all_reduce_norm(
    group: ProcessGroup, device: torch.device, dtype: torch.dtype
) -> AllReduceNorm:
    """Over the ranks of `group`; all of them must be here, and meet again before the first call.

    Raises RuntimeError if the GPUs cannot map each other's memory, or are not 2, 4 or 8.
    """
    if group.size() not in ONE_SHOT:
        raise RuntimeError(f"there is no kernel for {group.size()} ranks")
    from torch.distributed import _symmetric_memory as symmetric

    region = symmetric.empty(REGION_BYTES, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(region, group=group)
    region.zero_()
    bases, rank = list(handle.buffer_ptrs), group.rank()
    begins = region.data_ptr() - bases[rank]  # torch may have cut it out of something larger
    mine = torch.tensor([begins], device=device)
    all_begin = [torch.empty_like(mine) for _ in bases]
    dist.all_gather(all_begin, mine, group=group)
    differ = any(int(begin) != begins for begin in all_begin)
    if differ or begins < 0 or any((base + begins) % ALIGNED for base in bases):
        raise RuntimeError(f"rank {rank}'s region begins at byte {begins} of what is mapped")
    return AllReduceNorm(region, tuple(base + begins for base in bases), rank, dtype)
