"""RMSNorm, SwiGLU, GeGLU, quantization to FP8, all-reduce with norm: for interpreter and GPU.

Of the all-reduce only its arithmetic, one process playing all ranks; tests/distributed tests how
ranks wait for each other.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton_cases import (
    DEVICE,
    HALVES,
    INTERPRETED,
    TOLERANCE,
    randn,
    relative_error,
)
from pipeinfer.kernels import elementwise
from pipeinfer.kernels import elementwise as module
from pipeinfer.kernels.elementwise import (
    MAX_PROGRAMS,
    SIGNAL_BYTES,
    SymmetricMemory,
    all_reduce_norm,
    all_reduce_norm_reference,
    geglu,
    geglu_reference,
    rms_norm,
    rms_norm_quantized,
    rms_norm_quantized_reference,
    rms_norm_reference,
    swiglu,
    swiglu_reference,
)

ALL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("size", [64, 1000, 5120])
def test_norm_is_that_of_the_reference(size, dtype):
    x, weight = randn(0, 4, size, dtype=dtype) * 3, randn(1, size, dtype=dtype)
    for offset in (0.0, 1.0):
        got = rms_norm(x, weight, 1e-6, offset=offset)
        expected = rms_norm_reference(x, weight, 1e-6, offset=offset)
        assert relative_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_sum_goes_into_the_residual_and_its_norm_comes_back(offset, dtype):
    x, weight = randn(0, 5, 300, dtype=dtype), randn(1, 300, dtype=dtype)
    mine = randn(2, 5, 300, dtype=dtype)
    theirs = mine.clone()
    got = rms_norm(x, weight, 1e-5, mine, offset=offset)
    expected = rms_norm_reference(x, weight, 1e-5, theirs, offset)
    assert relative_error(mine, theirs) < TOLERANCE[dtype]
    # A sum that is rounded another way moves the norm by a place as well.
    assert relative_error(got, expected) < 2 * TOLERANCE[dtype]


def test_norm_may_overwrite_its_input_and_read_strided_rows():
    wide, weight = randn(0, 4, 200), randn(1, 100)
    expected = rms_norm_reference(wide[:, :100], weight, 1e-6)
    assert relative_error(rms_norm(wide[:, :100], weight, 1e-6), expected) < 1e-6
    x = wide[:, :100].contiguous()
    assert rms_norm(x, weight, 1e-6, out=x) is x
    assert relative_error(x, expected) < 1e-6


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("size", [24, 3000])
@pytest.mark.parametrize(
    ("kernel", "reference"), [(swiglu, swiglu_reference), (geglu, geglu_reference)]
)
def test_gated_activations_are_those_of_the_references(kernel, reference, size, dtype):
    merged = randn(0, 3, 2 * size, dtype=dtype) * 2
    assert relative_error(kernel(merged), reference(merged)) < TOLERANCE[dtype]
    wide = torch.cat((merged, merged), dim=1)[:, : 2 * size]
    assert torch.equal(kernel(wide), kernel(merged))


def test_no_tokens_are_no_work():
    assert rms_norm(randn(0, 0, 8), randn(1, 8), 1e-6).shape == (0, 8)
    assert swiglu(randn(0, 0, 8)).shape == geglu(randn(0, 0, 8)).shape == (0, 4)


DTYPES = [torch.float32, *HALVES]


@pytest.mark.parametrize("part", [0, 128])
def test_rows_are_rounded_by_their_largest(part):
    wide = randn(0, 5, 768) * 100
    wide[2, :384] = 0.0
    x = wide[:, :384]
    got, scale = elementwise.quantize_groups(x, part)
    expected, scales = elementwise.quantize_groups_reference(x, part)
    assert torch.equal(scale, scales) and got.dtype == torch.float8_e4m3fn
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert got[2].float().abs().max() == 0


def almost(got, expected):
    """Sums in another order move a scale by a place, and few values to their neighbour in e4m3."""
    (values, scale), (others, scales) = got, expected
    assert values.dtype == torch.float8_e4m3fn and torch.allclose(scale, scales, rtol=1e-5)
    steps = (place(values) - place(others)).abs()
    assert steps.max() <= 1 and steps.float().mean() < 0.01


def place(values):
    """Neighbours in e4m3 have neighbouring numbers; both zeros have 0."""
    magnitude = (values.view(torch.uint8) & 127).int()
    return torch.where(values.view(torch.uint8) < 128, magnitude, -magnitude)


@pytest.mark.parametrize("part", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_may_end_in_rounded_rows(dtype, part):
    merged = randn(1, 4, 1536, dtype=dtype)[:, :768]
    merged[1] = 0.0
    almost(
        elementwise.swiglu_quantize_groups(merged, part),
        elementwise.swiglu_quantize_groups_reference(merged, part),
    )


@pytest.mark.parametrize("part", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_may_end_in_rounded_rows(offset, dtype, part):
    x, weight = randn(2, 4, 768, dtype=dtype)[:, :384], randn(3, 384, dtype=dtype)
    residuals = [randn(4, 4, 384, dtype=dtype) for _ in range(2)]
    for more in ((None, None), residuals):
        got, expected = (
            norm(x, weight, 1e-6, residual, offset, part)
            for norm, residual in zip(
                (rms_norm_quantized, rms_norm_quantized_reference), more, strict=True
            )
        )
        almost(got, expected)
    assert relative_error(*residuals) < TOLERANCE[dtype]
    parts = randn(5, 3, 4, 384)
    got, expected = (
        norm(parts, weight, 1e-6, residual.clone(), offset, part)
        for norm, residual in zip(
            (rms_norm_quantized, rms_norm_quantized_reference), residuals, strict=True
        )
    )
    almost(got, expected)
    assert rms_norm_quantized(x[:0], weight, 1e-6)[0].shape == (0, 384)
    plain, expected = torch.empty_like(x), rms_norm(x, weight, 1e-6)
    kept, alone = (
        rms_norm_quantized(x, weight, 1e-6, unquantized_out=plain),
        rms_norm_quantized(x, weight, 1e-6),
    )
    assert torch.equal(plain, expected)
    assert torch.equal(kept[0].float(), alone[0].float()) and torch.equal(kept[1], alone[1])


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


@settings(max_examples=10 if INTERPRETED else 20, deadline=None, derandomize=True)
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
