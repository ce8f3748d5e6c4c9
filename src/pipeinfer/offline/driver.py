"""The offline side of a gateway core: calls go in, and each request's outputs go to its sink.

Takes the place of the HTTP driver. Knows the local events, no processes and no text. It is used on
the event loop of its shell only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pipeinfer.choices import choice_ids
from pipeinfer.gateway.events import Call, Delta, Failed, Hangup, Started, StatusChanged
from pipeinfer.gateway.health import StageStatus
from pipeinfer.gateway.sessions import CacheResets
from pipeinfer.messages import CacheReset, Message


class Sink(Protocol):
    """Takes what one request gets; the last is a delta with `finish`, or a failure."""

    def started(self, started: Started) -> None: ...

    def delta(self, delta: Delta) -> None: ...

    def failed(self, failed: Failed) -> None: ...


class OfflineDriver:
    """Routes by request id. `on_ready` is called each time the pipeline became ready."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._sinks: dict[str, Sink] = {}
        self._feed: Callable[[Message], None] | None = None
        self._resets = CacheResets()

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed

    def open(self, call: Call, sinks: Sequence[Sink]) -> None:
        """Sends the call; what comes of each choice goes to its sink, a refusal perhaps before this
        returns."""
        assert self._feed is not None
        names = choice_ids(call.request_id, range(call.params.n))
        self._sinks.update(zip(names, sinks, strict=True))
        self._feed(call)

    def hang_up(self, request_id: str) -> None:
        """Aborts the request if it still runs; its sink gets nothing more."""
        if self._sinks.pop(request_id, None) is not None and self._feed is not None:
            self._feed(Hangup(request_id))

    async def reset_caches(self, stages: Iterable[StageStatus]) -> set[int]:
        """Groups of `stages` that were asked to forget what is cached, and have not said so."""
        assert self._feed is not None
        return await self._resets.reset(self._feed, stages)

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs; what nobody waits for is dropped."""
        if isinstance(message, Delta):  # hot path: once for every token of every request
            if message.finish is None:
                sink = self._sinks.get(message.request_id)
            else:
                sink = self._sinks.pop(message.request_id, None)
            if sink is not None:
                sink.delta(message)
        elif isinstance(message, Started):
            if (sink := self._sinks.get(message.request_id)) is not None:
                sink.started(message)
        elif isinstance(message, Failed):
            if (sink := self._sinks.pop(message.request_id, None)) is not None:
                sink.failed(message)
        elif isinstance(message, CacheReset):
            self._resets.on_answer(message)
        elif isinstance(message, StatusChanged) and message.status == "ready":
            self._on_ready()

    def fail_all(self, reason: str, code: str) -> None:
        """Ends every live request with an error and aborts it in the pipeline."""
        for request_id, sink in list(self._sinks.items()):
            self.hang_up(request_id)
            sink.failed(Failed(request_id, 503, reason, code=code))

    async def stop(self) -> None:
        """Nothing: the pipeline knows why it ends, and fails what still runs with that reason."""

    def stats(self) -> dict[str, float]:
        return {}
