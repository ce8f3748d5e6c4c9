"""The shell of a stage: sockets, clock, timers, signals and heartbeats around a sans-IO core.

Knows no stage's logic. Every input of the core passes `handle` or `_on_message` here, in one order,
which makes a run repeatable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from pipeinfer import control
from pipeinfer.bus.bus import Bus, NoSuchStage
from pipeinfer.bus.frames import FrameHeader, Unencodable
from pipeinfer.control import Observed, Prefixes, ShowPrefixes
from pipeinfer.core import (
    EVERYONE,
    FORGET_FACTOR,
    HEARTBEAT_SECONDS,
    LOCAL,
    Drain,
    Leave,
    Send,
    SendFailed,
    Tick,
    heartbeat_period,
)
from pipeinfer.messages import Fenced, GroupFault, Message, Recover, State
from pipeinfer.observe.observer import StageObserver
from pipeinfer.runtime.logs import request_fields
from pipeinfer.runtime.stage import (
    CORE_CHANNELS,
    LEAVE_TIMEOUT,
    NOT_FOR_CORE,
    FencedOut,
    IncarnationFilter,
    Stage,
    StageContext,
    builder,
    heartbeat,
    rank_status,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity, Topology
from pipeinfer.trace.hook import RecorderHook

log = logging.getLogger(__name__)

REASON_CHARS = 300  # of a logged reason; parts may come from a client
MAX_LOG_LINES = 100  # each about a different kind of message or receiver


class UnsentMessages:
    """Counts and logs the messages of a stage that could not be sent.

    Attributes:
    - total: since the start
    """

    def __init__(self) -> None:
        self.total = 0
        self._logged: set[tuple[str, str, str]] = set()

    def record(self, send: Send, error: Exception) -> Sequence[SendFailed]:
        """Counts one more message; returns the events for the core, if the message belongs to a
        request. Empty if the receiver does not exist: a peer made up its name."""
        self.total += 1
        reason, message = str(error)[:REASON_CHARS], send.message
        kind = (type(message).__name__, send.channel, send.to)
        if kind not in self._logged and len(self._logged) < MAX_LOG_LINES:
            self._logged.add(kind)
            to = send.to or "everyone"
            line = "%s for %s was not sent (said once): %s"
            log.error(line, kind[0], to, reason, extra=request_fields(message))
        request_id: object = getattr(message, "request_id", None)
        attempt: object = getattr(message, "attempt", None)
        if isinstance(error, NoSuchStage) or not isinstance(attempt, int):
            return ()
        return (SendFailed(str(request_id), attempt, reason),)


# Seconds until a stopped stage logs what it waits for: the last steps of requests that have ended
# take less, and need no line.
DRAIN_NOTICE = 0.5
# seconds between two checks whether the core is idle; the successor waits for it
LEAVE_POLL = 0.005


class StoppedWhileBuilding(Exception):
    """The stage was stopped before it was built."""


@dataclass(frozen=True)
class ProcessOptions:
    """Properties of the process that a shell runs in.

    Attributes:
    - incarnation: of the process; 0: taken from the clock
    - busy_poll: seconds that the loop polls after a frame before it sleeps, see Reader.start
    - forks: whether the process may be forked, for a copy of the core's state
    """

    incarnation: int = 0
    busy_poll: float = 0.0
    forks: bool = False


class Shell:
    """Runs one stage on the current event loop until it is stopped.

    Attributes:
    - on_state_change: called as `on_state_change(state, reason)` at every change of state, beside
      the heartbeat
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        identity: Identity,
        context: zmq.Context[zmq.Socket[bytes]],
        build: Callable[[StageContext], Stage] | None = None,
        process: ProcessOptions = ProcessOptions(),
    ) -> None:
        self.identity, self.settings = identity, settings
        self.incarnation = process.incarnation or time.time_ns()
        self._started_at = _clock()
        resend_seconds = FORGET_FACTOR * settings.host_loss
        self.bus = Bus(identity, self.incarnation, topology, context, resend_seconds=resend_seconds)
        self._topology = topology
        self._build = build or builder(identity.name)
        self._core_channels = CORE_CHANNELS[identity.name]
        self._stages = frozenset(topology.ids())
        self._period, self._published_at = heartbeat_period(len(self._stages)), float("-inf")
        self._options = process
        self.on_state_change: Callable[[State, str], object] = lambda state, reason: None
        self._incarnations, self._unsent = IncarnationFilter(), UnsentMessages()
        self._stage: Stage | None = None
        self._hook: RecorderHook | None = None
        self._observer = StageObserver(settings, identity, self.incarnation, self._on_observed)
        self._progress: tuple[State, str] = ("starting", "")
        self._published: tuple[State, str] | None = None
        self._was_ready = False
        self._stop = asyncio.Event()
        self._drained_by = float("inf")
        self._leaving: asyncio.Task[None] | None = None
        self._reload_when_built = False
        self._failure: BaseException | None = None
        self._builder: threading.Thread | None = None

    async def run(self) -> None:
        """Builds the stage and serves. Raises the errors of the builder, the core or the driver."""
        self._loop = asyncio.get_running_loop()
        self.bus.bind()
        stage_arguments = self.settings, self._topology, self.identity, self.incarnation
        self._hook = RecorderHook(
            *stage_arguments, self._publish_control, self.handle, self._options.forks
        )
        beat = self._loop.call_soon(self._heartbeat)
        try:
            self._observer.begin()
            stage = await self._built()
            for peer, *channels in stage.listens:
                self.bus.listen(peer, *channels)
            self._stage = stage
            if self._reload_when_built:
                self.reload()
            self._hook.begin(stage.core, stage.facts)
            if stage.driver is not None:
                await stage.driver.start(self.handle)
            self.bus.start(self._on_message, self._options.busy_poll)
            if stage.control is not None:
                stage.control.open(self._ask)
            self._tick()
            await self._stop.wait()
        except ConfigurationError as error:
            self._progress = ("failed", str(error))
            self._publish_heartbeat()
            raise
        except Exception as error:
            self._failure = error
        finally:
            self._stop.set()
            beat.cancel()
            if self._leaving is not None:
                self._leaving.cancel()
            self._close_hook()
            if self._stage is not None and self._stage.control is not None:
                self._stage.control.close()
            if self._stage is not None and self._stage.driver is not None:
                await self._stage.driver.stop()
            self.bus.close()
            await self._observer.close()
        if self._failure is not None:
            raise self._failure

    @property
    def built(self) -> bool:
        """Whether there is a core: weights are loaded, ranks have met."""
        return self._stage is not None

    def reload(self) -> None:
        """Reads the stage's files again; no-op for a stage without any.

        Called while the stage is built, it takes effect afterwards, because files may have been
        read before the change. A reload that fails is logged, and the stage goes on with its old
        files.
        """
        if self._stage is None:
            self._reload_when_built = True
        elif self._stage.reload is not None and not self._stop.is_set():
            try:
                self._stage.reload()
            except Exception:
                log.exception("%s could not read anew", self.identity.id)

    def drain(self) -> None:
        """Finishes what runs, then stops; called again, or after the drain timeout, stops at
        once."""
        if self._stage is None or self._drained_by < float("inf"):
            self._stop.set()
            return
        self._drained_by = self._loop.time() + self.settings.drain_timeout
        self.handle(Drain())
        self._check_drained()
        self._loop.call_later(DRAIN_NOTICE, self._say_what_drains)

    def _say_what_drains(self) -> None:
        if not self._stop.is_set():
            text = "stopping: %s, at most %g s more; stopped again, it ends at once"
            log.info(text, self.state()[1] or "waits for what runs", self.settings.drain_timeout)

    def leave(self) -> None:
        """Lets another process take over: hands on the work in hand, then stops, within seconds.

        Does nothing when the stage ends already; `drain` and `stop` end it sooner.
        """
        if self._stage is None:
            self._stop.set()
        elif self._leaving is None and self._drained_by == float("inf"):
            self._leaving = self._loop.create_task(self._leave(self._stage))

    async def _leave(self, stage: Stage) -> None:
        try:
            if stage.before_leave is not None:
                await stage.before_leave()
            self.handle(Leave())
            deadline = self._loop.time() + LEAVE_TIMEOUT
            while not stage.core.idle() and self._loop.time() < deadline:
                await asyncio.sleep(LEAVE_POLL)
        except Exception as error:
            log.exception("%s could not leave in good order", self.identity.id)
            self._failure = error
        self._stop.set()

    def stop(self) -> None:
        """Stops without finishing anything."""
        self._stop.set()

    def join_builder(self) -> None:
        """Waits for the thread that builds the stage, if it still does: a process whose interpreter
        ends under such a thread is killed by a signal. The thread does not stop before it has
        loaded."""
        if self._builder is not None:
            self._builder.join()

    def handle(self, event: Message) -> None:
        """Passes one local event through the core; on the shell's loop only."""
        now = time.monotonic()
        if self._hook is not None and self._hook.active and not self._stop.is_set():
            self._hook.event(now, event)
        self._process_event(event, now)

    def _process_event(self, event: Message, now: float) -> None:
        """Passes one event through the core, and sends its outputs."""
        if self._stop.is_set() or self._stage is None:
            return
        driver, local = self._stage.driver, list[Message]()
        hook = self._hook if self._hook is not None and self._hook.active else None
        unsent: list[SendFailed] = []
        try:
            sends = self._stage.core.handle(event, now)
            for send in sends:  # hot path: in a gateway once for every token of every stream
                channel, _, message = send
                if channel != LOCAL:
                    unsent += self._send(send, hook)
                    continue
                local.append(message)
                if hook is not None:
                    hook.delivered(message)
            if self._observer.active:
                self._observer.on_exchange(event, sends, now)
            for message in local:  # last: a driver may feed the next event before it returns
                assert driver is not None
                driver.deliver(message)
            if not isinstance(event, SendFailed):  # no SendFailed about the answer to a SendFailed
                for one in unsent:
                    self.handle(one)
        except Exception as error:  # a broken invariant ends the stage, with the reason in its log
            kind = type(event).__name__
            log.exception("%s failed on %s", self.identity.id, kind, extra=request_fields(event))
            self._failure = error
            self._stop.set()

    async def _built(self) -> Stage:
        """The stage, built in a thread so that heartbeats go on while weights load.

        A daemon thread: a stage that is stopped while it loads does not wait for the load.
        """
        context = StageContext(
            self.settings, self._topology, self.identity, self.incarnation, self._report
        )
        built: asyncio.Future[Stage] = self._loop.create_future()

        def settle(result: Stage | BaseException) -> None:
            if built.done():
                return
            if isinstance(result, BaseException):
                built.set_exception(result)
            else:
                built.set_result(result)

        def work() -> None:
            result: Stage | BaseException
            try:
                result = self._build(context)
            except BaseException as error:
                result = error
            if not self._stop.is_set():
                self._loop.call_soon_threadsafe(settle, result)

        self._builder = threading.Thread(target=work, name=f"build {self.identity.id}", daemon=True)
        self._builder.start()
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({built, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not built.done():
            raise StoppedWhileBuilding(self.identity.id)
        return built.result()

    def _send(self, send: Send, hook: RecorderHook | None) -> Sequence[SendFailed]:
        """Sends a message; returns the events for the core if that cannot be done."""
        if isinstance(send.message, GroupFault):
            # A supervisor acts on the message; without one, this line informs a person.
            log.error("group %d is stuck: %s", send.message.group, send.message.reason)
        try:
            number, sent, body = self.bus.send(send)
        except (Unencodable, NoSuchStage) as error:
            if hook is not None:
                hook.unsent(send.channel, send.to, send.message)
            return self._unsent.record(send, error)
        if hook is not None:
            hook.sent(send.channel, send.to, number, sent, body)
        return ()

    def _on_message(self, channel: str, header: FrameHeader, message: Message) -> None:
        if channel == control.CHANNEL:
            self._control(message)
            return
        now = time.monotonic()
        if channel == "group" and isinstance(message, Fenced):
            self._on_fenced(header.sender, message)
            return
        if not self._incarnations.accepts(header, now):
            self._notify_fenced(header, now)
            return
        if kind := self._rejection(channel, message):
            self.bus.reader.drop(f"{self.identity.name} takes no {kind}, {header.sender} sent it")
            return
        if self._hook is not None and self._hook.active and not self._stop.is_set():
            self._hook.frame(now, channel, header, self.bus.reader.body)
        self._process_event(message, now)
        self._publish_if_changed()

    def _notify_fenced(self, header: FrameHeader, now: float) -> None:
        """Tells a process that its frames are dropped, because it was replaced, or its clock was
        set back."""
        if header.sender in self._stages and not self._stop.is_set():
            notice = self._incarnations.notice(header, now)
            if notice is not None:
                self.bus.send(Send("group", header.sender, notice))

    def _on_fenced(self, by: str, fenced: Fenced) -> None:
        """Ends this process, unless the message is about another process of this stage."""
        if (fenced.stage, fenced.incarnation) != (self.identity.id, self.incarnation):
            return
        if fenced.newest > self.incarnation and self._failure is None:
            self._failure = FencedOut(fenced, by, _clock() - self._started_at)
            log.error("%s", self._failure)
            self._stop.set()

    def _control(self, message: Message) -> None:
        """Takes a request of a person to this process, or another stage's message to a gateway."""
        stage = self._stage
        if isinstance(message, control.FOR_GATEWAYS):
            if stage is not None and stage.control is not None:
                stage.control.on_message(message)
        elif isinstance(message, ShowPrefixes):
            if stage is not None and stage.prefixes is not None:
                found = stage.prefixes(message.most, message.ids)
                self._publish(control.CHANNEL, Prefixes(message.question, self.identity.id, found))
        elif self._hook is not None:
            self._hook.control(message)
            self._observer.control(message)

    def _ask(self, stage: str, message: Message) -> None:
        """Sends a message of this stage's ControlHook to `stage`."""
        if stage == self.identity.id:
            self._control(message)
        elif not self._stop.is_set():
            self.bus.send(Send(control.CHANNEL, stage, message))

    def _rejection(self, channel: str, message: Message) -> str:
        """Why the core must not get the message: its channel or kind; "" if it may."""
        if channel not in self._core_channels:
            return channel
        if channel == "recovery":
            if isinstance(message, NOT_FOR_CORE.get(self.identity.name, ())):
                return type(message).__name__
            if isinstance(message, Recover) and message.stage not in self._stages:
                return f"Recover of {message.stage!r}"
        return ""

    def _publish_control(self, message: Message) -> None:
        if not self._stop.is_set():
            self._publish(control.CHANNEL, message)

    def _on_observed(self, observed: Observed) -> None:
        self._publish_control(observed)
        if self._stage is not None and self._stage.control is not None:
            self._stage.control.on_message(observed)  # a gateway sees itself without a socket

    def _publish(self, channel: str, message: Message) -> tuple[int, float, bytes] | None:
        """Publishes a message of the shell itself; None if it cannot be sent."""
        send = Send(channel, EVERYONE, message)
        try:
            return self.bus.send(send)
        except Unencodable as error:
            self._unsent.record(send, error)
            return None

    def _close_hook(self) -> None:
        assert self._hook is not None
        if self._failure is not None and self._stage is not None:
            self._hook.crashed(self._failure)
        self._hook.close()

    def _report(self, state: State, reason: str) -> None:
        """Takes a report of the builder's thread."""
        self._progress = (state, reason)
        self._loop.call_soon_threadsafe(self._publish_if_changed)

    def state(self) -> tuple[State, str]:
        """The stage's state, and its activity or the reason why it waits."""
        if self._stage is None or self._progress[0] == "failed":
            return self._progress
        return self._stage.core.state()

    def _tick(self) -> None:
        if self._stop.is_set() or self._stage is None:
            return
        self.handle(Tick())
        self._publish_if_changed()
        if self._drained_by < float("inf"):
            self._check_drained()
        self._loop.call_later(self._stage.tick, self._tick)

    def _check_drained(self) -> None:
        assert self._stage is not None
        if self._stage.core.idle() or self._loop.time() >= self._drained_by:
            self._stop.set()

    def _publish_if_changed(self) -> None:
        if self._published is None or self.state()[0] == self._published[0]:
            return
        was = self._published[0]
        self._publish_heartbeat()
        if was == "ready" and self._published[0] == "waiting":
            log.warning("not ready any more: %s", self._published[1])
        elif was == "waiting" and self._published[0] == "ready" and self._was_ready:
            log.info("ready again")
        self._was_ready = self._was_ready or "ready" in (was, self._published[0])

    def _heartbeat(self) -> None:
        if self._stop.is_set():
            return
        if self._loop.time() - self._published_at > self._period - HEARTBEAT_SECONDS / 2:
            self._publish_heartbeat()
        else:
            self._publish_rank_status()
        self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)

    def _publish_rank_status(self) -> None:
        """Publishes an engine's state, for its scheduler and the other ranks."""
        if self.identity.name == "engine":
            state, _ = self.state()
            self._publish("group", rank_status(self.identity, self.incarnation, state))

    def _stats(self) -> dict[str, float]:
        if self._stage is None:
            return {}
        driver = self._stage.driver
        return {
            **self._stage.core.stats(),
            **(driver.stats() if driver is not None else {}),
            **(self._hook.stats() if self._hook is not None else {}),
        }

    def _dropped(self) -> dict[str, float]:
        return {
            "bad_frames": float(self.bus.reader.bad_frames),
            "uptime_seconds": _clock() - self._started_at,
            "fenced": float(self._incarnations.dropped),
            "refused_handshakes_total": float(self.bus.refused_handshakes),
            "unsent_total": float(self._unsent.total),
            "repeated_frames_total": float(self.bus.repeated_frames),
        }

    def _publish_heartbeat(self) -> None:
        if self._stop.is_set():
            return
        was, (state, reason) = self._published, self.state()
        self._published = state, reason
        self._published_at = self._loop.time()
        self._publish_rank_status()
        if was is None or was[0] != state:
            self.on_state_change(state, reason)
        stats = {**self._stats(), **self._dropped()}
        beat = heartbeat(
            self.identity, self.incarnation, state, reason, pid=os.getpid(), stats=stats
        )
        frame = self._publish("telemetry", beat)
        if frame is not None and self._hook is not None and self._hook.active:
            self._hook.heartbeat(*frame)
        if self.identity.name == "gateway":
            self.handle(beat)  # a gateway sees itself without a socket


def _clock() -> float:
    """Seconds of a clock that also counts the time in which the host slept, because other hosts
    have gone on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
