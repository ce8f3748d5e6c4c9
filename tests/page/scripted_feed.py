"""A server with the page and a monitor feed that says what a test wants: for states that a real
pipeline is seldom in, and for pictures.

It streams over real sockets; everything else of the gateway it knows not.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import Future

from aiohttp import web

from pipeinfer.gateway.app import Page

EDGES = (
    ("gateway", "tokenizer", "requests/s"),
    ("tokenizer", "scheduler", "requests/s"),
    ("scheduler", "engine", "steps/s"),
    ("scheduler", "detokenizer", "tokens/s"),
    ("detokenizer", "gateway", "tokens/s"),
)
BEGUN = "chatcmpl-begun"  # the answer whose head comes, and nothing more
AGAIN = 0.5  # seconds; a feed that says nothing for some more is given up by the page
UNITS = {"scheduler": "tokens/s", "engine": "tokens/s", "detokenizer": "tokens/s"}
LATENCIES = {
    "gateway": 31.0, "tokenizer": 0.4, "scheduler": 1.9, "engine": 4.2, "detokenizer": 0.3,
}  # fmt: skip


def stage(name: str, group: int = 0, rank: int = 0, **changes: object) -> dict[str, object]:
    """A process as the feed shows it, ready and busy, but for `changes`."""
    numbers = {"scheduler": f"-{group}", "engine": f"-{group}-{rank}"}.get(name, "-0")
    waits = name in ("gateway", "scheduler")
    return {
        "stage": name + numbers, "name": name, "group": group, "rank": rank, "state": "ready",
        "reason": "", "pid": 4100 + 10 * group + rank + len(name), "up": 754.2, "restarts": 0,
        "last_restart": None, "heard": 0.2, "waiting": 3 if waits else 0, "running": 31,
        "rate": 1234.5 if name in UNITS else 3.5, "unit": UNITS.get(name, "requests/s"),
        "latency_ms": LATENCIES[name], "takeover": "", **changes,
    }  # fmt: skip


def stages(groups: int = 1, ranks: int = 1) -> list[dict[str, object]]:
    """A whole pipeline."""
    made = [stage("gateway"), stage("tokenizer")]
    for group in range(groups):
        made.append(stage("scheduler", group))
        made.extend(stage("engine", group, rank) for rank in range(ranks))
    return [*made, stage("detokenizer")]


def event(all_stages: list[dict[str, object]], **changes: object) -> dict[str, object]:
    """One event of the feed about them."""
    groups = sorted({one["group"] for one in all_stages if one["name"] == "engine"})
    rates = (3.5, 3.5, 221.0, 1234.5, 1234.5)
    return {
        "time": time.time(), "status": "ready", "reason": "", "model": "pipeinfer-demo",
        "version": "0.1.0", "context_length": 2048, "stages": all_stages,
        "edges": [
            {"from": a, "to": b, "rate": rate, "unit": unit}
            for (a, b, unit), rate in zip(EDGES, rates, strict=True)
        ],
        "pages": [
            {"group": group, "total": 512, "free": 100, "cached": 300, "used": 112,
             "page_tokens": 16}
            for group in groups
        ],
        "latency": {
            "ttft_ms": {"p50": 31.2, "p90": 54.1, "p99": 88.0, "count": 210},
            "itl_ms": {"p50": 4.4, "p90": 6.1, "p99": 19.7, "count": 71000},
        },
        "tokens_per_s": 1234.5, "requests_running": 31, "requests_waiting": 3,
        "steps": [], "requests": [], **changes,
    }  # fmt: skip


class ScriptedFeed:
    """Use it as a context manager. `answers`: what further paths say, as JSON."""

    def __init__(self, answers: dict[str, object] | None = None) -> None:
        self.answers = answers or {}
        self.url = ""
        self._listening: set[asyncio.Queue[dict[str, object] | None]] = set()
        self._last: dict[str, object] | None = None
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._repeating: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ScriptedFeed:
        self._thread.start()
        self._do(self._start()).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._do(self._stop()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def say(self, told: dict[str, object]) -> None:
        """To all that listen, and first to whoever listens later."""
        self._do(self._tell(told)).result(60)

    def cut(self) -> None:
        """Ends all connections of the feed."""
        self._do(self._tell(None)).result(60)

    def lose_answers(self) -> None:
        """Cuts the connections of answers that have begun; /v1/streams has them from then on."""
        self._loop.call_soon_threadsafe(self._lost.set)

    def _do(self, work) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self) -> None:
        app = web.Application()
        Page().route(app.router)
        app.router.add_get("/monitor/events", self._events)
        app.router.add_post("/v1/chat/completions", self._begin)
        app.router.add_delete(f"/v1/streams/{BEGUN}", self._ended)
        app.router.add_get(f"/v1/streams/{BEGUN}", self._resumed)
        app.router.add_get("/{path:.+}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._repeating = asyncio.create_task(self._repeat())

    async def _stop(self) -> None:
        assert self._runner is not None and self._repeating is not None
        self._repeating.cancel()
        await self._runner.cleanup()

    async def _repeat(self) -> None:
        """As of a real feed, events come also where nothing changes; steps are told once."""
        while True:
            await asyncio.sleep(AGAIN)
            if self._last is not None:
                self._put({**self._last, "steps": []})

    async def _tell(self, told: dict[str, object] | None) -> None:
        self._last = told or self._last
        self._put(told)

    def _put(self, told: dict[str, object] | None) -> None:
        for queue in self._listening:
            queue.put_nowait(told)

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if path not in self.answers:
            message = {"error": {"message": f"there is no /{path}"}}
            return web.json_response(message, status=404)
        return web.json_response(self.answers[path])

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "x-pipeinfer-stream": BEGUN}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await self._lost.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _ended(self, _request: web.Request) -> web.Response:
        return web.json_response({"deleted": True})

    async def _resumed(self, request: web.Request) -> web.Response:
        assert "Last-Event-ID" not in request.headers, "nothing has come"
        chunk = {"choices": [{"index": 0, "delta": {"content": "all of it"}}]}
        told = (json.dumps(chunk), "[DONE]")
        text = "".join(f"id: {BEGUN}/{n}\ndata: {data}\n\n" for n, data in enumerate(told))
        return web.Response(text=text, content_type="text/event-stream")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()
        if self._last is not None:
            queue.put_nowait(self._last)
        self._listening.add(queue)
        try:
            while (told := await queue.get()) is not None:
                await response.write(f"data: {json.dumps(told)}\n\n".encode())
        finally:
            self._listening.discard(queue)
        return response


MODELS = {"v1/models": {"data": [{"id": "pipeinfer-demo", "max_model_len": 2048}]}}
