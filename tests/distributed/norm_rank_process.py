"""Ranks that make sums with residual and norm, in Triton's interpreter, in files that all map.

`python norm_rank_process.py FOLDER` forks the ranks; see test_all_reduce.py. Exits with 0 if every
call gave every rank what the reference gives.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from forked_ranks import run_forked
from triton.runtime.interpreter import InterpreterBuilder

from pipeinfer import collectives
from pipeinfer.collectives import AllReduceNorm
from pipeinfer.kernels.elementwise import all_reduce_norm_reference
from quick_interpreter import hurry

RANKS, SIZE = 4, 24
SO_FAR = 2**31 - 10  # arrivals: counts must go on when they wrap around
SHAPES = ((1, 1), (5, 1), (3, 2), (6, 2), (4, 1), (2, 2))  # rows and shots of each call


def rows_of(call: int, rank: int, rows: int) -> torch.Tensor:
    """What a rank adds in a call: whole numbers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-50, 50, (rows, SIZE), generator=generator).float()


def pause_before_atomics() -> None:
    """Ranks that look again and again would take the processors from those they wait for."""
    real = InterpreterBuilder.create_atomic_rmw

    def paused(*arguments: Any) -> Any:
        time.sleep(0.0002)
        return real(*arguments)

    InterpreterBuilder.create_atomic_rmw = paused


def region(folder: Path, rank: int) -> torch.Tensor:
    size = collectives.region_bytes()
    return torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=torch.uint8)


def run(folder: Path, rank: int) -> None:
    """Raises AssertionError at the first wrong value."""
    regions = [region(folder, one) for one in range(RANKS)]
    addresses = tuple(one.data_ptr() for one in regions)
    fusion = AllReduceNorm(regions[rank], addresses, rank, torch.float32)
    fusion.shared.expected.fill_(SO_FAR)
    weight, dawdle = torch.linspace(0.5, 1.5, SIZE), random.Random(rank)
    for call, (rows, shots) in enumerate(SHAPES):
        buffer = fusion.buffer(rows, SIZE)
        assert buffer is not None
        buffer.copy_(rows_of(call, rank, rows))
        residual = rows_of(call, 99, rows)
        parts = torch.stack([rows_of(call, one, rows) for one in range(RANKS)])
        norm, total = all_reduce_norm_reference(parts, residual, weight, 1e-6)
        time.sleep(dawdle.choice((0, 0, 0.002, 0.02)))
        got, mine = fusion.add_norm(buffer, residual, weight, 1e-6, shots)
        time.sleep(dawdle.choice((0, 0, 0.002, 0.02)))
        own = slice(rank, None, RANKS) if shots == 2 else slice(None)
        assert torch.equal(mine[own], total[own]), f"call {call}: the sum is wrong"
        torch.testing.assert_close(got, norm, rtol=1e-5, atol=1e-6, msg=f"call {call}: {got}")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    pause_before_atomics()
    hurry()
    for rank in range(RANKS):
        region(folder, rank)[collectives.ARRIVALS_OFFSET :].view(torch.int32).fill_(SO_FAR)
    run_forked(lambda rank: run(folder, rank), RANKS)


if __name__ == "__main__":
    main()
