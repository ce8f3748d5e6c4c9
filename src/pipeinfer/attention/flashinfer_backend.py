"""FlashInfer's paged attention, by its wrappers. Knows rows and pages, no model and no graph.

A wrapper's plan lies in its own pinned buffer until the device has copied it. Two steps are in
flight, so each parity has wrappers of its own, and the plan of a step waits for no copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pipeinfer.attention.interface import (
    PAGE_SIZES,
    PREFERRED_PAGE_SIZE,
    AttentionInputs,
    BackendCapabilities,
    KVPool,
    PagedKind,
    qo_indptr_of,
)
from pipeinfer.kernels.formats import E4M3
from pipeinfer.step import AttentionShape

PARITIES = 2
FLOAT_BYTES = 128 * 2**20  # recommended by FlashInfer; more where split rows need it
GRAPH_INT_BYTES = 2**18  # a work list of split rows: 20 kB of 300 rows with 64 heads (_whole)
UNSPLIT_BYTES = 16  # bytes of a work list for each row: three indices and an offset
BLOCKS_PER_SM = 2  # assumed by FlashInfer's planner, too
QUICKLY_BUILT = 128  # largest head of the variant for Hopper: of 256, it is built for four minutes
SPLIT_TILE = 16  # queries times group of one work item of a decode


@dataclass(frozen=True)
class FlashInferMetadata:
    """Metadata of one kind of row of one step: a planned wrapper for each length of window that
    layers have.
    """

    wrappers: dict[int | None, Any]


class _Rows(NamedTuple):
    """R rows of a step that is no graph's, int32.

    Attributes:
    - qo_indptr, kv_indptr: [R + 1] on the host, where each row's queries and pages begin
    - kv_indices: on the device, the pages
    - last_page_len: [R] on the host
    - max_query_len: queries of the longest row
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    max_query_len: int


class _Wrappers(ABC):
    """The common part of both kinds of rows: the pool, the workspace for partial outputs, and the
    wrappers of steps without a graph, by window and parity.
    """

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._by_window = {shape.sliding_window: shape for shape in reversed(self._shapes)}
        self._device = device
        self._float = torch.empty(0)
        self._eager: dict[tuple[int | None, int], Any] = {}

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """Builds or loads the kernels for the pool's dtype: seconds, the first time."""
        self._pool = pool
        self._float = torch.zeros(self._float_bytes(max_rows), dtype=torch.uint8,
                                  device=self._device)  # fmt: skip
        self._eager = {
            (window, parity): self._wrapper(shape)
            for window, shape in self._by_window.items()
            for parity in range(PARITIES)
        }
        ends, page = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        row = _Rows(ends, ends, page.to(self._device), ends[1:], max_query_len=1)
        for (window, _), wrapper in self._eager.items():
            self._plan_rows(wrapper, window, row)

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: FlashInferMetadata
    ) -> None:
        """Attends, see PagedKernel.run."""
        scales, pages = self._pool.scales[layer], (self._pool.k[layer], self._pool.v[layer])
        wrapper = metadata.wrappers[self._shapes[layer].sliding_window]
        wrapper.run(q, pages, k_scale=scales.k, v_scale=float(scales.v), out=out)

    def _eager_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> FlashInferMetadata:
        host = inputs.on_host
        rows = _Rows(
            qo_indptr_of(host, begin, end),
            host.kv_indptr[begin : end + 1],
            inputs.step.kv_indices,
            host.last_page_len[begin:end],
            inputs.max_query_len,
        )
        wrappers = {window: self._eager[window, inputs.parity] for window in self._by_window}
        for window, wrapper in wrappers.items():
            self._plan_rows(wrapper, window, rows)
        return FlashInferMetadata(wrappers)

    def _options(self, window: int | None) -> dict[str, Any]:
        """Returns the options that all plans for layers with this window have in common."""
        shape = self._by_window[window]
        return {
            "num_qo_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "page_size": self._pool.page_size,
            "window_left": -1 if window is None else window - 1,  # keys before a query's own
            "sm_scale": shape.scale,
            "q_data_type": self._pool.dtype,
            "kv_data_type": self._pool.storage_dtype,
        }

    @abstractmethod
    def _float_bytes(self, max_rows: int) -> int:
        """Size of the workspace for partial outputs of split rows."""

    @abstractmethod
    def _wrapper(self, shape: AttentionShape) -> Any:
        """Returns a wrapper for steps without a graph."""

    @abstractmethod
    def _plan_rows(self, wrapper: Any, window: int | None, rows: _Rows) -> None:
        """Plans a wrapper of `_wrapper`; copies the needed parts of `rows` to the device."""


class PrefillKernel(_Wrappers):
    """Rows with several queries, by the kernels that FlashInfer chooses for the GPU."""

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> FlashInferMetadata:
        """Plans the wrappers, see PagedKernel.build_metadata."""
        return self._eager_metadata(inputs, begin, end)

    def _float_bytes(self, max_rows: int) -> int:
        return FLOAT_BYTES

    def _wrapper(self, shape: AttentionShape) -> Any:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper  # type: ignore

        # With pages in e4m3 only the older kernels: those for Hopper would have queries in it, too.
        older = shape.head_dim > QUICKLY_BUILT or self._pool.storage_dtype == E4M3
        backend = "fa2" if older else "auto"
        return BatchPrefillWithPagedKVCacheWrapper(self._float, "NHD", backend=backend)

    def _plan_rows(self, wrapper: Any, window: int | None, rows: _Rows) -> None:
        wrapper.plan(
            rows.qo_indptr,
            rows.kv_indptr,
            rows.kv_indices,
            rows.last_page_len,
            head_dim_qk=self._by_window[window].head_dim,
            causal=True,
            max_token_per_sequence=rows.max_query_len,
            **self._options(window),
        )


@dataclass
class _GraphPlans:
    """Plans of a graph's rows.

    Attributes:
    - wrappers: by parity, with one workspace on the device for their plans
    - kv_indptr: int32 [R + 1] on the host, the lengths for which the plan on the device was made
    """

    wrappers: list[Any]
    kv_indptr: torch.Tensor


class DecodeKernel(_Wrappers):
    """Rows with one query, on tensor cores always: measured better than FlashInfer's kernel for
    CUDA cores even at two queries a key, and "fa2" better than its kernel for Hopper.

    A graph reads the plan of its rows where the first one lay, in a workspace of that number of
    rows. FlashInfer's plans of decodes are made of each row's number of pages alone, so that a step
    whose rows have as many pages as before needs no new one: of a single row, that is the case for
    63 of 64 steps.
    """

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        super().__init__(shapes, device)
        self._blocks = (
            BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        )
        # By window and rows.
        self._split: dict[tuple[int | None, int], _GraphPlans] = {}
        self._unsplit: dict[tuple[int | None, int], Any] = {}

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """Sets the pool, see PagedKernel.bind."""
        self._split.clear()
        self._unsplit.clear()
        super().bind(pool, max_rows)

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> FlashInferMetadata:
        """Plans the wrappers, see PagedKernel.build_metadata."""
        if not inputs.step.padded:
            return self._eager_metadata(inputs, begin, end)
        wrappers = {}
        for window in self._by_window:
            whole = self._fills_gpu(window, end - begin)
            made = self._unsplit_wrapper if whole else self._split_wrapper
            wrappers[window] = made(inputs, window, end - begin)
        return FlashInferMetadata(wrappers)

    def _fills_gpu(self, window: int | None, rows: int) -> bool:
        """More rows than the GPU has room for are not worth splitting: each is one work item then,
        so that the grid is fixed without the padding and the merging that a graph else needs."""
        return rows * self._by_window[window].num_kv_heads > self._blocks

    def _unsplit_wrapper(self, inputs: AttentionInputs, window: int | None, rows: int) -> Any:
        """Returns a wrapper that is planned once: the plan is the same for all lengths. Waits for
        the device when it plans.
        """
        if (window, rows) not in self._unsplit:
            step, wrapper = inputs.step, self._wrapper(self._by_window[window])
            ints = torch.empty(UNSPLIT_BYTES * rows + 4096, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._float, ints)
            # The wrapper's runs read these tensors of the device, with their content at that time.
            wrapper.plan(
                step.kv_indptr[: rows + 1],
                step.kv_indices,
                step.last_page_len[:rows],
                disable_split_kv=True,
                **self._decode_options(window),
            )
            self._unsplit[window, rows] = wrapper
        return self._unsplit[window, rows]

    def _split_wrapper(self, inputs: AttentionInputs, window: int | None, rows: int) -> Any:
        """Planned anew where a row's number of pages has changed. The device has lengths and pages
        already, where `prepare_inputs` writes them: nothing else is copied than the plan."""
        host, key = inputs.on_host, (window, rows)
        kv_indptr = host.kv_indptr[: rows + 1]
        plans = self._split.get(key)
        if plans is not None and torch.equal(plans.kv_indptr, kv_indptr):
            return plans.wrappers[inputs.parity]
        last_page_len, none = host.last_page_len[:rows], inputs.step.kv_indices[:0]
        options = self._decode_options(window)
        if plans is None:
            ints = torch.empty(GRAPH_INT_BYTES, dtype=torch.uint8, device=self._device)
            made = [self._graph_wrapper(inputs, rows, ints) for _ in range(PARITIES)]
            for wrapper in made:
                wrapper.plan(kv_indptr, none, last_page_len, **options)
            self._split[key] = plans = _GraphPlans(made, kv_indptr)
        else:
            from flashinfer.decode import fast_decode_plan  # type: ignore

            fast_decode_plan(
                plans.wrappers[inputs.parity],
                kv_indptr,
                none,
                last_page_len,
                global_override_indptr_cpu=kv_indptr,
                **options,
            )
            plans.kv_indptr = kv_indptr
        return plans.wrappers[inputs.parity]

    def _graph_wrapper(self, inputs: AttentionInputs, rows: int, ints: torch.Tensor) -> Any:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper  # type: ignore

        step = inputs.step
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._float,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=step.kv_indptr[: rows + 1],
            paged_kv_indices_buffer=step.kv_indices,
            paged_kv_last_page_len_buffer=step.last_page_len[:rows],
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(self._float, ints)
        return wrapper

    def _float_bytes(self, max_rows: int) -> int:
        """A float32 vector per head and query of a work item."""
        widest = max(shape.num_heads * (shape.head_dim + 1) for shape in self._shapes)
        groups = max(-(-shape.num_heads // shape.num_kv_heads) for shape in self._shapes)
        tiles = -(-max_rows * groups // SPLIT_TILE) + max_rows
        return max(FLOAT_BYTES, 4 * widest * SPLIT_TILE * max(tiles, 512) + 2**20)

    def _wrapper(self, shape: AttentionShape) -> Any:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper  # type: ignore

        return BatchDecodeWithPagedKVCacheWrapper(
            self._float, "NHD", use_tensor_cores=True, backend="fa2"
        )

    def _plan_rows(self, wrapper: Any, window: int | None, rows: _Rows) -> None:
        wrapper.plan(
            rows.kv_indptr,
            rows.kv_indices,
            rows.last_page_len,
            **self._decode_options(window),
        )

    def _decode_options(self, window: int | None) -> dict[str, Any]:
        """Prefill wrappers call the head size head_dim_qk, decode wrappers head_dim."""
        return {"head_dim": self._by_window[window].head_dim, **self._options(window)}


FLASHINFER = PagedKind(
    DecodeKernel,
    PrefillKernel,
    BackendCapabilities(
        PAGE_SIZES, PREFERRED_PAGE_SIZE, host_lengths=True, captures_decode=True, lists_pages=True
    ),
)
