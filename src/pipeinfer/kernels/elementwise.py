"""Kernels between GEMMs: RMSNorm, SwiGLU, GeGLU, FP8 quantization, and all-reduce with norm.

RMSNorm: alone, with residual addition, of partial sums, to FP8, and with the all-reduce over ranks.
The all-reduce reads every rank's partial sums in memory that all ranks have mapped, without
multicast and without nvcc; collectives.py maps the memory and chooses messages. Quantization has a
scale for each row or group of values, and runs by itself or as the end of another kernel
(`store_quantized`). For devices on which no library's kernel is better, and for operations without
a library's kernel. Needs triton; formats.py has quantization in plain torch. Uses tensors and
addresses, no layer. Sources: https://arxiv.org/abs/2002.05202 (GLU variants),
https://arxiv.org/abs/2412.19437, 3.3.2 (scales of groups).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.formats import E4M3, E4M3_MAX, MIN_SCALE, quantize_rows
from pipeinfer.kernels.triton_support import as_kernel_arg, pdl_options, to_e4m3

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false


NORM_VALUES_PER_THREAD = 4  # values of a vector that a thread of RMSNorm has at most
MAX_PROGRAMS = 256  # programs of the all-reduce at most: two fit on each of 132 multiprocessors
SIGNAL_STRIDE = tl.constexpr(32)  # bytes from one program's signals to the next one's
SIGNAL_BYTES = MAX_PROGRAMS * SIGNAL_STRIDE.value


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, out_scale, unquantized_out, eps, x_stride, partial_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ADD: tl.constexpr,
    OFFSET: tl.constexpr, GROUP_SIZE: tl.constexpr, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr,
    STORE_UNQUANTIZED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): computes the norm of a row.

    - PARTIALS: partial sums in x
    - ADD: the residual is added, and the sum written back to it
    - GROUP_SIZE: values of out, in e4m3, that share an out_scale; 0: out is not quantized
    - STORE_UNQUANTIZED: unquantized_out gets the result, too
    """
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
        # The norm is of the sum as it is stored, which a later layer will add to.
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
    """RMSNorm of x, or of x + residual, which is then also written into `residual`.

    - x: [T, size]; rows may be strided
    - weight: [size], to which `offset` is added
    - residual, out: [T, size], contiguous; out may be x if that is contiguous

    float32 inside, rounded once (layer by layer in bfloat16 the product with the weight rounds
    again). Source: https://arxiv.org/abs/1910.07467.
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
    """Returns (e4m3 [T, size], float32 scales [T, size / group_size]) of `rms_norm`, rounded once.

    - x: [T, size], or partial sums float32 [P, T, size] as for `sum_rms_norm`
    - group_size: values that share a scale; 0: all of a row
    - unquantized_out: [T, size], contiguous; gets the norm itself if given
    """
    output = Fp8Output.empty(x.device, *x.shape[-2:], group_size)
    values, scale = output.kernel_args
    options = _block_options(x) | output.launch_options
    _launch_rms_norm(x, residual, weight, values, eps, options, offset, scale, unquantized_out)
    return output.result


def sum_rms_norm(
    partials: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm` of residual [T, size] plus the sum of partials [P, T, size], any float dtype.

    The values of a partial's row are contiguous. The sum is written into `residual`; the norm has
    its dtype.
    """
    out = torch.empty_like(residual)
    _launch_rms_norm(partials, residual, weight, out, eps, _block_options(residual))
    return out


def _block_options(x: torch.Tensor) -> dict[str, Any]:
    """Launch options where the result is not quantized."""
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
    unquantized_out: torch.Tensor | None = None,
) -> None:
    """Launches the norm of x [T, size], or of partial sums [P, T, size]."""
    tokens, partials = x.shape[-2], x.shape[0] if x.dim() == 3 else 1
    if tokens:
        _rms_norm_kernel[(tokens,)](
            x, residual, weight, out, scale, unquantized_out, eps, x.stride(-2), x.stride(0),
            PARTIALS=partials, ADD=residual is not None, OFFSET=offset,
            STORE_UNQUANTIZED=unquantized_out is not None, **options,
        )  # fmt: skip


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """`rms_norm` in plain torch."""
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
    """`rms_norm_quantized` in plain torch."""
    total = x.float().sum(0) if x.dim() == 3 else x.float()
    if residual is not None:
        total = residual.copy_(total + residual.float()).float()
    return quantize_groups_reference(
        rms_norm_reference(total, weight, eps, offset=offset), group_size
    )


@dataclass(frozen=True)
class SymmetricMemory:
    """A region of memory in each rank, laid out alike, as seen from one rank.

    Attributes:
    - addresses: of every rank's region, multiples of 16
    - rank: the rank that sees the regions
    - signals: offset in bytes of SIGNAL_BYTES, zero at first, with which ranks signal each other
    - expected: int32 [MAX_PROGRAMS], zero at first, of this rank alone: the signals for which each
      program has waited so far
    """

    addresses: tuple[int, ...]
    rank: int
    signals: int
    expected: torch.Tensor


# How ranks wait for each other: program p of every rank adds one to the signals of program p of
# every rank, itself included, and waits until its own have grown by the number of ranks. Nothing is
# ever reset, so a replayed graph goes on where the last launch ended, whichever it was; the
# difference of two counts stays right when they wrap around. A rank that signals for the next round
# cannot be mistaken for one that has not signalled in this round: it has passed only because all
# ranks had signalled.


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
    tl.debug_barrier()  # memory that one thread has acquired is visible to all


# Each rank reads and writes the others beginning with the next one, itself last, so that not all
# ranks use one rank's link at once.


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
    # The rank's own memory is read while it waits.
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
        # The norm is of the sum as it is stored, which a later layer will add to.
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
            tl.debug_barrier()  # all threads have written before one signals it
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
    """Makes `out` the norm of the ranks' partial sums plus `residual`.

    - memory: of all ranks
    - partials: offset in bytes of the partial sums [T, size] in every region, of residual's dtype
    - out, residual: [T, size]
    - weight: [size]
    - results: offset in bytes of `out` in every region: the kernel runs in two shots. Rank r
      computes the rows t with t % ranks == r and writes them to all ranks, and only these rows of
      `residual` become the sum. None: in one shot every rank computes all rows; `out` is any
      memory, and all of `residual` becomes the sum
    - barriers: False for one process that plays all ranks

    In float32, in the order of ranks, rounded once to the residual and once to `out`. All ranks
    call it with the same shapes, on one stream each. In one shot the partial sums must stay as they
    are until the next call, so that call's go elsewhere.
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
    """Compiles the kernel for `vectors` [T, size] and ranks that wait for each other; runs
    nothing."""
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
    """Returns (norm, sum), both [T, size], of the ranks' partials [ranks, T, size], in plain
    torch.
    """
    total = partials.float().sum(dim=0) + residual.float()
    total = total.to(residual.dtype)
    normed = torch.nn.functional.rms_norm(total.float(), total.shape[1:], weight.float(), eps)
    return normed.to(residual.dtype), total


ACTIVATION_BLOCK = 1024  # values of SwiGLU or GeGLU in one program
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)  # slope of GELU's approximation by tanh, twice its factor
QUANTIZE_VALUES_PER_THREAD = 16  # values of a thread, where a program may have so many


@triton.jit
def _swiglu_kernel(merged, out, stride, SIZE: tl.constexpr, ACTIVATION_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ACTIVATION_BLOCK + tl.arange(0, ACTIVATION_BLOCK)
    inside = column < SIZE
    gate = tl.load(merged + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + row * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(merged: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, [T, n], of merged [T, 2 n], gate first; rows may be strided. float32 inside,
    rounded once."""
    tokens, size = merged.shape[0], merged.shape[1] // 2
    out = merged.new_empty(tokens, size) if out is None else out
    if tokens:
        block = min(ACTIVATION_BLOCK, triton.next_power_of_2(size))
        _swiglu_kernel[(tokens, triton.cdiv(size, block))](
            merged,
            out,
            merged.stride(0),
            SIZE=size,
            ACTIVATION_BLOCK=block,
            num_warps=max(block // 256, 1),
        )
    return out


def swiglu_reference(merged: torch.Tensor) -> torch.Tensor:
    """`swiglu` in plain torch."""
    gate, up = merged.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(merged.dtype)


@triton.jit
def _geglu_kernel(
    merged,
    out,
    stride,
    SIZE: tl.constexpr,
    ACTIVATION_BLOCK: tl.constexpr,
    GELU_SLOPE: tl.constexpr,
):
    """GELU is gate * 0.5 (1 + tanh z), and 0.5 (1 + tanh z) is sigmoid(2 z)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ACTIVATION_BLOCK + tl.arange(0, ACTIVATION_BLOCK)
    inside = column < SIZE
    gate = tl.load(merged + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + row * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.sigmoid(GELU_SLOPE * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * SIZE + column, gate * weight * up, mask=inside)


def geglu(merged: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up, [T, n], of merged [T, 2 n], gate first; rows may be strided. GELU by its
    approximation with tanh; float32 inside, rounded once."""
    tokens, size = merged.shape[0], merged.shape[1] // 2
    out = merged.new_empty(tokens, size) if out is None else out
    if tokens:
        block = min(ACTIVATION_BLOCK, triton.next_power_of_2(size))
        _geglu_kernel[(tokens, triton.cdiv(size, block))](
            merged, out, merged.stride(0), SIZE=size, ACTIVATION_BLOCK=block, GELU_SLOPE=GELU_SLOPE,
            num_warps=max(block // 256, 1),
        )  # fmt: skip
    return out


def geglu_reference(merged: torch.Tensor) -> torch.Tensor:
    """`geglu` in plain torch."""
    gate, up = merged.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(merged.dtype)


@triton.jit
def _scale_for(amax, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr):
    return tl.maximum(amax / E4M3_MAX, MIN_SCALE)


@triton.jit
def _store_scaled(values, scale, out, column, inside):
    inverse = tl.math.div_rn(1.0, scale)  # dividing each value would take most of the time
    tl.store(out + column, to_e4m3(values * inverse, out.dtype.element_ty), mask=inside)


@triton.jit
def _store_groups(
    values, out, scale, begin, SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    """Quantizes `values` [BLOCK] of a row, from its value `begin` on, into out [SIZE] and scale
    [SIZE / GROUP_SIZE]. GROUP_SIZE: a power of two."""
    part = tl.arange(0, BLOCK // GROUP_SIZE)
    inside = begin + part * GROUP_SIZE < SIZE
    parts = tl.reshape(values, (BLOCK // GROUP_SIZE, GROUP_SIZE))
    found = _scale_for(tl.max(tl.abs(parts), axis=1), E4M3_MAX, MIN_SCALE)
    tl.store(scale + begin // GROUP_SIZE + part, found, mask=inside)
    column = begin + part[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    _store_scaled(parts, found[:, None], out, column, inside[:, None])


@triton.jit
def store_quantized(
    values, out, scale, row, SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    """Quantizes `values`, float32 [BLOCK], zeros from SIZE on, as row `row`.

    - out: e4m3 [rows, SIZE]
    - scale: [rows, SIZE / GROUP_SIZE]
    - GROUP_SIZE: SIZE, or a power of two
    """
    out += row * SIZE
    scale += row * (SIZE // GROUP_SIZE)
    if GROUP_SIZE == SIZE:
        column = tl.arange(0, BLOCK)
        found = _scale_for(tl.max(tl.abs(values), axis=0), E4M3_MAX, MIN_SCALE)
        tl.store(scale, found)
        _store_scaled(values, found, out, column, column < SIZE)
    else:
        _store_groups(values, out, scale, 0, SIZE, GROUP_SIZE, BLOCK, E4M3_MAX, MIN_SCALE)


@triton.jit
def store_quantized_tile(
    values, out, scale, row, real, begin, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_SIZE: tl.constexpr, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    """Quantizes `values`, float32 [ROWS, BLOCK_N], as columns from `begin` on of the rows `row`
    [ROWS] that are `real`. out, scale, GROUP_SIZE: as for store_quantized; begin is a multiple of
    GROUP_SIZE.
    """
    ROWS: tl.constexpr = values.shape[0]
    parts: tl.constexpr = BLOCK_N // GROUP_SIZE
    by_part = tl.reshape(values, (ROWS, parts, GROUP_SIZE))
    found = _scale_for(tl.max(tl.abs(by_part), axis=2), E4M3_MAX, MIN_SCALE)
    at = (
        scale
        + row[:, None] * (SIZE // GROUP_SIZE)
        + begin // GROUP_SIZE
        + tl.arange(0, parts)[None, :]
    )
    tl.store(at, found, mask=real[:, None])
    scaled = tl.reshape(by_part * tl.math.div_rn(1.0, found)[:, :, None], (ROWS, BLOCK_N))
    at = out + row[:, None] * SIZE + begin + tl.arange(0, BLOCK_N)[None, :]
    tl.store(at, to_e4m3(scaled, out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _load_values(x, column, SIZE: tl.constexpr, SWIGLU: tl.constexpr):
    """float32 values of a row at x; SWIGLU: SwiGLU of 2 SIZE values, gate first."""
    inside = column < SIZE
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(x + SIZE + column, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.sigmoid(values) * up
    return values


@triton.jit
def _quantize_kernel(
    x, out, scale, x_stride, SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, SWIGLU: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): quantizes a row in two powers of two: its first BLOCK values, and the TAIL
    after them.
    """
    row = tl.program_id(0).to(tl.int64)
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    x += row * x_stride
    column, tail_column = tl.arange(0, BLOCK), BLOCK + tl.arange(0, TAIL)
    values, tail = _load_values(x, column, SIZE, SWIGLU), _load_values(x, tail_column, SIZE, SWIGLU)
    out += row * SIZE
    scale += row * (SIZE // GROUP_SIZE)
    if GROUP_SIZE == SIZE:
        amax = tl.maximum(tl.max(tl.abs(values), axis=0), tl.max(tl.abs(tail), axis=0))
        found = _scale_for(amax, E4M3_MAX, MIN_SCALE)
        tl.store(scale, found)
        _store_scaled(values, found, out, column, column < SIZE)
        _store_scaled(tail, found, out, tail_column, tail_column < SIZE)
    else:
        _store_groups(values, out, scale, 0, SIZE, GROUP_SIZE, BLOCK, E4M3_MAX, MIN_SCALE)
        _store_groups(tail, out, scale, BLOCK, SIZE, GROUP_SIZE, TAIL, E4M3_MAX, MIN_SCALE)


@dataclass(frozen=True)
class Fp8Output:
    """Rows in e4m3 that a kernel writes, with their scales.

    Attributes:
    - values: e4m3 [T, size]
    - scale: float32 [T, size / group_size]
    """

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device, rows: int, size: int, group_size: int) -> Fp8Output:
        """Returns arrays that are not filled. group_size: values that share a scale; 0: all of a
        row.
        """
        return cls(
            torch.empty(rows, size, dtype=E4M3, device=device),
            torch.empty(rows, size // (group_size or size), dtype=torch.float32, device=device),
        )

    @property
    def kernel_args(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors as kernels take them."""
        return as_kernel_arg(self.values), self.scale

    @property
    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.scale

    @property
    def launch_options(self) -> dict[str, float]:
        """Options of a launch with a program a row, but for blocks and warps."""
        size = self.values.shape[1]
        given: dict[str, float] = {"SIZE": size, "GROUP_SIZE": size // self.scale.shape[1]}
        given |= {"E4M3_MAX": E4M3_MAX, "MIN_SCALE": MIN_SCALE}
        return given | pdl_options(self.values.device)


def _quantized(
    x: torch.Tensor, size: int, group_size: int, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    output = Fp8Output.empty(x.device, len(x), size, group_size)
    block = 1 << (size.bit_length() - 1)
    tail = max(triton.next_power_of_2(size - block), group_size, 1)
    if len(x):
        _quantize_kernel[(len(x),)](
            x, *output.kernel_args, x.stride(0), BLOCK=block, TAIL=tail, SWIGLU=gated,
            num_warps=min(max(block // (32 * QUANTIZE_VALUES_PER_THREAD), 1), 32),
            **output.launch_options,
        )  # fmt: skip
    return output.result


def quantize_groups(x: torch.Tensor, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (e4m3 [T, n], float32 scales [T, n / group_size]) of x, any float dtype [T, n],
    strided rows.

    - group_size: values that share a scale; 0: all of a row
    """
    return _quantized(x, x.shape[1], group_size, gated=False)


def swiglu_quantize_groups(
    merged: torch.Tensor, group_size: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of `quantize_groups` for SwiGLU of merged [T, 2 n], gate first, which is
    not rounded before.
    """
    return _quantized(merged, merged.shape[1] // 2, group_size, gated=True)


def quantize_groups_reference(
    x: torch.Tensor, group_size: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_groups` in plain torch."""
    quantized, scale = quantize_rows(x.unflatten(1, (-1, group_size or x.shape[1])))
    return quantized.flatten(1), scale.flatten(1)


def swiglu_quantize_groups_reference(
    merged: torch.Tensor, group_size: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_quantize_groups` in plain torch."""
    return quantize_groups_reference(swiglu_reference(merged.float()), group_size)
