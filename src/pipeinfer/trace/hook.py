"""The recorder hook of a stage's shell: every input and output of its core becomes a row.

Answers the channel `control`: recordings that begin and end while the stage runs. Knows settings
and clocks; neither what messages mean nor how a file is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from pipeinfer.bus.frames import FrameHeader
from pipeinfer.control import RecordingState, StartRecording, StopRecording
from pipeinfer.core import LOCAL, Core, NewEpoch, Tick
from pipeinfer.messages import PROTOCOL, Message
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, Topology
from pipeinfer.trace.format import Crash, Direction, TraceHeader, Unencoded
from pipeinfer.trace.recorder import (
    FlightRing,
    Outcome,
    Quota,
    Recorder,
    Recording,
    default_folder,
    identify_model,
)
from pipeinfer.trace.redact import redactor
from pipeinfer.trace.snapshot import StateCopier, StateCopy, StateCopyFailed, Unsnapshottable
from pipeinfer.version import __version__

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5  # seconds between blocks; what a killed process loses at most, and a little
CHECK_SECONDS = 0.05  # seconds between looks whether a block is due
# Seconds without an input after which a large state may be walked beside the loop.
QUIET_SECONDS = 0.5
# Rows: a block that takes the interpreter from the loop for a fraction of a ms.
MAX_WAITING_ROWS = 1000
MAX_RECORDING_SECONDS = 366 * 86_400.0  # seconds of a recording; no timer takes "inf"
UNNUMBERED = -1  # in place of the number of what was not sent
FROM_THE_START = "--record"  # the name of the recording that the setting asks for
_encode = msgspec.msgpack.Encoder().encode


class RecorderHook:
    """Between a stage's shell and its recorder, on the stage's event loop; acts between events.

    Attributes:
    - active: whether rows are wanted; the shell looks before it makes one
    - answer: `answer(state)` publishes what became of a recording
    - feed: the shell's `handle`
    - forks: whether this process may be forked, see StateCopier
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        identity: Identity,
        incarnation: int,
        answer: Callable[[RecordingState], None],
        feed: Callable[[Message], None],
        forks: bool = False,
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._identity = identity
        self._incarnation = incarnation
        self._answer = answer
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        who = identity
        number = who.rank if who.name == "engine" else who.index
        engine = who.name == "engine"
        budget = settings.flight_recorder_mib << 20
        self._recorder = Recorder(
            f"{who.name}-{who.group}-{number}-{os.getpid()}",
            partial(identify_model, settings.model_name, settings.model),
            FlightRing(budget, keep_all=engine) if budget else None,
            restarts=engine,
        )
        self.add = self._recorder.add
        self._copier = StateCopier(forks)
        self._needs_quiet = engine and not forks  # for a quiet moment to take a large state
        self._inputs = 0  # all but ticks
        self._seen = 0  # of them, when they were looked at last
        self._quiet_since = 0.0
        self._core: Core | None = None
        self._facts: dict[str, object] = {}
        self._requested = 0  # recordings that were begun and have not ended
        self._bytes = 0  # in the files of those that have ended
        self.active = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the next block is handed over at the latest

    # --------------------------------------------------------------------------------- the hot path

    def frame(self, now: float, channel: str, header: FrameHeader, body: bytes) -> None:
        """The core is about to take a frame's message."""
        self._inputs += 1
        self.add((now, "in", channel, header.sender, header.seq, header.sent, body))

    def event(self, now: float, event: Message) -> None:
        """The core is about to take a local event."""
        self._inputs += type(event) is not Tick
        try:
            body = _encode(event)
        except Exception as error:  # see bus/frames.encode; a recording is no reason to die
            self._recorder.flush(now)
            kind = type(event).__name__
            self._recorder.gap(f"a {kind} cannot be recorded: {type(error).__name__}")
            return
        self.add((now, "in", LOCAL, "", 0, 0.0, body))

    def sent(self, channel: str, to: str, number: int, sent: float, body: bytes) -> None:
        """The core's output left over the bus."""
        self.add((sent, "out", channel, to, number, sent, body))

    def delivered(self, message: Message) -> None:
        """The core's output is about to go to the driver."""
        note: Callable[[], Message] | None = getattr(message, "note", None)
        direction: Direction = "out" if note is None else "note"
        # Encoded at once: a row of plain values is nothing that the garbage collector must follow.
        try:
            body = _encode(message if note is None else note())
        except Exception:  # as above; it is only compared with what a replay gives
            body = _encode(Unencoded(type(message).__name__))
        self.add((time.monotonic(), direction, LOCAL, "", 0, 0.0, body))

    def unsent(self, channel: str, to: str, message: Message) -> None:
        """The core's output that could not be sent: of what kind it was."""
        body = _encode(Unencoded(type(message).__name__))
        self.add((time.monotonic(), "out", channel, to, UNNUMBERED, 0.0, body))

    def heartbeat(self, number: int, sent: float, body: bytes) -> None:
        """The shell said how the stage is."""
        self.add((sent, "note", "telemetry", "", number, sent, body))

    # ------------------------------------------------------------------------------ begin and end

    def begin(self, core: Core, facts: dict[str, object]) -> None:
        """The core is built and has seen nothing yet."""
        self._core = core
        self._facts = facts
        if self._settings.record:
            quota = Quota(bytes=self._settings.record_max_bytes)
            recording = Recording(FROM_THE_START, self._settings.record, quota, self._queue_outcome)
            self._start(recording, None)
        if self._recorder.ring is not None:
            now = self._loop.time()
            self._recorder.begin_segment(self._header(flight=True), now)
            self._activate()

    def control(self, message: Message) -> None:
        """Takes a message of the channel `control`."""
        if isinstance(message, StartRecording):
            self._start_recording(message)
        elif isinstance(message, StopRecording):
            self._stop(message.recording, "it was told to stop")

    def crashed(self, error: BaseException) -> None:
        """The stage dies of `error`: the ring is written."""
        text = f"{type(error).__name__}: {error}"
        if self.active:
            self.add((time.monotonic(), "note", LOCAL, "", 0, 0.0, _encode(Crash(text))))
        self._recorder.flush(time.monotonic())
        self._recorder.dump(self._flight_folders(), text)

    def close(self) -> None:
        """The stage ends; everything is written when this returns."""
        if self._timer is not None:
            self._timer.cancel()
        self.active = False
        self._recorder.flush(time.monotonic())
        self._recorder.close("the stage stopped")

    def stats(self) -> dict[str, float]:
        """Running recordings, bytes of finished ones, lost messages, bytes of the ring."""
        ring = self._recorder.ring
        return {
            "recordings": float(self._requested),
            "recorded_bytes_total": float(self._bytes),
            "recorded_lost_total": float(self._recorder.lost),
            "flight_bytes": float(ring.bytes) if ring is not None else 0.0,
        }

    # ----------------------------------------------------------------------------------- recordings

    def _start_recording(self, request: StartRecording) -> None:
        if self._core is None:
            self._refuse(request.recording, "the stage is still being built")
            return
        self._recorder.flush(self._loop.time())  # what came before the state
        try:
            state = self._copier.take(self._core)
        except (Unsnapshottable, StateCopyFailed) as error:
            self._refuse(request.recording, str(error))
            return
        rewriter = None
        if request.redact:
            rewriter = partial(redactor, request.redact, self._identity.name, self._settings.model)
        quota = Quota(request.messages, request.max_bytes)
        self._start(
            Recording(request.recording, request.out, quota, self._queue_outcome, rewriter),
            state,
        )
        if request.seconds > 0:
            stop = partial(self._stop, request.recording, f"after {request.seconds:g} s")
            self._loop.call_later(min(request.seconds, MAX_RECORDING_SECONDS), stop)
        if request.fresh_epoch and self._identity.name == "engine":
            self._feed(NewEpoch())

    def _start(self, recording: Recording, state: StateCopy | None) -> None:
        self._requested += 1
        self._recorder.start(recording, self._header(), state)
        self._activate()

    def _stop(self, name: str, reason: str) -> None:
        self._recorder.flush(self._loop.time())
        self._recorder.stop(name, reason)

    def _refuse(self, name: str, reason: str) -> None:
        self._answer(RecordingState(name, self._identity.id, "failed", reason=reason))

    def _queue_outcome(self, outcome: Outcome) -> None:
        """From the recorder's thread."""
        self._loop.call_soon_threadsafe(self._on_outcome, outcome)

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.state != "recording":
            self._requested -= 1
            self._bytes += outcome.bytes
            self.active = self._requested > 0 or self._recorder.ring is not None
        state = RecordingState(
            recording=outcome.name,
            stage=self._identity.id,
            state=outcome.state,
            path=outcome.path,
            records=outcome.records,
            bytes=outcome.bytes,
            reason=outcome.reason,
        )
        self._answer(state)

    # ------------------------------------------------------------------------------------- flushing

    def _activate(self) -> None:
        self.active = True
        if self._timer is None:
            self._due = self._loop.time() + FLUSH_SECONDS
            self._timer = self._loop.call_later(CHECK_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        if now >= self._due or self._recorder.waiting >= MAX_WAITING_ROWS:
            self._due = now + FLUSH_SECONDS
            self._recorder.flush(now)
            if self._recorder.needs_segment(now, self._copier.small or self._quiet(now)):
                self._next_segment(now)
        self.active = self._requested > 0 or self._recorder.ring is not None
        self._timer = self._loop.call_later(CHECK_SECONDS, self._on_timer) if self.active else None

    def _quiet(self, now: float) -> bool:
        """Whether the core does nothing, and has taken nothing for a while: the first ticks after
        its work may change it yet."""
        if self._seen != self._inputs:
            self._seen = self._inputs
            self._quiet_since = now
        idle = self._core is not None and self._core.idle()
        return idle and now - self._quiet_since >= QUIET_SECONDS

    def _unchanged_check(self, now: float) -> Callable[[], bool] | None:
        """For an engine, whether its state is the one of now still."""
        if not self._needs_quiet:
            return None
        quiet, inputs = self._quiet(now), self._inputs
        return lambda: quiet and self._inputs == inputs

    def _next_segment(self, now: float) -> None:
        assert self._core is not None
        try:
            state = self._copier.take(self._core, self._unchanged_check(now))
        except StateCopyFailed as error:
            self._recorder.postpone_segment(now, str(error))
        except Unsnapshottable as error:
            log.error("no flight recorder from now on: %s", error)
            self._recorder.ring = None
        else:
            self._recorder.begin_segment(self._header(flight=True), now, state)

    def _header(self, flight: bool = False) -> TraceHeader:
        who = self._identity
        settings = msgspec.structs.asdict(self._settings)
        del settings["api_key"]
        return TraceHeader(
            protocol=PROTOCOL,
            version=__version__,
            stage=who.id,
            name=who.name,
            group=who.group,
            rank=who.rank,
            index=who.index,
            incarnation=self._incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            settings=settings,
            stages=tuple(self._topology.ids()),
            seed=self._settings.seed,
            wall=time.time(),
            monotonic=time.monotonic(),
            facts=dict(self._facts),
            reason="flight" if flight else "record",
        )

    def _flight_folders(self) -> list[Path]:
        """Folders into which the ring may be written, the best one first."""
        named = self._settings.flight_dir or self._settings.record
        fallback = Path(tempfile.gettempdir(), f"pipeinfer-{os.getuid()}")
        return [Path(named)] if named else [default_folder(), fallback]
