"""What steps take on this GPU: captured graphs are replayed with artificial steps, and timed.

All ranks of a group measure the same replays in the same order, because graphs hold collectives.
Knows sizes and arrays of steps; no request, and not what the times are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeinfer.engine.cuda.artificial import deep_decodes, deep_prompts
from pipeinfer.engine.cuda.graphs import DecodeGraphs, Frame, replay_seconds
from pipeinfer.engine.cuda.mixed_graphs import DECODES, MixedGraphs, MixedSize
from pipeinfer.engine.step import Step
from pipeinfer.step_cost import StepCost

REPLAYS = 3
ROWS = frozenset((1, 8, 16, 32, 64, 96, 128, 192))  # of decodes alone, and as many as there may be
CONTEXT = 1024  # tokens before each decode where their price is measured
DEPTH = 2048  # tokens of a prompt before those that are measured
PER_SECOND = 10**12

# Packs a step for the graph of that size, and plans it.
Prepare = Callable[[Any, "int | MixedSize", Step], object]


def step_cost(
    decodes: DecodeGraphs, mixed: MixedGraphs, frame: Frame, pages: int, prepare: Prepare
) -> StepCost | None:
    """Measured on the current stream; `pages`: of the pool, the dummy included.

    None without graphs of prompts beside decodes, or where a row has only one page.
    """
    beside = [size for size in mixed.sizes if size.decodes]
    longest = (frame.pages - 1) * frame.page_size
    if not beside or not longest:
        return None

    def time(graphs: Any, size: int | MixedSize, step: Step) -> int:
        prepare(graphs, size, step)
        return round(replay_seconds(graphs[size], REPLAYS) * PER_SECOND)

    def alone(rows: int, deep: int) -> int:
        return time(decodes, rows, deep_decodes(rows, deep, frame.page_size, frame.dummy_slot))

    def amid(size: MixedSize, depth: int) -> int:
        return time(mixed, size, amid_prompts(size, longest, depth, frame))

    fewest = {size.tokens: size for size in reversed(beside)}  # decodes, of each number of tokens
    together: list[tuple[int, int, int]] = []
    for tokens, size in sorted(fewest.items()):
        begun, depth = amid(size, 0), max(min(DEPTH, longest - tokens), 0)
        more = max(amid(size, depth) - begun, 0) // depth if depth else 0
        together.append((tokens, begun, more))
    sizes = [rows for rows in decodes.sizes if rows in ROWS or rows == decodes.sizes[-1]]
    shallow = {rows: alone(rows, 0) for rows in sizes}
    rows = max((rows for rows in sizes if rows <= DECODES), default=sizes[0])
    deep = min(frame.pages - 1, (pages - 1) // rows, -(-CONTEXT // frame.page_size))
    more = max(alone(rows, deep) - shallow[rows], 0)
    each = more // (rows * deep * frame.page_size) if deep else 0
    return StepCost(tuple(shallow.items()), tuple(together), each)


def amid_prompts(size: MixedSize, longest: int, depth: int, frame: Frame) -> Step:
    """A step that fills a graph of `size`, with as few prompts as it takes, each after `depth`
    tokens; `longest`: tokens of a row at most.
    """
    prompts = -(-size.tokens // longest)
    decodes = max(size.decodes - prompts, 0)
    each, rest = divmod(size.tokens - decodes, prompts)
    counts = [each + (prompt < rest) for prompt in range(prompts)]
    return deep_prompts(decodes, counts, depth, frame.page_size, frame.dummy_slot)
