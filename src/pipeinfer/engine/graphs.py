"""CUDA graphs of steps: the shapes for which they are captured, and the choice of one for a step.

Launched one by one, the kernels of a step take longer to start than to run. A shape is a number of
tokens, decode rows and prefill rows; its graph runs every step that fits into it. Shapes have
decodes only, or prompts with or without decodes, or draft tokens to be verified. A graph holds a
whole step: it reads ids from last_token, computes, samples by temperature alone and writes
last_token. If a row needs more than temperature, the runner samples all rows again and writes
last_token again. A graph reads fixed addresses only, which the forward stream fills before a
replay. All graphs share one memory pool. No request is known here.
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
MIN_SHARED_DECODES = 9  # decodes with shared prefixes, at least
LARGE = 1024  # tokens of a step: beyond it rows that are not there cost nothing, and one class does
# Tokens of a step. Larger ones take 20 ms of a model of 14B on an H200, beside which the
# millisecond that their first run takes more is little; to run them all at each start takes over a
# second.
FIRST_RUN_TOKENS = 512
MAX_PADDING = 128  # tokens, or
MAX_PADDING_DIVISOR = 4  # that part of a shape's tokens


def shape_of(step: Step) -> StepShape:
    """The shape that `step` fills exactly."""
    shares = step.shared_prefixes is not None
    return StepShape(len(step.tokens), step.num_decodes, len(step.slots) - step.num_decodes, shares)


def holds(shape: StepShape, step: Step) -> bool:
    """Whether a graph of `shape` is large enough for `step`, and is of its kind (with prompts, or
    decodes alone).
    """
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
    """The largest step that buffers have room for.

    Attributes:
    - rows: rows
    - tokens: tokens of all rows
    - pages: pages of one row
    - drafts: draft tokens of one row
    - draft_rows: rows that have draft tokens
    - acceptance: rate at which draft tokens are accepted, for benchmarks (SlotDrafts)
    """

    rows: int
    tokens: int
    pages: int
    drafts: int = 0
    draft_rows: int = 0
    acceptance: float = -1.0

    @property
    def logits(self) -> int:
        """Rows of logits: one for each row, and one for each draft token."""
        return self.rows + self.drafts * self.draft_rows

    def hold(self, shape: StepShape) -> bool:
        """Whether steps of `shape` can occur. Graphs have room for as many rows of either kind."""
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
    """Shapes of steps of up to `max_tokens` tokens and `max_rows` rows, ascending: prompts alone,
    and prompts beside decodes. The latter have up to `mixed` tokens, or a few more if the decodes
    alone have nearly as many. Empty if max_decodes is 0: no graphs are captured.
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
        # For each size also a shape with as many decodes as the size has room for.
        full = min(max(tokens - prompts, classes[0]), max_decodes)
        if tokens < largest + DECODES:
            rows = {*classes, full} if tokens <= LARGE else {max_decodes}
            with_decodes += [(tokens, decodes, prompts) for decodes in rows]
    shapes = (StepShape(*one) for one in (*prompts_only, *with_decodes))
    return tuple(
        sorted(shape for shape in shapes if shape.num_rows <= shape.num_tokens <= max_tokens)
    )


def eager_and_deferred(shapes: Sequence[StepShape]) -> tuple[list[StepShape], list[StepShape]]:
    """Splits `shapes` into those that are captured at once, so that every step finds a graph that
    is not much larger, and those whose capture is deferred, in the order of their benefit.

    Captured at once are: for decodes alone, powers of two, one and a half times those, and the
    largest; for each number of tokens with prompts, the shape with most rows, which also runs steps
    with fewer. If one of these has a shared-prefix variant, the variant takes its place, since it
    runs every step.
    """
    every = set(shapes)
    first = [
        shared_variant if (shared_variant := replace(shape, shared_prefix=True)) in every else shape
        for shape in (*_eager_decode_only(shapes), *_largest(shapes))
    ]
    eager = set(first)
    return first, sorted((shape for shape in shapes if shape not in eager), key=_capture_priority)


def shared_prefix_variants(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Returns the shapes for which a second graph is captured, with shared_prefix set. shapes:
    without it.

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
    """Returns, for each number of tokens with prompts, the shape with most rows."""
    largest: dict[int, StepShape] = {}
    for shape in shapes:
        rows = largest.get(shape.num_tokens, _NO_SHAPE).num_rows
        if shape.num_prefills and not shape.shared_prefix and shape.num_rows > rows:
            largest[shape.num_tokens] = shape
    return list(largest.values())


def _is_coarse_size(size: int) -> bool:
    return size // (size & -size) in (1, 3)


def _capture_priority(shape: StepShape) -> tuple[bool, bool, StepShape]:
    """Sort key of deferred captures. Steps of decodes alone are the most frequent, and small ones
    gain most; reading shared prefixes once saves more than graphs of the right size for prompts.
    """
    return shape.num_prefills > 0 and not shape.shared_prefix, shape.shared_prefix, shape


def uncaptured_shapes(max_tokens: int, max_rows: int) -> tuple[StepShape, ...]:
    """Shapes to be measured if no steps with prompts are captured: one prompt beside a few
    decodes.
    """
    decodes = min(DECODES, max_rows - 1)
    shapes = (StepShape(tokens, decodes, 1) for tokens in measured_sizes(max_tokens))
    return tuple(shape for shape in shapes if decodes > 0 and shape.num_rows < shape.num_tokens)


def _max_prompts(tokens: int, least: int) -> int:
    """Number of prompts that a step of `tokens` tokens has room for, at least `least`."""
    return max(least, min(tokens // TOKENS_PER_PROMPT, MAX_PROMPTS)) if tokens > LARGE else least


def verifying_ladder(largest: StepCapacity) -> tuple[StepShape, ...]:
    """Shapes of steps that verify draft tokens and compute nothing else, ascending: for 1, 2, 4 ...
    rows, and for the most rows that have drafts. Each number of rows has two shapes: one in which
    every row has drafts, without decode rows to attend for, and one in which some rows may have
    none.
    """
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
    """The shape of a step of `decodes` decode rows and nothing else."""
    return StepShape(decodes, decodes, 0)


SMALL = 8
REPLAYS = 8


@dataclass(frozen=True)
class Captured:
    """The CUDA graph of one shape.

    Attributes:
    - views: of the device buffers, for the shape
    - replay: queues the graph
    - logits: [L, vocab or shard]; each replay writes them here
    - drawn: int64 [L, 2] as `Sampled.of` reads it; each replay writes them here

    The next replay or capture of any graph overwrites `logits` and `drawn`.
    """

    views: DeviceStep
    replay: Work
    logits: torch.Tensor
    drawn: torch.Tensor


# (views, metadata) -> (logits [L, vocab], sampled ids [L, 2]): the step that is captured.
Body = Callable[[DeviceStep, AttentionMetadata], tuple[torch.Tensor, torch.Tensor]]


class Graphs:
    """The CUDA graphs of a device, by shape.

    Attributes, all in ascending order but `deferred`:
    - decodes: numbers of decode rows that have a graph
    - mixed: shapes with prefills that have a graph; the shared-prefix variant of a size only if no
      other was captured
    - shared_prefix_shapes: captured shapes that are shared-prefix variants
    - verifying: shapes of steps that verify draft tokens; in none of the other lists
    - deferred: shapes whose capture is deferred, the next one first
    - slow: numbers of tokens of mixed shapes whose steps take the next larger graph, if they fit
      into it
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
        """Seconds of one replay over the current content of the buffers: precise enough to compare
        sizes.
        """
        return self._device.seconds(self[shape].replay, times)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def captured_or_deferred(self) -> tuple[StepShape, ...]:
        """Shapes of `mixed`, and those with prefills whose capture is deferred, ascending."""
        later = (shape for shape in self.deferred if shape.num_prefills and not shape.shared_prefix)
        return tuple(sorted({*self.mixed, *later}))

    def like(self, shape: StepShape, step: Step) -> StepShape | None:
        """Returns `shape` or its shared-prefix variant; if neither has a graph yet, the smallest
        captured shape for as many tokens that holds the step; None if there is none.
        """
        there = self._either(shape)
        if there in self:
            return there
        same = (other for other in self.mixed if other.num_tokens == shape.num_tokens)
        return next((other for other in same if holds(other, step)), None)

    def fitting(self, step: Step) -> Captured | None:
        """Returns the smallest graph for the step; None if there is none, or it is far larger. If
        decodes share prefixes, a shared-prefix variant; without one each decode reads the prefix
        for itself. For steps that verify draft tokens: a graph in which every token has a row of
        logits.
        """
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
        """Returns the first of `shapes`, ascending, that holds the step and is not slow, or else
        the first that holds it; None if there is none, or it is far larger.
        """
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
        """Returns `shape`, or if it has no graph, its shared-prefix variant."""
        return shape if shape in self else replace(shape, shared_prefix=True)

    def capture(
        self,
        shapes: Sequence[StepShape],
        pack: Callable[[StepShape], tuple[DeviceStep, AttentionMetadata]],
        body: Body,
        progress: Callable[[], None],
    ) -> None:
        """Captures every shape, the largest first; to be called from within the device's `run`.

        - pack: pack(shape) puts a step of padding rows into the buffers that graphs read, and
          returns its views and metadata
        - body: computes the step
        - progress: called after each capture
        """
        for shape in sorted(shapes, reverse=True):
            views, metadata = pack(shape)
            first_run = shape.num_tokens <= FIRST_RUN_TOKENS
            made = self._device.capture(partial(body, views, metadata), first_run)
            self._captured[shape] = Captured(views, made.run, *made.tensors)
            progress()
        self._list()

    def _list(self) -> None:
        """Fills the lists of captured shapes, by kind."""
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
        """Drops graphs of small numbers of decodes that take longer than a larger one: for very few
        rows, libraries' matrix kernels are not always faster. To be called after `capture`, from
        within the device's `run`. pack: as of `capture`.
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
    """Whether the padding of a step of `tokens` tokens to `shape` would exceed MAX_PADDING tokens
    and the MAX_PADDING_DIVISOR-th part of the shape.
    """
    return shape.num_tokens - tokens > max(MAX_PADDING, shape.num_tokens // MAX_PADDING_DIVISOR)
