"""Shapes of steps: so many tokens, decode rows and prefill rows. CUDA graphs are captured for a
few of them, and a graph runs every step that fits into its shape.

Also how a step is written into the words that a device reads. In plain NumPy, and nothing here
loops over rows: this is the hot path of the engine's host. Knows no device and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipeinfer.kernels.tables import NO_LOGITS, GraphShape
from pipeinfer.step_cost import steps_up_to
from pipeinfer.steps.step import Step

FIRST = (1, 2, 4)  # decode rows; then every multiple of STEP
STEP = 8
FEW, SOME = 8, 32  # prompts in a step: alone, and beside decodes
PROMPT, MANY = 64, 128  # in large steps, one for so many tokens, up to so many prompts
DECODES = 64  # the smallest class of decode rows beside prompts, each other has twice as many
SHARING = 9  # decodes that share what they read, at least
LARGE = 1024  # tokens of a step: beyond it rows that are not there cost nothing, and one class does
MOST_PADDING = 128  # tokens, or
PADDING_SHARE = 4  # that part of a room's
ALIGN = 4  # words: kernels load 16 bytes at once where they may
NONE = np.empty(0, dtype=np.int32)


def shape_of(step: Step) -> GraphShape:
    """What the step needs."""
    shares = step.runs is not None
    return GraphShape(len(step.tokens), step.decodes, len(step.slots) - step.decodes, shares)


def holds(shape: GraphShape, step: Step) -> bool:
    """Whether it is large enough, and for steps of that kind."""
    prompts = len(step.slots) - step.decodes
    enough = shape.tokens >= len(step.tokens) and shape.prefills >= prompts
    return enough and shape.decodes >= step.decodes and (prompts > 0) == (shape.prefills > 0)


_NO_SHAPE = GraphShape(0, 0, 0)


@dataclass(frozen=True)
class LargestStep:
    """The largest step: rows, tokens, and pages of one row."""

    rows: int
    tokens: int
    pages: int

    def hold(self, room: GraphShape) -> bool:
        """Whether steps of that size may be. Graphs have room for as many rows of either kind."""
        return room.tokens <= self.tokens and max(room.decodes, room.prefills) <= self.rows


def decode_ladder(most: int) -> tuple[int, ...]:
    """Numbers of decode rows up to `most`, itself included: 1, 2, 4, 8, 16, 24 ..."""
    if most <= 0:
        return ()
    sizes = {size for size in (*FIRST, *range(STEP, most + 1, STEP)) if size < most}
    return tuple(sorted(sizes | {most}))


def mixed_ladder(
    most_tokens: int, most_rows: int, most_decodes: int, mixed: int
) -> tuple[GraphShape, ...]:
    """Rooms for steps of up to `most_tokens` and `most_rows`, ascending: of prompts alone, and of
    prompts beside decodes that together have `mixed` tokens, or a few more where the decodes alone
    nearly have. None if graphs of decodes are off (most_decodes 0).
    """
    if not most_decodes:
        return ()
    doubled = (DECODES << power for power in range(most_decodes.bit_length()))
    classes = sorted({*(rows for rows in doubled if rows < most_decodes), most_decodes})
    largest = max(mixed, most_decodes + mixed // PADDING_SHARE)
    every = steps_up_to(most_tokens)
    alone = [(tokens, 0, min(_prompts(tokens, FEW), most_rows)) for tokens in every]
    beside: list[tuple[int, int, int]] = []
    for tokens in every:
        some = min(_prompts(tokens, SOME), most_rows)
        # Of each size also one with as many decodes as it has room for.
        full = min(max(tokens - some, classes[0]), most_decodes)
        if tokens < largest + DECODES:
            rows = {*classes, full} if tokens <= LARGE else {most_decodes}
            beside += [(tokens, decodes, some) for decodes in rows]
    rooms = (GraphShape(*one) for one in (*alone, *beside))
    return tuple(sorted(room for room in rooms if room.rows <= room.tokens <= most_tokens))


def parted(rooms: Sequence[GraphShape]) -> tuple[list[GraphShape], list[GraphShape]]:
    """`rooms` of graphs as those that must be there first, so that every step finds one that is not
    much larger, and the others in the order in which they are worth it. First come, of decodes
    alone, powers of two, one and a half times those, and the most; of each number of tokens with
    prompts, the one for most rows, which holds those for fewer. Where one of those has a twin that
    shares, the twin comes first, since it serves every step.
    """
    every = set(rooms)
    first = [
        twin if (twin := replace(room, shares=True)) in every else room
        for room in (*_few_alone(rooms), *_largest(rooms))
    ]
    there = set(first)
    return first, sorted((room for room in rooms if room not in there), key=_worth)


def sharing(rooms: Sequence[GraphShape]) -> list[GraphShape]:
    """Of `rooms`, none of which shares, those that are wanted a second time for steps that do: as
    many decodes alone as are there first, and beside prompts the smallest class and the largest.
    """
    beside = {room for room in rooms if room.prefills and room.decodes == DECODES}
    beside |= {room for room in _largest(rooms) if room.decodes}
    enough = [room for room in (*_few_alone(rooms), *sorted(beside)) if room.decodes >= SHARING]
    return [replace(room, shares=True) for room in enough]


def _few_alone(rooms: Sequence[GraphShape]) -> list[GraphShape]:
    alone = sorted(room for room in rooms if not (room.prefills or room.shares))
    few = [room for room in alone if _rough(room.decodes)]
    return few + [room for room in alone[-1:] if room not in few]


def _largest(rooms: Sequence[GraphShape]) -> list[GraphShape]:
    """Of each number of tokens with prompts, the one for most rows."""
    largest: dict[int, GraphShape] = {}
    for room in rooms:
        most = largest.get(room.tokens, _NO_SHAPE).rows
        if room.prefills and not room.shares and room.rows > most:
            largest[room.tokens] = room
    return list(largest.values())


def _rough(size: int) -> bool:
    return size // (size & -size) in (1, 3)


def _worth(room: GraphShape) -> tuple[bool, bool, GraphShape]:
    """Steps of decodes alone are the most frequent ones, and small ones gain most; what is read
    once saves more than prompts' graphs of the right size."""
    return room.prefills > 0 and not room.shares, room.shares, room


def unaided(most_tokens: int, most_rows: int) -> tuple[GraphShape, ...]:
    """To be measured where no prompts are captured: of one prompt beside a few decodes."""
    decodes = min(DECODES, most_rows - 1)
    rooms = (GraphShape(tokens, decodes, 1) for tokens in steps_up_to(most_tokens))
    return tuple(room for room in rooms if decodes > 0 and room.rows < room.tokens)


def _prompts(tokens: int, few: int) -> int:
    """That a step of so many tokens has room for, at least `few`."""
    return max(few, min(tokens // PROMPT, MANY)) if tokens > LARGE else few


class Layout(NamedTuple):
    """The words, int32, at which a step's arrays begin; see kernels/tables.py for what they are.

    | number of pairs | slots R | starts R | counts R | logits_rows R | leaders R | ranks R |
    tokens T | pairs ... |

    The pairs are indices and values of what changes in the slots' state before. leaders, ranks:
    what decodes begin with in common, as in Step.runs.
    """

    slots: int
    starts: int
    counts: int
    logits_rows: int
    leaders: int
    ranks: int
    tokens: int
    pairs: int


@lru_cache(maxsize=4096)
def layout(room: GraphShape) -> Layout:
    """Every array begins at a multiple of 16 bytes."""
    at = [ALIGN]
    for size in (*[room.rows] * 6, room.tokens):
        at.append(at[-1] + -(-size // ALIGN) * ALIGN)
    return Layout(*at)


class Packer:
    """Writes steps into `words` int32, one after the other. Rows that are nobody's have the slot
    `nobody`.
    """

    def __init__(self, words: np.ndarray, nobody: int) -> None:
        self.words = words
        self._nobody = nobody
        self._last: tuple[GraphShape, int, Step] | None = None
        self._entries: np.ndarray | None = None

    def pack(
        self, step: Step, room: GraphShape, samples: int, pairs: np.ndarray
    ) -> tuple[int, np.ndarray | None]:
        """The step, and `pairs` int32 [2n] of what changes before it.

        Its decodes are the room's first decode rows, its prompts the first prompt rows. There are
        `samples` entries: in a room of decode rows with one for each, every row has its own, else
        rows that sample have the first ones. Returns how many words are of use, and where the
        entries of the rows that sample are, None if they are the first.
        """
        at, words, last = layout(room), self.words, self._last
        _spread(words[at.starts : at.starts + room.rows], step.starts, room, step.decodes, 0)
        if last is None or last[:2] != (room, samples) or not _alike(last[2], step):
            self._rows(step, room, at, samples)
        self._last = room, samples, step
        words[0] = len(pairs) // 2
        words[at.pairs : at.pairs + len(pairs)] = pairs
        return at.pairs + len(pairs), self._entries

    def _rows(self, step: Step, room: GraphShape, at: Layout, samples: int) -> None:
        words, sampling = self.words, step.samples
        if step.slots.max(initial=0) >= self._nobody:
            raise ValueError(f"slot {step.slots.max()}, where there are {self._nobody}")
        for begin, values, filler in (
            (at.slots, step.slots, self._nobody), (at.counts, step.counts, 0)
        ):  # fmt: skip
            _spread(words[begin : begin + room.rows], values, room, step.decodes, filler)
        lines, seats = (NONE, NONE) if step.runs is None else (step.runs.lines, step.runs.seats)
        for begin, values in ((at.leaders, lines), (at.ranks, seats)):
            words[begin : begin + len(values)] = values
            words[begin + len(values) : begin + room.rows] = 0
        words[at.tokens : at.tokens + len(step.tokens)] = step.tokens
        if len(step.slots) < room.rows:
            sampling = np.zeros(room.rows, dtype=bool)
            _spread(sampling, step.samples, room, step.decodes, False)
        entries = words[at.logits_rows : at.logits_rows + room.rows]
        self._entries = None
        if samples == room.rows and not room.prefills:
            own = np.arange(room.rows, dtype=np.int32)
            entries[:] = np.where(sampling, own, -1 - own)
            if not step.samples.all():
                self._entries = np.flatnonzero(step.samples)
        else:
            _enter(entries, sampling, samples)


def _alike(one: Step, other: Step) -> bool:
    """Whether they are the same but for `starts`: such steps share their arrays."""
    return (
        one.slots is other.slots
        and one.counts is other.counts
        and one.samples is other.samples
        and one.tokens is other.tokens
        and one.runs is other.runs
    )


def _spread(
    view: np.ndarray, values: np.ndarray, room: GraphShape, decodes: int, filler: int
) -> None:
    """Decodes where the room has decode rows, prompts where it has prompt rows."""
    if len(values) == len(view):
        view[:] = values
        return
    end = room.decodes + len(values) - decodes
    view[:decodes] = values[:decodes]
    view[decodes : room.decodes] = filler
    view[room.decodes : end] = values[decodes:]
    view[end:] = filler


def _enter(entries: np.ndarray, sampling: np.ndarray, samples: int) -> None:
    """The first entries are those of rows that sample, the other rows have the rest: nobody's."""
    entries[:] = NO_LOGITS
    mine = np.flatnonzero(sampling)
    entries[mine] = np.arange(len(mine))
    left = np.arange(len(mine), samples, dtype=np.int32)
    if len(left):
        entries[np.flatnonzero(~sampling)[: len(left)]] = -1 - left
