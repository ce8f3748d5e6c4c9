"""Three ranks that add up in the order of ranks, and agree on how to where one of them cannot or
finds it wrong.

`python agreeing_rank_process.py ADDRESS`; see test_collectives.py. Exits with 0 if all sums are
right, bit by bit, and all ranks came to the same end.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from forked_ranks import run_forked

from pipeinfer.collectives import TorchCollectives, join_group

RANKS = 3


def add_in_order(group: TorchCollectives) -> None:
    group.in_order = True
    for dtype in (torch.float32, torch.bfloat16):
        source = torch.Generator().manual_seed(0)  # every rank knows what the others have
        parts = torch.randn(RANKS, 64, 100, generator=source).to(dtype)
        expected = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
        assert torch.equal(group.all_reduce(parts[group.rank].clone()), expected)
        for row in (0, 7, 63):
            alone = group.all_reduce(parts[group.rank, row : row + 1].clone())
            assert torch.equal(alone[0], expected[row])
    group.in_order = False


def agree(group: TorchCollectives) -> None:
    rank = group.rank
    assert group.all_reduce_min(5 - rank) == 3
    assert group.all_gather_host(np.array([rank])).tolist() == [[0], [1], [2]]

    def cannot() -> str:
        if rank == 1:
            raise RuntimeError("no access to the other's memory\nand a long trace")
        return "made"

    found = [
        group._enable_on_all_ranks(cannot, lambda made: True, "apart"),
        group._enable_on_all_ranks(lambda: "made", lambda made: rank == 0, "apart"),
        group._enable_on_all_ranks(lambda: "made", lambda made: True, "apart"),
    ]
    assert found == [None, None, "made"], found
    # Nobody is left behind in a collective of its own.
    assert group.all_reduce(torch.full((3,), 1.0 + rank)).tolist() == [6.0] * 3


def run(rank: int) -> None:
    group = join_group(sys.argv[1], rank, RANKS, "cpu", 300)
    add_in_order(group)
    agree(group)
    group.close()


if __name__ == "__main__":
    run_forked(run, RANKS)
