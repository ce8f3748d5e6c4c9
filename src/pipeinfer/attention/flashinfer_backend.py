"""FlashInfer's paged attention kernels, planned into buffers of our own.

FlashInfer's wrappers reuse one pinned staging buffer for all plans, which a step in flight may
still be read from; here each parity has its own. Knows rows and pages, no model and no graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeinfer.attention.interface import PlanInputs, Traits
from pipeinfer.attention.paged import PAGE_SIZES, PREFERRED, PagedKind
from pipeinfer.kernels.e4m3 import E4M3
from pipeinfer.memory.pool import KVPool
from pipeinfer.step import AttentionShape

PARITIES = 2
STAGING_BYTES = 8 * 2**20  # FlashInfer's own choice; a plan copies only what it fills
FLOAT_BYTES = 128 * 2**20  # recommended by FlashInfer; more where split rows need it
NON_CAUSAL, CAUSAL = 0, 1  # flashinfer.utils.MaskMode
NHD = 0  # flashinfer.utils.TensorLayout
NO_POSITIONS = 0  # flashinfer.utils.PosEncodingMode.NONE
BLOCKS_PER_SM = 2  # as FlashInfer's planner assumes
UNSPLIT_BYTES = 16  # of a work list for each row: three indices and an offset
QUICKLY_BUILT = 128  # largest head of the variant for Hopper: of 256, it is built for four minutes
SPLIT_TILE = 16  # queries times group of one work item of a decode


@dataclass(frozen=True)
class FlashInferWindowPlan:
    """What the layers with one sliding window share: FlashInfer's plan and where it lies."""

    info: Any
    workspace: torch.Tensor


@dataclass(frozen=True)
class FlashInferPlan:
    """One kind of row of one step."""

    by_window: dict[int | None, FlashInferWindowPlan]
    q_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    last_page: torch.Tensor


class _Staging:
    """For one window: pinned bytes and device bytes by parity, and a graph's fixed device bytes."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = [
            torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(PARITIES)
        ]
        self.device = [
            torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device) for _ in range(PARITIES)
        ]
        self.fixed = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)


class FlashInferKernel:
    """Rows with one query (causal=False), or with several (causal=True)."""

    def __init__(
        self, shapes: Sequence[AttentionShape], device: torch.device, causal: bool
    ) -> None:
        self._shapes = tuple(shapes)
        self._device = device
        self._causal = causal
        self._staging = {shape.sliding_window: _Staging(device) for shape in shapes}
        self._modules: dict[tuple[int, bool], tuple[str, Any]] = {}
        self._unsplit: dict[tuple[int | None, int], FlashInferWindowPlan] = {}
        self._float = torch.empty(0)
        self._room = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    def bind(self, pool: KVPool, most_rows: int) -> None:
        """Builds or loads the kernels for the pool's dtype: seconds, the first time."""
        self._k = pool.k
        self._v = pool.v
        self._scales = pool.scales
        self._page_size = pool.page_size
        self._unsplit.clear()
        self._float = torch.zeros(self._float_bytes(most_rows), dtype=torch.uint8,
                                  device=self._device)  # fmt: skip
        for shape in self._shapes:
            key = (shape.head_dim, shape.sliding_window is not None)
            if key not in self._modules:
                self._modules[key] = self._load(pool.dtype, pool.stored, *key)

    def _float_bytes(self, most_rows: int) -> int:
        """Partial outputs of split rows: a float32 vector per head and query of a work item."""
        if self._causal:
            return FLOAT_BYTES
        widest = max(shape.num_heads * (shape.head_dim + 1) for shape in self._shapes)
        groups = max(-(-shape.num_heads // shape.num_kv_heads) for shape in self._shapes)
        tiles = -(-most_rows * groups // SPLIT_TILE) + most_rows
        return max(FLOAT_BYTES, 4 * widest * SPLIT_TILE * max(tiles, 512) + 2**20)

    def _load(
        self, dtype: torch.dtype, stored: torch.dtype, head_dim: int, windowed: bool
    ) -> tuple[str, Any]:
        """For queries and outputs of `dtype`. With pages in e4m3 only the older kernels: those for
        Hopper would have queries in e4m3 as well."""
        from flashinfer.prefill import get_batch_prefill_module  # type: ignore
        from flashinfer.utils import determine_attention_backend  # type: ignore

        kernels = "fa2"  # decodes: measured better than the variant for Hopper
        if self._causal and head_dim <= QUICKLY_BUILT and stored != E4M3:
            kernels = determine_attention_backend(
                self._device, NO_POSITIONS, False, False, dtype, dtype
            )
        module = get_batch_prefill_module(
            kernels, dtype, stored, dtype, torch.int32, head_dim, head_dim, NO_POSITIONS,
            windowed, False, False,
        )  # fmt: skip
        return kernels, module

    def plan(self, inputs: PlanInputs, begin: int, end: int) -> FlashInferPlan:
        """Work lists of rows begin..end-1, copied to the device on the current stream. Of a graph's
        rows only those that are split by length; the others are the same for all lengths.
        """
        step = inputs.step
        by_window = {
            window: self._plan_window(inputs, window, begin, end) for window in self._staging
        }
        return FlashInferPlan(
            by_window,
            step.queries(begin, end),
            step.kv_indptr[begin : end + 1],
            step.kv_indices,
            step.last_page_len[begin:end],
        )

    def _shape(self, window: int | None) -> AttentionShape:
        return next(shape for shape in self._shapes if shape.sliding_window == window)

    def _whole(self, inputs: PlanInputs, window: int | None, count: int) -> bool:
        """More rows than the GPU has room for are not worth splitting: each is one work item then,
        so that the grid is fixed without the padding and the merging that a graph else needs."""
        return inputs.step.padded and count * self._shape(window).num_kv_heads > self._room

    def _plan_window(
        self, inputs: PlanInputs, window: int | None, begin: int, end: int
    ) -> FlashInferWindowPlan:
        staging, count = self._staging[window], end - begin
        if not self._whole(inputs, window, count):
            workspace = staging.fixed if inputs.step.padded else staging.device[inputs.parity]
            return self._plan_into(workspace, inputs, window, begin, end)
        if (window, count) not in self._unsplit:
            workspace = torch.empty(
                UNSPLIT_BYTES * count + 4096, dtype=torch.uint8, device=self._device
            )
            plan = self._plan_into(workspace, inputs, window, begin, end)
            self._unsplit[window, count] = plan
        return self._unsplit[window, count]

    def _plan_into(
        self, workspace: torch.Tensor, inputs: PlanInputs, window: int | None, begin: int, end: int
    ) -> FlashInferWindowPlan:
        shape, whole = self._shape(window), self._whole(inputs, window, end - begin)
        host = inputs.on_host
        q_indptr, lengths = host.queries(begin, end), host.seq_lens[begin:end]
        kernels, module = self._modules[shape.head_dim, window is not None]
        staging = self._staging[window].pinned[inputs.parity]
        arguments = [
            self._float, workspace, staging, q_indptr, host.kv_indptr[begin : end + 1], lengths,
            int(q_indptr[-1]), len(lengths), shape.num_heads, shape.num_kv_heads, self._page_size,
            inputs.step.padded and not whole, shape.head_dim, shape.head_dim, self._causal,
            _left(window),
        ]  # fmt: skip
        if kernels == "fa2":
            arguments += [-1, whole, 0]  # no fixed split, whether not to split, nothing beside it
        return FlashInferWindowPlan(module.plan(*arguments), workspace)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: FlashInferPlan) -> None:
        shape, scales = self._shapes[layer], self._scales[layer]
        window = shape.sliding_window
        share = plan.by_window[window]
        _, module = self._modules[shape.head_dim, window is not None]
        module.paged_run(
            self._float, share.workspace, share.info, q, self._k[layer], self._v[layer],
            plan.q_indptr, plan.kv_indptr, plan.indices, plan.last_page, out, None,
            CAUSAL if self._causal else NON_CAUSAL, NHD, _left(window), True,
            None, None, None, None, None, None, 0.0, shape.scale * scales.k,
            None, None, None, 1.0, 1e4, 0, len(self._float),
        )  # fmt: skip
        if scales.v != 1:
            out.mul_(scales.v)


def _left(window: int | None) -> int:
    """Keys before a query's own, as FlashInfer counts; -1 is all."""
    return -1 if window is None else window - 1


def decode_kernel(shapes: Sequence[AttentionShape], device: torch.device) -> FlashInferKernel:
    """Tensor cores always: measured better than the CUDA-core kernel even at two queries a key."""
    return FlashInferKernel(shapes, device, causal=False)


def prefill_kernel(shapes: Sequence[AttentionShape], device: torch.device) -> FlashInferKernel:
    """FlashInfer's own choice of kernels for the GPU."""
    return FlashInferKernel(shapes, device, causal=True)


FLASHINFER = PagedKind(
    decode_kernel,
    prefill_kernel,
    Traits(PAGE_SIZES, PREFERRED, host_lengths=True, captures_decode=True, lists_pages=True),
)
