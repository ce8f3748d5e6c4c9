"""HTTP for the page: the feed, a request's way, and the largest prefixes.

Knows the service and what was seen; nothing about how the page shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

import msgspec
from aiohttp import web

from pipeinfer.control import Passage, Prefix
from pipeinfer.gateway.admission import Identity
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.monitor.picture import PipelineRates, PipelineSnapshot
from pipeinfer.gateway.monitor.told import (
    CachedPrefix,
    CachedPrefixes,
    GroupPrefixes,
    RequestSpans,
    SpanEvent,
    StageSpan,
)
from pipeinfer.gateway.schema import DetokenizeRequest
from pipeinfer.gateway.service import Service
from pipeinfer.gateway.sight import PipelineMonitor
from pipeinfer.gateway.streams import EVENT_STREAM_HEADERS
from pipeinfer.gateway.tokenizing import EncodedPrompt, detokenize_call
from pipeinfer.packing import unpack
from pipeinfer.recent import Recent
from pipeinfer.version import __version__

EVENT_INTERVAL = 0.25  # seconds between two events
MOST_FEEDS = 64
MOST_PREFIXES = 16
MOST_PREFIX_LETTERS = 240  # of a prefix
TEXT_LIFETIME, MOST_TEXTS = 600.0, 256  # seconds, and how many
_encode = msgspec.json.Encoder().encode


class MonitorHandlers:
    """The handlers of one gateway; `sight` is the stage's eyes."""

    def __init__(self, service: Service, sight: PipelineMonitor) -> None:
        self._service = service
        self._monitor = sight
        self._rates = PipelineRates(service.core.health)
        self._snapshot: PipelineSnapshot | None = None
        self._snapshot_at = 0.0  # when
        self._feeds = 0
        self._texts: Recent[str] = Recent(TEXT_LIFETIME, MOST_TEXTS)

    def route(self, router: web.UrlDispatcher) -> None:
        """Says which path is whose."""
        router.add_get("/monitor/events", self.events, allow_head=False)
        router.add_get("/monitor/requests/{id}", self.request)
        router.add_get("/monitor/prefixes", self.prefixes)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events until client or gateway leaves, or the client's key is taken away. Who
        reads slowly gets fewer. Others' requests are in an operator's alone."""
        if self._feeds >= MOST_FEEDS:
            raise ApiError(503, f"{MOST_FEEDS} pages look already", code="too_many_pages")
        response = web.StreamResponse(headers=EVENT_STREAM_HEADERS)
        self._feeds += 1
        try:
            with self._monitor.watching(), contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                seen = 0
                while not self._monitor.leaving and (right := self._identity(request)):
                    event, seen = self._event(seen, right)
                    await response.write(event)
                    await asyncio.sleep(EVENT_INTERVAL)
        finally:
            self._feeds -= 1
        return response

    async def request(self, request: web.Request) -> web.StreamResponse:
        """A request's way through the stages."""
        name, right = request.match_info["id"], self._service.admission.identity(request)
        mine = right.operator or self._monitor.is_owner(name, right.name)
        passages = self._monitor.spans(name) if mine else []
        if not passages:
            raise ApiError(404, f"nothing was seen of a request {name[:200]!r}", code="not_seen")
        return _json(RequestSpans(name, [_stage_span(one) for one in passages]))

    async def prefixes(self, request: web.Request) -> web.StreamResponse:
        """The largest cached prefixes of each group. Their texts are somebody's prompts: an
        operator alone is told, and of salted ones nobody."""
        rows = self._service.core.health.stages.values()
        engines = {row.stage: row.group for row in rows if row.name == "engine" and row.rank == 0}
        found = await self._monitor.prefixes(tuple(engines), MOST_PREFIXES)
        shown = self._service.admission.identity(request).operator
        groups = [
            GroupPrefixes(group, [await self._prefix(one, shown) for one in found.get(engine, ())])
            for engine, group in engines.items()
        ]
        return _json(CachedPrefixes(groups))

    async def _prefix(self, prefix: Prefix, shown: bool) -> CachedPrefix:
        told = CachedPrefix(prefix.tokens, prefix.ends, prefix.held)
        if not shown or not prefix.first:
            return told
        ids = unpack(prefix.first).tolist()
        return msgspec.structs.replace(told, ids=ids, text=await self._text(ids))

    async def _text(self, ids: list[int]) -> str:
        name, now = str(ids), time.monotonic()
        text = self._texts.get(name)
        if text is None:
            text = await self._decoded(ids)
            self._texts.put(name, text, now)
        return text

    async def _decoded(self, ids: list[int]) -> str:
        call = detokenize_call(
            DetokenizeRequest(tokens=ids), f"tok-{uuid.uuid4().hex}", self._service.terms
        )
        sink = EncodedPrompt()
        async with self._service.sessions.open([call], sink):
            return (await sink.prompt()).prompt_text[:MOST_PREFIX_LETTERS]

    def _identity(self, request: web.Request) -> Identity | None:
        """None: its key is none any more."""
        try:
            return self._service.admission.identity(request)
        except ApiError:
            return None

    def _event(self, seen: int, right: Identity) -> tuple[bytes, int]:
        """The event for who has seen so many changes, and how many there are."""
        sight = self._monitor
        event = msgspec.structs.asdict(self._current_snapshot()) | {
            "time": time.time(),
            "model": self._service.model,
            "version": __version__,
            "context_length": self._service.context_length,
            "steps": sight.steps_since(seen),
            "requests": sight.requests_since(seen, None if right.operator else right.name),
        }
        return b"data: " + _encode(event) + b"\n\n", sight.changes

    def _current_snapshot(self) -> PipelineSnapshot:
        """One for all who look at about the same time."""
        now = time.monotonic()
        if self._snapshot is None or now - self._snapshot_at > EVENT_INTERVAL / 2:
            status, latency = self._service.core.status, self._monitor.latency
            self._rates.update()
            self._snapshot = self._rates.snapshot(status, now, time.time(), latency)
            self._snapshot_at = now
        return self._snapshot


def _stage_span(passage: Passage) -> StageSpan:
    return StageSpan(
        stage=passage.stage,
        began=passage.began,
        ended=passage.ended or None,
        outcome=passage.outcome,
        moments=[SpanEvent(one.at, one.name, one.values) for one in passage.moments],
    )


def _json(told: msgspec.Struct) -> web.Response:
    return web.Response(body=_encode(told), content_type="application/json")
