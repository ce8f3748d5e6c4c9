"""What is left of connections in a gateway's process when they have ended."""

from __future__ import annotations

import asyncio
import gc
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient, post

import servers
from certificates import make
from pipeinfer.gateway.connections import Connection
from pipeinfer.messages import TextRow
from pipeinfer.wire import pack
from waiting import until

MOST = 5 * 2**20  # bytes
ENDED = 3_000  # connections; garbage of so many was 13 MiB
AT_ONCE = 8


def private(pid: int) -> int:
    """Bytes of memory that the process shares with nobody."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) << 10 for size in re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.M))


async def connections(url: str, many: int) -> None:
    """One request on each."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    content = head + b'Content-Length: 15\r\n\r\n{"messages": 1}'

    async def loop() -> None:
        for _ in range(many // AT_ONCE):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(content)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    await asyncio.gather(*(loop() for _ in range(AT_ONCE)))


def test_connections_that_ended_take_no_memory():
    with servers.Server("--threads", "1", "--flight-recorder-mib", "0") as server:
        asyncio.run(connections(server.url, 400))
        pid = server.pid("gateway")
        before = private(pid)
        asyncio.run(connections(server.url, ENDED))
        grown = private(pid) - before
    assert grown < MOST, f"{grown / 2**20:.1f} MiB"


async def test_a_client_that_leaves_just_before_the_first_chunk_counts_as_gone(gateway: Gateway):
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "hang up", "stream": true, "max_tokens": 3}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(20):
        while not gateway.pipeline.submits:
            await asyncio.sleep(0.01)
        [submit] = gateway.pipeline.submits
        assert gateway.driver._connections is not None
        [connection] = gateway.driver._connections._all
        assert connection.transport is not None
        gateway.pipeline.rows(TextRow(submit.request_id, submit.attempt, "a", 0, 0, pack([7])))
        connection.transport.abort()  # both within one iteration of the loop
        aborted = await gateway.pipeline.aborts.get()
        while gateway.driver._in_flight:
            await asyncio.sleep(0.01)
    writer.close()
    assert aborted.request_id == submit.request_id
    counted = gateway.driver._service.metrics.exposition("")[0].decode()
    assert 'key_requests_total{key="anonymous",outcome="abort"} 1.0' in counted
    assert 'key_requests_total{key="anonymous",outcome="ok"} 0.0' in counted


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What forms a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def connections_in_memory() -> int:
    return sum(isinstance(one, Connection) for one in gc.get_objects())


async def asked(gateway: Gateway, content: bytes, end: str, **options: object) -> None:
    """Asks once. "read": until the server closes; "close": then the client does; "leave", "reset":
    the client goes away while its request is in the pipeline."""
    client = await RawClient.connect(gateway, **options)
    client.send(content)
    if end == "read":
        assert (await client.all()).startswith(b"HTTP/1.")
    elif end == "close":
        assert (await client.reader.read(1000)).startswith(b"HTTP/1.1 200 OK")
    else:
        await until(lambda: gateway.pipeline.submits)
    if end == "reset":
        client.writer.transport.abort()
    await client.close()


CLOSE = "Connection: close"


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (post({"prompt": "a b"}, CLOSE), "read"),
        (post({"prompt": "a b"}), "close"),
        (post({"prompt": "a b", "stream": True}, CLOSE), "read"),
        (post({"prompt": "a b"}, CLOSE, "Expect: 100-continue"), "read"),
        (post({"prompt": 1}, CLOSE), "read"),
        (post({"prompt": "refuse"}, CLOSE), "read"),
        (post({"prompt": "refuse", "stream": True}, CLOSE), "read"),
        (b"GET nothing\r\n\r\n", "read"),
        (post({"prompt": "hang up"}), "leave"),
        (post({"prompt": "hang up", "stream": True}), "reset"),
        (post({"prompt": "pause here", "stream": True}), "leave"),
        (post({"prompt": "pause here", "stream": True}), "reset"),
    ],
)
async def test_a_connection_that_ended_is_gone_without_the_garbage_collector(
    gateway: Gateway, uncollected: None, content: bytes, end: str
):
    before = connections_in_memory()
    await asked(gateway, content, end)
    await until(lambda: connections_in_memory() == before)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
@pytest.mark.parametrize(
    ("content", "end"),
    [
        (post({"prompt": "a b"}, CLOSE), "read"),
        (post({"prompt": "a b", "stream": True}), "close"),
        (post({"prompt": "hang up", "stream": True}), "reset"),
    ],
)
async def test_so_is_one_that_spoke_tls(
    start_gateway: StartGateway, tmp_path: Path, uncollected: None, content: bytes, end: str
):
    cert, key = make(tmp_path, "gateway")
    gateway = await start_gateway(tls_cert=cert, tls_key=key)
    before = connections_in_memory()
    trusting = ssl.create_default_context(cafile=cert)
    await asked(gateway, content, end, ssl=trusting)
    await until(lambda: connections_in_memory() == before)
