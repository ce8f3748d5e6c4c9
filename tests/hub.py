"""A hub on this machine, for the real hub client: what it says of models, and their files, slowly,
cut off and refused as a test wants.

Knows the hub's protocol and nothing of pipeinfer. Import it as `import hub`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "5a9e3b7c" * 5
PIECE = 16_384  # bytes between two looks at what the test wants


@dataclass
class Hub:
    """Models of `hub.models`, {"owner/name": folder}, at the revisions `main`, `v2` and COMMIT.

    refuses: {"owner/name": (status, the hub's code of the error, its message)}, of everything that
    is asked of it; gated: the same of files alone. token: what a request must bring, if not "".
    cuts: how often each connection that carries a file is broken after so many bytes, and how:
    "closed" in good order, or "reset". rate: bytes a second of a file, 0 for as fast as may be.
    ranges: whether Range is heeded. Seen: requests as (method, path, Range header or "").
    """

    models: dict[str, Path]
    url: str = ""
    refuses: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = ""
    cuts: list[tuple[int, str]] = field(default_factory=list)
    rate: float = 0.0
    ranges: bool = True
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    reached: threading.Event = field(default_factory=threading.Event)

    def ranges_of(self, file: str) -> list[str]:
        """What was asked for of a file, in order; "" is the whole."""
        return [of for method, path, of in self.seen if method == "GET" and path.endswith(file)]

    def cut(self, sent: int) -> str:
        """How the connection ends after `sent` bytes; "" if it goes on."""
        with self.lock:
            if self.cuts and sent >= self.cuts[0][0]:
                return self.cuts.pop(0)[1]
        return ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.seen.append((self.command, path, self.headers.get("Range", "")))
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name in hub.refuses:
            self._refuse(*hub.refuses[name])
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif name not in hub.models:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif len(rest) > 1 and rest[1] not in ("main", "v2", COMMIT):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        elif api:
            self._tell(name, tree=rest[:1] == ["tree"])
        elif name in hub.gated:
            self._refuse(403, "GatedRepo", "Access to model is restricted")
        else:
            self._send(hub.models[name] / "/".join(rest[2:]))

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._reply(status, {k: v for k, v in headers.items() if v}, b"{}")

    def _tell(self, name: str, tree: bool) -> None:
        folder = self.hub.models[name]
        files = [_file(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        if tree:
            entries = [{"type": "file", "path": f.pop("rfilename"), **f} for f in files]
            for entry in entries:
                entry["oid"] = entry.pop("blobId")
            self._reply(200, {}, json.dumps(entries).encode())
        else:
            said = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files}
            self._reply(200, {}, json.dumps(said).encode())

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send(self, path: Path) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        body = path.read_bytes()
        asked = self.headers.get("Range", "") if self.hub.ranges else ""
        first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            self._send_body(body[first:])

    def _send_body(self, body: bytes) -> None:
        for at in range(0, len(body), PIECE):
            how = self.hub.cut(at) if len(body) > 1 << 20 else ""
            if how:
                self._break(how)
                return
            self.wfile.write(body[at : at + PIECE])
            if self.hub.rate:
                time.sleep(PIECE / self.hub.rate)  # it is the hub that is slow
            if len(body) > 1 << 20 and at >= len(body) // 2:
                self.hub.reached.set()

    def _break(self, how: str) -> None:
        self.wfile.flush()
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR) if how == "closed" else self.connection.close()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # a client that went away, or that was sent away
            self.close_connection = True

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            self.close_connection = True


def _file(path: Path, folder: Path) -> dict:
    body = path.read_bytes()
    told = {
        "rfilename": str(path.relative_to(folder)),
        "size": len(body),
        "blobId": hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest(),
    }
    if len(body) > 1 << 20:
        sha = hashlib.sha256(body).hexdigest()
        told["lfs"] = {"sha256": sha, "oid": sha, "size": len(body), "pointerSize": 134}
    return told


@contextmanager
def serve(models: dict[str, Path]) -> Iterator[Hub]:
    """A hub that listens until the context ends."""
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """The hub client of this process asks the hub at `url` alone, with an empty `cache`."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def environment(url: str, cache: Path) -> dict[str, str]:
    """The same for another process."""
    return {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}
