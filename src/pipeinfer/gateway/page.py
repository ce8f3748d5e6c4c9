"""The web page at /: its files, and the endpoints of /monitor from which it reads.

Knows the monitor, not how the page shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import ETag, web

from pipeinfer.control import Prefix, RequestSpan
from pipeinfer.core import RecentTable
from pipeinfer.gateway import openapi
from pipeinfer.gateway.auth import Principal
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.monitor import (
    CachedPrefix,
    CachedPrefixes,
    GroupPrefixes,
    PipelineMonitor,
    PipelineRates,
    PipelineSnapshot,
    RequestSpans,
    SpanEvent,
    StageSpan,
)
from pipeinfer.gateway.response_encoders import EVENT_STREAM_HEADERS
from pipeinfer.gateway.schema import DetokenizeRequest
from pipeinfer.gateway.serving import EncodedPrompt, Service, detokenize_call
from pipeinfer.version import __version__
from pipeinfer.wire import unpack

PAGE_FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the names stay the same in the next version: ask, and get 304
}
VENDOR_FOLDER = "vendor"  # libraries by others; tools/page builds them
# The name of each has a hash of its content: what a browser has, it need not ask for again.
VENDOR_HEADERS = PAGE_HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class PageFile:
    """A file of the page. etag: digest of its content, without quotes."""

    body: bytes
    content_type: str
    etag: str
    headers: dict[str, str]


class Page:
    """Handlers of the page and its files. They need no key: nothing in them is secret."""

    def __init__(self) -> None:
        self._files = _files(PAGE_FOLDER, PAGE_HEADERS)
        vendored = _files(PAGE_FOLDER / VENDOR_FOLDER, VENDOR_HEADERS)
        self._files |= {f"{VENDOR_FOLDER}/{name}": file for name, file in vendored.items()}

    def route(self, router: web.UrlDispatcher) -> None:
        """Registers the handlers."""
        router.add_get("/", self.index)
        router.add_get("/{_:/+}", self.redirect_slashes)
        router.add_get("/page/{name:(vendor/)?[^/]+}", self.file)

    def route_docs(self, router: web.UrlDispatcher) -> None:
        """Registers the files of /docs, which is served also without the page."""
        names = "|".join(map(re.escape, openapi.FILES))
        router.add_get(f"/docs/{{name:{names}}}", self.file)

    async def index(self, request: web.Request) -> web.StreamResponse:
        return self._answer(request, INDEX)

    async def redirect_slashes(self, request: web.Request) -> web.StreamResponse:
        """Several slashes are the page, too; but its files are found relative to one alone."""
        return web.Response(status=308, headers={"Location": "/"})

    async def file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound()
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        file = self._files[name]
        known = request.if_none_match or ()
        if any(tag.value in (file.etag, "*") for tag in known):
            response = web.Response(status=304, headers=file.headers)
        else:
            charset = None if file.content_type.startswith("font/") else "utf-8"
            response = web.Response(
                body=file.body,
                content_type=file.content_type,
                charset=charset,
                headers=file.headers,
            )
        response.etag = ETag(value=file.etag)
        return response


def _files(folder: Path, headers: dict[str, str]) -> dict[str, PageFile]:
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in CONTENT_TYPES]
    return {path.name: _read(path, headers) for path in paths}


def _read(path: Path, headers: dict[str, str]) -> PageFile:
    body = path.read_bytes()
    return PageFile(
        body, CONTENT_TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32], headers
    )


EVENT_INTERVAL = 0.25  # seconds between two events
MAX_FEEDS = 64
MAX_PREFIXES = 16
MAX_PREFIX_LETTERS = 240  # of a prefix
TEXT_LIFETIME, MAX_TEXTS = 600.0, 256  # seconds, and how many
_encode = msgspec.json.Encoder().encode


class MonitorHandlers:
    """Handlers of /monitor of one gateway."""

    def __init__(self, service: Service, monitor: PipelineMonitor) -> None:
        self._service = service
        self._monitor = monitor
        self._rates = PipelineRates(service.core.health)
        self._snapshot: PipelineSnapshot | None = None
        self._snapshot_at = 0.0  # when
        self._feeds = 0
        self._texts: RecentTable[str] = RecentTable(TEXT_LIFETIME, MAX_TEXTS)

    def route(self, router: web.UrlDispatcher) -> None:
        """Registers the handlers."""
        router.add_get("/monitor/events", self.events, allow_head=False)
        router.add_get("/monitor/requests/{id}", self.request)
        router.add_get("/monitor/prefixes", self.prefixes)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events until client or gateway leaves, or the client's key is withdrawn.

        A slow reader gets fewer events. Requests of other clients are shown to operators alone.
        """
        if self._feeds >= MAX_FEEDS:
            raise ApiError(503, f"{MAX_FEEDS} pages look already", code="too_many_pages")
        response = web.StreamResponse(headers=EVENT_STREAM_HEADERS)
        self._feeds += 1
        try:
            with self._monitor.watching(), contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                seen = 0
                while not self._monitor.leaving and (right := self._principal(request)):
                    event, seen = self._event(seen, right)
                    await response.write(event)
                    await asyncio.sleep(EVENT_INTERVAL)
        finally:
            self._feeds -= 1
        return response

    async def request(self, request: web.Request) -> web.StreamResponse:
        """The spans of a request in all stages."""
        name, right = request.match_info["id"], self._service.admission.principal(request)
        allowed = right.operator or self._monitor.is_owner(name, right.name)
        spans = self._monitor.spans(name) if allowed else []
        if not spans:
            raise ApiError(404, f"nothing was seen of a request {name[:200]!r}", code="not_seen")
        return _json(RequestSpans(name, [_stage_span(one) for one in spans]))

    async def prefixes(self, request: web.Request) -> web.StreamResponse:
        """The largest cached prefixes of each group.

        Their texts are prompts of clients: operators alone see them, and nobody sees salted ones.
        """
        rows = self._service.core.health.stages.values()
        engines = {row.stage: row.group for row in rows if row.name == "engine" and row.rank == 0}
        found = await self._monitor.prefixes(tuple(engines), MAX_PREFIXES)
        shown = self._service.admission.principal(request).operator
        groups = [
            GroupPrefixes(group, [await self._prefix(one, shown) for one in found.get(engine, ())])
            for engine, group in engines.items()
        ]
        return _json(CachedPrefixes(groups))

    async def _prefix(self, prefix: Prefix, shown: bool) -> CachedPrefix:
        cached = CachedPrefix(prefix.tokens, prefix.ends, prefix.held)
        if not shown or not prefix.first:
            return cached
        ids = unpack(prefix.first).tolist()
        return msgspec.structs.replace(cached, ids=ids, text=await self._text(ids))

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
            return (await sink.prompt()).prompt_text[:MAX_PREFIX_LETTERS]

    def _principal(self, request: web.Request) -> Principal | None:
        """None if the request's key was withdrawn."""
        try:
            return self._service.admission.principal(request)
        except ApiError:
            return None

    def _event(self, seen: int, right: Principal) -> tuple[bytes, int]:
        """The event with all after change number `seen`, and the number of the latest change."""
        monitor = self._monitor
        event = msgspec.structs.asdict(self._current_snapshot()) | {
            "time": time.time(),
            "model": self._service.model,
            "version": __version__,
            "context_length": self._service.context_length,
            "steps": monitor.steps_since(seen),
            "requests": monitor.requests_since(seen, None if right.operator else right.name),
        }
        return b"data: " + _encode(event) + b"\n\n", monitor.changes

    def _current_snapshot(self) -> PipelineSnapshot:
        """One snapshot for all feeds that need it at about the same time."""
        now = time.monotonic()
        if self._snapshot is None or now - self._snapshot_at > EVENT_INTERVAL / 2:
            status, latency = self._service.core.status, self._monitor.latency
            self._rates.update()
            self._snapshot = self._rates.snapshot(status, now, time.time(), latency)
            self._snapshot_at = now
        return self._snapshot


def _stage_span(span: RequestSpan) -> StageSpan:
    return StageSpan(
        stage=span.stage,
        began=span.began,
        ended=span.ended or None,
        outcome=span.outcome,
        moments=[SpanEvent(one.at, one.name, one.values) for one in span.moments],
    )


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=_encode(answer), content_type="application/json")
