"""Measurement of what steps take on this GPU: dummy steps of all sizes, by graphs or without, are
timed.

All ranks of a group measure the same steps in the same order, because steps hold collectives. Dummy
steps belong to no request: they warm up, measure, or are captured. They write to the dummy page,
and leave nothing in the first slots that a later step reads. Uses sizes and arrays of steps; no
request, and no purpose of the times.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pipeinfer.engine.graphs import DECODES, Graphs, StepCapacity, decode_only, uncaptured_shapes
from pipeinfer.engine.step_builder import filled
from pipeinfer.kernels.interface import StepShape
from pipeinfer.params import MAX_LOGPROBS
from pipeinfer.step import (
    LogprobRows,
    MaskRows,
    PenaltyRows,
    RequestLogitEdits,
    SharedPrefixes,
    Step,
    StepDelta,
)
from pipeinfer.step_cost import PER_SECOND, StepCost
from pipeinfer.wire import PREFIX_UPPER

REPLAYS = 3
ROWS = frozenset((1, 8, 16, 32, 64, 96, 128, 192))  # decode rows; the largest number, too
CONTEXT = 1024  # tokens before each decode where their price is measured
DEPTH, LEAST_DEPTH = 2048, 512  # tokens of a prompt before the measured ones
SLOWER = 105  # percent of a larger step's time from which on a step is called slow
FULL = 2048  # tokens of a step, beyond which its time grows evenly: only the largest is measured


@dataclass(frozen=True)
class PageGeometry:
    """Sizes of a row's pages.

    Attributes:
    - pages: pages of the longest row
    - page_size: tokens of a page
    """

    pages: int
    page_size: int


def measured(
    graphs: Graphs,
    largest: tuple[int, int],
    frame: PageGeometry,
    pages: int,
    replayed: Callable[[StepShape, Step], float],
    run: Callable[[Step], float],
) -> StepCost | None:
    """Measures step_cost(): of the graphs' shapes if there are graphs, else of steps up to
    `largest` (rows, tokens).

    - replayed: returns the device's seconds for a step by the graph of that shape
    - run: returns the device's seconds for a step kernel by kernel
    """
    max_rows, max_tokens = largest
    max_tokens = min(max_tokens, max_rows * (frame.pages - 1) * frame.page_size)  # all of all rows
    decode_rows = tuple(sorted({*(rows for rows in ROWS if rows < max_rows), max_rows}))

    def seconds(shape: StepShape, step: Step) -> float:
        at = graphs.like(shape, step)
        if at is None:
            return min(run(step) for _ in range(REPLAYS))
        return replayed(at, step)

    return step_cost(
        graphs.decodes or decode_rows,
        graphs.captured_or_deferred or uncaptured_shapes(max_tokens, max_rows),
        frame,
        pages,
        lambda rows, step: seconds(decode_only(rows), step),
        seconds,
    )


def step_cost(
    rows: Sequence[int],
    sizes: Sequence[StepShape],
    frame: PageGeometry,
    pages: int,
    of_decodes: Callable[[int, Step], float],
    of_prompts: Callable[[StepShape, Step], float],
) -> StepCost | None:
    """Measures the cost of steps on the current stream; None without shapes of prompts beside
    decodes, or if a row has only one page.

    - rows: numbers of rows of steps of decodes alone, ascending
    - sizes: shapes of steps with prompts, ascending
    - pages: of the pool, the dummy included
    - of_decodes, of_prompts: return the seconds of such a step
    """
    mixed = [size for size in sizes if size.num_decodes]
    longest = (frame.pages - 1) * frame.page_size
    if not mixed or not longest:
        return None

    def decode_time(rows: int, deep: int) -> int:
        step = deep_decodes(rows, deep, frame.page_size)
        return round(of_decodes(rows, step) * PER_SECOND)

    timed = priced(_with_prompts(mixed, longest, frame, of_prompts))
    together = without_outliers(interpolated(timed, [size.num_tokens for size in mixed], longest))
    measured = [count for count in rows if count in ROWS or count == rows[-1]]
    shallow = {some: decode_time(some, 0) for some in measured}
    deep_rows = max((some for some in measured if some <= DECODES), default=measured[0])
    deep = min(frame.pages - 1, (pages - 1) // deep_rows, -(-CONTEXT // frame.page_size))
    extra = max(decode_time(deep_rows, deep) - shallow[deep_rows], 0)
    each = extra // (deep_rows * deep * frame.page_size) if deep else 0
    return StepCost(tuple(shallow.items()), tuple(together), each)


def _with_prompts(
    sizes: Sequence[StepShape],
    longest: int,
    frame: PageGeometry,
    seconds: Callable[[StepShape, Step], float],
) -> list[tuple[int, int, int | None]]:
    """Returns StepCost.mixed for sizes up to FULL tokens, and for the largest; for each number of
    tokens, of the shape with the fewest decodes. The cost of depth is None if a prompt cannot be
    deep.
    """

    def amid(size: StepShape, depth: int) -> int:
        return round(seconds(size, amid_prompts(size, longest, depth, frame)) * PER_SECOND)

    found: list[tuple[int, int, int | None]] = []
    for tokens, size in sorted({size.num_tokens: size for size in reversed(sizes)}.items()):
        if FULL < tokens < sizes[-1].num_tokens:
            continue
        begun, depth = amid(size, 0), min(DEPTH, longest - tokens)
        deep = depth >= LEAST_DEPTH
        found.append((tokens, begun, max(amid(size, depth) - begun, 0) // depth if deep else None))
    return found


def priced(sizes: Sequence[tuple[int, int, int | None]]) -> list[tuple[int, int, int]]:
    """Completes `sizes` (tokens, time, extra), ascending: an `extra` of None becomes, by the token,
    that of the largest size that has one; 0 if none has.
    """
    last, price = next(
        ((size, extra) for size, _, extra in sizes[::-1] if extra is not None), (1, 0)
    )
    return [
        (tokens, time, price * tokens // last if more is None else more)
        for tokens, time, more in sizes
    ]


def interpolated(
    sizes: Sequence[tuple[int, int, int]], every: Sequence[int], longest: int
) -> list[tuple[int, int, int]]:
    """Returns `sizes` (tokens, time, extra) ascending, with interpolated entries for the other
    numbers of tokens in `every`. longest: tokens of a prompt at most.

    One part of a step's time is for pairs of a prompt's tokens, and grows with the square of their
    number. The cost of a pair follows from `extra`, the time of as many pairs as there are tokens;
    that of the smaller step is taken, since a larger one's may be measured too long, or its prompts
    may not be longer. The remaining time is interpolated linearly.
    """
    found = {size[0]: size for size in sizes}
    for tokens in every:
        if tokens in found:
            continue
        low = max(size for size in sizes if size[0] < tokens)
        high = min(size for size in sizes if size[0] > tokens)
        fraction = (tokens - low[0]) / (high[0] - low[0])
        price = low[2] / low[0]
        first, last = (time - price * _pairs(size, longest) for size, time, _ in (low, high))
        time = round(first + fraction * (last - first) + price * _pairs(tokens, longest))
        found[tokens] = tokens, time, round(low[2] + fraction * (high[2] - low[2]))
    return sorted(found.values())


def _pairs(tokens: int, longest: int) -> float:
    """Returns the pairs of tokens of the same prompt in a step of `tokens` tokens, as in
    `amid_prompts`.
    """
    return tokens * tokens / _prompts(tokens, longest) / 2


def _prompts(tokens: int, longest: int) -> int:
    """Returns the least number of prompts that have `tokens` tokens."""
    return -(-tokens // longest)


def slow(cost: StepCost) -> frozenset[int]:
    """Returns numbers of tokens of steps with prompts that take longer than larger steps: libraries
    do not choose an equally good kernel for each number of rows.
    """
    found: set[int] = set()
    least = cost.mixed[-1][1]
    for tokens, time, _ in reversed(cost.mixed):
        if time > least * SLOWER // 100:
            found.add(tokens)
        least = min(least, time)
    return frozenset(found)


def padded(cost: StepCost, slow_sizes: Container[int]) -> StepCost:
    """Returns `cost` with steps of the numbers of tokens in `slow_sizes`, but the largest, padded
    to the next larger size.
    """
    sizes: list[tuple[int, int, int]] = []
    for tokens, time, extra in reversed(cost.mixed):
        sizes.append((tokens, sizes[-1][1] if tokens in slow_sizes else time, extra))
    return msgspec.structs.replace(cost, mixed=tuple(sizes[::-1]))


def without_outliers(sizes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns `sizes` (tokens, time, extra), ascending, with each `extra` bounded by that of the
    larger sizes.

    A measurement is at times too long, never too short: one such time, five times too high, kept
    steps of that size from being made at all.
    """
    found: list[tuple[int, int, int]] = []
    least = sizes[-1][2]
    for tokens, begun, extra in reversed(sizes):
        least = min(least, extra)
        found.append((tokens, begun, least))
    return found[::-1]


def amid_prompts(size: StepShape, longest: int, depth: int, frame: PageGeometry) -> Step:
    """Returns a step of `size` tokens with as few prompts as possible, each after `depth` tokens.
    longest: tokens of a row at most.
    """
    prompts = _prompts(size.num_tokens, longest)
    decodes = max(size.num_decodes - prompts, 0)
    each, remainder = divmod(size.num_tokens - decodes, prompts)
    counts = [each + (prompt < remainder) for prompt in range(prompts)]
    return deep_prompts(decodes, counts, depth, frame.page_size)


USUAL = {"temperature": 1.0}  # sampling fields of most requests
LARGE_TOP_K = 20


def dummy_step(
    counts: np.ndarray,
    page_size: int,
    starts: np.ndarray | None = None,
    distinct_pages: bool = False,
    **fields: float,
) -> Step:
    """Returns a step of rows with `counts` int32 tokens each (ones first), all of which sample. The
    rows lie in the first slots and compute into the dummy page.

    - starts: int32, tokens before each row; None: 0
    - distinct_pages: the tokens before a row lie in pages that no other row has; else in the dummy
      page, too
    - fields: sampling fields of all rows, by the names of engine/step_builder.py
    """
    rows, values = len(counts), filled(len(counts), **(USUAL | fields))
    starts = np.zeros(rows, dtype=np.int32) if starts is None else starts
    slots, num_pages = np.arange(rows, dtype=np.int32), -(-(starts + counts) // page_size)
    slot = np.repeat(slots, num_pages)
    column = np.arange(len(slot), dtype=np.int32) - np.repeat(
        np.cumsum(num_pages) - num_pages, num_pages
    )
    before = (
        column < np.repeat(starts // page_size, num_pages)
        if distinct_pages
        else np.zeros(len(slot), bool)
    )
    pages = np.where(before, np.cumsum(before), 0).astype(np.int32)
    return Step(
        epoch=0,
        number=0,
        num_decodes=int((counts == 1).sum()),
        slots=slots,
        starts=starts,
        counts=counts,
        samples=np.ones(rows, dtype=bool),
        tokens=np.zeros(int(counts.sum()), dtype=np.int32),
        fields=values,
        delta=StepDelta(slot, column.astype(np.int32), pages, admitted=slots, fields=values),
    )


def page_step(ids: np.ndarray, pages: np.ndarray, start: int) -> Step:
    """Returns a step that computes `ids` int32 [n] at positions start .. start + n - 1 of `pages`
    int32, in the first slot. The sampled id belongs to no request.
    """
    usual, slot = filled(1, **USUAL), np.zeros(1, dtype=np.int32)
    columns = np.arange(len(pages), dtype=np.int32)
    where = np.zeros(len(pages), dtype=np.int32)
    return Step(
        epoch=0,
        number=0,
        num_decodes=int(len(ids) == 1),
        slots=slot,
        starts=np.full(1, start, dtype=np.int32),
        counts=np.full(1, len(ids), dtype=np.int32),
        samples=np.ones(1, dtype=bool),
        tokens=ids.astype(np.int32),
        fields=usual,
        delta=StepDelta(where, columns, pages.astype(np.int32), admitted=slot, fields=usual),
    )


def largest_step(largest: StepCapacity, page_size: int, max_model_len: int) -> Step:
    """Returns a step of all rows and all tokens, in the dummy page. Every row samples with all
    features of sampling, so that all kernels are loaded and their memory is known. To be completed
    with `allow_all`.
    """
    rows = min(largest.rows, largest.tokens)
    counts = np.ones(rows, dtype=np.int32)
    remaining = largest.tokens - rows
    for row in range(rows - 1, -1, -1):
        counts[row] += min(remaining, max_model_len - 1)
        remaining -= int(counts[row]) - 1
    step = dummy_step(counts, page_size, top_k=LARGE_TOP_K, top_p=0.9, min_p=0.01)
    every, max_logprobs = np.arange(rows), np.full(rows, MAX_LOGPROBS, dtype=np.int32)
    nothing, raised = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.float32)
    logit_edits = tuple(RequestLogitEdits(slot, nothing, raised, nothing) for slot in range(rows))
    return replace(
        step,
        delta=replace(step.delta, logit_edits=logit_edits),
        penalties=PenaltyRows(every, every, np.full((rows, 3), 1.5, dtype=np.float32)),
        logprobs=LogprobRows(every, max_logprobs, suppressed=True),
        masked=MaskRows(every, step.slots),
    )


def allow_all(words: np.ndarray) -> dict[int, str]:
    """Writes masks int32 [N, W] that forbid nothing."""
    words.fill(-1)
    return {}


def deep_decodes(rows: int, pages: int, page_size: int) -> Step:
    """Returns decodes after `pages` full pages each; no page belongs to two rows or is the
    dummy.
    """
    starts = np.full(rows, pages * page_size, dtype=np.int32)
    return dummy_step(np.ones(rows, dtype=np.int32), page_size, starts, distinct_pages=True)


def alike_decodes(rows: int, prompts: int, page_size: int) -> Step:
    """Returns decodes that all begin with the dummy page, beside `prompts` prompts of two
    tokens.
    """
    counts = np.array([1] * rows + [2] * prompts, dtype=np.int32)
    starts = np.where(counts > 1, 0, page_size).astype(np.int32)
    ranks, one_page = np.arange(rows, dtype=np.int32), np.ones(rows, dtype=np.int32)
    step = dummy_step(counts, page_size, starts)
    return replace(step, shared_prefixes=SharedPrefixes(one_page, ranks * PREFIX_UPPER + rows))


def deep_prompts(decodes: int, prompts: Sequence[int], before: int, page_size: int) -> Step:
    """Returns a step of `decodes` decodes without earlier tokens, and chunks of prompts (2 tokens
    or more), each after `before` tokens; all of it lies in the dummy page.
    """
    counts = np.array([1] * decodes + [*prompts], dtype=np.int32)
    starts = np.where(counts > 1, before, 0).astype(np.int32)
    return dummy_step(counts, page_size, starts)


def empty_step() -> Step:
    """Returns a step of no rows, which packing for a graph fills up with padding rows."""
    return dummy_step(np.zeros(0, dtype=np.int32), 1)
