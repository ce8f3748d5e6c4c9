"""Messages of the channel `control`: what a command line asks of a running stage, and its answer.

They are for the shell, never for a core, and are not recorded. Any stage takes them in its inbox
and answers on its telemetry socket, where the asker listens before it asks. Knows no stage.
"""

from __future__ import annotations

from typing import Any, Literal, Union

from pipeinfer.messages import Message

CHANNEL = "control"


class StartRecording(Message, frozen=True):
    """Record from now on into a new file in the folder `out`, as the stage's host sees it.

    recording: the asker's name for it. seconds, messages, max_bytes: it ends by itself after that
    much, 0 is without limit. fresh_epoch: an engine ends its epoch first, so that the trace has a
    whole one. redact: a key as hexadecimal text, "" to record as it is.
    """

    recording: str
    out: str
    seconds: float = 0.0
    messages: int = 0
    max_bytes: int = 0
    fresh_epoch: bool = False
    redact: str = ""


class StopRecording(Message, frozen=True):
    """End that recording in good order; unknown ones are answered with "failed"."""

    recording: str


class RecordingState(Message, frozen=True):
    """A stage's answer. `path`: of its file. `reason`: why it is done, or what failed."""

    recording: str
    stage: str
    state: Literal["recording", "done", "failed"]
    path: str = ""
    records: int = 0
    bytes: int = 0
    reason: str = ""


class Swap(Message, frozen=True):
    """To the supervisor: put another process in the place of stage id `stage`.

    swap: the asker's name for it. command: what to start, before the stage's own arguments; empty
    is what ran before. folder: where to start it.
    """

    swap: str
    stage: str
    command: tuple[str, ...] = ()
    folder: str = ""


class SwapState(Message, frozen=True):
    """The supervisor's answer, at every change. `reason`: what failed, and what runs now.

    old, new: process ids, one for each rank. seconds: from asking the old process to leave until
    the new one was ready.
    """

    swap: str
    stage: str
    state: Literal["leaving", "starting", "done", "failed"]
    reason: str = ""
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    seconds: float = 0.0


CONTROL: Any = Union[StartRecording, StopRecording, RecordingState, Swap, SwapState]
