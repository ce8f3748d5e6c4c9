"""Weight matrices and the products with them, in any number format.

- `Weight`: what a layer asks of a matrix. `UnquantizedWeight` is one in the model's dtype,
  `QuantizedWeight` one that stays in a number format of its own, for devices with a GEMM for it,
  `DequantizedWeight` one that is stored in such a format and becomes unquantized once it is final.
- `ActivationQuantizer`: how a weight that multiplies in FP8 quantizes its input, if nothing before
  it has done so as its last step.
- `packed_bytes`, `layout_of`, `packed_over`: matrices that oneDNN has packed, as bytes, so that
  they can lie in memory of ours; `unsupported_reason`: why there can be none here. torch has no
  public call for the last step; that of its compiler's runtime is used, a C function of a stable
  name, and tried before it is relied on.
- `SmallMGemm`: the project's own GEMM kernels for few rows; `ExactGemm`: those of exact mode.

Knows no layer, no shard and no format (quantized.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import functional

from pipeinfer.kernels.formats import E4M3
from pipeinfer.kernels.tile_configs import small_m_gemm_config
from pipeinfer.layers.placement import (
    HALF_DTYPES,
    IN_TORCH,
    ParameterMemory,
    PartialSum,
    Placement,
    WeightSource,
    packs_matrices,
)


@dataclass(frozen=True)
class QuantizedActivations:
    """Rows that a weight multiplies in FP8.

    Attributes:
    - values: e4m3 [T, n]
    - scale: float32, of each row, [T, 1], or of each group of values of a row, [T, groups]
    - unquantized: [T, n], the rows as they were, where more than the weight reads them
    """

    values: torch.Tensor
    scale: torch.Tensor
    unquantized: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """e4m3, which no plain rows have."""
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows, [T, n]."""
        return self.values.shape


# Input of a weight: a torch.Tensor [T, n], or a result of the weight's `input_quantizer`.
Activations = Any


def unquantized(x: Activations) -> torch.Tensor:
    """The rows [T, n] in the model's dtype. Of QuantizedActivations: as they were, which their
    quantizer must have kept."""
    return x.unquantized if x.dtype == E4M3 else x


class ActivationQuantizer:
    """Quantizes rows to FP8 for one weight, by itself or as the last step of the operation before
    that weight. Needs Triton.
    """

    def __init__(self, group_size: int = 0, keep_unquantized: bool = False) -> None:
        """Chooses the kernels.

        - group_size: values of a row that share a scale; 0: all of them
        - keep_unquantized: norms and unquantized rows are wanted, too
        """
        from pipeinfer.kernels import elementwise

        self._group_size, self._keep_unquantized = group_size, keep_unquantized
        self._norm = elementwise.rms_norm_quantized
        self._swiglu = elementwise.swiglu_quantize_groups
        self._quantize = elementwise.quantize_groups

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        offset: float,
    ) -> QuantizedActivations:
        """RMSNorm of x plus `residual`, quantized.

        - x: [T, n], or the parts [P, T, n] of a sum
        - weight: [n]
        - eps: added to the mean square
        - residual: [T, n], which becomes the sum with x; None: there is none
        - offset: added to the weight
        """
        plain = weight.new_empty(x.shape[-2:]) if self._keep_unquantized else None
        rounded = self._norm(x, weight, eps, residual, offset, self._group_size, plain)
        return QuantizedActivations(*rounded, plain)

    def swiglu(self, merged: torch.Tensor) -> QuantizedActivations:
        """SwiGLU of [T, 2 n], gate first, quantized: [T, n]."""
        return QuantizedActivations(*self._swiglu(merged, self._group_size))

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        """x [T, n], quantized."""
        unquantized = x if self._keep_unquantized else None
        return QuantizedActivations(*self._quantize(x, self._group_size), unquantized)


# Shared memory that a block must be able to have: the tiles were chosen for GPUs that have as much.
MIN_SHARED_MEMORY_BYTES = 200 * 1024


class SmallMGemm:
    """GEMM with few rows by the project's own kernels: x [T, depth] times weights [width, depth].

    Products give None for shapes for which the kernels have no tile: there the library's GEMM
    is the faster one, as measured. Needs Triton.
    """

    def __init__(self) -> None:
        from pipeinfer.kernels import elementwise, gemm

        self._kernels = gemm
        self._norm = elementwise

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns x @ weight.T + bias, [T, width]."""
        tile = small_m_gemm_config("product", x.shape[0], *weight.shape)
        return None if tile is None else self._kernels.small_m_gemm(x, weight, tile, bias)

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """SwiGLU of x @ weight.T, gate first: [T, width / 2]."""
        tile = small_m_gemm_config("gated", x.shape[0], weight.shape[0] // 2, weight.shape[1])
        return None if tile is None else self._kernels.small_m_gemm_swiglu(x, weight, tile)

    def split_k(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        """Returns x @ weight.T + bias, [T, width], as split-K parts that the norm that follows adds
        up.
        """
        tile = small_m_gemm_config("split", x.shape[0], *weight.shape)
        if tile is None:
            return None
        partial = self._kernels.split_k_gemm(x, weight, tile, bias)
        return PartialSum(partial, self)

    def split_k_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The split-K parts, float32 [split_k, T, width], of a weight with few rows, such as a
        router's; their sum over split_k is x @ weight.T + bias."""
        tile = small_m_gemm_config("narrow", x.shape[0], *weight.shape)
        return None if tile is None else self._kernels.split_k_gemm(x, weight, tile, bias)

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds and norms, see SumNorm. partial: split-K parts [split_k, T, size]."""
        return self._norm.sum_rms_norm(partial, residual, weight, eps), residual


@lru_cache(maxsize=8)
def small_m_gemm_for(device: torch.device, dtype: torch.dtype) -> SmallMGemm | None:
    """Returns the kernels; None if the device has less shared memory than the tiles take, or no
    tensor cores for `dtype`.
    """
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return None
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
    return SmallMGemm() if shared_bytes >= MIN_SHARED_MEMORY_BYTES else None


class Gemm(Protocol):
    """Products that replace a library's; None if the library is faster, or if there is no such
    kernel.
    """

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None: ...

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None: ...


# Rows up to which the own kernel is as fast as a library's: there reading the weights takes all.
EXACT_OWN_ROWS = 32
# Rows that a library is given at once, where there are more than the smallest; else a multiple of
# the step, as CUDA graphs have. So few numbers can be compared with the own kernel's bits.
EXACT_LIBRARY_ROWS = (2048, 1024, 512, 256)
EXACT_ROW_STEP = 8
# Columns of a product that a library may compute: fewer cost nothing, and are the likeliest to be
# split within a block.
EXACT_LIBRARY_MIN_WIDTH = 512
# Numbers of a product that are compared. Another order of sums changes one of 5,000 once they are
# rounded to 16 bits, so that none of so many differing means the same order.
EXACT_COMPARED = 1_000_000
# Values of a matrix up to which a random one is compared instead; larger ones are vocabularies,
# whose products are so many numbers that the matrix itself will do.
EXACT_MAX_RANDOM = 1 << 28


class ExactGemm:
    """Products whose rows are the same bits whatever else is computed: x [T, depth] times weights
    [width, depth]. Needs Triton.

    Computed by the project's own kernel. Torch's library computes numbers of rows for which, with
    this shape, it gave the own kernel's bits for random numbers. That comparison is made when a
    shape is first computed outside of the capture of a graph. For this process the library is set
    not to split the depth.
    """

    def __init__(self) -> None:
        from pipeinfer.kernels.exact import exact_gemm

        torch.backends.cuda.preferred_blas_library("cublaslt")  # only cublaslt has that setting
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
        self._own = exact_gemm
        self._same: dict[tuple[object, ...], bool] = {}

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns x @ weight.T + bias, [T, width]."""
        out = x.new_empty(x.shape[0], weight.shape[0])
        begin = 0
        for rows in exact_pieces(x.shape[0]):
            piece, into = x[begin : begin + rows], out[begin : begin + rows]
            if piece.is_contiguous() and self._library_gives_the_same(rows, weight, bias):
                _library_product(piece, weight, bias, into)
            else:
                self._own(piece, weight, bias, out=into)
            begin += rows
        return out

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Returns None: gate and up are rounded before the activation, as they are with more
        rows.
        """
        return

    def _library_gives_the_same(
        self, rows: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> bool:
        small = rows <= EXACT_OWN_ROWS or len(weight) < EXACT_LIBRARY_MIN_WIDTH
        if small or rows % EXACT_ROW_STEP or weight.dtype not in HALF_DTYPES:
            return False
        key = rows, weight.shape, weight.dtype, weight.device, bias is None
        if key not in self._same:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._same[key] = self._gives_the_same(rows, weight, bias is not None)
        return self._same[key]

    def _gives_the_same(self, rows: int, weight: torch.Tensor, biased: bool) -> bool:
        source = torch.Generator(weight.device)
        source.manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            values = torch.empty(size, dtype=weight.dtype, device=weight.device)
            return values.normal_(generator=source)

        width, depth = weight.shape
        matrix = draw(width, depth) if weight.numel() <= EXACT_MAX_RANDOM else weight
        bias = draw(width) if biased else None
        library = weight.new_empty(rows, width)
        for _ in range(-(-EXACT_COMPARED // library.numel())):
            x = draw(rows, depth)
            if not torch.equal(
                _library_product(x, matrix, bias, library), self._own(x, matrix, bias)
            ):
                return False
        return True


def exact_pieces(rows: int) -> Iterator[int]:
    """Yields numbers of rows that ExactGemm multiplies at a time, out of `rows` rows: numbers of
    EXACT_LIBRARY_ROWS, then a rest below the smallest of them.
    """
    for size in EXACT_LIBRARY_ROWS:
        while rows >= size:
            yield size
            rows -= size
    if rows:
        yield rows


def _library_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Writes x @ weight.T + bias to `out` [T, width], and returns `out`."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@lru_cache(maxsize=1)
def _exact_gemm() -> ExactGemm:
    return ExactGemm()


def exact_gemm_for(placement: Placement) -> ExactGemm | None:
    """None where exact mode is not on, and on a CPU, where torch computes each row as it does alone
    (float32, UnquantizedWeight)."""
    return _exact_gemm() if placement.exact and placement.device.type == "cuda" else None


# Numbers of rows for which oneDNN chooses the packed layout: decode steps. Others work, too.
PACKING_HINT_ROWS = 64


class Weight(Protocol):
    """A matrix [out, in] in some number format, and the products of rows [T, in] with it.

    Few and many rows may round differently.

    Attributes:
    - bias: [out], added to products; None: there is none
    """

    bias: torch.Tensor | None

    def __call__(self, x: Activations, /) -> torch.Tensor:
        """x times the transpose of the matrix, plus the bias: [T, out]."""
        ...

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """Quantizer of x, which may be quantized by it before; None: the weight takes x
        unquantized.
        """
        ...

    def swiglu(self, x: Activations, /) -> torch.Tensor | None:
        """Returns SwiGLU of the product without the bias, gate first, in one kernel: [T, out / 2];
        None if there is no kernel for this number of rows or this format.
        """
        ...

    def split_k(self, x: Activations, /) -> PartialSum | None:
        """Returns the product, [T, out], as split-K parts, which the norm that follows adds up;
        None if there is no kernel for this number of rows or this format.
        """
        ...

    def into(
        self, out: torch.Tensor, x: Activations, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """Writes the product, plus `bias` in place of the weight's own, to `out` [T, out], which is
        returned."""
        ...

    def pack(self, memory: ParameterMemory = IN_TORCH, /) -> None:
        """Lays the values out as products want them; to be called when the values are final.
        memory: of the parameters.
        """
        ...

    def permute(self, rows: torch.Tensor, /) -> None:
        """Moves row rows[i] to row i, for i < n; rows: int64 [n]. Before `pack`."""
        ...

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice], /
    ) -> Iterator[WeightSource]:
        """Yields the sources of `rows` of the matrix: `slices` of the checkpoint's matrix `name`,
        whose shape is `shape`.
        """
        ...


class UnquantizedWeight:
    """A Weight in the dtype of the rows that it is multiplied with; packed for the CPU.

    oneDNN's packed layout is 1.3 to 2 times as fast as a float32 product without it at 4 to 64 rows
    (measured, AVX-512), and rows come out alike however many there are.
    """

    input_quantizer = None

    def __init__(
        self,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        gemm: Gemm | None = None,
        split_k: SmallMGemm | None = None,
        packed: torch.Tensor | None = None,
    ) -> None:
        """Unquantized matrix.

        - weight: [out, in]; None: `packed` is given
        - bias: [out] or None
        - gemm: computes products; those that it does not take are left to the library
        - split_k: computes products that a norm adds up; None: the library computes them
        - packed: a result of `reordered`, in place of `weight`
        """
        self.bias = bias
        self._weight = weight
        self._packed = packed
        self._gemm, self._split_k = gemm, split_k

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [out, in], to be filled; RuntimeError once it is packed."""
        if self._weight is None:
            raise RuntimeError("this matrix is packed: its weights are final")
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return self._unpacked_product(x)
        if x.shape[0] == 1:  # oneDNN computes a single row in another way, with other rounding
            return self._packed_product(x.expand(2, -1))[:1]
        return self._packed_product(x)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self._gemm is None else self._gemm.swiglu(x, self.weight)

    def split_k(self, x: torch.Tensor) -> PartialSum | None:
        gemm = self._split_k
        return None if gemm is None else gemm.split_k(x, self.weight, self.bias)

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._packed is not None:
            out.copy_(torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], ""))
            return out
        return _library_product(x, self.weight, bias, out)

    def _unpacked_product(self, x: torch.Tensor) -> torch.Tensor:
        if self._gemm is not None:
            product = self._gemm.product(x, self.weight, self.bias)
            if product is not None:
                return product
        return functional.linear(x, self.weight, self.bias)

    def _packed_product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Replaces the weight by its packed form, where this CPU has one for its dtype."""
        if self._packed is None and packs_matrices(self.weight.device, self.weight.dtype):
            weight, self._weight = self.weight, None
            self._packed = memory.packed(lambda: reordered(weight))

    def permute(self, rows: torch.Tensor) -> None:
        self.weight[: len(rows)] = self.weight[rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        yield WeightSource(f"{name}.weight", shape, slices, self.weight[rows])


def reordered(weight: torch.Tensor) -> torch.Tensor:
    """A matrix [out, in] as oneDNN packs it, opaque to all but its products."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_HINT_ROWS)


class QuantizedTensor(Protocol):
    """A matrix [rows, columns] in a number format of its own, to be filled from a checkpoint."""

    def dequantized(self, dtype: torch.dtype, /) -> torch.Tensor:
        """The matrix in `dtype`, to which each value is rounded once."""
        ...

    def permute(self, rows: torch.Tensor, /) -> None:
        """Moves rows, see Weight.permute."""
        ...

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice], /
    ) -> Iterator[WeightSource]:
        """Yields the sources, see Weight.sources."""
        ...


class DequantizedWeight:
    """A Weight that is stored in a number format and becomes an UnquantizedWeight in `pack`: for
    devices without a GEMM for the format."""

    input_quantizer = None

    def __init__(
        self, quantized: QuantizedTensor, bias: torch.Tensor | None, placement: Placement
    ) -> None:
        self.bias = bias
        self._quantized: QuantizedTensor | None = quantized
        self._dtype, self._gemm = placement.dtype, exact_gemm_for(placement)
        self._packs = packs_matrices(placement.device, placement.dtype)
        self._dequantized: UnquantizedWeight | None = None

    @property
    def dequantized(self) -> UnquantizedWeight:
        """The unquantized weight; RuntimeError before `pack`."""
        if self._dequantized is None:
            raise RuntimeError("this matrix is dequantized when it is packed")
        return self._dequantized

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequantized(x)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.dequantized.swiglu(x)

    def split_k(self, x: torch.Tensor) -> PartialSum | None:
        return self.dequantized.split_k(x)

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.dequantized.into(out, x, bias)

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        if self._dequantized is not None:
            return
        (quantized, self._quantized), dtype = (self._unpacked(), None), self._dtype
        if self._packs:
            packed = memory.packed(lambda: reordered(quantized.dequantized(dtype)))
            self._dequantized = UnquantizedWeight(None, self.bias, self._gemm, packed=packed)
        else:
            plain = memory.packed(lambda: quantized.dequantized(dtype))
            self._dequantized = UnquantizedWeight(plain, self.bias, self._gemm)

    def permute(self, rows: torch.Tensor) -> None:
        self._unpacked().permute(rows)

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        return self._unpacked().sources(name, rows, shape, slices)

    def _unpacked(self) -> QuantizedTensor:
        if self._quantized is None:
            raise RuntimeError("this matrix is packed: its weights are final")
        return self._quantized


TensorKind = TypeVar("TensorKind", bound=QuantizedTensor)
AnyTensorKind = TypeVar("AnyTensorKind", bound=QuantizedTensor, contravariant=True)


class QuantizedGemm(Protocol[AnyTensorKind]):
    """Products of rows [T, in] with a matrix [out, in] that stays in one number format."""

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """Quantizer of the input, see Weight.input_quantizer."""
        ...

    def pack(self, values: AnyTensorKind, /) -> None:
        """Lays `values`, which are final, out as `product` takes them."""
        ...

    def product(
        self, x: Activations, values: AnyTensorKind, bias: torch.Tensor | None, /
    ) -> torch.Tensor:
        """Returns the product [T, out], plus `bias` [out]."""
        ...

    def split_k(
        self, x: Activations, values: AnyTensorKind, bias: torch.Tensor | None, /
    ) -> PartialSum | None:
        """Returns the product as split-K parts, which the norm that follows adds up; None if there
        is no kernel for this number of rows.
        """
        ...


class QuantizedWeight(Generic[TensorKind]):
    """A Weight that stays in its number format, for devices with a GEMM for it."""

    def __init__(
        self,
        quantized: TensorKind,
        bias: torch.Tensor | None,
        gemm: QuantizedGemm[TensorKind],
        split_k: bool,
    ) -> None:
        """Quantized matrix. split_k: whether a norm may add up its products of few rows."""
        self.bias = bias
        self._quantized = quantized
        self._gemm = gemm
        self._may_split_k = split_k

    def __call__(self, x: Activations) -> torch.Tensor:
        return self._gemm.product(x, self._quantized, self.bias)

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        return self._gemm.input_quantizer

    def swiglu(self, x: Activations) -> torch.Tensor | None:
        return None

    def split_k(self, x: Activations) -> PartialSum | None:
        return self._gemm.split_k(x, self._quantized, self.bias) if self._may_split_k else None

    def into(
        self, out: torch.Tensor, x: Activations, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return out.copy_(self._gemm.product(x, self._quantized, bias))

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        if not memory.final:
            self._gemm.pack(self._quantized)

    def permute(self, rows: torch.Tensor) -> None:
        self._quantized.permute(rows)

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        return self._quantized.sources(name, rows, shape, slices)


OPAQUE = 3  # c10::Layout::Mkldnn
CPU = 0  # c10::DeviceType::CPU
# c10::ScalarType of the dtypes that oneDNN packs.
SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
TRIED_SHAPE, TRIED_ROWS = (48, 40), (2, 17)


def packed_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [n], which live as long as `packed`."""
    size = torch.ops.mkldnn._nbytes(packed)
    address = torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def layout_of(packed: torch.Tensor) -> bytes:
    """Returns the layout of a packed matrix as bytes, valid for this version of oneDNN and this
    CPU.
    """
    return torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()


def packed_over(
    values: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: bytes
) -> torch.Tensor:
    """A packed matrix of `shape` over `values` uint8 [n], which must outlive it. Raises
    RuntimeError where torch makes none."""
    create, take = _calls()
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    made = ctypes.c_void_p()
    failed = create(
        values.data_ptr(), len(shape), sizes, sizes, 0, SCALAR_TYPES[dtype], CPU, 0,
        ctypes.byref(made), OPAQUE, layout, len(layout),
    )  # fmt: skip
    if failed or not made.value:
        raise RuntimeError("torch makes no packed matrix of bytes")
    return take(made.value)


@lru_cache(maxsize=1)
def _calls() -> tuple[Callable[..., int], Callable[[int], torch.Tensor]]:
    """Returns two functions of the library: from bytes to a handle, from a handle to a tensor."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    create = library.aoti_torch_create_tensor_from_blob_v2
    pointer, number, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    create.restype = kind
    create.argtypes = (
        pointer, number, pointer, pointer, number, kind, kind, kind, pointer, kind,
        ctypes.c_char_p, number,
    )  # fmt: skip
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (pointer, ctypes.c_char_p, pointer)
    steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # pyright: ignore
    return create, lambda handle: steal(capsule(handle, None, None))


@lru_cache(maxsize=4)
def unsupported_reason(dtype: torch.dtype) -> str:
    """The reason why no packed matrix of `dtype` can be made over bytes here; "" if a small one
    gives the products of its source.
    """
    source = torch.Generator().manual_seed(0)
    try:
        packed = reordered(torch.randn(TRIED_SHAPE, generator=source).to(dtype))
        values = packed_bytes(packed).clone()
        over = packed_over(values, tuple(packed.shape), dtype, layout_of(packed))
        for rows in TRIED_ROWS:
            x = torch.randn(rows, TRIED_SHAPE[1], generator=source).to(dtype)
            products = [
                torch.ops.mkldnn._linear_pointwise(x, one, None, "none", [], "")
                for one in (packed, over)
            ]
            if not torch.equal(*products):
                return "its products are others"
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""
