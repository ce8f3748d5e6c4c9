"""SwiGLU and GeGLU, and FP8 quantization of activations with a scale a row or a group of values.

Quantization runs by itself, or as the last thing that another kernel does (`store_quantized`).
For devices on which no library's kernel is better. Needs triton; formats.py has quantization in
plain torch. Knows tensors, no layer. Sources: https://arxiv.org/abs/2002.05202 (GLU variants),
https://arxiv.org/abs/2412.19437, 3.3.2 (scales of groups).
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.formats import E4M3, E4M3_MAX, MIN_SCALE, quantize_rows
from pipeinfer.kernels.triton_support import as_kernel_arg, pdl_options, to_e4m3

ACTIVATION_BLOCK = 1024  # values of SwiGLU or GeGLU in one program
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)  # of the approximation of GELU by tanh, twice its factor
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

    out: e4m3 [rows, SIZE]. scale: [rows, SIZE / GROUP_SIZE]. GROUP_SIZE: SIZE, or a power of two.
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
    """One row, in two powers of two: its first BLOCK values, and the TAIL after them."""
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

    values: e4m3 [T, size].
    scale: float32 [T, size / group_size].
    """

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device, rows: int, size: int, group_size: int) -> Fp8Output:
        """group_size: values that share a scale; 0: all of a row."""
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
    """(e4m3 [T, n], float32 scales [T, n / group_size]) of x, any float dtype [T, n], strided rows.

    group_size: values that share a scale; 0: all of a row.
    """
    return _quantized(x, x.shape[1], group_size, gated=False)


def swiglu_quantize_groups(
    merged: torch.Tensor, group_size: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize_groups`, of SwiGLU of merged [T, 2 n], gate first, which is not rounded
    before."""
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
