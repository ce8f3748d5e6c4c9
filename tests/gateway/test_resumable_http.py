"""Kept answers over HTTP: malformed ids, bounds, slow readers, limits, and who may have what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient, post

from pipeinfer.gateway import resumable_answers
from pipeinfer.gateway.resumable_answers import WRITE_BYTES, AnswerRetention, ResumableAnswers
from pipeinfer.gateway.retention import (
    MAX_READERS,
    RetentionBounds,
    RetentionPolicy,
    StoredResponse,
)
from pipeinfer.messages import TextRow
from pipeinfer.wire import pack
from waiting import until

DETACHED = "x-pipeinfer-detached"
WORDS = " ".join(f"word{n}" for n in range(40))


async def ask(
    gateway: Gateway, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    content = {"prompt": WORDS, "max_tokens": 100, "stream": True, **body}
    return await gateway.http().post(f"{gateway.url}/v1/completions", json=content, headers=headers)


async def resume(gateway: Gateway, name: str, event: str | None = None) -> httpx.Response:
    headers = {} if event is None else {"Last-Event-ID": event}
    return await gateway.http().get(f"{gateway.url}/v1/streams/{name}", headers=headers)


def same(stream: str) -> str:
    """The stream without its id and its time."""
    return re.sub(r'"created":\d+', "", re.sub(r"cmpl-[0-9a-f]{32}", "", stream))


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_no_client_is_late_because_the_gateway_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its looks at the clock come far apart then, and it has not heard who came back meanwhile."""
    monkeypatch.setattr(resumable_answers, "EXPIRE_INTERVAL", 0.01)
    now = looks = 0.0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    answers = ResumableAnswers(RetentionBounds(1 << 20, 1 << 20), clock=clock)
    encoder: Any = None  # nothing is written
    answers.open(AnswerRetention("a", RetentionPolicy(False, 3.0)), "me", encoder)
    now, before = 600.0, looks
    await until(lambda: looks > before + 3)
    assert answers.streams.find("a", "me"), "it has had no time for the client"

    def gone() -> bool:
        nonlocal now
        now += 0.2
        return len(answers.streams) == 0

    await until(gone)
    assert now > 602.0


@pytest.fixture
async def kept(gateway: Gateway) -> AsyncIterator[httpx.Response]:
    """A whole detached stream."""
    answer = await ask(gateway, {DETACHED: "60"})
    assert answer.status_code == 200
    yield answer


async def test_plain_streams_have_no_ids_and_are_not_kept(gateway: Gateway) -> None:
    answer = await ask(gateway)
    assert "\nid:" not in answer.text and "x-pipeinfer-stream" not in answer.headers
    name = json.loads(answer.text.partition("data: ")[2].partition("\n")[0])["id"]
    assert code(await resume(gateway, name)) == (404, "stream_not_found")


async def test_a_kept_stream_is_the_plain_one_with_ids(
    gateway: Gateway, kept: httpx.Response
) -> None:
    name, plain = kept.headers["x-pipeinfer-stream"], (await ask(gateway)).text
    lines = [line for line in same(kept.text).splitlines() if not line.startswith("id: ")]
    assert lines == same(plain).splitlines()
    assert code(await resume(gateway, name, f"{name}/41")) == (400, "invalid_value")
    assert (await resume(gateway, name, f"{name}/40")).text == "", "all of it was had"
    assert (await resume(gateway, name)).text == kept.text
    assert (await resume(gateway, name, "")).text == kept.text, "as a browser asks first"


@pytest.mark.parametrize(
    "event",
    [
        *("x", "/1", "{}", "{}/", "{}/-1", "{}/1.5", "{}/²", "other/1", "{}/0/1", "{}/1e1"),
        *("{}/99999999999999999999", "{}/" + "1" * 4000),
    ],
)
async def test_a_malformed_event_id_is_refused(
    gateway: Gateway, kept: httpx.Response, event: str
) -> None:
    name = kept.headers["x-pipeinfer-stream"]
    given = event.replace("{}", name).encode()
    answer = await gateway.http().get(
        f"{gateway.url}/v1/streams/{name}", headers={b"Last-Event-ID": given}
    )
    assert code(answer) == (400, "invalid_value")


@pytest.mark.parametrize(
    "name", ["x", "%00", "..", "%2e%2e%2f", "a" * 4000, "resp_1/2", "%F0%9F%98%80"]
)
async def test_an_unknown_id_is_not_found(gateway: Gateway, name: str) -> None:
    for path in (f"/v1/streams/{name}", f"/v1/responses/{name}"):
        answer = await gateway.http().get(gateway.url + path)
        assert answer.status_code in (404, 405), answer.text


@pytest.mark.parametrize("seconds", ["", "x", "0", "-1", "nan", "inf", "86401", "1s"])
async def test_a_malformed_header_is_refused(gateway: Gateway, seconds: str) -> None:
    assert code(await ask(gateway, {DETACHED: seconds})) == (400, "invalid_value")
    assert not gateway.pipeline.submits


async def test_only_streams_and_responses_can_be_detached(gateway: Gateway) -> None:
    answer = await ask(gateway, {DETACHED: "5"}, stream=False)
    assert code(answer) == (400, "invalid_value") and "stream" in answer.json()["error"]["message"]
    body = {"input": "x", "background": True}
    made = await gateway.http().post(
        f"{gateway.url}/v1/responses", json=body, headers={DETACHED: "5"}
    )
    assert made.status_code == 200, "a background response needs no stream"


async def test_a_refused_prompt_is_an_error_with_its_status(gateway: Gateway) -> None:
    for headers in ({DETACHED: "5"}, None):
        assert code(await ask(gateway, headers, prompt="refuse")) == (400, "length")
    response = {"input": "refuse", "background": True}
    answer = await gateway.http().post(f"{gateway.url}/v1/responses", json=response)
    assert code(answer) == (400, "length")


async def test_a_request_that_breaks_tells_whoever_resumes(gateway: Gateway) -> None:
    answer = await ask(gateway, {DETACHED: "5"}, prompt="break x y")
    name = answer.headers["x-pipeinfer-stream"]
    assert "the engine is on fire" in answer.text
    assert (await resume(gateway, name)).text == answer.text
    client = gateway.client()
    made = await client.responses.create(model="test", input="break x y", background=True)
    await until(lambda: gateway.driver._context.answers.running is False)
    found = await client.responses.retrieve(made.id)
    assert found.status == "failed" and found.error is not None
    assert "on fire" in found.error.message


async def test_without_reattach_a_lost_connection_aborts_its_request(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "pause x", "stream": True}))
    assert b"pause" in await client.reader.readuntil(b"\n\n")
    await client.close()
    assert (await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)).reason == "client"


async def test_with_reattach_it_is_aborted_when_nobody_came(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(reattach=60.0)
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "pause x", "stream": True}))
    got = await client.reader.readuntil(b"\n\n")
    await client.close()
    event = got.rpartition(b"id: ")[2].partition(b"\n")[0].decode()
    name = event.partition("/")[0]
    second = await RawClient.connect(gateway)
    second.send(f"GET /v1/streams/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert b"pause" in await second.reader.readuntil(b"\r\n\r\n") + await second.reader.readuntil(
        b"\n\n"
    )
    assert gateway.pipeline.aborts.empty()
    stream = gateway.driver._context.answers.streams._streams[name]
    stream.policy = stream.policy._replace(seconds=0.2)
    await second.close()
    assert (await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)).reason == "client"
    assert code(await resume(gateway, name, event)) == (410, "stream_gone")


async def test_who_leaves_before_the_prompt_was_accepted_ends_even_a_detached_request(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(reattach=60.0)
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "hang", "stream": True}))
    await until(lambda: len(gateway.pipeline.submits) == 1)
    await client.close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert len(gateway.driver._context.answers.streams) == 0


async def test_a_detached_client_gets_the_head_before_any_output(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "hang", "stream": True}, f"{DETACHED}: 60"))
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 60)
    name = head.lower().partition(b"x-pipeinfer-stream: ")[2].partition(b"\r\n")[0].decode()
    assert name.startswith("cmpl-") and b" 200 " in head
    await client.close()
    await until(lambda: gateway.driver._context.answers.streams.num_detached == 1)
    assert gateway.pipeline.aborts.empty()


async def test_detached_answers_count_against_their_keys_limit(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(key_concurrent=2)
    client, made = gateway.client(), list[Any]()
    for _ in range(2):
        made.append(await client.responses.create(model="test", input="hang", background=True))
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="test", input="hang", background=True)
    await client.responses.cancel(made[0].id)
    await client.responses.create(model="test", input="hang", background=True)
    await client.responses.delete(made[1].id)
    await client.responses.create(model="test", input="hang", background=True)


def connection_with_small_buffers(gateway: Gateway) -> socket.socket:
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = gateway.url.partition("://")[2].rsplit(":", 1)
    small.connect((host, int(port)))
    return small


@pytest.mark.parametrize("reads", [True, False], ids=["reads on", "leaves"])
async def test_an_answer_is_kept_until_the_operating_system_has_all_of_it(
    gateway: Gateway, reads: bool
) -> None:
    """What lies in buffers of the gateway's process dies with it, so another must be able to write
    it again."""
    small = connection_with_small_buffers(gateway)
    client = RawClient(*await asyncio.open_connection(sock=small, limit=2**12))
    client.send(post({"prompt": "hang", "stream": True}, f"{DETACHED}: 60"))
    await client.reader.readuntil(b"\r\n\r\n")
    [stream] = gateway.driver._context.answers.streams._streams.values()
    runner = gateway.driver._runner
    assert runner is not None and runner.server is not None
    [connection] = runner.server.connections
    transport = connection.transport
    assert transport is not None
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    [submit] = gateway.pipeline.submits
    text = "0123456789" * 5_000
    gateway.pipeline.rows(TextRow(submit.request_id, 1, text, 0, 0, pack([1]), "length", None, 2))
    await until(lambda: stream.ended)
    for _ in range(100):
        await asyncio.sleep(0)
    assert 0 < transport.get_write_buffer_size() < WRITE_BYTES
    assert not stream.delivered and not gateway.pipeline.done
    if reads:
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got += await asyncio.wait_for(client.reader.read(2**16), 60)
        assert got.count(b"0123456789") == 5_000
        await until(lambda: stream.delivered)
        await until(lambda: gateway.pipeline.done == [submit.request_id])
    client.writer.transport.abort()
    await until(lambda: not stream.readers)
    assert stream.delivered == reads
    assert text in (await resume(gateway, stream.name)).text


async def test_a_slow_reader_costs_a_bounded_buffer_and_the_kept_answer_goes_on(
    start_gateway: StartGateway,
) -> None:
    """Of 6 MB of output 1 MiB is kept: a reader that reads nothing is cut off."""
    gateway = await start_gateway(kept_mib=1, key_kept_mib=1)
    kept = gateway.driver._context.answers
    small = connection_with_small_buffers(gateway)
    client = RawClient(*await asyncio.open_connection(sock=small, limit=2**12))
    client.send(post({"prompt": "hang", "stream": True}, f"{DETACHED}: 60"))
    head = await client.reader.readuntil(b"\r\n\r\n")
    name = head.lower().partition(b"x-pipeinfer-stream: ")[2].partition(b"\r\n")[0].decode()
    [submit] = gateway.pipeline.submits
    for n in range(300):
        text, finish = f"{n:05}" * 4000, "length" if n == 299 else None
        gateway.pipeline.rows(
            TextRow(submit.request_id, 1, text, n * len(text), n, pack([n]), finish, None, n + 1)
        )
        await asyncio.sleep(0)
        assert kept.streams.bytes <= 2**20
    await until(lambda: not kept.running)
    answer = await resume(gateway, name)
    assert code(answer) == (410, "stream_gone")
    first = int(answer.json()["error"]["message"].partition("from number ")[2].split()[0])
    rest = await resume(gateway, name, f"{name}/{first - 1}")
    assert rest.text.startswith(f"id: {name}/{first}\n") and rest.text.endswith("[DONE]\n\n")
    with contextlib.suppress(ConnectionResetError):
        got = await client.all(60.0)
        assert b"[DONE]" not in got and not got.endswith(b"0\r\n\r\n"), "it sees no orderly end"
    await client.close()


async def test_thousands_of_gets_of_one_stream_cost_little(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "pause x", "stream": True}, f"{DETACHED}: 60"))
    head = await client.reader.readuntil(b"\n\n")
    name = head.partition(b"x-pipeinfer-stream: ")[2].partition(b"\r\n")[0].decode()
    asked = f"GET /v1/streams/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    readers = [await RawClient.connect(gateway) for _ in range(200)]
    for one in readers:
        one.send(asked)
    [stream] = gateway.driver._context.answers.streams._streams.values()

    async def ended(one: RawClient) -> bool:
        return bool(await one.all(60.0))

    done, waiting = await asyncio.wait(
        [asyncio.create_task(ended(one)) for one in readers], timeout=60,
        return_when=asyncio.FIRST_COMPLETED,
    )  # fmt: skip
    await until(lambda: len(readers) - sum(t.done() for t in [*done, *waiting]) <= MAX_READERS)
    assert len(stream.readers) == MAX_READERS and stream.bytes < WRITE_BYTES
    for one in (*readers, client):
        await one.close()
    for task in waiting:
        task.cancel()


async def test_input_items_come_in_pages(gateway: Gateway) -> None:
    client = gateway.client()
    given: Any = [{"role": "user", "content": f"turn {n}"} for n in range(25)]
    given.append({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"})
    given.append({"type": "function_call_output", "call_id": "c", "output": "done", "id": "fco_1"})
    made = await client.responses.create(model="test", input=given, background=True)
    items = [
        item async for item in client.responses.input_items.list(made.id, order="asc", limit=7)
    ]
    assert [item.type for item in items] == ["message"] * 25 + [
        "function_call",
        "function_call_output",
    ]
    assert items[3].content[0].text == "turn 3" and items[-1].id == "fco_1"  # type: ignore[union-attr]
    assert len({item.id for item in items}) == 27
    newest = await client.responses.input_items.list(made.id)
    assert newest.data == items[::-1][:20] and newest.has_more
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none"):
        url = f"{gateway.url}/v1/responses/{made.id}/input_items?{query}"
        assert code(await gateway.http().get(url)) == (400, "invalid_value")


async def test_only_background_responses_can_be_cancelled(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(reattach=60.0)
    client = gateway.client()
    events = [
        e async for e in await client.responses.create(model="test", input="a b", stream=True)
    ]
    name = events[-1].response.id  # type: ignore[union-attr]
    assert (await client.responses.retrieve(name)).output_text == "a b "
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(name)
    await client.responses.delete(name)
    answer = await gateway.http().get(f"{gateway.url}/v1/responses/{name}")
    assert code(answer) == (404, "response_not_found")


async def test_a_stream_of_chat_is_no_response(gateway: Gateway, kept: httpx.Response) -> None:
    name = kept.headers["x-pipeinfer-stream"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        url = f"{gateway.url}/v1/responses/{name}{path}"
        assert code(await gateway.http().request(method, url)) == (404, "response_not_found")


async def test_a_full_store_of_running_answers_refuses_more(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(kept_mib=1, key_kept_mib=1)
    body = {"input": "hang " + "x" * 400_000, "background": True}
    url = f"{gateway.url}/v1/responses"
    assert (await gateway.http().post(url, json=body)).status_code == 200
    assert code(await gateway.http().post(url, json=body)) == (429, "too_much_kept")
    assert len(gateway.pipeline.submits) == 1


async def test_a_response_larger_than_all_that_may_be_kept_is_gone(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(kept_mib=1, key_kept_mib=1)
    gateway.pipeline.cut = lambda _: ["w" * 600_000, "x" * 600_000]
    made = await gateway.client().responses.create(model="test", input="x", background=True)
    await until(lambda: not gateway.driver._context.answers.running)
    for path in (f"/v1/responses/{made.id}", f"/v1/streams/{made.id}"):
        answer = await gateway.http().get(gateway.url + path)
        assert code(answer) == (410, "stream_gone")
    assert gateway.driver._context.answers.streams.bytes < 2**20


async def test_a_server_that_stops_ends_its_kept_answers(gateway: Gateway) -> None:
    made = await gateway.client().responses.create(model="test", input="pause x", background=True)
    events = await gateway.client().responses.retrieve(made.id, stream=True)
    reading = asyncio.create_task(collect(events))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(gateway.driver.stop())
    seen = await asyncio.wait_for(reading, 60)
    await stopping
    assert seen[-1].type == "response.failed"
    assert not gateway.driver._context.answers.running


async def collect(events: Any) -> list[Any]:
    return [event async for event in events]


@pytest.mark.parametrize("form", [{}, {"stream": True}, {"background": True, "stream": True}])
async def test_a_stored_response_is_on_the_disk_before_its_client_has_its_end(
    start_gateway: StartGateway, tmp_path: Path, form: dict[str, bool]
) -> None:
    gateway = await start_gateway(store=str(tmp_path / "responses.db"))
    store, may_write = gateway.driver._context.store, asyncio.Event()
    assert store is not None
    put = store.put

    async def held(stored: StoredResponse) -> None:
        await may_write.wait()
        await put(stored)

    store.put = held  # type: ignore[method-assign]
    client = await RawClient.connect(gateway)
    client.send(post({"input": "one two", **form}, "Connection: close", path="/v1/responses"))
    if form:
        await client.reader.readuntil(b"response.output_text.delta")
    reading = asyncio.create_task(client.all())
    await until(lambda: len(gateway.pipeline.submits) == 1)
    for _ in range(20):  # whatever could be sent is
        await asyncio.sleep(0.005)
    assert not reading.done()
    may_write.set()
    last = await reading
    assert b'"status":"completed"' in last and b'"store":true' in last
    name = re.findall(rb'"id":"(resp_\w+)"', last)[-1].decode()
    assert await store.get(name, "anonymous") is not None


async def test_what_cannot_be_stored_is_answered_and_counted(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    path = tmp_path / "responses.db"
    gateway = await start_gateway(store=str(path))
    other = sqlite3.connect(path)
    other.execute("DROP TABLE responses")
    other.commit()
    other.close()
    made = await gateway.client().responses.create(model="test", input="one two")
    assert made.output_text == "one two "
    answer = await gateway.http().get(f"{gateway.url}/v1/responses/{made.id}")
    assert code(answer) == (500, "store_failed")
    metrics = (await gateway.http().get(f"{gateway.url}/metrics")).text
    assert "pipeinfer_store_errors_total 1.0" in metrics


async def test_a_conversation_has_the_bound_of_a_body(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = await start_gateway(store=str(tmp_path / "responses.db"), max_body_mib=1)
    client, previous = gateway.client(), openai.omit
    for _ in range(3):
        made: Any = await client.responses.create(
            model="test", input="w" * 200_000, previous_response_id=previous
        )
        previous = made.id
    said = [turn["content"] for turn in gateway.pipeline.submits[-1].chat or ()]
    assert [len(str(text)) for text in said] == [200_000, 200_001, 200_000, 200_001, 200_000]
    with pytest.raises(openai.BadRequestError, match="too long"):
        await client.responses.create(model="test", input="x", previous_response_id=previous)
