"""CUDA graphs of steps: the shapes for which they are captured, and the choice of one for a step.

Launched one by one, the kernels of a step take longer to start than to run. A shape is a number of
tokens, decode rows and prefill rows; its graph runs every step that fits into it. Shapes have
decodes only, or prompts with or without decodes, or draft tokens to be verified. A graph holds a
whole step: it reads ids from last_token, computes, samples by temperature alone and writes
last_token; where a row wants more, the runner samples all rows again, and writes it again. It reads
fixed addresses only, which the forward stream fills before a replay. All graphs share one memory
pool. Knows no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from pipeinfer.attention.interface import AttentionMetadata
from pipeinfer.engine.device import Device, Work
from pipeinfer.kernels.interface import DeviceStep, StepShape
from pipeinfer.step import Step
from pipeinfer.step_cost import measured_sizes

FIRST = (1, 2, 4)  # decode rows; then every multiple of STEP
STEP = 8
PROMPTS_ONLY, PROMPTS_WITH_DECODES = 8, 32  # prompts in a step: alone, and beside decodes
TOKENS_PER_PROMPT, MAX_PROMPTS = (
    64,
    128,
)  # in large steps, one for so many tokens, up to so many prompts
DECODES = 64  # the smallest class of decode rows beside prompts, each other has twice as many
MIN_SHARED_DECODES = 9  # decodes that share what they read, at least
LARGE = 1024  # tokens of a step: beyond it rows that are not there cost nothing, and one class does
MAX_PADDING = 128  # tokens, or
MAX_PADDING_DIVISOR = 4  # that part of a shape's


def shape_of(step: Step) -> StepShape:
    """The shape that `step` fills exactly."""
    shares = step.shared_prefixes is not None
    return StepShape(len(step.tokens), step.num_decodes, len(step.slots) - step.num_decodes, shares)


def holds(shape: StepShape, step: Step) -> bool:
    """Whether a graph of `shape` is large enough for `step`, and for steps of its kind (with
    prompts, or decodes alone)."""
    prompts = len(step.slots) - step.num_decodes
    enough = shape.num_tokens >= len(step.tokens) and shape.num_prefills >= prompts
    return (
        enough
        and shape.num_decodes >= step.num_decodes
        and (prompts > 0) == (shape.num_prefills > 0)
    )


_NO_SHAPE = StepShape(0, 0, 0)


@dataclass(frozen=True)
class StepCapacity:
    """The largest step: rows, tokens, and pages of one row; draft tokens of one row, rows that have
    any, and the rate at which they are accepted (SlotDrafts)."""

    rows: int
    tokens: int
    pages: int
    drafts: int = 0
    draft_rows: int = 0
    acceptance: float = -1.0

    @property
    def logits(self) -> int:
        """Rows of logits."""
        return self.rows + self.drafts * self.draft_rows

    def hold(self, shape: StepShape) -> bool:
        """Whether steps of that size may be. Graphs have room for as many rows of either kind."""
        return (
            shape.num_tokens <= self.tokens
            and max(shape.num_decodes, shape.num_prefills) <= self.rows
        )


def decode_ladder(largest: int) -> tuple[int, ...]:
    """Numbers of decode rows up to `largest`, itself included: 1, 2, 4, 8, 16, 24 ..."""
    if largest <= 0:
        return ()
    sizes = {size for size in (*FIRST, *range(STEP, largest + 1, STEP)) if size < largest}
    return tuple(sorted(sizes | {largest}))


def mixed_ladder(
    max_tokens: int, max_rows: int, max_decodes: int, mixed: int
) -> tuple[StepShape, ...]:
    """Shapes of steps of up to `max_tokens` and `max_rows`, ascending: of prompts alone, and of
    prompts beside decodes that together have `mixed` tokens, or a few more where the decodes alone
    nearly have. None if graphs of decodes are off (max_decodes 0).
    """
    if not max_decodes:
        return ()
    doubled = (DECODES << power for power in range(max_decodes.bit_length()))
    classes = sorted({*(rows for rows in doubled if rows < max_decodes), max_decodes})
    largest = max(mixed, max_decodes + mixed // MAX_PADDING_DIVISOR)
    every = measured_sizes(max_tokens)
    prompts_only = [
        (tokens, 0, min(_max_prompts(tokens, PROMPTS_ONLY), max_rows)) for tokens in every
    ]
    with_decodes: list[tuple[int, int, int]] = []
    for tokens in every:
        prompts = min(_max_prompts(tokens, PROMPTS_WITH_DECODES), max_rows)
        # Of each size also one with as many decodes as it has room for.
        full = min(max(tokens - prompts, classes[0]), max_decodes)
        if tokens < largest + DECODES:
            rows = {*classes, full} if tokens <= LARGE else {max_decodes}
            with_decodes += [(tokens, decodes, prompts) for decodes in rows]
    shapes = (StepShape(*one) for one in (*prompts_only, *with_decodes))
    return tuple(
        sorted(shape for shape in shapes if shape.num_rows <= shape.num_tokens <= max_tokens)
    )


def eager_and_deferred(shapes: Sequence[StepShape]) -> tuple[list[StepShape], list[StepShape]]:
    """`shapes` of graphs as those that are captured at once, so that every step finds one that is
    not much larger, and those whose capture is deferred, in the order in which they are worth it.
    First come, of decodes alone, powers of two, one and a half times those, and the most; of each
    number of tokens with prompts, the one for most rows, which holds those for fewer. Where one of
    those has a shared-prefix variant, that comes first, since it serves every step.
    """
    every = set(shapes)
    first = [
        shared_variant if (shared_variant := replace(shape, shared_prefix=True)) in every else shape
        for shape in (*_eager_decode_only(shapes), *_largest(shapes))
    ]
    eager = set(first)
    return first, sorted((shape for shape in shapes if shape not in eager), key=_capture_priority)


def shared_prefix_variants(shapes: Sequence[StepShape]) -> list[StepShape]:
    """The shapes of which a second graph is captured, with shared_prefix set. shapes: without it.

    These are the decode-only shapes that are captured eagerly, and of the shapes with prompts those
    with the fewest and with the most decodes for each number of tokens.
    """
    with_prompts = {
        shape for shape in shapes if shape.num_prefills and shape.num_decodes == DECODES
    }
    with_prompts |= {shape for shape in _largest(shapes) if shape.num_decodes}
    enough = [
        shape
        for shape in (*_eager_decode_only(shapes), *sorted(with_prompts))
        if shape.num_decodes >= MIN_SHARED_DECODES
    ]
    return [replace(shape, shared_prefix=True) for shape in enough]


def _eager_decode_only(shapes: Sequence[StepShape]) -> list[StepShape]:
    decode_shapes = sorted(
        shape for shape in shapes if not (shape.num_prefills or shape.shared_prefix)
    )
    eager = [shape for shape in decode_shapes if _is_coarse_size(shape.num_decodes)]
    return eager + [shape for shape in decode_shapes[-1:] if shape not in eager]


def _largest(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Of each number of tokens with prompts, the one for most rows."""
    largest: dict[int, StepShape] = {}
    for shape in shapes:
        rows = largest.get(shape.num_tokens, _NO_SHAPE).num_rows
        if shape.num_prefills and not shape.shared_prefix and shape.num_rows > rows:
            largest[shape.num_tokens] = shape
    return list(largest.values())


def _is_coarse_size(size: int) -> bool:
    return size // (size & -size) in (1, 3)


def _capture_priority(shape: StepShape) -> tuple[bool, bool, StepShape]:
    """Steps of decodes alone are the most frequent ones, and small ones gain most; what is read
    once saves more than prompts' graphs of the right size."""
    return shape.num_prefills > 0 and not shape.shared_prefix, shape.shared_prefix, shape


def uncaptured_shapes(max_tokens: int, max_rows: int) -> tuple[StepShape, ...]:
    """To be measured where no prompts are captured: of one prompt beside a few decodes."""
    decodes = min(DECODES, max_rows - 1)
    shapes = (StepShape(tokens, decodes, 1) for tokens in measured_sizes(max_tokens))
    return tuple(shape for shape in shapes if decodes > 0 and shape.num_rows < shape.num_tokens)


def _max_prompts(tokens: int, least: int) -> int:
    """That a step of so many tokens has room for, at least `least` of them."""
    return max(least, min(tokens // TOKENS_PER_PROMPT, MAX_PROMPTS)) if tokens > LARGE else least


def verifying_ladder(largest: StepCapacity) -> tuple[StepShape, ...]:
    """Shapes of steps that verify draft tokens and compute nothing else, ascending: for 1, 2, 4 ...
    rows, and for the most that have any. Of each number one in which every row has drafts, which
    has no decode rows to attend for, and one in which any of the rows may have none."""
    tokens = 1 + largest.drafts
    most = min(largest.draft_rows, largest.tokens // tokens) if largest.drafts else 0
    if not most:
        return ()
    doubled = (1 << power for power in range(most.bit_length()))
    sizes = sorted({*(rows for rows in doubled if rows < most), most})
    return tuple(
        StepShape(rows * tokens, decodes, rows, verifies=True)
        for rows in sizes
        for decodes in (0, rows)
    )


def decode_only(decodes: int) -> StepShape:
    """For so many decodes and nothing else."""
    return StepShape(decodes, decodes, 0)


SMALL = 8
REPLAYS = 8


@dataclass(frozen=True)
class Captured:
    """The CUDA graph of one shape.

    Attributes:
    - views: of the device buffers, for the shape
    - replay: queues the graph
    - logits: [L, vocab or shard], and drawn: int64 [L, 2] as `Sampled.of` reads it; where each
      replay leaves them. The next replay or capture of any graph overwrites them
    """

    views: DeviceStep
    replay: Work
    logits: torch.Tensor
    drawn: torch.Tensor


# (views, metadata) -> (logits [L, vocab], what is drawn [L, 2]): the step that is captured.
Body = Callable[[DeviceStep, AttentionMetadata], tuple[torch.Tensor, torch.Tensor]]


class Graphs:
    """Of a device, by shape.

    decodes: numbers of decode rows that have a graph; mixed: shapes with prefills that have one.
    Either is the shared-prefix variant only where there is no other. shared_prefix_shapes: all
    shapes that are shared-prefix variants. verifying: shapes of steps that verify draft tokens,
    which are none of the others. All ascend. deferred: shapes whose capture is deferred, the next
    one first.
    slow: tokens of mixed shapes whose steps take the next larger one's graph, if it fits them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.decodes: tuple[int, ...] = ()
        self.mixed: tuple[StepShape, ...] = ()
        self.shared_prefix_shapes: tuple[StepShape, ...] = ()
        self.verifying: tuple[StepShape, ...] = ()
        self.deferred: list[StepShape] = []
        self.slow: frozenset[int] = frozenset()
        self._captured: dict[StepShape, Captured] = {}

    def __getitem__(self, shape: StepShape) -> Captured:
        return self._captured[shape]

    def seconds(self, shape: StepShape, times: int = REPLAYS) -> float:
        """What a replay takes of whatever graphs read now: enough to compare sizes."""
        return self._device.seconds(self[shape].replay, times)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def captured_or_deferred(self) -> tuple[StepShape, ...]:
        """As `mixed`, with those that get a graph later."""
        later = (shape for shape in self.deferred if shape.num_prefills and not shape.shared_prefix)
        return tuple(sorted({*self.mixed, *later}))

    def like(self, shape: StepShape, step: Step) -> StepShape | None:
        """`shape`, or while that has no graph, the smallest that has one for as many tokens and
        for the step."""
        there = self._either(shape)
        if there in self:
            return there
        same = (other for other in self.mixed if other.num_tokens == shape.num_tokens)
        return next((other for other in same if holds(other, step)), None)

    def fitting(self, step: Step) -> Captured | None:
        """The smallest for the step; None if there is none, or it is far larger. Where decodes
        share, one in which they do; if there is none, each reads for itself. Of steps that verify
        draft tokens: those in which every token has a row of logits."""
        if step.verifies:
            every = step.num_logits == len(step.tokens)
            shape = next((one for one in self.verifying if every and holds(one, step)), None)
            return None if shape is None else self[shape]
        if step.shared_prefixes is not None and step.num_decodes >= MIN_SHARED_DECODES:
            shape = self._smallest(self.shared_prefix_shapes, step)
            if shape is not None:
                return self[shape]
        if step.num_decodes == len(step.slots):
            at = bisect_left(self.decodes, step.num_decodes)
            return (
                None
                if at == len(self.decodes)
                else self[self._either(decode_only(self.decodes[at]))]
            )
        shape = self._smallest(self.mixed, step)
        return None if shape is None else self[shape]

    def _smallest(self, shapes: Sequence[StepShape], step: Step) -> StepShape | None:
        """Of `shapes`, ascending, the first for the step that is not slow, or else the first; None
        if there is none, or it is far larger."""
        slow: StepShape | None = None
        for shape in shapes:
            if _far_larger(shape, len(step.tokens)):
                break
            if holds(shape, step):
                if not shape.num_prefills or shape.num_tokens not in self.slow:
                    return shape
                slow = slow or shape
        return slow

    def _either(self, shape: StepShape) -> StepShape:
        """`shape`, or where that has no graph, the one of that size whose decodes share."""
        return shape if shape in self else replace(shape, shared_prefix=True)

    def capture(
        self,
        shapes: Sequence[StepShape],
        pack: Callable[[StepShape], tuple[DeviceStep, AttentionMetadata]],
        body: Body,
        progress: Callable[[], None],
    ) -> None:
        """Captures every shape, the largest first, from within the device's `run`.

        pack(shape) puts a step of padding rows into the buffers that graphs read, and builds its
        metadata. progress() is called after each.
        """
        for shape in sorted(shapes, reverse=True):
            views, metadata = pack(shape)
            made = self._device.capture(partial(body, views, metadata))
            self._captured[shape] = Captured(views, made.run, *made.tensors)
            progress()
        self._list()

    def _list(self) -> None:
        """What was captured, by kind."""
        every = sorted(shape for shape in self._captured if not shape.verifies)
        self.verifying = tuple(sorted(shape for shape in self._captured if shape.verifies))
        self.decodes = tuple(
            sorted({shape.num_decodes for shape in every if not shape.num_prefills})
        )
        mixed = {
            self._either(replace(shape, shared_prefix=False))
            for shape in every
            if shape.num_prefills
        }
        self.mixed = tuple(sorted(mixed))
        self.shared_prefix_shapes = tuple(shape for shape in every if shape.shared_prefix)

    def drop_slower_small_ones(self, pack: Callable[[StepShape], object]) -> None:
        """Forgets small numbers of decodes that take longer than the next one: for very few rows,
        libraries' matrix kernels are not always faster. As `capture`, after it.
        """
        small = [size for size in self.decodes if size <= SMALL]
        seconds: dict[int, float] = {}
        for size in small:
            pack(decode_only(size))  # all read the same words, each in its own way
            seconds[size] = self.seconds(decode_only(size))
        for size, larger in reversed(list(pairwise(small))):
            best = min(seconds[other] for other in small if other >= larger)
            if seconds[size] > best:
                del self._captured[decode_only(size)]
        self._list()


def _far_larger(shape: StepShape, tokens: int) -> bool:
    """Whether a step of so many tokens would be padded too much."""
    return shape.num_tokens - tokens > max(MAX_PADDING, shape.num_tokens // MAX_PADDING_DIVISOR)
