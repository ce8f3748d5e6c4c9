"""Paged attention with torch operations only: for the CPU, and the reference of other backends.

Knows a step's rows and the pool; no request, no model. Decode rows are gathered in buckets of
similar length and attended to together; rows with several tokens go one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeinfer.attention import step_index
from pipeinfer.attention.interface import KV, PlanInputs, Traits
from pipeinfer.attention.step_index import Piece, RowPages
from pipeinfer.attention.unfused import attend_unfused, is_unfused
from pipeinfer.kernels.e4m3 import E4M3, Scales, widened
from pipeinfer.memory.pool import KVPool
from pipeinfer.steps.shape import AttentionShape

NEVER = float("-inf")


@dataclass(frozen=True)
class LengthBucket:
    """Rows begin..end-1 of the sorted decode rows, padded to `longest` keys.

    places: int64 [rows * longest]; padding reads the dummy page. bias: [rows, 1, 1, longest], 0 or
    -inf, None if nothing is padded.
    """

    begin: int
    end: int
    longest: int
    places: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class PrefillPiece:
    """Queries first..first+count-1 of the step's tokens.

    places: int64 [keys], *the last key first*, None if the keys are exactly those of the piece
    (then plain causal attention does). bias: [count, keys] over the keys in that order.
    """

    first: int
    count: int
    places: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True)
class WindowPlan:
    """What the layers with the same sliding window share. order: int64 [decodes], longest first."""

    order: torch.Tensor | None
    buckets: list[LengthBucket]
    pieces: list[PrefillPiece]


TorchPlan = dict[int | None, WindowPlan]  # of one step, by sliding window


class TorchBackend:
    """Attention backend `torch`; takes any page size and any mix of rows.

    The keys of a whole prompt are the step's own: they are not gathered from their pages.
    """

    traits = Traits(page_sizes=None, preferred_page_size=16, needs_kv=True)

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._windows = {shape.sliding_window for shape in self._shapes}
        self._device = device
        self._page_size = 0
        self._dtype = torch.float32
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        self._scales: tuple[Scales, ...] = ()
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, pool: KVPool, most_rows: int) -> None:
        """See interface.py, here and below."""
        self._page_size = pool.page_size
        self._dtype = pool.dtype
        self._k, self._v = pool.by_place()
        if pool.stored == E4M3:  # as bytes, which are gathered on every device
            self._k, self._v = ([x.view(torch.uint8) for x in part] for part in (self._k, self._v))
        self._scales = pool.scales
        self._scratch = None

    def plan(self, inputs: PlanInputs) -> TorchPlan:
        """Reads the step's arrays where they are: on a GPU that waits for the steps before."""
        step = inputs.step
        lengths, queries = _on_host(step.seq_lens), _on_host(step.qo_indptr)
        pages = RowPages(_on_host(step.kv_indptr), _on_host(step.kv_indices), self._page_size)
        rows = lengths, queries, pages, step.shape.decodes
        return {window: self._window(*rows, window) for window in self._windows}

    def attend(self, layer: int, q: torch.Tensor, k: KV, v: KV, plan: TorchPlan) -> torch.Tensor:
        assert k is not None and v is not None, "this backend needs_kv"
        shape = self._shapes[layer]
        within = plan[shape.sliding_window]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if within.order is not None:
            # sorted once, so that every bucket is a slice
            rows = q.index_select(0, within.order)
            done = torch.empty_like(rows)
            for bucket in within.buckets:
                done[bucket.begin : bucket.end] = self._decode(layer, shape, rows, bucket)
            out.index_copy_(0, within.order, done)
        for piece in within.pieces:
            tokens = slice(piece.first, piece.first + piece.count)
            out[tokens] = self._prefill(layer, shape, q[tokens], k[tokens], v[tokens], piece)
        return out

    # ------------------------------------------------------------------------------------- a step

    def _window(
        self,
        lengths: np.ndarray,
        queries: np.ndarray,
        pages: RowPages,
        decodes: int,
        window: int | None,
    ) -> WindowPlan:
        pieces = [
            self._piece(pages, window, piece)
            for piece in step_index.pieces(lengths, queries, decodes, window)
        ]
        if decodes == 0:
            return WindowPlan(None, [], pieces)
        firsts, seen = step_index.key_spans(lengths[:decodes], window)
        order, bounds = step_index.length_buckets(seen)
        buckets = [
            self._bucket(pages, order[begin:end], firsts, seen, begin) for begin, end in bounds
        ]
        return WindowPlan(self._tensor(order), buckets, pieces)

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
        places = pages.places(rows[:, None], at)
        places[padding] = 0  # the dummy page's first token: finite, and nobody's
        bias = None
        if padding[-1, -1]:
            bias = np.where(padding, np.float32(NEVER), np.float32(0))[:, None, None, :]
            bias = self._tensor(bias).to(self._dtype)
        return LengthBucket(
            begin, begin + len(rows), longest, self._tensor(places.reshape(-1)), bias
        )

    def _piece(self, pages: RowPages, window: int | None, piece: Piece) -> PrefillPiece:
        count, keys = piece.count, piece.keys
        if keys == count and (window is None or count <= window):
            return PrefillPiece(piece.first, count, None, None)
        at = np.arange(piece.key_start + keys - 1, piece.key_start - 1, -1)
        places = pages.places(piece.row, at)
        # With the keys reversed, query i sees key j iff count-1 <= i + j < count-1 + window: one
        # vector, read with strides (1, 1), is the whole mask in count + keys floats.
        band = torch.full((count + keys - 1,), NEVER, dtype=self._dtype, device=self._device)
        band[count - 1 : None if window is None else count - 1 + window] = 0
        bias = band.as_strided((count, keys), (1, 1))
        return PrefillPiece(piece.first, count, self._tensor(places), bias)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    # ------------------------------------------------------------------------------------ a layer

    def _decode(
        self, layer: int, shape: AttentionShape, rows: torch.Tensor, bucket: LengthBucket
    ) -> torch.Tensor:
        """Sorted rows [R, heads, head_dim]; returns the bucket's [rows, heads, head_dim]."""
        size = bucket.end - bucket.begin
        k, v = self._gather(layer, bucket.places)
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
        piece: PrefillPiece,
    ) -> torch.Tensor:
        """q [n, heads, head_dim], the step's own k, v [n, kv_heads, head_dim]; q's shape."""
        if piece.places is not None:
            k, v = self._gather(layer, piece.places)
            k = k.view(-1, shape.num_kv_heads, shape.head_dim)
            v = v.view(-1, shape.num_kv_heads, shape.head_dim)
        if is_unfused(shape):
            return self._prefill_unfused(shape, q, k, v, piece)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=piece.bias,
            is_causal=piece.places is None,
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
        piece: PrefillPiece,
    ) -> torch.Tensor:
        """As _prefill, one KV head after the other: scores of all at once take too much memory."""
        bias = piece.bias
        if bias is None:
            count = (piece.count, piece.count)
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

    def _gather(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `places`, [n, kv_heads * head_dim]; valid until the next gather.

        Into buffers that stay: fresh memory of that size costs more in page faults than the copy.
        """
        flat_k, flat_v = self._k[layer], self._v[layer]
        need = len(places) * flat_k.shape[1]
        if self._scratch is None or len(self._scratch[0]) < need:
            size = 1 << (need - 1).bit_length()
            self._scratch = (flat_k.new_empty(size), flat_v.new_empty(size))
        k, v = (buffer[:need].view(len(places), -1) for buffer in self._scratch)
        torch.index_select(flat_k, 0, places, out=k)
        torch.index_select(flat_v, 0, places, out=v)
        if k.dtype != torch.uint8:
            return k, v
        scales = self._scales[layer]
        k, v = k.view(E4M3), v.view(E4M3)
        return widened(k, scales.k, self._dtype), widened(v, scales.v, self._dtype)


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    """Of a tensor of the CPU the same memory."""
    return tensor.cpu().numpy()
