"""Messages of the channel `control`: requests of people to a running stage, and its answers.

They are for the shell, never for a core, and are not recorded. Any stage takes them in its inbox
and answers on its telemetry socket, to which the asker subscribes before it asks. The asker is a
command line, or a gateway whose page is open. Gateways also exchange the state here that each needs
to answer for all. Knows no stage.
"""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from pipeinfer.messages import AdapterState, Int32s, Message, NonNegativeInt

CHANNEL = "control"


class StartRecording(Message, frozen=True):
    """Record from now on into a new file.

    Attributes:
    - recording: the asker's name for it
    - out: the folder, as the stage's host sees it
    - seconds, messages, max_bytes: limits at which the recording ends by itself; 0: without limit
    - fresh_epoch: an engine ends its epoch first, so that the trace has a whole one
    - redact: a key as hexadecimal text; empty: nothing is redacted
    """

    recording: str
    out: str
    seconds: float = 0.0
    messages: int = 0
    max_bytes: int = 0
    fresh_epoch: bool = False
    redact: str = ""


class StopRecording(Message, frozen=True):
    """End the recording in good order; an unknown one is answered with "failed"."""

    recording: str


class RecordingState(Message, frozen=True):
    """A stage's answer about a recording.

    Attributes:
    - path: of its file
    - records, bytes: in the file so far
    - reason: why it is done, or what failed
    """

    recording: str
    stage: str
    state: Literal["recording", "done", "failed"]
    path: str = ""
    records: int = 0
    bytes: int = 0
    reason: str = ""


class Swap(Message, frozen=True):
    """To the supervisor: put another process in the place of a stage.

    Attributes:
    - swap: the asker's name for it
    - stage: id of the stage
    - command: command to start, before the stage's own arguments; empty: the command that ran
      before
    - folder: where to start it
    """

    swap: str
    stage: str
    command: tuple[str, ...] = ()
    folder: str = ""


class SwapState(Message, frozen=True):
    """The supervisor's answer, at every change of a swap.

    Attributes:
    - reason: what failed, and what runs now
    - old, new: process ids, one for each rank
    - seconds: from asking the old process to leave until the new one was ready
    """

    swap: str
    stage: str
    state: Literal["leaving", "starting", "done", "failed"]
    reason: str = ""
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    seconds: float = 0.0


class Watch(Message, frozen=True):
    """Answer with Observed, from now on. Repeated as long as answers are wanted, because a process
    that was started meanwhile does not have the request.

    Attributes:
    - seconds: how long
    - past: also, once, a scheduler's steps of the last minute, see Observed
    """

    seconds: float
    past: bool = False


class TimedEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event of a request in a stage.

    Attributes:
    - at: Unix seconds by the stage's clock
    - name: of the event
    - values: numbers of the event, by name
    """

    at: float
    name: str
    values: dict[str, float] = {}


class RequestSpan(msgspec.Struct, frozen=True, array_like=True):
    """The span of a request in one stage.

    Attributes:
    - began, ended: Unix seconds; `ended` 0: the request has not ended
    - outcome: how it ended, if that is of note; else empty
    - trace: the W3C traceparent that it came in with, or empty
    - span: the traceparent that a gateway passes on, if it has a span of its own
    - client: of a gateway's span: hash of the client, as in Submit
    """

    stage: str
    request_id: str
    began: float
    ended: float = 0.0
    outcome: str = ""
    trace: str = ""
    moments: tuple[TimedEvent, ...] = ()
    span: str = ""
    client: str = ""


class StepMade(msgspec.Struct, frozen=True, array_like=True):
    """A step of a scheduler whose result has come; or several.

    Attributes:
    - at: Unix seconds of its plan
    - seconds: from the result before it, or from its plan if no step was in flight
    - decodes: rows that decode
    - prompt_tokens: tokens of prompts
    - target: seconds, `--itl-target`
    - count: steps of one half second from `at` on: then `decodes` and `prompt_tokens` are sums,
      `seconds` and `target` the largest
    """

    at: float
    seconds: float
    decodes: int
    prompt_tokens: int
    target: float = 0.0
    count: int = 1


class Observed(Message, frozen=True):
    """The events of `stage` since its last Observed.

    Attributes:
    - spans: spans that have begun, changed or ended
    - steps: steps whose results have come
    - past: sums of earlier steps, of a minute
    """

    stage: str
    incarnation: int
    spans: tuple[RequestSpan, ...] = ()
    steps: tuple[StepMade, ...] = ()
    past: tuple[StepMade, ...] = ()


class ShowPrefixes(Message, frozen=True):
    """To an engine: which of your cached prefixes save the most, and which are the longest?

    Attributes:
    - question: the asker's name for it
    - most: prefixes of each kind
    - ids: number of first tokens of each that are sent
    """

    question: str
    most: int = 16
    ids: int = 64


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """A path of the prefix tree, from its root.

    Attributes:
    - tokens: length of the path
    - sequences: cached sequences that begin with it
    - locks: requests that use it now
    - first: its first ids, int32 bytes; empty for a salted one
    """

    tokens: int
    sequences: int
    locks: int
    first: Int32s


class Prefixes(Message, frozen=True):
    """The answer of `stage` to ShowPrefixes."""

    question: str
    stage: str
    prefixes: tuple[Prefix, ...] = ()


class ShareState(msgspec.Struct, frozen=True, array_like=True):
    """A gateway's report of its share of a limit, see gateway/peers.py.

    Attributes:
    - name, kind: of the limit
    - given, taken: units, by index of the other gateway, since the limit began to be shared
    - wanted: units that it lacks now
    - free: units that it has left
    """

    name: str
    kind: str
    given: tuple[NonNegativeInt, ...]
    taken: tuple[NonNegativeInt, ...]
    wanted: NonNegativeInt = 0
    free: NonNegativeInt = 0


class GatewayState(Message, frozen=True):
    """gateway -> gateway: the part of the state that all gateways need and that has changed since
    number `since`. Repeated until the receiver has acknowledged this number.

    Attributes:
    - stage, incarnation: of the sender
    - number: of its latest change
    - since: number up to which the receiver has acknowledged all; a new process, which has not,
      drops this message
    - heard_incarnation, heard: acknowledgement: the receiver's process and number up to which the
      sender has all changes
    - adapters, forgotten_adapters: as in AdapterChanges; all of them if there was a change, else
      none
    """

    stage: str
    incarnation: int
    number: NonNegativeInt
    since: NonNegativeInt = 0
    heard_incarnation: int = 0
    heard: NonNegativeInt = 0
    adapters: tuple[AdapterState, ...] = ()
    shares: tuple[ShareState, ...] = ()
    forgotten_adapters: NonNegativeInt = 0


class ShowMetrics(Message, frozen=True):
    """To a gateway: what have you counted? It answers `stage` with CountedMetrics.

    Attributes:
    - question: the asker's name for it
    """

    question: str
    stage: str


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a metric, with Prometheus's names and labels."""

    name: str
    labels: dict[str, str]
    value: float


class MetricSamples(msgspec.Struct, frozen=True, array_like=True):
    """A metric: counter, gauge or histogram."""

    name: str
    help: str
    kind: str
    samples: tuple[MetricSample, ...]


class CountedMetrics(Message, frozen=True):
    """The answer of `stage` to ShowMetrics: its own counts."""

    question: str
    stage: str
    metrics: tuple[MetricSamples, ...] = ()


CONTROL: Any = Union[
    StartRecording,
    StopRecording,
    RecordingState,
    Swap,
    SwapState,
    Watch,
    Observed,
    ShowPrefixes,
    Prefixes,
    GatewayState,
    ShowMetrics,
    CountedMetrics,
]
# Messages that a gateway takes in addition to those of every stage.
FOR_GATEWAYS = (Observed, Prefixes, GatewayState, ShowMetrics, CountedMetrics)
