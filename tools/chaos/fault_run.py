"""Streams of a real server while faults are injected: every text is compared with its calm one.

Knows clients, their pauses, and what a server may not leave behind; nothing of what a fault does.
Where faults kill the gateway, every second client resumes its stream; the others ask again.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from chaos.harms import Broken
from harness.processes import computes
from harness.server import ServerUnderTest, leftovers, running
from pipeinfer.demo import copy_task

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.0, "ignore_eos": False, "min_tokens": 60},
    {"temperature": 0.8, "stop": ["zz", "7 8"]},
)


class Cut(Exception):
    """A gateway died under an answer, before it had begun or where its client does not resume."""


RESUME = 0.05  # seconds after which a client whose connection was cut comes back
# Where clients resume, they ask in turn as these APIs have it; {path: how the body differs}.
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/completions": {"n": 2},
    "/v1/messages": {},
    "/v1/responses": {},
}
LAST_EVENTS = ("[DONE]", "message_stop", "response.completed", "response.incomplete")


@dataclass
class StreamClient:
    """A client that asks one question again and again.

    Attributes:
    - path: of the API
    - resumes: it resumes its stream when the gateway dies; None: the gateway does not
    - texts: of its answers, each with the reason of its end
    - moved: when pieces of its answers came
    - resumed, retried: answers, of which others than the first gateway have sent a part or all
    """

    number: int
    question: str
    tokens: int
    path: str = "/v1/chat/completions"
    resumes: bool | None = None
    texts: list[tuple[str, str]] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    resumed: int = 0
    retried: int = 0

    async def ask_under_deaths(self, api: aiohttp.ClientSession) -> None:
        """One answer, though gateways die. Raises Broken."""
        while True:
            try:
                return await self._ask_once(api)
            except Cut:
                self.retried += 1
                await asyncio.sleep(RESUME)

    async def _ask_once(self, api: aiohttp.ClientSession) -> None:
        text: dict[int, str] = {}
        name = event = finish = ""
        body = self._body()
        while True:
            answer: aiohttp.ClientResponse | None = None
            try:
                headers = {"Last-Event-ID": event} if event else {}
                answer = await (
                    api.get(f"/v1/streams/{name}", headers=headers)
                    if event
                    else api.post(self.path, json=body)
                )
                if answer.status in (500, 503, 529) and not event:
                    raise Cut  # the server stops or starts: try again
                if answer.status == 503:
                    raise aiohttp.ClientPayloadError("it starts")
                if answer.status != 200:
                    said = await answer.text()
                    raise Broken(f"client {self.number} got {answer.status}: {said} ({event})")
                name = answer.headers.get("x-pipeinfer-stream", name)
                shown = ""
                async for line in answer.content:
                    if line.startswith(b"id: "):
                        shown = line[4:].strip().decode()
                    elif line.startswith(b"data: "):
                        finish = self._take(line[6:].strip().decode(), text) or finish
                    elif line == b"\n" and shown:
                        event, shown = shown, ""
                        self.moved.append(time.monotonic())
                if finish:
                    self.texts.append((str(sorted(text.items())), finish))
                    return
                raise aiohttp.ClientPayloadError("it ended early")
            except (aiohttp.ClientError, OSError):
                if not event or not self.resumes:
                    raise Cut from None
                self.resumed += 1
                await asyncio.sleep(RESUME)
            finally:
                if answer is not None:
                    answer.close()

    def _body(self) -> dict[str, Any]:
        shared = {"seed": self.number, "stream": True, "ignore_eos": True, "temperature": 0.8}
        by_path = {
            "/v1/completions": {"prompt": self.question, "max_tokens": self.tokens},
            "/v1/responses": {"input": self.question, "max_output_tokens": self.tokens},
        }
        chat = {
            "messages": [{"role": "user", "content": self.question}],
            "max_tokens": self.tokens,
        }
        given = {**by_path.get(self.path, chat), **shared, **DIALECTS[self.path]}
        if self.path == "/v1/messages":  # which knows no seed
            given = {**chat, "stream": True, "temperature": 0}
        return given

    def _take(self, data: str, text: dict[int, str]) -> str:
        """Adds an event's text; the event's name if it is the last one. Raises Broken."""
        if data == "[DONE]":
            return data
        event = json.loads(data)
        kind = event.get("type", "")
        if "error" in event and event["error"] is not None:
            raise Broken(f"client {self.number}: {data}")
        if kind == "response.output_text.delta":
            text[0] = text.get(0, "") + event["delta"]
        elif kind == "content_block_delta":
            text[0] = text.get(0, "") + event["delta"]["text"]
        for choice in event.get("choices", ()):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            text[choice["index"]] = text.get(choice["index"], "") + piece
        return kind if kind in LAST_EVENTS else ""

    async def ask(self, api: aiohttp.ClientSession) -> None:
        """One answer. Raises Broken for anything but a stream that ends well."""
        body = {
            "messages": [{"role": "user", "content": self.question}],
            "seed": self.number,
            "max_tokens": self.tokens,
            "stream": True,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token moves the stream
            **SAMPLING[self.number % len(SAMPLING)],
        }
        text, finish = "", None
        async with api.post("/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise Broken(f"client {self.number} got {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    data = json.loads(line[len("data: ") :])
                    if "error" in data:
                        raise Broken(f"client {self.number}: {data}")
                    [choice] = data["choices"]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                    self.moved.append(time.monotonic())
        self.texts.append((text, str(finish)))

    def pause(self, since: float, until: float) -> float:
        """Seconds of the longest pause between two pieces that touches this time."""
        pairs = ((a, b) for a, b in pairwise(self.moved) if b > since and a < until)
        return max((b - a for a, b in pairs), default=0.0)


PATIENCE = 240.0  # seconds for one answer, faults included
STUCK = 90.0  # seconds after a fault until every stream moves again
LOOK = 0.02  # seconds between looks at the streams
BREATH = 0.2  # seconds after an answer that was none
MAX_BROKEN = 20  # promises; then it is over


@dataclass(frozen=True)
class Fault:
    """One of a run.

    Attributes:
    - kind: under which its pauses are reported
    - what: which stages, for people
    - wait: seconds before it, so that it falls anywhere between steps
    - inject(): returns when the server says that it is well again, or raises Broken
    """

    kind: str
    what: str
    wait: float
    inject: Callable[[], None]


FaultPlan = Callable[[ServerUnderTest], Sequence[Fault]]


def summary(pauses: Sequence[float]) -> dict[str, Any]:
    """Of the longest pauses of any stream, a fault each, in seconds."""
    return {
        "count": len(pauses), "p50": round(statistics.median(pauses), 2), "max": max(pauses),
        "all": list(pauses),
    }  # fmt: skip


class FaultRun:
    """`streams` clients under faults, of which none begins after `limit` seconds.

    Attributes:
    - pauses: for each kind of fault, seconds of the longest pause of any stream
    - cut: of each stream that was cut by a fault and resumed, seconds of its pause
    - beside: of the same streams, seconds of the pause beyond the fault's own
    - resumed, retried: answers, under deaths of gateways
    - emptied: seconds until no stage kept anything, after the last answer
    - broken: promises that did not hold
    - answers: that were compared
    """

    def __init__(
        self,
        streams: int,
        tokens: int,
        source: random.Random,
        limit: float = float("inf"),
        gateway_dies: bool = False,
    ) -> None:
        self._gateway_dies = gateway_dies
        self.cut: list[float] = []
        self.beside: list[float] = []
        self.resumed = self.retried = 0
        self.emptied = 0.0
        self._questions = [copy_task(source, source.randint(10, 40))[0] for _ in range(streams)]
        self._tokens, self._limit = tokens, limit
        self._expected: list[tuple[str, str]] = []
        self._during = "before the first fault"
        self.pauses: dict[str, list[float]] = {}
        self.broken: list[str] = []
        self.answers = 0

    def serve(
        self, server: ServerUnderTest, plan: FaultPlan, over: Callable[[], None] = lambda: None
    ) -> None:
        """Asks in calm, injects faults, compares, and looks for what is left. `plan` gives the
        faults for the server that runs; `over` is called when they are over."""
        try:
            self._serve(server, plan, over)
        except (Broken, TimeoutError, aiohttp.ClientError) as error:
            self._break(f"{type(error).__name__}: {error}")

    def _serve(self, server: ServerUnderTest, plan: FaultPlan, over: Callable[[], None]) -> None:
        with server:
            pid = server.process.pid
            folder = running(pid).file.parent
            calm = asyncio.run(self._everybody(server, ()))
            if self.broken:
                return
            self._expected = [client.texts[0] for client in calm]
            self._during = "after the last fault"
            asyncio.run(self._everybody(server, plan(server)))
            over()
            ended = time.monotonic()
            left = leftovers(pid)
            self.emptied = round(time.monotonic() - ended, 1)
            if left:
                self._break(f"left behind: {left}")
            family = psutil.Process(pid).children(recursive=True)
            code = server.stop()
        alive = [process.pid for process in family if computes(process)]
        sockets = str(folder) in Path("/proc/net/unix").read_text()
        if code or alive or folder.exists() or sockets:
            self._break(
                f"the server ended with code {code}; processes {alive}, its folder "
                f"({folder.exists()}) and its sockets ({sockets}) are left"
            )

    def _break(self, what: str) -> None:
        self.broken.append(what)
        print(f"broken: {what}", file=sys.stderr, flush=True)

    async def _everybody(
        self, server: ServerUnderTest, faults: Sequence[Fault]
    ) -> list[StreamClient]:
        """One answer of each client in calm, without faults; with them as many as they take."""
        clients = [self._client(n, question) for n, question in enumerate(self._questions)]
        over = asyncio.Event()
        patience = aiohttp.ClientTimeout(total=PATIENCE)
        # Where gateways die each answer has a connection of its own: one that stays open leads to
        # a gateway that lives, so in the end none would lead to those that were killed.
        connections = aiohttp.TCPConnector(limit=0, force_close=self._gateway_dies)
        async with aiohttp.ClientSession(
            server.url, timeout=patience, connector=connections
        ) as api:

            async def loop(client: StreamClient) -> None:
                await self._ask(client, api)
                while not over.is_set():
                    await self._ask(client, api)

            tasks = [asyncio.create_task(loop(client)) for client in clients]
            try:
                if faults:
                    await self._inject(faults, clients)
            except BaseException:
                for task in tasks:
                    task.cancel()
                raise
            over.set()
            await asyncio.gather(*tasks)
        self.resumed += sum(client.resumed for client in clients)
        self.retried += sum(client.retried for client in clients)
        return clients

    def _client(self, number: int, question: str) -> StreamClient:
        if not self._gateway_dies:
            return StreamClient(number, question, self._tokens)
        path = list(DIALECTS)[number // 2 % len(DIALECTS)]
        return StreamClient(number, question, self._tokens, path, resumes=number % 2 == 0)

    async def _ask(self, client: StreamClient, api: aiohttp.ClientSession) -> None:
        """One answer, compared with that in calm."""
        began = self._during
        try:
            await (client.ask(api) if client.resumes is None else client.ask_under_deaths(api))
        except (Broken, TimeoutError, aiohttp.ClientError) as error:
            when = began if began == self._during else f"{began} ... {self._during}"
            self._break(f"{type(error).__name__}: {error} ({when})")
            await asyncio.sleep(BREATH)
            return
        if not self._expected:
            return
        self.answers += 1
        text, expected = client.texts[-1], self._expected[client.number]
        if text != expected:
            self._break(f"client {client.number}: {text}, not {expected} ({began})")

    async def _inject(self, faults: Sequence[Fault], clients: list[StreamClient]) -> None:
        """All of them in turn, each when every stream has moved since the one before."""
        began = time.monotonic()
        await self._all_moved(began, clients)
        for number, fault in enumerate(faults):
            if len(self.broken) >= MAX_BROKEN or time.monotonic() - began > self._limit:
                return
            await asyncio.sleep(fault.wait)
            self._during = f"{number + 1}/{len(faults)} {fault.kind} {fault.what}"
            resumed = [client.resumed for client in clients]
            injected = time.monotonic()
            try:
                await asyncio.to_thread(fault.inject)
            except Broken as error:
                self._break(f"{error} ({self._during})")
            ready = time.monotonic()
            await self._all_moved(ready, clients)
            pause = round(max(client.pause(injected, ready) for client in clients), 2)
            self.pauses.setdefault(fault.kind, []).append(pause)
            cut = [
                client.pause(injected, ready)
                for client, before in zip(clients, resumed, strict=True)
                if client.resumed > before
            ]
            self.cut += cut
            self.beside += [max(seconds - (ready - injected), 0.0) for seconds in cut]
            said = f"{time.strftime('%H:%M:%S')} {self._during}: {pause:.2f} s"
            print(said, file=sys.stderr, flush=True)

    async def _all_moved(self, since: float, clients: list[StreamClient]) -> None:
        """Waits until each stream has moved. Raises Broken, which names those that do not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK):
                while not all(c.moved and c.moved[-1] > since for c in clients):
                    await asyncio.sleep(LOOK)
            return
        still = [c.number for c in clients if not c.moved or c.moved[-1] <= since]
        raise Broken(f"{len(still)} streams stand still since {STUCK:g} s ({self._during})")
