"""Observes a stage while somebody watches: its request spans, and how long its steps take.

Stands beside the recorder hook in the shell. While nobody watches, only a scheduler keeps sums of
its last minute. Knows clocks and the channel `control`; what messages mean is read in stages.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from pipeinfer.control import Observed, RequestSpan, StepMade, Watch
from pipeinfer.core import Send
from pipeinfer.messages import Message
from pipeinfer.observe.opentelemetry import OpenTelemetryExporter
from pipeinfer.observe.spans import Exchange, SpanObserver, SpanStore
from pipeinfer.observe.stages import span_observer
from pipeinfer.observe.steps import LastMinute
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity

log = logging.getLogger(__name__)

PUBLISH_PERIOD = 0.25  # seconds between two Observed messages
MAX_WATCH = 3600.0  # seconds that one Watch lasts at most
MAX_SPANS = 256  # in an Observed message: far below what a frame of telemetry may have
MAX_ENDED = 4096  # ended spans that wait to be published; then the oldest go
MAX_STEPS = 2048  # steps that wait to be published; then the oldest go


class StageObserver:
    """The observer of one stage, on its event loop.

    active: whether exchanges are wanted; the shell looks before it makes an Exchange.
    publish: sends an Observed message.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        incarnation: int,
        publish: Callable[[Observed], None],
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._exporter: OpenTelemetryExporter | None = None
        self._incarnation = incarnation
        self._publish = publish
        self._until = 0.0  # on the loop's clock: when nobody watches any more
        self._timer: asyncio.TimerHandle | None = None
        self._observer: SpanObserver | None = None
        self._ended: deque[RequestSpan] = deque(maxlen=MAX_ENDED)
        self._steps: deque[StepMade] = deque(maxlen=MAX_STEPS)
        self._minute: LastMinute | None = None  # of a scheduler's steps
        self._past_requested = False  # whether a Watch asked for the last minute
        self.active = False

    def begin(self) -> None:
        """The stage begins. ConfigurationError if spans are wanted and cannot be had."""
        self._begin_minute()
        if self._settings.otlp_endpoint:
            self._exporter = OpenTelemetryExporter(self._settings, self._identity)
            self._start_observing()

    def control(self, message: Message) -> None:
        """Takes a message of the channel `control`."""
        if isinstance(message, Watch) and message.seconds > 0:
            loop = asyncio.get_running_loop()
            self._until = max(self._until, loop.time() + min(message.seconds, MAX_WATCH))
            self._past_requested |= message.past
            self._start_observing()
            if self._timer is None:
                self._timer = loop.call_later(PUBLISH_PERIOD, self._publish_changes)

    def on_exchange(self, event: Message, sends: Sequence[Send], began: float) -> None:
        """The core took `event` at monotonic time `began`, and `sends` are on their way."""
        wall, now = time.time(), time.monotonic()
        exchange = Exchange(event, sends, wall - (now - began), wall)
        try:
            if self._minute is not None:
                self._minute.on_exchange(exchange)
            if self._observer is not None:
                self._observer.on_exchange(exchange)
        except Exception:  # observing must not end a stage
            log.exception("nothing is observed for now: %s", type(event).__name__)
            self._begin_minute()
            self._stop_observing()

    async def close(self) -> None:
        """The stage ends: spans that are still open end as "left", and the exporter sends them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.active = False
        if self._exporter is not None:
            if self._observer is not None:
                self._observer.spans.end_all(time.time(), "left")
            await self._exporter.close()

    def _start_observing(self) -> None:
        if self._observer is None:
            self._observer = span_observer(
                self._identity.name, SpanStore(self._identity.id, self._on_span_end)
            )
        self.active = True

    def _begin_minute(self) -> None:
        if self._identity.name == "scheduler":
            self._minute = LastMinute(self._settings.itl_target, self._on_step)
            self.active = True

    def _on_step(self, step: StepMade) -> None:
        if self._timer is not None:
            self._steps.append(step)

    def _on_span_end(self, span: RequestSpan) -> None:
        if self._exporter is not None:
            self._exporter.add(span)
        if self._timer is not None:
            self._ended.append(span)

    def _publish_changes(self) -> None:
        """Four times a second, while somebody watches."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._observer is None:
            return
        count = min(len(self._ended), MAX_SPANS)
        spans = [self._ended.popleft() for _ in range(count)]
        spans += self._observer.spans.changes(MAX_SPANS - count)
        past: tuple[StepMade, ...] = ()
        if self._past_requested and self._minute is not None:
            past = self._minute.sums(self._steps[0].at if self._steps else time.time())
        self._past_requested = False
        if spans or self._steps or past:
            observed = Observed(
                stage=self._identity.id,
                incarnation=self._incarnation,
                passages=tuple(spans),
                steps=tuple(self._steps),
                past=past,
            )
            self._steps.clear()
            self._publish(observed)
        if loop.time() < self._until:
            self._timer = loop.call_later(PUBLISH_PERIOD, self._publish_changes)
        elif self._exporter is None:
            self._stop_observing()
        else:
            self._ended.clear()

    def _stop_observing(self) -> None:
        """Drops all spans: exchanges until the next Watch are missed, so that the spans would be
        wrong then. The sums of a scheduler's steps go on."""
        self._ended.clear()
        self._steps.clear()
        self._observer = None
        self.active = self._minute is not None
        if self._exporter is not None:
            self._start_observing()
