"""Where HTTP handlers and the core meet: calls go in, deltas go to the sinks that wait for them.

Knows the local events and the metrics, no HTTP. It is used on the event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pipeinfer.gateway.events import Call, Delta, Failed, Hangup, Started
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.messages import Message


class Sink(Protocol):
    """Takes what one HTTP request gets; `index` is the choice. Must not raise."""

    def started(self, index: int, started: Started) -> None: ...

    def delta(self, index: int, delta: Delta) -> None: ...

    def failed(self, index: int, failed: Failed) -> None: ...


class _Route:
    __slots__ = ("first", "index", "last", "sink")

    def __init__(self, sink: Sink, index: int, now: float) -> None:
        self.sink, self.index = sink, index
        self.last = now
        self.first = True


class Port:
    """Routes of the live requests. `bind` it to the core's feed before the first call."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics, self._clock = metrics, clock
        self._routes: dict[str, _Route] = {}
        self._feed: Callable[[Message], None] | None = None

    def bind(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed

    def open(self, calls: Iterable[Call], sink: Sink) -> None:
        """Sends the calls; call i delivers to `sink` as choice i, until the first that fails."""
        assert self._feed is not None
        failed = False
        for index, call in enumerate(calls):
            self._routes[call.request_id] = _Route(sink, index, self._clock())
            self._feed(call)  # may deliver a refusal before it returns
            failed = call.request_id not in self._routes
            if failed:
                return

    def close(self, calls: Iterable[Call]) -> None:
        """Hangs up those that still run."""
        assert self._feed is not None
        for call in calls:
            if self._routes.pop(call.request_id, None) is not None:
                self._metrics.ended("abort")
                self._feed(Hangup(call.request_id))

    def deliver(self, message: Started | Delta | Failed) -> None:
        """Hands an output of the core to its sink; what nobody waits for is dropped."""
        route = self._routes.get(message.request_id)
        if route is None:
            return
        if isinstance(message, Delta):
            self._measure(route, message)
            if message.finish is not None:
                del self._routes[message.request_id]
                self._metrics.ended(message.finish)
            route.sink.delta(route.index, message)
        elif isinstance(message, Started):
            self._metrics.prompt_tokens.inc(len(message.prompt_ids) // 4)
            route.sink.started(route.index, message)
        else:
            del self._routes[message.request_id]
            self._metrics.ended(_outcome(message))
            route.sink.failed(route.index, message)

    def fail_all(self, status: int, message: str) -> None:
        """Ends every live request with an error: the server stops before they are done."""
        for request_id in list(self._routes):
            self.deliver(Failed(request_id, status, message, code="shutting_down"))

    def _measure(self, route: _Route, delta: Delta) -> None:
        if not delta.ids:
            return
        now = self._clock()
        histogram = self._metrics.first_token if route.first else self._metrics.between_tokens
        histogram.observe(now - route.last)
        route.last, route.first = now, False
        self._metrics.generated_tokens.inc(len(delta.ids) // 4)


def _outcome(failed: Failed) -> str:
    if failed.status == 408:
        return "abort"
    refused = failed.status < 500 or failed.code in ("starting", "draining")
    return "refused" if refused else "error"
