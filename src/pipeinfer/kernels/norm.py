"""RMSNorm in Triton, alone or fused with the residual addition before it.

For devices on which no library's kernel is better, and for sums that are still partial, which no
library's kernel takes, or that are rounded to FP8; needs triton. Knows vectors, no layer.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.activations import Fp8Output, quantize_groups_reference, store_quantized
from pipeinfer.kernels.triton_support import pdl_options

NORM_VALUES_PER_THREAD = 4  # values of a vector that a thread has, at most


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, out_scale, unquantized_out, eps, x_stride, partial_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ADD: tl.constexpr,
    OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr,
    STORE_UNQUANTIZED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One row. USE_PDL: it starts while the kernel before it ends, and lets the next do the same.
    GROUP_SIZE: values of out, in e4m3, that share an out_scale; 0: out is not rounded to e4m3. STORE_UNQUANTIZED:
    unquantized_out, too, gets the result."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0:
        factor += OFFSET
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        at = x + partial * partial_stride + row * x_stride + column
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * SIZE + column
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, value, mask=inside)
        # The norm is of the sum as it is stored: what a later layer will add to.
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    normed = value * scale * factor
    if GROUP_SIZE:
        store_quantized(normed, out, out_scale, row, SIZE, GROUP_SIZE, BLOCK, E4M3_MAX, MIN_SCALE)
        if STORE_UNQUANTIZED:
            tl.store(unquantized_out + row * SIZE + column, normed, mask=inside)
    else:
        tl.store(out + row * SIZE + column, normed, mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """RMSNorm of x [T, size], or of x + residual, which is then also written into `residual`.
    `offset` is added to the weight.

    Rows of x may be strided; residual and out [T, size] are contiguous; out may be x if that is
    contiguous. float32 inside, rounded once (layer by layer in bfloat16 the product with the
    weight rounds again). Source: https://arxiv.org/abs/1910.07467.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    _launch_rms_norm(x, residual, weight, out, eps, _block_options(x), offset=offset)
    return out


def rms_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    group_size: int = 0,
    unquantized_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm`, or as `sum_norm` for x float32 [P, T, size]: (e4m3 [T, size], float32 scales
    [T, size / part]), rounded once; part 0: a scale a row. plain: [T, size], contiguous, where the
    norm itself is wanted, too."""
    room = Fp8Output.empty(x.device, *x.shape[-2:], group_size)
    values, scale = room.kernel_args
    _launch_rms_norm(
        x,
        residual,
        weight,
        values,
        eps,
        _block_options(x) | room.launch_options,
        offset,
        scale,
        unquantized_out,
    )
    return room.result


def sum_rms_norm(
    partials: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm` of residual [T, size] plus the sum of partials [P, T, size], any float dtype.

    Values of a partial's row lie side by side. The new residual is written where it was; the norm
    has its dtype.
    """
    out = torch.empty_like(residual)
    _launch_rms_norm(partials, residual, weight, out, eps, _block_options(residual))
    return out


def _block_options(x: torch.Tensor) -> dict[str, Any]:
    """The options of a launch, whose result is not rounded to e4m3."""
    block = triton.next_power_of_2(x.shape[-1])
    return {
        "SIZE": x.shape[-1], "BLOCK": block, "GROUP_SIZE": 0, "E4M3_MAX": 0.0, "MIN_SCALE": 0.0,
        "num_warps": min(max(block // (32 * NORM_VALUES_PER_THREAD), 1), 16),
    } | pdl_options(x.device)  # fmt: skip


def _launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    options: dict[str, Any],
    offset: float = 0.0,
    scale: torch.Tensor | None = None,
    plain: torch.Tensor | None = None,
) -> None:
    """x: one [T, size], or [P, T, size]."""
    tokens, partials = x.shape[-2], x.shape[0] if x.dim() == 3 else 1
    if tokens:
        _rms_norm_kernel[(tokens,)](
            x, residual, weight, out, scale, plain, eps, x.stride(-2), x.stride(0),
            PARTIALS=partials, ADD=residual is not None, OFFSET=offset,
            STORE_UNQUANTIZED=plain is not None, **options,
        )  # fmt: skip


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """The same in plain torch."""
    if residual is not None:
        x = residual.copy_(x.float() + residual.float())
    factor = weight.float() + offset
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), factor, eps).to(x.dtype)


def rms_norm_quantized_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    group_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rounded_norm` in plain torch."""
    total = x.float().sum(0) if x.dim() == 3 else x.float()
    if residual is not None:
        total = residual.copy_(total + residual.float()).float()
    return quantize_groups_reference(
        rms_norm_reference(total, weight, eps, offset=offset), group_size
    )


MAX_PROGRAMS = 256  # at the most: two on each of 132 multiprocessors have room for them
SIGNAL_STRIDE = tl.constexpr(32)  # bytes from one program's arrivals to the next one's
SIGNAL_BYTES = MAX_PROGRAMS * SIGNAL_STRIDE.value


@dataclass(frozen=True)
class SymmetricMemory:
    """One region of memory in each rank, laid out alike, as seen from rank `rank`.

    addresses: of every rank's region, a multiple of 16. arrivals: where ARRIVALS_BYTES of it begin,
    zero at first, in which ranks announce themselves. counts: int32 [PROGRAMS], zero at first, of
    this rank alone: the arrivals that each program has waited for so far.
    """

    addresses: tuple[int, ...]
    rank: int
    signals: int
    expected: torch.Tensor


# How ranks wait for each other: program p of every rank adds one to the arrivals of program p of
# every rank, itself included, and waits until its own have grown by the number of ranks. Nothing
# is ever reset, so a replayed graph goes on where the last launch ended, whichever it was; the
# difference of two counts stays right when they wrap around. A rank that comes again before a
# third was seen for the first time cannot be mistaken for it: it has passed only because the third
# had come, and that was before its own second coming.


@triton.jit
def _signal_peers(peers, signals, RANKS: tl.constexpr):
    peer = tl.arange(0, RANKS)
    address = tl.zeros((RANKS,), tl.int64)
    for index in tl.static_range(RANKS):
        address = tl.where(peer == index, peers[index], address)
    address += signals + tl.program_id(0) * SIGNAL_STRIDE
    one = tl.full((RANKS,), 1, tl.int32)
    tl.atomic_add(address.to(tl.pointer_type(tl.int32)), one, sem="release", scope="sys")


@triton.jit
def _wait_for_peers(peers, signals, target, RANK: tl.constexpr):
    mine = (peers[RANK] + signals + tl.program_id(0) * SIGNAL_STRIDE).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") - target < 0:
        pass
    tl.debug_barrier()  # what one thread has acquired holds for all


# Each rank reads and writes beginning with the next one, itself last, so that no rank's link is the
# first of all.


@triton.jit
def _sum_ranks(peers, partials, at, inside, own, BLOCK: tl.constexpr, RANK: tl.constexpr,
         RANKS: tl.constexpr):  # fmt: skip
    parts = ()
    for turn in tl.static_range(RANKS):
        source = peers[(RANK + 1 + turn) % RANKS] + partials
        source = tl.multiple_of(source.to(tl.pointer_type(own.dtype)), 16) + at
        parts += (tl.load(source, mask=inside, other=0.0, cache_modifier=".cg"),)
    # In the order of ranks on all of them: sums are equal bit by bit.
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(RANKS):
        total += parts[(index + RANKS - RANK - 1) % RANKS].to(tl.float32)
    return total + own.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "partials", "results", "signals"])
def _all_reduce_norm_kernel(
    peers, partials, results, signals, expected, residual, weight, out, rows, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    TWO_SHOTS: tl.constexpr, BARRIERS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if BARRIERS:
        _signal_peers(peers, signals, RANKS)
    target = tl.load(expected + program) + RANKS
    norm_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    # Row r is that of rank r % RANKS in two shots; in one shot every rank computes every row.
    first = program * RANKS + RANK if TWO_SHOTS else program
    step = tl.num_programs(0) * (RANKS if TWO_SHOTS else 1)
    # What this rank alone has is read while it waits.
    own = tl.load(residual + tl.minimum(first, rows - 1) * SIZE + column, mask=inside, other=0.0)
    if BARRIERS:
        _wait_for_peers(peers, signals, target, RANK)
    for row in range(first, rows, step):
        at = row * SIZE + column
        total = _sum_ranks(peers, partials, at, inside, own, BLOCK, RANK, RANKS)
        following = tl.minimum(row + step, rows - 1) * SIZE + column
        own = tl.load(residual + following, mask=inside, other=0.0)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        # The norm is of the sum as it is stored: what a later layer will add to.
        total = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
        normed = (total * scale * norm_weight).to(residual.dtype.element_ty)
        if TWO_SHOTS:
            for turn in tl.static_range(RANKS):
                theirs = peers[(RANK + 1 + turn) % RANKS] + results
                theirs = theirs.to(tl.pointer_type(normed.dtype))
                tl.store(tl.multiple_of(theirs, 16) + at, normed, mask=inside)
        else:
            tl.store(out + at, normed, mask=inside)
    if BARRIERS:
        if TWO_SHOTS:
            tl.debug_barrier()  # all threads have written before one says so
            _signal_peers(peers, signals, RANKS)
            target += RANKS
            _wait_for_peers(peers, signals, target, RANK)
        tl.store(expected + program, target)


def all_reduce_norm(
    memory: SymmetricMemory,
    partials: int,
    out: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    results: int | None = None,
    barriers: bool = True,
) -> None:
    """`out` [T, size] becomes the norm of the ranks' partial sums plus `residual` [T, size].

    partials: where in every region the partial sums lie, [T, size] of residual's dtype, bytes.
    results: where `out` is in every region; then in two shots: rank r computes the rows t with
    t % ranks == r and writes them to all ranks, and only those rows of `residual` become the sum.
    None: in one shot, every rank computes all rows, `out` is any memory, all of `residual` is the
    sum. In float32, in the order of ranks, rounded once to the residual and once to `out`.

    All ranks must call it with the same shapes, on one stream each. In one shot the partial sums
    must stay as they are until the next call: what is written for that goes elsewhere.
    barriers=False is for one process that plays all ranks.
    """
    rows, size = residual.shape
    ranks = len(memory.addresses)
    programs = min(rows if results is None else -(-rows // ranks), MAX_PROGRAMS)
    if rows:
        _all_reduce_norm_kernel[(programs,)](
            memory.addresses, partials, results or 0, memory.signals, memory.expected,
            residual, weight, out, rows, eps, **_constants(memory, size, results, barriers),
        )  # fmt: skip


def compile_all_reduce_norm(
    memory: SymmetricMemory, vectors: torch.Tensor, results: int | None
) -> None:
    """Compiles it for `vectors` [T, size] and ranks that wait for each other; nothing runs."""
    constants = _constants(memory, vectors.shape[1], results, True)
    _all_reduce_norm_kernel.warmup(
        memory.addresses, 0, 0, memory.signals, memory.expected, vectors, vectors,
        vectors, len(vectors), 1e-6, grid=(1,), **constants,
    )  # fmt: skip


def _constants(
    memory: SymmetricMemory, size: int, results: int | None, barriers: bool
) -> dict[str, object]:
    block = triton.next_power_of_2(size)
    return {
        "SIZE": size, "BLOCK": block, "RANK": memory.rank, "RANKS": len(memory.addresses),
        "TWO_SHOTS": results is not None, "BARRIERS": barriers,
        "num_warps": min(max(block // 1024, 1), 16),
    }  # fmt: skip


def all_reduce_norm_reference(
    partials: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm, the sum) [T, size] of the ranks' partials [ranks, T, size], in plain torch."""
    total = partials.float().sum(dim=0) + residual.float()
    total = total.to(residual.dtype)
    normed = torch.nn.functional.rms_norm(total.float(), total.shape[1:], weight.float(), eps)
    return normed.to(residual.dtype), total
