"""HTTP requests of strangers, on the socket of a real gateway whose other stages are played.

An input says how its last part is sent: as raw bytes, or as a body in a well-formed request,
whole, chunked, packed, twice in a row or half-closed. No 5xx, no line at ERROR in the log, every
body that comes back is an answer or an error in its form, the loop never stands still, and the
next client is answered.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import uvloop
from msgspec import inspect

from fuzz import inputs
from fuzz.engines import Wrong
from harness import raw_http
from harness.command_line import ROOT
from pipeinfer import topology as topologies
from pipeinfer.bus import frames
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import LOCAL, Core, Send, Tick
from pipeinfer.gateway.errors import REFUSED
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest
from pipeinfer.gateway.stage import build
from pipeinfer.messages import PROTOCOL, Message, Submit
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity

sys.path.append(str(ROOT / "tests/gateway"))
gateway_pipeline: Any = importlib.import_module("gateway_pipeline")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KINDS = {CHAT: ChatRequest, COMPLETION: CompletionRequest}
DEPTHS = (2, 30, 63, 64, 65, 66, 500, 900, 975, 979, 985, 1100, 20_000)

HUGE = tuple(msgspec.Raw(str(n).encode()) for n in (2**64, -(2**63) - 1, 10**40, -(10**40)))

encode = msgspec.json.Encoder().encode
_infos = {path: inspect.type_info(kind) for path, kind in KINDS.items()}


def plain(path: str) -> dict[str, Any]:
    """A request that is answered."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "one two three"}]}
    return {"prompt": "one two three"}


def example(path: str, source: Random) -> dict[str, Any]:
    """A request that is mostly good: a few fields are drawn, at their edges too."""
    whole = inputs.drawn(_infos[path], source)
    whole.pop("model", None)
    few = source.sample(sorted(whole), min(len(whole), source.choice((1, 2, 3, 6))))
    return {**plain(path), **{name: whole[name] for name in few}}


def raw(source: Random) -> msgspec.Raw:
    """JSON that an encoder would not write."""
    depth = source.choice(DEPTHS)
    many = source.choice((3, 17, 300, 5000))
    return msgspec.Raw(
        source.choice(
            (
                b"[" * depth + b"]" * depth,
                b'{"a":' * depth + b"1" + b"}" * depth,
                b'[{"a":' * depth + b"1" + b"}]" * depth,
                b"[" + b",".join([b'"a"'] * many) + b"]",
                b"[" + b",".join([b"97"] * many) + b"]",
                b'"' + b"a" * many + b'"',
                b"1e400",
                b"-1e-400",
                b"1E5",
                b"0.1e-7",
                b"1" * 400,
                b"-" + b"9" * 30,
                str(source.choice(inputs.ATOMS[8:13])).encode(),
                b"18446744073709551616",
                b'"\\ud800"',
                b'"\\udc00\\ud800"',
                b'"\xff\xfe"',
                b'"\\u0000"',
                b"NaN",
                b"Infinity",
                b"tru",
            )
        )
    )


def mutated_body(body: bytes, source: Random) -> bytes:
    """Another body, made from one."""
    try:
        value = msgspec.json.decode(body)
        if not isinstance(value, dict):
            return body
        if source.random() < 0.3:
            fields = (*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)
            value[source.choice((*fields, *REFUSED))] = source.choice(
                source.choice((inputs.ATOMS, inputs.ATOMS, HUGE))
            )
            return encode(value)
        return encode(inputs.mutated_value(value, source, raw))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return body


MODEL = "fuzz"
MOST_WORDS = 8
BODY = 1  # MiB; little enough for an input to reach


class FramedCore:
    """The gateway's core. What it sends to others arrives as through the bus."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def handle(self, event: Message, now: float) -> list[Send]:
        """As the core's."""
        sends = self._core.handle(event, now)
        return [send if send.channel == LOCAL else _framed(send) for send in sends]


def _framed(send: Send) -> Send:
    header = FrameHeader(PROTOCOL, "gateway-0", 1, 0, 0.0)
    _, _, arrived = frames.decode(frames.encode(send.channel, header, send.message))
    return send._replace(message=arrived)


class Stages(gateway_pipeline.Pipeline):
    """The others, as tests/gateway plays them. `failures`: what the core or a frame raised, since
    last asked."""

    def __init__(self, core: Any, driver: Any) -> None:
        super().__init__(core, driver)
        self.cut = self._few_words
        self.failures: list[Exception] = []
        self.on_failure: Callable[[], None] = lambda: None

    def feed(self, event: Message) -> None:
        """As the shell does; what would end the stage is noted."""
        try:
            super().feed(event)
        except Exception as error:
            self.failures.append(error)
            self.on_failure()  # its client may wait for ever
        self.submits.clear()

    def _few_words(self, submit: Submit) -> list[str]:
        """None that tests have a meaning for."""
        words = gateway_pipeline.words_of(submit)[:MOST_WORDS]
        return [f"{word[:20].strip()}. " for word in words] or ["nothing"]


class Gateway:
    """A gateway's core and driver among the other stages, which are played."""

    async def start(self) -> str:
        """Its URL, when it serves."""
        settings = Settings(port=0, served_model_name=MODEL, max_body_mib=BODY)
        topology = topologies.local(settings, "inproc://fuzz-")
        stage = build(StageContext(settings, topology, Identity("gateway"), 1, lambda *_: None))
        self._driver: Any = stage.driver
        self.stages = Stages(FramedCore(stage.core), self._driver)
        await self._driver.start(self.stages.feed)
        self.beat()
        while not getattr(self._driver, "url", ""):
            await asyncio.sleep(0.01)
        return self._driver.url

    async def stop(self) -> None:
        """Closes its sockets."""
        await self._driver.stop()

    def beat(self) -> None:
        """The others say that they are well, and a timer fires."""
        self.stages.beat()
        self.stages.feed(Tick())
        self.stages.gone.clear()
        self.stages.aborts = asyncio.Queue()


RAW, WHOLE, CHUNKED, PACKED, TWICE, HALF, PATH, HEADERS = range(8)
WAYS = 8
PATIENCE = 0.02  # seconds for an answer to what is perhaps no whole request
CANARY = 5.0  # for one that is
STALL = 0.5  # seconds in which the loop does nothing else
EVERY = 0.005  # seconds between looks at the clock
BEATS = 200  # inputs between two heartbeats
PATHS = (CHAT, COMPLETION)
STATIC = ("text/plain", "text/html", "text/css", "text/javascript", "image/")  # of /metrics, pages


def make() -> Http:
    """The target."""
    return Http()


class Errors(logging.Handler):
    """Keeps what is logged at ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[0] if record.exc_info else None
        said = record.getMessage().split("\n")[0]
        self.found.append(f"logged at ERROR: {said} ({raised.__name__ if raised else 'no error'})")


class Watch:
    """`longest`: seconds between two beats of the running loop, which has one every few ms."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.longest, self._last = 0.0, time.monotonic()
        self._next = self._loop.call_later(EVERY, self._beat)

    def _beat(self) -> None:
        self._note()
        self._next = self._loop.call_later(EVERY, self._beat)

    def _note(self) -> None:
        now = time.monotonic()
        self.longest, self._last = max(self.longest, now - self._last), now

    def end(self) -> None:
        """No more beats."""
        self._note()
        self._next.cancel()


class Http:
    """See Target."""

    instrumented = (
        "pipeinfer.gateway.serving", "pipeinfer.gateway.schema", "pipeinfer.gateway.requests",
        "pipeinfer.gateway.app", "pipeinfer.gateway.core", "pipeinfer.gateway.errors",
        "pipeinfer.gateway.sessions", "pipeinfer.gateway.response_encoders", "pipeinfer.params",
    )  # fmt: skip

    def __init__(self) -> None:
        self._errors = Errors()
        logging.getLogger().handlers[:] = [self._errors]
        logging.getLogger().setLevel(logging.ERROR)
        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._gateway = Gateway()
        self._runs = 0
        self._address = raw_http.Address.of(self._loop.run_until_complete(self._gateway.start()))
        self._loop.run_until_complete(self._listening())

    async def _listening(self) -> None:
        deadline = time.monotonic() + CANARY
        while True:
            try:
                await self._canary()
                return
            except (OSError, Wrong):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    def seeds(self) -> list[bytes]:
        """Both endpoints, each way of sending, whole and streamed; other paths; raw requests."""
        found = []
        source = Random(5)
        for at, path in enumerate(PATHS):
            for way in range(1, 6):
                for stream in (False, True):
                    body = {**example(path, source), "stream": stream}
                    found.append(_input(way, at, encode(body)))
        for path in (
            "/health",
            "/v1/models",
            f"/v1/models/{MODEL}",
            "/metrics",
            "/v1/models/a%20b",
        ):
            found.append(_input(PATH, 0, path.encode()))
            found.append(_input(RAW, 0, raw_http.request(path, method="GET")))
        found.append(_input(HEADERS, 0, b"Authorization: Bearer x\r\nX-Request-Id: a"))
        found.append(_input(RAW, 0, raw_http.request(CHAT, encode(plain(CHAT)))))
        return found

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Another body, another way of sending it, or other bytes in a header or a path."""
        if len(data) < 2:
            return _input(WHOLE, 0, encode(plain(CHAT)))
        way, at, body = data[0] % WAYS, data[1] % 2, data[2:]
        kind = source.randrange(10)
        if kind == 0:
            way = source.randrange(1, 6)
        elif kind < 3 and way in (WHOLE, CHUNKED, PACKED, TWICE, HALF):
            body = encode(example(PATHS[at], source))
        elif kind == 3 or way in (RAW, PATH, HEADERS):
            body = inputs.mutated_bytes(body, source)
        else:
            body = mutated_body(body, source)
        return _input(way, at, body)

    def one(self, data: bytes) -> None:
        """Sends it, and then a canary."""
        if len(data) < 2:
            return
        self._runs += 1
        if self._runs % BEATS == 0:
            self._loop.run_until_complete(self._beat())
        try:
            self._loop.run_until_complete(self._exchange(data[0] % WAYS, data[1] % 2, data[2:]))
        finally:
            errors, self._errors.found = self._errors.found, []
            failures, self._gateway.stages.failures = self._gateway.stages.failures, []
            if failures:
                raise failures[0] from None  # the reason of whatever the client saw
        if errors:
            raise Wrong(errors[0])

    async def _beat(self) -> None:
        self._gateway.beat()

    async def _exchange(self, way: int, at: int, body: bytes) -> None:
        content, sure = _request(way, PATHS[at], body)
        watch = Watch()
        try:
            await self._send(content, half=way == HALF, sure=sure)
        finally:
            watch.end()
        if watch.longest > STALL:
            raise Wrong(f"the loop stood still for {watch.longest:.1f} s")
        if zlib.crc32(body) % 4 == 0 or self._runs == 1:
            await self._canary()

    async def _send(self, content: bytes, half: bool, sure: bool) -> None:
        """Sends, and looks at every answer until none comes any more."""
        reader, writer = await raw_http.connect(self._address)
        answers = 0
        try:
            writer.write(content)
            if half:
                writer.write_eof()
            while True:
                async with asyncio.timeout(
                    CANARY if sure and not answers else PATIENCE
                ) as patience:
                    self._gateway.stages.on_failure = lambda: patience.reschedule(0)
                    answer = await raw_http.answer(reader)
                _check(answer)
                answers += 1
                if sure:
                    return
        except TimeoutError:
            if sure:
                raise Wrong("a well-formed request gets no answer") from None
        except OSError:
            if sure and not answers:
                raise Wrong("a well-formed request gets no answer, the connection ends") from None
        finally:
            self._gateway.stages.on_failure = lambda: None
            writer.transport.abort()

    async def _canary(self) -> None:
        """A good request is answered as it should be."""
        reader, writer = await raw_http.connect(self._address)
        try:
            writer.write(raw_http.request(COMPLETION, encode({"prompt": "one two"})))
            async with asyncio.timeout(CANARY):
                answer = await raw_http.answer(reader)
        except TimeoutError:
            raise Wrong("the next client is not answered") from None
        finally:
            writer.transport.abort()
        if answer.status != 200 or json.loads(answer.body)["choices"][0]["text"] != "one. two. ":
            raise Wrong(f"the next client gets {answer.status}: {answer.body[:200]!r}")

    def close(self) -> None:
        """Stops the gateway."""
        self._loop.run_until_complete(self._gateway.stop())
        self._loop.close()


def _input(way: int, at: int, body: bytes) -> bytes:
    return bytes([way, at]) + body


def _request(way: int, path: str, body: bytes) -> tuple[bytes, bool]:
    """(bytes, whether a server must answer them)."""
    if way == RAW:
        return body, False
    if way == CHUNKED:
        half = len(body) // 2
        chunks = [chunk for chunk in (body[:half], body[half:]) if chunk]
        packed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        head = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        return raw_http.request(path, packed + b"0\r\n\r\n", head), True
    if way == PACKED:
        packed = gzip.compress(body, 1) if len(body) % 4 else body
        return raw_http.request(path, packed, {"Content-Encoding": "gzip"}), bool(packed)
    if way == TWICE:
        return raw_http.request(path, body) * 2, bool(body)
    if way == PATH:
        return b"GET " + body + b" HTTP/1.1\r\nHost: server\r\n\r\n", False
    if way == HEADERS:
        form = encode(plain(path))
        head = b"POST %s HTTP/1.1\r\nHost: server\r\nContent-Length: %d\r\n%s\r\n\r\n"
        return head % (path.encode(), len(form), body) + form, False
    return raw_http.request(path, body), bool(body)  # also of who says that it will send no more


def _check(answer: raw_http.Answer) -> None:
    """An answer in its form; what aiohttp itself refuses is in its own."""
    if answer.status >= 500:
        raise Wrong(f"status {answer.status}: {answer.body[:300]!r}")
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json"):
        content = json.loads(answer.body)
        if answer.status >= 400:
            error = content["error"]
            if not (isinstance(error["message"], str) and {"type", "param", "code"} <= set(error)):
                raise Wrong(f"an error in another form: {answer.body[:300]!r}")
    elif kind.startswith("text/event-stream"):
        _check_stream(answer.body)
    elif answer.status == 200 and not kind.startswith(STATIC):
        raise Wrong(f"an answer of type {kind!r}")


def _check_stream(body: bytes) -> None:
    *events, rest = body.split(b"\n\n")
    if rest or not events:
        raise Wrong(f"a stream that ends with {body[-100:]!r}")
    for event in events[:-1]:
        json.loads(event.removeprefix(b"data: "))
    if events[-1] != b"data: [DONE]" and "error" not in json.loads(events[-1][6:]):
        raise Wrong(f"a stream that ends with {events[-1]!r}")
