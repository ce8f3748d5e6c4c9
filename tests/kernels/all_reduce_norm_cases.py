"""All-reduce with residual and norm in Triton: its arithmetic, one process playing all ranks.

How ranks wait for each other is for tests/distributed.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton_cases import DEVICE, TOLERANCE, randn, relative_error
from pipeinfer.kernels import norm as module
from pipeinfer.kernels.norm import (
    MAX_PROGRAMS,
    SIGNAL_BYTES,
    SymmetricMemory,
    all_reduce_norm,
    all_reduce_norm_reference,
)

GAP = 4096  # bytes before the partial sums, which no kernel may touch


class Ranks:
    """Regions [ gap | partial sums | norms of two shots | arrivals ], one for each rank."""

    def __init__(self, partials: torch.Tensor) -> None:
        self.partials = partials
        nbytes = -(-partials[0].nbytes // 256) * 256
        self.results, self.end = GAP + nbytes, GAP + 2 * nbytes
        self.regions = [
            torch.full((self.end + SIGNAL_BYTES,), 77, dtype=torch.uint8, device=DEVICE)
            for _ in partials
        ]
        for region, partial in zip(self.regions, partials, strict=True):
            self.part(region, GAP).copy_(partial)
        self.addresses = tuple(region.data_ptr() for region in self.regions)

    def part(self, region: torch.Tensor, begin: int) -> torch.Tensor:
        like = self.partials[0]
        return region[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def run(
        self, residuals: list[torch.Tensor], weight: torch.Tensor, two_shots: bool
    ) -> list[torch.Tensor]:
        outs = []
        for rank, (region, residual) in enumerate(zip(self.regions, residuals, strict=True)):
            counts = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=DEVICE)
            shared = SymmetricMemory(self.addresses, rank, self.end, counts)
            results = self.results if two_shots else None
            out = self.part(region, self.results) if two_shots else torch.empty_like(residual)
            all_reduce_norm(shared, GAP, out, residual, weight, 1e-6, results, barriers=False)
            outs.append(out)
        return outs


def run(rows, size, ranks, dtype, two_shots):
    """What came of the kernel on every rank, and of the reference: norms and residuals."""
    partials = torch.stack([randn(rank, rows, size, dtype=dtype) * 2 for rank in range(ranks)])
    residual, weight = randn(8, rows, size, dtype=dtype), randn(9, size, dtype=dtype)
    played = Ranks(partials)
    residuals = [residual.clone() for _ in range(ranks)]
    outs = played.run(residuals, weight, two_shots)
    for region, partial in zip(played.regions, partials, strict=True):
        assert torch.equal(played.part(region, GAP), partial), "the sums of others were changed"
        assert (region[:GAP] == 77).all()
    return outs, residuals, residual, all_reduce_norm_reference(partials, residual, weight, 1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 21),
    size=st.sampled_from([8, 24, 96, 128, 1000, 5120]),
    ranks=st.sampled_from([2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    two_shots=st.booleans(),
)
def test_every_rank_gets_the_norm_of_the_sum_and_the_sum(rows, size, ranks, dtype, two_shots):
    outs, residuals, before, (norm, total) = run(rows, size, ranks, dtype, two_shots)
    for out in outs:
        assert torch.equal(out, outs[0]), "ranks differ"
        # A sum that is rounded another way moves the norm by a place as well.
        assert relative_error(out, norm) < 2 * TOLERANCE[dtype]
    for rank, residual in enumerate(residuals):
        own = torch.zeros(rows, dtype=torch.bool)
        own[slice(rank, None, ranks) if two_shots else slice(None)] = True
        if own.any():
            assert relative_error(residual[own], total[own]) < TOLERANCE[dtype]
        assert torch.equal(residual[~own], before[~own]), "somebody else's rows were changed"


@pytest.mark.parametrize("two_shots", [False, True])
def test_rows_beyond_one_for_each_program_are_done_by_the_same_programs(two_shots, monkeypatch):
    monkeypatch.setattr(module, "MAX_PROGRAMS", 3)
    outs, _, _, (norm, _) = run(17, 8, 2, torch.float32, two_shots)
    assert relative_error(outs[1], norm) < 1e-6


def test_no_rows_are_no_work():
    outs, *_ = run(0, 8, 2, torch.float32, False)
    assert outs[0].shape == (0, 8)
