"""Random steps over a pool, and what attention must give for them, computed densely in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from device_steps import device_step
from pipeinfer.attention.interface import AttentionInputs, KVPool
from pipeinfer.attention.torch_backend import RowPages
from pipeinfer.engine.step_builder import filled
from pipeinfer.kernels.interface import StepShape
from pipeinfer.step import AttentionShape, Step
from step_pages import all_pages, pages_of


@dataclass
class Case:
    """One step, its layers' shapes, and per layer and row all K and V up to the row's end."""

    step: Step
    pool: KVPool
    shapes: list[AttentionShape]
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]
    queries: list[torch.Tensor]

    @property
    def pages(self) -> np.ndarray:
        """int32 [R, P] of the step's rows."""
        return pages_of(self.step, self.pool.page_size)

    def tokens(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The step's own part of per-row tensors, flattened to [T, heads, head_dim]."""
        starts = self.step.starts
        return torch.cat([row[start:] for row, start in zip(rows, starts, strict=True)])

    def stored(self, layer: int) -> list[torch.Tensor]:
        """K and V of the step's tokens, which the pool gets as whoever calls a backend does it."""
        row = np.repeat(np.arange(len(self.step.counts)), self.step.counts)
        ends = np.cumsum(self.step.counts)
        first = np.repeat(self.step.starts - (ends - self.step.counts), self.step.counts)
        width = self.pages.shape[1]
        indptr = np.arange(len(self.pages)) * width
        pages = RowPages(indptr, self.pages.reshape(-1), self.pool.page_size)
        at = pages.kv_locations(row, first + np.arange(len(row)))
        both = [self.tokens(part[layer]) for part in (self.keys, self.values)]
        for flat, new in zip(self.pool.token_views(), both, strict=True):
            flat[layer][torch.from_numpy(at)] = new.flatten(1)
        return both


def attention_inputs(step: Step, pages: np.ndarray) -> AttentionInputs:
    """Of a step without a graph, `pages` int32 [R, P]; what a CPU's plans do not read is empty."""
    ints = {
        "seq_lens": step.starts + step.counts,
        "qo_indptr": np.concatenate(([0], np.cumsum(step.counts))),
        "kv_indptr": np.arange(len(pages) + 1) * pages.shape[1],
        "kv_indices": pages.reshape(-1),
    }
    views = {name: torch.from_numpy(values.astype(np.int32)) for name, values in ints.items()}
    shape = StepShape(len(step.tokens), step.num_decodes, len(step.slots) - step.num_decodes)
    longest = int(step.counts.max(initial=0))
    return AttentionInputs(device_step(shape, **views), longest, pages.shape[1])


def make_case(
    shapes: list[AttentionShape],
    spans: list[tuple[int, int]],
    page_size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`spans`: (start, count) of each row; those of one token are put first.

    Prefixes lie in the pool on permuted pages. Everything else but the dummy page is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    spans = sorted(spans, key=lambda span: span[1] != 1)
    step = make_step(spans, page_size, seed)
    pages = pages_of(step, page_size)
    pool = KVPool(shapes, int(pages.max(initial=0)) + 3, page_size, dtype)
    keys, values, queries = [], [], []
    total = sum(count for _, count in spans)
    for layer, shape in enumerate(shapes):
        pool.k[layer][1:] = float("nan")
        pool.v[layer][1:] = float("nan")
        size = (shape.num_kv_heads, shape.head_dim)
        ends = [start + count for start, count in spans]
        keys.append([torch.randn(end, *size, generator=generator).to(dtype) for end in ends])
        values.append([torch.randn(end, *size, generator=generator).to(dtype) for end in ends])
        q = torch.randn(total, shape.num_heads, shape.head_dim, generator=generator)
        queries.append(q.to(dtype))
        for row, (start, _) in enumerate(spans):
            for position in range(start):
                page, offset = divmod(position, page_size)
                page = int(pages[row, page])
                pool.k[layer][page, offset] = keys[-1][row][position]
                pool.v[layer][page, offset] = values[-1][row][position]
    return Case(step, pool, shapes, keys, values, queries)


def make_step(spans: list[tuple[int, int]], page_size: int, seed: int) -> Step:
    """A step of rows (start, count) on distinct pages in random order; no row samples."""
    needed = [-(-(start + count) // page_size) for start, count in spans]
    order = np.random.default_rng(seed).permutation(sum(needed)) + 1
    pages = np.zeros((len(spans), max(needed, default=0)), dtype=np.int32)
    slots = np.arange(len(spans), dtype=np.int32)
    for row, count in enumerate(needed):
        pages[row, :count], order = order[:count], order[count:]
    counts = np.array([count for _, count in spans], dtype=np.int32)
    return Step(
        epoch=0,
        number=0,
        num_decodes=int((counts == 1).sum()),
        slots=slots,
        starts=np.array([start for start, _ in spans], dtype=np.int32),
        counts=counts,
        samples=np.zeros(len(spans), dtype=bool),
        tokens=np.zeros(int(counts.sum()), dtype=np.int32),
        fields=filled(0),
        delta=all_pages(slots, pages),
    )


def dense(case: Case, layer: int) -> torch.Tensor:
    """[T, heads, head_dim] float64: every query by itself, no paging, no masks."""
    shape = case.shapes[layer]
    group = shape.num_heads // shape.num_kv_heads
    out = []
    token = 0
    for row, (start, count) in enumerate(zip(case.step.starts, case.step.counts, strict=True)):
        for position in range(int(start), int(start + count)):
            first = 0
            if shape.sliding_window is not None:
                first = max(position + 1 - shape.sliding_window, 0)
            k = case.keys[layer][row][first : position + 1].double()
            v = case.values[layer][row][first : position + 1].double()
            q = case.queries[layer][token].double().view(shape.num_kv_heads, group, -1)
            scores = torch.einsum("hgd,lhd->hgl", q, k).mul(shape.scale)
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            if shape.sinks is not None:
                sinks = shape.sinks.double().view(shape.num_kv_heads, group, 1)
                scores = torch.cat((scores, sinks), dim=-1)
            weights = scores.softmax(-1)[..., : len(k)]
            out.append(torch.einsum("hgl,lhd->hgd", weights, v).reshape(shape.num_heads, -1))
            token += 1
    return torch.stack(out)
