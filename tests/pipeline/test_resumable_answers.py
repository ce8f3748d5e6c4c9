"""A real server whose clients lose their connections: answers go on, each byte once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from held_processes import held_engines
from servers import Server

KEYS = ("alice", "bob")
PROMPT = [{"role": "user", "content": "What are the stages?"}]
CHAT: dict[str, Any] = {"messages": PROMPT, "max_tokens": 80, "temperature": 0.8, "seed": 7,
                        "ignore_eos": True, "stream": True}  # fmt: skip
DETACHED = {"x-pipeinfer-detached": "60"}
FORMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "count", "max_tokens": 60, "n": 2, "temperature": 0.8, "seed": 3,
                        "ignore_eos": True, "stream": True},
    "/v1/messages": {"messages": PROMPT, "max_tokens": 80, "temperature": 0, "stream": True},
    "/v1/responses": {"input": "What are the stages?", "max_output_tokens": 80, "seed": 7,
                      "temperature": 0.8, "ignore_eos": True, "stream": True},
}  # fmt: skip
# What differs between two runs of one request, and says nothing.
RANDOM = re.compile(rb"(chatcmpl|cmpl|msg|resp|rs)[-_][0-9a-f]{32,48}|\"(created|created_at)\":\d+")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("kept") / "keys.txt"
    secrets = {name: hashlib.sha256(f"pik-{name}-s3cret".encode()).hexdigest() for name in KEYS}
    keys.write_text("".join(f"{name} sha256:{digest}\n" for name, digest in secrets.items()))
    arguments = ("--api-key-file", str(keys), "--reattach", "60", "--kv-pages", "600")
    with Server(*arguments) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with session(server, "alice") as made:
        yield made


def session(server: Server, key: str) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer pik-{key}-s3cret"}
    return aiohttp.ClientSession(server.url, headers=headers)


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="pik-alice-s3cret", max_retries=0
    )


def metric(text: str, name: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


async def metrics(http: aiohttp.ClientSession) -> str:
    async with http.get("/metrics") as answer:
        return await answer.text()


async def until(condition: Any, what: str) -> Any:
    async with asyncio.timeout(60):
        while not (value := await condition()):
            await asyncio.sleep(0.05)
    assert value, what
    return value


async def part(answer: aiohttp.ClientResponse, events: int) -> bytes:
    """So many of a stream's first events, or all where there are fewer, then the connection is cut.
    What came together with them is lost with the connection: that may be all, if this process was
    slower than the server."""
    got = b""
    async for chunk in answer.content.iter_any():
        got += chunk
        if got.count(b"\n\n") >= events:
            break
    answer.close()
    return b"".join(event + b"\n\n" for event in got.split(b"\n\n")[:-1][:events])


def last_id(stream: bytes) -> str:
    return re.findall(rb"^id: (.+)$", stream, re.MULTILINE)[-1].decode()


def same(stream: bytes) -> bytes:
    """The stream without what is random."""
    return RANDOM.sub(b"-", stream)


def by_choice(stream: bytes) -> dict[bytes, list[bytes]]:
    """The events without what is random, by their choice (b"": none): two choices of a request are
    two rows of the engine, and one may be some steps ahead of the other, or not."""
    choices: dict[bytes, list[bytes]] = {}
    for event in same(stream).split(b"\n\n"):
        index = re.search(rb'"index":(\d+)', event)
        data = re.sub(rb"^id: .+\n", b"", event)
        choices.setdefault(index[1] if index else b"", []).append(data)
    return choices


WHOLE: dict[str, bytes] = {}  # what `whole` has asked for


async def whole(http: aiohttp.ClientSession, path: str) -> bytes:
    """The answer as it is with its prompt in the prefix cache."""
    for _ in range(0 if path in WHOLE else 2):
        async with http.post(path, json=FORMS[path]) as answer:
            assert answer.status == 200, await answer.text()
            WHOLE[path] = await answer.read()
    return WHOLE[path]


@pytest.mark.parametrize("path", FORMS)
async def test_a_stream_that_is_cut_again_and_again_comes_as_if_it_never_was(
    http: aiohttp.ClientSession, path: str
) -> None:
    undisturbed = await whole(http, path)
    total, drawn = undisturbed.count(b"\n\n"), random.Random(path)
    async with http.post(path, json=FORMS[path], headers=DETACHED) as answer:
        name = answer.headers["x-pipeinfer-stream"]
        got = await part(answer, drawn.randint(1, total // 3))
    cuts = 0
    while got.count(b"\n\n") < total:
        headers = {"Last-Event-ID": last_id(got)}
        async with http.get(f"/v1/streams/{name}", headers=headers) as answer:
            assert answer.status == 200
            got += await part(answer, drawn.randint(1, total // 3))
        cuts += 1
    assert by_choice(got) == by_choice(undisturbed) and cuts >= 2
    numbers = [number.split(b".") for number in re.findall(rb"^id: .+/(.+)$", got, re.MULTILINE)]
    if len(numbers[0]) == 1:
        assert [int(number) for [number] in numbers] == [*range(total)]
    else:  # one for each choice, and one for what comes behind both
        assert [sum(map(int, number)) for number in numbers] == [*range(1, total + 1)]
    async with http.get(f"/v1/streams/{name}") as answer:
        assert await answer.read() == got, "and once more from the beginning"


async def test_two_resume_at_once_and_both_get_all_of_it(http: aiohttp.ClientSession) -> None:
    undisturbed = await whole(http, "/v1/chat/completions")
    path = "/v1/chat/completions"
    async with http.post(path, json=FORMS[path], headers=DETACHED) as answer:
        name = answer.headers["x-pipeinfer-stream"]
        first = await part(answer, 3)
    headers = {"Last-Event-ID": last_id(first)}

    async def rest() -> bytes:
        async with http.get(f"/v1/streams/{name}", headers=headers) as resumed:
            return await resumed.read()

    one, other = await asyncio.gather(rest(), rest())
    assert one == other and same(first + one) == same(undisturbed)


async def test_a_client_that_comes_back_in_time_finds_its_stream_alive(
    http: aiohttp.ClientSession,
) -> None:
    """Without being detached: --reattach is a minute here."""
    undisturbed = await whole(http, "/v1/messages")
    async with http.post("/v1/messages", json=FORMS["/v1/messages"]) as answer:
        name = answer.headers["x-pipeinfer-stream"]
        first = await part(answer, 4)
    headers = {"Last-Event-ID": last_id(first)}
    async with http.get(f"/v1/streams/{name}", headers=headers) as answer:
        assert same(first + await answer.read()) == same(undisturbed)


async def test_a_client_that_stays_away_ends_its_request(
    server: Server, http: aiohttp.ClientSession
) -> None:
    """The engine stands still meanwhile: the answer does not end by itself."""

    async def running() -> float:
        return metric(await metrics(http), "pipeinfer_requests_running")

    body, headers = CHAT | {"max_tokens": 1900}, {"x-pipeinfer-reattach": "0.5"}
    with await asyncio.to_thread(held_engines, server) as engines:
        asked = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await asyncio.to_thread(engines.compute_until, asked.done)
        async with await asked as answer:
            name = answer.headers["x-pipeinfer-stream"]
            assert metric(await metrics(http), "pipeinfer_kept_bytes") > 0
            await part(answer, 1)

        async def gone() -> bool:
            headers = {"Last-Event-ID": f"{name}/99999"}
            async with http.get(f"/v1/streams/{name}", headers=headers) as a:
                return a.status == 410

        await until(gone, "its time is over")

    async def idle() -> bool:
        return await running() == 0

    await until(idle, "what nobody waits for is aborted")
    assert 'outcome="abort"' in await metrics(http)


async def test_another_key_finds_nothing(server: Server, http: aiohttp.ClientSession) -> None:
    background = {"input": "What are the stages?", "background": True}
    async with http.post("/v1/responses", json=background) as answer:
        name = (await answer.json())["id"]
    async with session(server, "bob") as bob:
        for method, path in (
            ("GET", f"/v1/streams/{name}"),
            ("GET", f"/v1/responses/{name}"),
            ("GET", f"/v1/responses/{name}?stream=true"),
            ("GET", f"/v1/responses/{name}/input_items"),
            ("POST", f"/v1/responses/{name}/cancel"),
            ("DELETE", f"/v1/responses/{name}"),
        ):
            async with bob.request(method, path) as answer:
                assert answer.status == 404, (method, path)
                unknown = path.replace(name, "resp_unknown")
                theirs = (await answer.text()).replace(name, "resp_unknown")
            async with bob.request(method, unknown) as answer:
                assert await answer.text() == theirs, "as if there were none"
    async with http.get(f"/v1/responses/{name}") as answer:
        assert answer.status == 200


async def test_a_background_response_by_the_official_client(server: Server) -> None:
    async with client(server) as api:
        asked: Any = {"model": "pipeinfer-demo", "input": "What are the stages?", "temperature": 0}
        plain = await api.responses.create(**asked)
        made = await api.responses.create(**asked, background=True)
        # Tokens may have come before the gateway has turned to its answer.
        assert made.status in ("queued", "in_progress") and made.background

        async def done() -> Any:
            found = await api.responses.retrieve(made.id)
            assert found.id == made.id and plain.output_text.startswith(found.output_text)
            return found if found.status not in ("queued", "in_progress") else None

        found = await until(done, "it ends")
        assert found.status == "completed" and found.output_text == plain.output_text
        assert found.usage is not None and plain.usage is not None
        assert found.usage.output_tokens == plain.usage.output_tokens
        events = [e async for e in await api.responses.retrieve(made.id, stream=True)]
        assert [e.type for e in events[:3]] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert events[-1].type == "response.completed" and events[-1].response == found
        later = [e async for e in await api.responses.retrieve(made.id, stream=True,
                                                               starting_after=5)]  # fmt: skip
        assert later == events[6:]
        items = [item async for item in api.responses.input_items.list(made.id)]
        assert [(i.role, i.content[0].text) for i in items] == [("user", "What are the stages?")]  # type: ignore[union-attr]
        again = await api.responses.cancel(made.id)
        assert again == found, "what is over stays as it is"
        await api.responses.delete(made.id)
        for asking in (api.responses.retrieve, api.responses.delete, api.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await asking(made.id)


async def test_a_background_stream_goes_on_after_its_client_left(server: Server) -> None:
    async with client(server) as api:
        asked: Any = {"model": "pipeinfer-demo", "input": "What are the stages?", "temperature": 0,
                      "background": True, "max_output_tokens": 200}  # fmt: skip
        stream = await api.responses.create(**asked, stream=True)
        name, seen = "", []
        async for event in stream:
            seen.append(event)
            name = (getattr(event, "response", None) and event.response.id) or name  # type: ignore[union-attr]
            if len(seen) == 6:
                break
        await stream.close()
        rest = [e async for e in await api.responses.retrieve(
            name, stream=True, starting_after=seen[-1].sequence_number)]  # fmt: skip
        assert [e.sequence_number for e in seen + rest] == list(range(len(seen + rest)))
        text = "".join(e.delta for e in seen + rest if e.type == "response.output_text.delta")
        assert rest[-1].type == "response.completed" and rest[-1].response.output_text == text


async def test_a_cancelled_response_ends_everywhere(server: Server) -> None:
    """The engine stands still meanwhile: the response does not end by itself."""
    async with client(server) as api, session(server, "alice") as http:
        with await asyncio.to_thread(held_engines, server) as engines:
            made = await api.responses.create(
                model="pipeinfer-demo", input="count", background=True, max_output_tokens=1900,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            events = await api.responses.retrieve(made.id, stream=True)
            seen: list[Any] = []

            async def first_five() -> None:
                while len(seen) < 5:
                    seen.append(await anext(aiter(events)))

            reading = asyncio.create_task(first_five())
            await asyncio.to_thread(engines.compute_until, reading.done)
            await reading
            cancelled = await api.responses.cancel(made.id)
        assert cancelled.status == "cancelled" and cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
        seen += [event async for event in events]
        last: Any = seen[-1]
        assert last.type == "response.cancelled" and last.response["status"] == "cancelled"
        assert (await api.responses.retrieve(made.id)).status == "cancelled"

        async def idle() -> bool:
            return metric(await metrics(http), "pipeinfer_requests_running") == 0

        await until(idle, "its slot is free")


async def test_the_official_clients_read_streams_with_ids(server: Server) -> None:
    async with client(server) as api:
        stream = await api.chat.completions.create(
            model="pipeinfer-demo", messages=PROMPT, stream=True, extra_headers=DETACHED,  # type: ignore[arg-type]
        )  # fmt: skip
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        plain = await api.chat.completions.create(model="pipeinfer-demo", messages=PROMPT)  # type: ignore[arg-type]
        assert text == plain.choices[0].message.content
    headers = {**DETACHED, "x-api-key": "pik-alice-s3cret"}
    import anthropic  # 2 s, which only the worker that has these tests spends

    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="pik-alice-s3cret", default_headers=headers
    ) as api:
        asked: Any = {"model": "pipeinfer-demo", "messages": PROMPT, "max_tokens": 200}
        async with api.messages.stream(**asked) as events:
            streamed = await events.get_final_text()
        assert streamed == text


async def test_a_prompt_that_is_refused_is_an_error_and_nothing_is_kept(
    http: aiohttp.ClientSession,
) -> None:
    before = metric(await metrics(http), "pipeinfer_kept_streams")
    for path, body in (
        ("/v1/responses", {"input": "long " * 20_000, "background": True}),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "long " * 20_000}]},
        ),
    ):
        async with http.post(path, json=body, headers=DETACHED if "messages" in body else {}) as a:
            assert a.status == 400 and json.loads(await a.text())["error"]["code"] == (
                "context_length_exceeded"
            )
    assert metric(await metrics(http), "pipeinfer_kept_streams") <= before


class CuttingProxy:
    """A TCP proxy that cuts each connection after a number of bytes that it draws."""

    def __init__(self, url: str, seed: int) -> None:
        self._host, self._port = url.partition("://")[2].rsplit(":", 1)
        self._random = random.Random(seed)
        self.cuts = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection(self._host, int(self._port))
        asking = asyncio.create_task(self._pass(reader, outer, 1 << 30))
        left = await self._pass(inner, writer, self._random.randint(500, 9000))
        self.cuts += not left
        asking.cancel()
        for one in (outer, writer):
            one.transport.abort()

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> int:
        while size and (data := await reader.read(min(size, 4096))):
            size -= len(data)
            writer.write(data)
            await writer.drain()
        return size


async def test_the_client_of_the_page_loses_no_event(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [source] = [block for block in blocks if "x-pipeinfer-stream" in block]
    assert len([line for line in source.splitlines() if line.strip()]) <= 25
    module: dict[str, Any] = {}
    exec(source, module)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def short(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.01)

    path = "/v1/chat/completions"
    undisturbed = re.findall(r"^data: (.*)$", same(await whole(http, path)).decode(), re.MULTILINE)
    proxy = CuttingProxy(server.url, 5)
    async with proxy as url:
        monkeypatch.setattr(asyncio, "sleep", short)
        got = [data async for data in module["events"](url, FORMS[path], "pik-alice-s3cret")]
        monkeypatch.undo()
    assert [same(data.encode()).decode() for data in got] == undisturbed
    assert proxy.cuts >= 2 and len(pauses) >= 2
