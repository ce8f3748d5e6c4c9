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
from pipeinfer.gateway.admission import Right
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.monitor.picture import Figures, Pictures
from pipeinfer.gateway.monitor.told import (
    GroupTold,
    MomentTold,
    PassageTold,
    PrefixesTold,
    PrefixTold,
    RequestTold,
)
from pipeinfer.gateway.schema import DetokenizeRequest
from pipeinfer.gateway.service import Service
from pipeinfer.gateway.sight import Sight
from pipeinfer.gateway.streams import HEADERS
from pipeinfer.gateway.tokenizing import Encoded, detokenize_call
from pipeinfer.packing import unpack
from pipeinfer.recent import RecentTable
from pipeinfer.version import __version__

EVERY = 0.25  # seconds between two events
MOST_FEEDS = 64
MOST_PREFIXES = 16
LETTERS = 240  # of a prefix
TEXTS_KEPT, MOST_TEXTS = 600.0, 256  # seconds, and how many
_encode = msgspec.json.Encoder().encode


class MonitorHandlers:
    """The handlers of one gateway; `sight` is the stage's eyes."""

    def __init__(self, service: Service, sight: Sight) -> None:
        self._service = service
        self._sight = sight
        self._pictures = Pictures(service.core.health)
        self._figures: Figures | None = None
        self._made = 0.0  # when
        self._feeds = 0
        self._texts: RecentTable[str] = RecentTable(TEXTS_KEPT, MOST_TEXTS)

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
        response = web.StreamResponse(headers=HEADERS)
        self._feeds += 1
        try:
            with self._sight.looking(), contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                seen = 0
                while not self._sight.leaving and (right := self._right(request)):
                    event, seen = self._event(seen, right)
                    await response.write(event)
                    await asyncio.sleep(EVERY)
        finally:
            self._feeds -= 1
        return response

    async def request(self, request: web.Request) -> web.StreamResponse:
        """A request's way through the stages."""
        name, right = request.match_info["id"], self._service.admission.right(request)
        mine = right.operator or self._sight.owned(name, right.name)
        passages = self._sight.passages(name) if mine else []
        if not passages:
            raise ApiError(404, f"nothing was seen of a request {name[:200]!r}", code="not_seen")
        return _answer(RequestTold(name, [_passage(one) for one in passages]))

    async def prefixes(self, request: web.Request) -> web.StreamResponse:
        """The largest cached prefixes of each group. Their texts are somebody's prompts: an
        operator alone is told, and of salted ones nobody."""
        rows = self._service.core.health.rows.values()
        engines = {row.stage: row.group for row in rows if row.name == "engine" and row.rank == 0}
        found = await self._sight.prefixes(tuple(engines), MOST_PREFIXES)
        shown = self._service.admission.right(request).operator
        groups = [
            GroupTold(group, [await self._prefix(one, shown) for one in found.get(engine, ())])
            for engine, group in engines.items()
        ]
        return _answer(PrefixesTold(groups))

    async def _prefix(self, prefix: Prefix, shown: bool) -> PrefixTold:
        told = PrefixTold(prefix.tokens, prefix.ends, prefix.held)
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
        sink = Encoded()
        async with self._service.port.opened([call], sink):
            return (await sink.prompt()).prompt_text[:LETTERS]

    def _right(self, request: web.Request) -> Right | None:
        """None: its key is none any more."""
        try:
            return self._service.admission.right(request)
        except ApiError:
            return None

    def _event(self, seen: int, right: Right) -> tuple[bytes, int]:
        """The event for who has seen so many changes, and how many there are."""
        sight = self._sight
        event = msgspec.structs.asdict(self._now()) | {
            "time": time.time(),
            "model": self._service.model,
            "version": __version__,
            "context_length": self._service.context_length,
            "steps": sight.steps_since(seen),
            "requests": sight.requests_since(seen, None if right.operator else right.name),
        }
        return b"data: " + _encode(event) + b"\n\n", sight.changes

    def _now(self) -> Figures:
        """One for all who look at about the same time."""
        now = time.monotonic()
        if self._figures is None or now - self._made > EVERY / 2:
            status, latency = self._service.core.status, self._sight.latency
            self._pictures.look()
            self._figures = self._pictures.figures(status, now, time.time(), latency)
            self._made = now
        return self._figures


def _passage(passage: Passage) -> PassageTold:
    return PassageTold(
        stage=passage.stage,
        began=passage.began,
        ended=passage.ended or None,
        outcome=passage.outcome,
        moments=[MomentTold(one.at, one.name, one.values) for one in passage.moments],
    )


def _answer(told: msgspec.Struct) -> web.Response:
    return web.Response(body=_encode(told), content_type="application/json")
