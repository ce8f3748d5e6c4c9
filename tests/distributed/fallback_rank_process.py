"""One rank of two that agree on how to add up, where one of them cannot or finds it wrong.

`python fallback_rank_process.py ADDRESS RANK`; see test_collectives.py.
"""

from __future__ import annotations

import sys

import torch

from pipeinfer.collectives import join_group


def main() -> None:
    rank = int(sys.argv[2])
    group = join_group(sys.argv[1], rank, 2, "cpu", 60)

    def cannot() -> str:
        if rank:
            raise RuntimeError("no access to the other's memory\nand a long trace")
        return "made"

    found = [
        group._enable_on_all_ranks(cannot, lambda made: True, "apart"),
        group._enable_on_all_ranks(lambda: "made", lambda made: rank == 0, "apart"),
        group._enable_on_all_ranks(lambda: "made", lambda made: True, "apart"),
    ]
    assert found == [None, None, "made"], found
    # Nobody is left behind in a collective of its own.
    assert group.all_reduce(torch.full((3,), 1.0 + rank)).tolist() == [3.0] * 3
    group.close()


if __name__ == "__main__":
    main()
