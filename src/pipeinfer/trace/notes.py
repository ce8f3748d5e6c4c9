"""What a trace says beside messages: the numbers of a step, and how the recording ended.

Notes are never fed to a core and never compared. Knows nobody.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import numpy as np

from pipeinfer.messages import Message


class StepNote(Message, frozen=True):
    """The engine's core gave step `number` to the device, at the record's time.

    rows: requests in it, `decodes` of them with one token; tokens: of all rows; sampled: rows that
    sample. When the step ran follows from its StepDone: it ended just before that record's time
    and had begun `seconds` earlier.
    """

    epoch: int
    number: int
    rows: int
    decodes: int
    tokens: int
    sampled: int


class Unencoded(Message, frozen=True):
    """An output that has no encoding, or that nobody could be sent: its type's name."""

    kind: str


class Crash(Message, frozen=True):
    """The stage died here of an exception, most likely on the last input; "TypeError: ..."."""

    error: str


class End(Message, frozen=True):
    """The recording ended here, in order; `reason` says why. `lost`: records after it that could
    not be kept."""

    reason: str
    lost: int = 0


class _Arrays(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def decodes(self) -> int: ...

    @property
    def slots(self) -> Sized: ...

    @property
    def tokens(self) -> Sized: ...

    @property
    def samples(self) -> np.ndarray: ...


def step_note(step: _Arrays) -> StepNote:
    """The numbers of an engine's step (step.py, which is not imported here)."""
    return StepNote(
        step.epoch,
        step.number,
        len(step.slots),
        step.decodes,
        len(step.tokens),
        int(step.samples.sum()),
    )
