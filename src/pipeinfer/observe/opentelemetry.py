"""Passages as OpenTelemetry spans, sent to a collector by a thread of the library's.

The one module that knows OpenTelemetry, which is imported only when it is used. A collector
that is slow or gone costs spans, and no request anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeinfer.control import RequestSpan
from pipeinfer.observe.spans import Traceparent, read_traceparent
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity
from pipeinfer.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context

PATH = "/v1/traces"
NEEDED = "opentelemetry.exporter.otlp.proto.http"
SHUTDOWN_TIMEOUT = 1.0  # seconds that a stage's end waits for what was not sent yet
ERROR_LOG_PERIOD = (
    60.0  # seconds between two lines of the log about a collector that does not answer
)
NANOSECONDS = 1e9
# Moments' values that the span has as attributes, under the names of the semantic conventions.
ATTRIBUTES = {
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
        return importlib.util.find_spec(NEEDED) is not None
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


class _Ids:
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
    """Those of one stage. Raises ConfigurationError as `check`."""

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
        exporter = trace_exporter.OTLPSpanExporter(url if url.endswith(PATH) else url + PATH)
        resource = {
            "service.name": "pipeinfer",
            "service.version": __version__,
            "service.instance.id": identity.id,
            "pipeinfer.stage": identity.id,
        }
        self._ids = _Ids()
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
            context=_context(parent),
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
                if name in ATTRIBUTES:
                    found[ATTRIBUTES[name]] = int(value)
        if gateway:
            found["gen_ai.request.model"] = self._model
            found["gen_ai.response.id"] = request_span.request_id
            if request_span.outcome in ("stop", "length"):
                found["gen_ai.response.finish_reasons"] = [request_span.outcome]
        return found


def _context(parent: Traceparent | None) -> Context:
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
