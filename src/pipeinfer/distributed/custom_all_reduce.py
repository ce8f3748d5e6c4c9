"""All-reduce of small and middling messages between GPUs that see each other's memory.

Every rank writes into a buffer that all others have mapped, and reads theirs: in one shot for few
bytes, in two (each rank adds up its share, then all collect) for more. torch's own kernels over its
symmetric memory (torch.ops.symm_mem); nothing here uses multicast. Knows no layer and no model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed import ProcessGroup

ALIGNED = 16  # bytes that the kernels load at a time
MOST_BYTES = 16 * 2**20  # larger ones are NCCL's: there bandwidth alone counts
# By the number of ranks: bytes up to which one shot is the fastest, and from which two shots are;
# between them NCCL is.
ONE_SHOT = {2: 16 * 2**10, 4: 384 * 2**10, 8: 256 * 2**10}
TWO_SHOTS = {2: 1536 * 2**10, 4: 1024 * 2**10, 8: 256 * 2**10}
TRIED = (ALIGNED // 2, 4096, 65536, MOST_BYTES // 4)  # elements: what is checked at the start

Algorithm = Literal["one-shot", "two-shot", "library"]


def algorithm(nbytes: int, ranks: int) -> Algorithm:
    """How a message of `nbytes` is added up over so many ranks: the same on all of them."""
    if ranks not in ONE_SHOT or nbytes > MOST_BYTES or not nbytes:
        return "library"
    if nbytes <= ONE_SHOT[ranks] and nbytes % ALIGNED == 0:
        return "one-shot"
    if nbytes >= TWO_SHOTS[ranks] and nbytes % (ALIGNED * ranks) == 0:
        return "two-shot"
    return "library"


class CustomAllReduce:
    """Over the ranks of `group`; all of them must be here. Works inside CUDA graphs.

    Calls are ordered by the stream that they are on, which must be one at a time: there is one
    buffer. Raises RuntimeError if the GPUs cannot map each other's memory.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.ranks = group.size()
        self.dtype = dtype
        self._name = group.group_name
        self._buffer = symmetric.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(self._buffer, group=group)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `add_up` is for this message; the same on all ranks."""
        return self._algorithm(x) != "library"

    def add_up(self, x: torch.Tensor, force: Algorithm | None = None) -> torch.Tensor:
        """The sum of `x` over the ranks, bit by bit the same on all; `x` may be overwritten.

        `force`: an algorithm, to measure it.
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
            return "library"
        return algorithm(x.numel() * x.element_size(), self.ranks)
