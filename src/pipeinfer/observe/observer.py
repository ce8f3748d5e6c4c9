"""Observes a stage while a page or an exporter watches: request spans, and how long steps take.

- `StageObserver` stands beside the recorder hook in the shell.
- `StepTimer` and `LastMinute`: while no page watches, only a scheduler keeps sums of its last
  minute: how long its steps took from plan to result, how many decodes they had, how much prompt.
- `OpenTelemetryExporter` sends request spans to a collector, from a thread of OpenTelemetry's
  library, which is imported only when it is used. A collector that is slow or gone costs spans, and
  no request anything.

Knows clocks and the channel `control`; what messages mean is read in spans.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from pipeinfer.control import Observed, RequestSpan, StepMade, Watch
from pipeinfer.core import ANY_PLAN, PlanFilter, Send
from pipeinfer.messages import BeginEpoch, Message, Plan, Result, num_ids
from pipeinfer.observe.spans import (
    Exchange,
    SpanObserver,
    SpanStore,
    Traceparent,
    read_traceparent,
    span_observer,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity
from pipeinfer.version import __version__
from pipeinfer.wire import unpack

if TYPE_CHECKING:
    from opentelemetry.context import Context

OTLP_PATH = "/v1/traces"
EXPORTER_PACKAGE = "opentelemetry.exporter.otlp.proto.http"
SHUTDOWN_TIMEOUT = 1.0  # seconds that a stage's end waits for what was not sent yet
# Seconds between two lines of the log about a collector that does not answer.
ERROR_LOG_PERIOD = 60.0
NANOSECONDS = 1e9
# Moments' values that the span has as attributes, under the names of the semantic conventions.
SPAN_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "group": "pipeinfer.group",
    "status": "http.response.status_code",
}


def check_opentelemetry(settings: Settings) -> None:
    """ConfigurationError if spans are wanted and cannot be had."""
    url = settings.otlp_endpoint
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--otlp-endpoint {url}: must begin with http:// or https://")
    if not _installed():
        raise ConfigurationError(
            "--otlp-endpoint needs OpenTelemetry: pip install 'pipeinfer[otel]'"
        )


def _installed() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER_PACKAGE) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class _Seldom(logging.Filter):
    """Lets one line pass, and then none for a while: who retries says so each time."""

    def __init__(self) -> None:
        super().__init__()
        self._next = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + ERROR_LOG_PERIOD
        return True


class _SpanIds:
    """Ids of spans: the one that was named for the next span, or any."""

    def __init__(self) -> None:
        self.next: Traceparent | None = None
        self._random = random.SystemRandom()

    def generate_span_id(self) -> int:
        if self.next is not None:
            return int(self.next.span_id, 16)
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        if self.next is not None:
            return int(self.next.trace_id, 16)
        return self._random.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return False


class OpenTelemetryExporter:
    """Exports the spans of one stage. Raises ConfigurationError as `check` does."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        check_opentelemetry(settings)
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        name = trace_exporter.__name__
        logging.getLogger(name).addFilter(_Seldom())
        url = settings.otlp_endpoint.rstrip("/")
        exporter = trace_exporter.OTLPSpanExporter(
            url if url.endswith(OTLP_PATH) else url + OTLP_PATH
        )
        resource = {
            "service.name": "pipeinfer",
            "service.version": __version__,
            "service.instance.id": identity.id,
            "pipeinfer.stage": identity.id,
        }
        self._ids = _SpanIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # the trace's own flag has decided
            resource=Resource.create(resource),
            id_generator=self._ids,  # type: ignore[arg-type]  # which is duck-typed
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pipeinfer", __version__)
        self._name = identity.name
        self._model = settings.model_name

    def add(self, request_span: RequestSpan) -> None:
        """Takes a span that has ended. If its trace is not sampled, nothing is sent; of a span
        without a trace the gateway's, which begins one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = read_traceparent(request_span.trace)
        own = read_traceparent(request_span.span)
        gateway = self._name == "gateway"
        if (parent is None and not gateway) or (parent is not None and not parent.sampled):
            return
        self._ids.next = own
        span = self._tracer.start_span(
            self._name,
            context=_parent_context(parent),
            kind=SpanKind.SERVER if gateway else SpanKind.INTERNAL,
            attributes=self._attributes(request_span, gateway),
            start_time=_nanoseconds(request_span.began),
        )
        self._ids.next = None
        for event in request_span.moments:
            span.add_event(event.name, event.values, _nanoseconds(event.at))
        if request_span.outcome == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(request_span.ended))

    async def close(self) -> None:
        """Sends what was not sent yet, and waits a second for that at most."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(done.set)

        # A daemon: the process ends even while a collector does not answer.
        threading.Thread(target=end, name="end of spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), SHUTDOWN_TIMEOUT)

    def _attributes(
        self, request_span: RequestSpan, gateway: bool
    ) -> Mapping[str, str | int | list[str]]:
        found: dict[str, str | int | list[str]] = {
            "pipeinfer.request_id": request_span.request_id,
            "pipeinfer.outcome": request_span.outcome,
        }
        for event in request_span.moments:
            for name, value in event.values.items():
                if name in SPAN_ATTRIBUTES:
                    found[SPAN_ATTRIBUTES[name]] = int(value)
        if gateway:
            found["gen_ai.request.model"] = self._model
            found["gen_ai.response.id"] = request_span.request_id
            if request_span.outcome in ("stop", "length"):
                found["gen_ai.response.finish_reasons"] = [request_span.outcome]
        return found


def _parent_context(parent: Traceparent | None) -> Context:
    """In which a span is a child of `parent`, or a root."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    if parent is None:
        return Context()
    ids = int(parent.trace_id, 16), int(parent.span_id, 16)
    flags = TraceFlags(TraceFlags.SAMPLED)
    remote = SpanContext(*ids, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


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
        self._until = 0.0  # on the loop's clock: when the last watcher's time ends
        self._timer: asyncio.TimerHandle | None = None
        self._observer: SpanObserver | None = None
        self._ended: deque[RequestSpan] = deque(maxlen=MAX_ENDED)
        self._steps: deque[StepMade] = deque(maxlen=MAX_STEPS)
        self._minute: LastMinute | None = None  # of a scheduler's steps
        self._past_requested = False  # whether a Watch asked for the last minute
        self.active = False

    def begin(self) -> None:
        """Begins to observe the stage. Raises ConfigurationError if spans are wanted and cannot be
        had."""
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
        """Publishes changes four times a second, while a page watches."""
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
                spans=tuple(spans),
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


MAX_PLANNED = 64  # plans; far more than are ever in flight
UNKNOWN = -1
SUM_SECONDS = 0.5  # seconds of a sum
MAX_SUMS = 120  # a minute of them


class _Planned(NamedTuple):
    """A plan without a result. `known`: tokens that each row's request was admitted with."""

    at: float
    known: np.ndarray


class StepTimer:
    """`target`: what a step should take at most, in seconds."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._known = np.full(256, UNKNOWN, dtype=np.int64)  # by slot
        self._planned: OrderedDict[tuple[int, int], _Planned] = OrderedDict()
        self._result_at = 0.0
        self._plans = PlanFilter(ANY_PLAN)

    def on_plan(self, plan: Plan, at: float) -> None:
        """Takes a plan that was published at `at` (seconds)."""
        if self._plans.take(plan.number) != "next":
            return
        for release in plan.releases:
            self._admit(release.slot, UNKNOWN)
        for admit in plan.admits:
            self._admit(admit.slot, num_ids(admit.token_ids))
        slots = unpack(plan.slots)
        if len(slots) and int(slots.max()) >= len(self._known):
            self._admit(int(slots.max()), UNKNOWN)
        self._planned[plan.epoch, plan.number] = _Planned(at, self._known[slots])
        while len(self._planned) > MAX_PLANNED:
            self._planned.popitem(last=False)

    def on_result(self, result: Result, at: float) -> StepMade | None:
        """A result came; None if its plan is unknown, or it computed nothing.

        A row decodes if it begins behind the tokens that its request was admitted with; where those
        are not known, if it computed one token.
        """
        planned = self._planned.pop((result.epoch, result.number), None)
        before, self._result_at = self._result_at, at
        starts, counts = unpack(result.starts), unpack(result.counts)
        if planned is None or len(planned.known) != len(counts) or not counts.any():
            return None
        known = planned.known
        decodes = np.where(known == UNKNOWN, counts == 1, starts >= known) & (counts > 0)
        return StepMade(
            at=planned.at,
            seconds=at - max(before, planned.at),
            decodes=int(np.count_nonzero(decodes)),
            prompt_tokens=int(counts[~decodes].sum()),
            target=self._target,
        )

    def begin(self) -> None:
        """An epoch begins: no slot is taken, and no plan is in flight."""
        self._planned.clear()
        self._known[:] = UNKNOWN
        self._plans = PlanFilter()

    def _admit(self, slot: int, known: int) -> None:
        if slot >= len(self._known):
            more = np.full(2 * (slot + 1), UNKNOWN, dtype=np.int64)
            more[: len(self._known)] = self._known
            self._known = more
        self._known[slot] = known


class LastMinute:
    """A scheduler's steps: each is passed to `stepped`, and sums by half seconds are kept of those
    of the last minute. `target`: see StepTimer."""

    def __init__(self, target: float, stepped: Callable[[StepMade], object]) -> None:
        self._steps = StepTimer(target)
        self._stepped = stepped
        self._sums: deque[StepMade] = deque(maxlen=MAX_SUMS)

    def on_exchange(self, exchange: Exchange) -> None:
        """Reads a result, then the plans that it brought."""
        event, outputs, began, ended = exchange
        if type(event) is Result:
            step = self._steps.on_result(event, began)
            if step is not None:
                self._add(step)
                self._stepped(step)
        for send in outputs:
            message = send.message
            if type(message) is Plan:
                self._steps.on_plan(message, ended)
            elif type(message) is BeginEpoch:
                self._steps.begin()

    def sums(self, before: float) -> tuple[StepMade, ...]:
        """The sums that had ended at `before` (Unix seconds), and began at most a minute
        earlier."""
        from_ = before - SUM_SECONDS * MAX_SUMS
        return tuple(one for one in self._sums if from_ <= one.at <= before - SUM_SECONDS)

    def _add(self, step: StepMade) -> None:
        at = step.at // SUM_SECONDS * SUM_SECONDS
        if not self._sums or self._sums[-1].at != at:
            self._sums.append(msgspec.structs.replace(step, at=at))
            return
        last = self._sums[-1]
        self._sums[-1] = StepMade(
            at=last.at,
            seconds=max(last.seconds, step.seconds),
            decodes=last.decodes + step.decodes,
            prompt_tokens=last.prompt_tokens + step.prompt_tokens,
            target=max(last.target, step.target),
            count=last.count + 1,
        )
