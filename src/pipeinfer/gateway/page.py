"""The web page at /: its files, read once, and what browsers are told of them.

Knows no other endpoint; what the page asks the server for is said in page/.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ETag, web

from pipeinfer.gateway import openapi

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
HEADERS = {
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
VENDOR = "vendor"  # libraries by others; tools/page builds them
# The name of each has a hash of its content: what a browser has, it need not ask for again.
VENDOR_HEADERS = HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class File:
    """One of the page. `etag`: of its content, without quotes."""

    body: bytes
    kind: str
    etag: str
    headers: dict[str, str]


class Page:
    """The handlers of the page and its files. Nobody is asked for a key here: nothing is secret."""

    def __init__(self) -> None:
        self._files = _files(FOLDER, HEADERS)
        vendored = _files(FOLDER / VENDOR, VENDOR_HEADERS)
        self._files |= {f"{VENDOR}/{name}": file for name, file in vendored.items()}

    def route(self, router: web.UrlDispatcher) -> None:
        """Says which path is whose."""
        router.add_get("/", self.index)
        router.add_get("/{_:/+}", self.plain)
        router.add_get("/page/{name:(vendor/)?[^/]+}", self.file)

    def route_docs(self, router: web.UrlDispatcher) -> None:
        """The files of /docs, which is there also where the page is not."""
        names = "|".join(map(re.escape, openapi.FILES))
        router.add_get(f"/docs/{{name:{names}}}", self.file)

    async def index(self, request: web.Request) -> web.StreamResponse:
        return self._answer(request, INDEX)

    async def plain(self, request: web.Request) -> web.StreamResponse:
        """Several slashes are the page, too, but what it loads is found from one alone."""
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
            charset = None if file.kind.startswith("font/") else "utf-8"
            response = web.Response(
                body=file.body, content_type=file.kind, charset=charset, headers=file.headers
            )
        response.etag = ETag(value=file.etag)
        return response


def _files(folder: Path, headers: dict[str, str]) -> dict[str, File]:
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in KINDS]
    return {path.name: _read(path, headers) for path in paths}


def _read(path: Path, headers: dict[str, str]) -> File:
    body = path.read_bytes()
    return File(body, KINDS[path.suffix], hashlib.sha256(body).hexdigest()[:32], headers)
