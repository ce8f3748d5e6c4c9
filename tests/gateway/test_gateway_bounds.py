"""What one client sends at its worst, over real connections: it disturbs nobody."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.core import Drain
from pipeinfer.messages import TextRow
from pipeinfer.runtime.entry import GC_THRESHOLDS
from pipeinfer.wire import pack

PATHS = ("/v1/completions", "/v1/chat/completions")
HELLO = [{"role": "user", "content": "hello"}]
TURN = 0.01  # seconds between two tokens of the calm stream
# Seconds that the gateway may work between two tokens of that stream; without the bounds it is 12.
# Of processor time, so that a busy machine is not taken for a busy gateway.
MOST_GAP = 0.5

# A client of its own process, which sends each body in turn over two connections at a time.
ATTACK = r"""
import http.client, os, sys, threading
M = 32 * 2**20 - 300
C, H = "/v1/completions", "/v1/chat/completions"
USER = b'"messages": [{"role": "user", "content": "a"}]'
BODIES = [
    (C, b'{"prompt": [' + b'"a",' * 1_250_000 + b'"a"]}'),
    (C, b'{"prompt": [' + b'"a",' * 999_000 + b'"a"]}'),
    (C, b'{"prompt": [' + b'[1],' * 99_000 + b'[1]]}'),
    (C, b'{"prompt": [' + b'12345,' * 999_000 + b'1]}'),
    (C, b'{"prompt": [' + b",".join([b'"' + b"lorem " * 5000 + b'"'] * 1024) + b']}'),
    (C, b'{"prompt": "' + b"\\n" * (M // 2) + b'"}'),
    (C, b'{"prompt": "' + b"\xf0\x9f\xa6\x80" * (M // 4) + b'"}'),
    (C, b'{"prompt": "a", "stop": [' + b'"a",' * 900_000 + b'"a"]}'),
    (C, b'{"prompt": "a", "stop": ["' + b"a" * M + b'"]}'),
    (C, b'"' * M),
    (H, b'{"messages": [' + b'{"role": "user", "content": "a"},' * 33_000 + USER[13:] + b"}"),
    (H, b'{"messages": [{"role": "' + b"x" * M + b'"}]}'),
    (H, b"{" + USER + b', "chat_template_kwargs": {"a": ' + b"[" * 979 + b"]" * 979 + b"}}"),
    (H, b"{" + USER + b', "chat_template_kwargs": {"a": ' + b"[" * M),
    (H, b"{" + USER + b', "chat_template_kwargs": {"a": [' + b"[]," * 45_000 + b"1]}}"),
    (H, b"{" + USER + b', "model": "' + b"x" * M + b'"}'),
]
def send(host, rounds):
    for _ in range(rounds):
        for i, (path, body) in enumerate(BODIES):
            connection = http.client.HTTPConnection(host)
            connection.request("POST", path, body)
            answer = connection.getresponse()
            answer.read()
            os.write(1, f"{i} {answer.status}\n".encode())
            connection.close()
print("go", flush=True)
threads = [threading.Thread(target=send, args=(sys.argv[1], int(sys.argv[2]))) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


async def raw(gateway: Gateway, head: str) -> tuple[int, dict[str, Any]]:
    """(status, error) of a request of which nothing but the head is ever sent."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode())
    async with asyncio.timeout(60):
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        headers = await reader.readuntil(b"\r\n\r\n")
        length = next(h for h in headers.lower().split(b"\r\n") if h.startswith(b"content-length"))
        body = await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
    return status, json.loads(body)["error"]


def head(path: str, length: int) -> str:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"


async def _talk(gateway: Gateway, name: str) -> None:
    """A token every TURN for the request `name`."""
    for i in range(1, 100_000):
        gateway.pipeline.rows(TextRow(name, 1, "x", 5 + i, i, pack([1])))
        await asyncio.sleep(TURN)


@pytest.fixture
def collector_of_a_stage() -> Iterator[None]:
    """The garbage collector as a stage's process sets it: this one holds all that other tests have
    imported, which it would walk again and again."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector_of_a_stage")
async def test_a_stream_goes_on_while_one_client_sends_the_worst_bodies_in_a_loop(
    gateway: Gateway,
) -> None:
    client = gateway.client()
    stream = await client.completions.create(model="test", prompt="pause here", stream=True)
    gaps: list[float] = []

    async def listen() -> None:
        last = time.thread_time()
        async for _ in stream:
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    await anext(stream)
    gateway.pipeline.refuses_all = True
    tasks = [
        asyncio.create_task(_talk(gateway, gateway.pipeline.submits[0].request_id)),
        asyncio.create_task(listen()),
    ]
    attack = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ATTACK, gateway.url.removeprefix("http://"), "1",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert attack.stdout is not None
    await attack.stdout.readuntil(b"go\n")
    gaps.clear()
    output = await asyncio.wait_for(attack.stdout.read(), 300)
    assert await attack.wait() == 0
    longest, count = max(gaps), len(gaps)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await stream.close()
    answers = [tuple(map(int, line.split())) for line in output.decode().splitlines()]
    assert {status for _, status in answers} == {400, 404}, answers
    assert len(answers) == 2 * len({i for i, _ in answers}) == 32
    assert longest < MOST_GAP, f"{longest:.2f} s of work in one of {count} gaps"
    assert count > 20, "it streamed all the while"
    gateway.pipeline.refuses_all = False
    assert await client.completions.create(model="test", prompt="x")


@pytest.mark.parametrize("depth", [65, 978, 979, 980])
async def test_nested_json_is_refused_and_the_gateway_lives(gateway: Gateway, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    user = b'{"role": "user", "content": "hello"}'
    bodies = [
        b'{"messages": [%s], "chat_template_kwargs": {"a": %s}}' % (user, nested),
        b'{"messages": [%s, {"role": "assistant", "tool_calls": [{"a": %s}]}]}' % (user, nested),
        b'{"messages": [%s], "tools": %s}' % (user, nested),
    ]
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for body in bodies:
            response = await http.post("/v1/chat/completions", content=body)
            assert response.status_code == 400
            assert "nested deeper than 64" in response.json()["error"]["message"]
        assert not gateway.pipeline.submits
        response = await http.post("/v1/chat/completions", json={"messages": HELLO})
        assert response.status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_full_queue_answers_before_the_body_is_there(
    start_gateway: StartGateway, path: str
) -> None:
    for limit in ({"max_queue": 1}, {"max_queue_tokens": 1}):
        gateway = await start_gateway(**limit)
        waiting = asyncio.create_task(
            gateway.client().completions.create(model="test", prompt="hang")
        )
        while not gateway.pipeline.submits:
            await asyncio.sleep(0.001)
        status, error = await raw(gateway, head(path, 20 * 2**20))
        assert (status, error["code"]) == (429, "queue_full")
        metrics = gateway.driver._context.metrics.exposition("")[0].decode()
        assert 'pipeinfer_requests_total{outcome="refused"} 1.0' in metrics
        waiting.cancel()


@pytest.mark.parametrize("path", PATHS)
async def test_a_draining_or_starting_server_answers_before_the_body_is_there(
    start_gateway: StartGateway, path: str
) -> None:
    starting = await start_gateway(ready=False)
    status, error = await raw(starting, head(path, 1000))
    assert (status, error["code"]) == (503, "starting")
    gateway = await start_gateway()
    gateway.pipeline.feed(Drain())
    status, error = await raw(gateway, head(path, 1000))
    assert (status, error["code"]) == (503, "draining")
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for stream in (True, False):
            body = {"prompt": ["a", "b"], "messages": HELLO, "stream": stream}
            response = await http.post(path, json=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert (await http.get("/v1/models")).status_code == 503


async def test_a_body_that_says_it_is_too_large_is_not_read(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_body_mib=2)
    status, error = await raw(gateway, head("/v1/completions", 2 * 2**20 + 1))
    assert (status, error["code"]) == (413, "body_too_large")


async def test_the_number_of_prompts_is_a_setting_and_not_above_what_may_wait(
    start_gateway: StartGateway,
) -> None:
    for gateway in (
        await start_gateway(max_prompts=3),
        await start_gateway(max_prompts=100, max_queue=3),
    ):
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            for prompts in (["a"] * 4, [[1]] * 4):
                response = await http.post("/v1/completions", json={"prompt": prompts})
                assert response.status_code == 400
                assert "at most 3 prompts" in response.json()["error"]["message"]
            assert not gateway.pipeline.submits
            response = await http.post("/v1/completions", json={"prompt": ["a"] * 3})
            assert len(response.json()["choices"]) == 3


async def test_each_prompt_of_a_request_needs_room_in_the_queue(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(max_queue=3)
    waiting = asyncio.create_task(gateway.client().completions.create(model="test", prompt="hang"))
    while not gateway.pipeline.submits:
        await asyncio.sleep(0.001)
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        response = await http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert response.status_code == 429
        assert len(gateway.pipeline.submits) == 1, "none of them was begun"
        response = await http.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert response.status_code == 200
    waiting.cancel()


async def test_a_thousand_prompts_in_one_request_are_all_answered(gateway: Gateway) -> None:
    prompts = [f"{i} words" for i in range(1024)]
    whole = await gateway.client().completions.create(model="test", prompt=prompts)
    assert [choice.text for choice in whole.choices] == [f"{i} words " for i in range(1024)]
    assert gateway.core.idle()


async def test_requests_get_the_servers_timeout(start_gateway: StartGateway) -> None:
    for settings, expected in (({}, 3600.0), ({"request_timeout": 7.0}, 7.0)):
        gateway = await start_gateway(**settings)
        client = gateway.client()
        await client.completions.create(model="test", prompt="x")
        await client.completions.create(model="test", prompt="x", extra_body={"timeout": 9})
        timeouts = [submit.timeout for submit in gateway.pipeline.submits]
        assert timeouts == [expected, 9.0]
