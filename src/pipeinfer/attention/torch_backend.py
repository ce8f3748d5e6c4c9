"""Paged attention with torch operations only: for the CPU, and the reference of other backends.

Decode rows are gathered in buckets of similar length and attended to together; rows with several
tokens go one by one. A KV location (vLLM: slot mapping) is page * page_size + offset: the index of
one token in a layer's K or V seen as [tokens, ...]. What torch's fused attention does not know,
sinks (a key of each head that all queries see and that has no value:
https://arxiv.org/abs/2309.17453) and soft caps (https://arxiv.org/abs/2408.00118), is computed by
one operation after the other. Knows a step's rows and the pool; no request, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeinfer.attention.interface import KV, AttentionInputs, BackendCapabilities, KVPool
from pipeinfer.kernels.formats import E4M3, KVScales, dequantize_e4m3
from pipeinfer.step import AttentionShape

NEVER = float("-inf")


@dataclass(frozen=True)
class LengthBucket:
    """Rows begin..end-1 of the sorted decode rows, padded to `longest` keys.

    Attributes:
    - kv_locations: int64 [rows * longest]; padding reads the dummy page
    - bias: [rows, 1, 1, longest], 0 or -inf; None if nothing is padded
    """

    begin: int
    end: int
    longest: int
    kv_locations: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """Queries first .. first + count - 1 of the step's tokens.

    Attributes:
    - kv_locations: int64 [keys], *the last key first*; None if the keys are exactly those of the
      chunk (then plain causal attention does)
    - bias: [count, keys] over the keys in that order
    """

    first: int
    count: int
    kv_locations: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True)
class TorchWindowMetadata:
    """Metadata that the layers with the same sliding window share.

    Attributes:
    - order: int64 [decodes], longest first; None without decodes, and if one bucket has all rows of
      the step in their order
    """

    order: torch.Tensor | None
    buckets: list[LengthBucket]
    chunks: list[PrefillChunk]


TorchMetadata = dict[int | None, TorchWindowMetadata]  # metadata of one step, by sliding window


class TorchBackend:
    """Attention backend `torch`; takes any page size and any mix of rows.

    The keys of a whole prompt are the step's own: they are not gathered from their pages.
    """

    traits = BackendCapabilities(page_sizes=None, preferred_page_size=16, needs_kv=True)

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._windows = {shape.sliding_window for shape in self._shapes}
        self._device = device
        self._page_size = 0
        self._dtype = torch.float32
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        self._scales: tuple[KVScales, ...] = ()
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """Sets the pool, see Attention.bind. The methods below without a docstring are those of
        Attention, too.
        """
        self._page_size = pool.page_size
        self._dtype = pool.dtype
        self._k, self._v = pool.token_views()
        if pool.storage_dtype == E4M3:  # bytes are gathered on every device
            self._k, self._v = ([x.view(torch.uint8) for x in part] for part in (self._k, self._v))
        self._scales = pool.scales
        self._scratch = None

    def build_metadata(self, inputs: AttentionInputs) -> TorchMetadata:
        """Builds the metadata from the step's arrays: on a GPU this waits for the steps before."""
        step = inputs.step
        lengths, queries = _on_host(step.seq_lens), _on_host(step.qo_indptr)
        pages = RowPages(_on_host(step.kv_indptr), _on_host(step.kv_indices), self._page_size)
        rows = lengths, queries, pages, step.shape.num_decodes
        return {window: self._window(*rows, window) for window in self._windows}

    def attend(
        self, layer: int, q: torch.Tensor, k: KV, v: KV, metadata: TorchMetadata
    ) -> torch.Tensor:
        assert k is not None and v is not None, "this backend needs_kv"
        shape = self._shapes[layer]
        within = metadata[shape.sliding_window]
        if within.order is None and len(within.buckets) == 1:
            return self._decode(layer, shape, q, within.buckets[0])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if within.order is not None:
            # sorted once, so that every bucket is a slice
            rows = q.index_select(0, within.order)
            done = torch.empty_like(rows)
            for bucket in within.buckets:
                done[bucket.begin : bucket.end] = self._decode(layer, shape, rows, bucket)
            out.index_copy_(0, within.order, done)
        for chunk in within.chunks:
            tokens = slice(chunk.first, chunk.first + chunk.count)
            out[tokens] = self._prefill(layer, shape, q[tokens], k[tokens], v[tokens], chunk)
        return out

    # ------------------------------------------------------------------------------------- a step

    def _window(
        self,
        lengths: np.ndarray,
        queries: np.ndarray,
        pages: RowPages,
        decodes: int,
        window: int | None,
    ) -> TorchWindowMetadata:
        chunks = [
            self._prefill_chunk(pages, window, chunk)
            for chunk in prefill_chunks(lengths, queries, decodes, window)
        ]
        if decodes == 0:
            return TorchWindowMetadata(None, [], chunks)
        firsts, seen = key_spans(lengths[:decodes], window)
        order, bounds = length_buckets(seen)
        buckets = [
            self._bucket(pages, order[begin:end], firsts, seen, begin) for begin, end in bounds
        ]
        if len(buckets) == 1 and not chunks and (order == np.arange(decodes)).all():
            return TorchWindowMetadata(None, buckets, chunks)
        return TorchWindowMetadata(self._tensor(order), buckets, chunks)

    def _bucket(
        self,
        pages: RowPages,
        rows: np.ndarray,
        firsts: np.ndarray,
        lengths: np.ndarray,
        begin: int,
    ) -> LengthBucket:
        longest = int(lengths[rows[0]])
        steps = np.arange(longest)
        padding = steps >= lengths[rows, None]
        at = np.where(padding, 0, firsts[rows, None] + steps)
        kv_locations = pages.kv_locations(rows[:, None], at)
        kv_locations[padding] = 0  # the dummy page's first token: finite, and of no request
        bias = None
        if padding[-1, -1]:
            bias = np.where(padding, np.float32(NEVER), np.float32(0))[:, None, None, :]
            bias = self._tensor(bias).to(self._dtype)
        return LengthBucket(
            begin, begin + len(rows), longest, self._tensor(kv_locations.reshape(-1)), bias
        )

    def _prefill_chunk(self, pages: RowPages, window: int | None, chunk: QuerySpan) -> PrefillChunk:
        count, keys = chunk.count, chunk.keys
        if keys == count and (window is None or count <= window):
            return PrefillChunk(chunk.first, count, None, None)
        at = np.arange(chunk.key_start + keys - 1, chunk.key_start - 1, -1)
        kv_locations = pages.kv_locations(chunk.row, at)
        # With the keys reversed, query i sees key j iff count-1 <= i + j < count-1 + window: one
        # vector, read with strides (1, 1), is the whole mask in count + keys floats.
        band = torch.full((count + keys - 1,), NEVER, dtype=self._dtype, device=self._device)
        band[count - 1 : None if window is None else count - 1 + window] = 0
        bias = band.as_strided((count, keys), (1, 1))
        return PrefillChunk(chunk.first, count, self._tensor(kv_locations), bias)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    # ------------------------------------------------------------------------------------ a layer

    def _decode(
        self, layer: int, shape: AttentionShape, rows: torch.Tensor, bucket: LengthBucket
    ) -> torch.Tensor:
        """Sorted rows [R, heads, head_dim]; returns the bucket's [rows, heads, head_dim]."""
        size = bucket.end - bucket.begin
        k, v = self._gather(layer, bucket.kv_locations)
        keys = (size, bucket.longest, shape.num_kv_heads, shape.head_dim)
        # The query heads of one KV head stand as its queries: nothing is repeated for GQA.
        queries = (size, shape.num_kv_heads, -1, shape.head_dim)
        q = rows[bucket.begin : bucket.end].view(queries)
        k, v = k.view(keys).transpose(1, 2), v.view(keys).transpose(1, 2)
        if is_unfused(shape):
            sinks = shape.sinks
            sinks = None if sinks is None else sinks.view(shape.num_kv_heads, -1, 1)
            out = attend_unfused(shape, q, k, v, bucket.bias, sinks)
        else:
            mask = self._expanded(bucket.bias, shape)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale)
        return out.reshape(size, shape.num_heads, shape.head_dim)

    def _expanded(self, bias: torch.Tensor | None, shape: AttentionShape) -> torch.Tensor | None:
        queries = shape.num_heads // shape.num_kv_heads
        return None if bias is None else bias.expand(-1, -1, queries, -1)

    def _prefill(
        self,
        layer: int,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk: PrefillChunk,
    ) -> torch.Tensor:
        """q [n, heads, head_dim], the step's own k, v [n, kv_heads, head_dim]; q's shape."""
        if chunk.kv_locations is not None:
            k, v = self._gather(layer, chunk.kv_locations)
            k = k.view(-1, shape.num_kv_heads, shape.head_dim)
            v = v.view(-1, shape.num_kv_heads, shape.head_dim)
        if is_unfused(shape):
            return self._prefill_unfused(shape, q, k, v, chunk)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=chunk.bias,
            is_causal=chunk.kv_locations is None,
            scale=shape.scale,
            enable_gqa=shape.num_kv_heads != shape.num_heads,
        )
        return out[0].transpose(0, 1)

    def _prefill_unfused(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk: PrefillChunk,
    ) -> torch.Tensor:
        """Attends as _prefill does, one KV head after the other: scores of all heads at once take
        too much memory.
        """
        bias = chunk.bias
        if bias is None:
            count = (chunk.count, chunk.count)
            bias = torch.full(count, NEVER, dtype=self._dtype, device=q.device).triu_(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        group = shape.num_heads // shape.num_kv_heads
        for head in range(shape.num_kv_heads):
            of_head = slice(head * group, (head + 1) * group)
            sinks = None if shape.sinks is None else shape.sinks[of_head, None, None]
            queries = q[:, of_head].transpose(0, 1)
            found = attend_unfused(shape, queries, k[:, head], v[:, head], bias, sinks)
            out[:, of_head] = found.transpose(0, 1)
        return out

    def _gather(self, layer: int, kv_locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `kv_locations`, [n, kv_heads * head_dim]; valid until the next gather.

        Into buffers that stay: fresh memory of that size costs more in page faults than the copy.
        """
        flat_k, flat_v = self._k[layer], self._v[layer]
        need = len(kv_locations) * flat_k.shape[1]
        if self._scratch is None or len(self._scratch[0]) < need:
            size = 1 << (need - 1).bit_length()
            self._scratch = (flat_k.new_empty(size), flat_v.new_empty(size))
        k, v = (buffer[:need].view(len(kv_locations), -1) for buffer in self._scratch)
        torch.index_select(flat_k, 0, kv_locations, out=k)
        torch.index_select(flat_v, 0, kv_locations, out=v)
        if k.dtype != torch.uint8:
            return k, v
        scales = self._scales[layer]
        k, v = k.view(E4M3), v.view(E4M3)
        return dequantize_e4m3(k, scales.k, self._dtype), dequantize_e4m3(v, scales.v, self._dtype)


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    """Returns the numbers on the host; for a tensor of the CPU in the same memory."""
    return tensor.cpu().numpy()


# Rows of one bucket share a padded [rows, longest] gather. A bucket ends where it would hold more
# tokens than this (so that the gathered keys are still in the cache when they are read) ...
BUCKET_TOKENS = 2048
# ... or where a row is shorter than this share of the bucket's longest (so that little is padding).
BUCKET_SHORTEST = 0.8
# Rows behind a sliding window are cut into chunks of at least that many queries.
WINDOW_CHUNK = 128


@dataclass(frozen=True)
class QuerySpan:
    """Consecutive queries of one row: tokens first..first+count-1 of the step, from `start` on.

    The keys that they see are positions key_start .. start+count-1.
    """

    row: int
    first: int
    count: int
    start: int
    key_start: int

    @property
    def keys(self) -> int:
        """Number of keys that the chunk reads."""
        return self.start + self.count - self.key_start


@dataclass(frozen=True)
class RowPages:
    """Pages of rows: position p of row r lies in page indices[indptr[r] + p // page_size]."""

    indptr: np.ndarray
    indices: np.ndarray
    page_size: int

    def kv_locations(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """int64 kv_locations of `positions` of `rows` (broadcast against each other)."""
        page, offset = np.divmod(positions, self.page_size)
        return self.indices[self.indptr[rows] + page].astype(np.int64) * self.page_size + offset


def key_spans(lengths: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns (first key's position, number of keys), int64 [decodes] each, of single-token rows of
    that many tokens.
    """
    ends = lengths.astype(np.int64)
    firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    return firsts, ends - firsts


def length_buckets(lengths: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Cuts rows with that many keys into buckets of similar length.

    Returns (order, bounds): `order` sorts the rows by falling length; bucket i is
    order[bounds[i][0] : bounds[i][1]], its longest row first.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    bounds = []
    begin = 0
    while begin < len(order):
        longest = int(falling[begin])
        most = begin + max(BUCKET_TOKENS // longest, 1)
        alike = int(np.searchsorted(-falling, -longest * BUCKET_SHORTEST, side="right"))
        end = min(most, max(alike, begin + 1), len(order))
        bounds.append((begin, end))
        begin = end
    return order, bounds


def prefill_chunks(
    lengths: np.ndarray, q_indptr: np.ndarray, decodes: int, window: int | None
) -> Iterator[QuerySpan]:
    """The rows after the `decodes`; under a sliding window long rows come in several chunks.

    Without the cut, every query of a long row would read the keys of all its windows. The arrays
    are DeviceStep's.
    """
    for row in range(decodes, len(lengths)):
        first, count = int(q_indptr[row]), int(q_indptr[row + 1] - q_indptr[row])
        start = int(lengths[row]) - count
        size = count if window is None else max(window, WINDOW_CHUNK)
        for offset in range(0, count, size):
            begin = start + offset
            key_start = 0 if window is None else max(begin + 1 - window, 0)
            yield QuerySpan(row, first + offset, min(size, count - offset), begin, key_start)


def is_unfused(shape: AttentionShape) -> bool:
    """Whether heads of that shape need `attend_unfused`."""
    return shape.sinks is not None or shape.soft_cap is not None


def attend_unfused(
    shape: AttentionShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by separate operations; returns [..., queries, dim]. Weights in float32.

    - shape: scale and soft cap of the layer
    - q: [..., queries, dim]
    - k, v: [..., keys, dim]
    - bias: [.., queries, keys]; None: none
    - sinks: [..., 1 or queries, 1]; None: none

    All tensors but q are broadcast.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * shape.scale
    if shape.soft_cap is not None:
        scores = torch.tanh(scores / shape.soft_cap) * shape.soft_cap
    if bias is not None:
        scores += bias
    if sinks is None:
        return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
    sinks = sinks.float()
    most = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = (scores - most).exp_()
    weights /= weights.sum(dim=-1, keepdim=True) + (sinks - most).exp()
    return torch.matmul(weights.to(v.dtype), v)
