"""What is left of connections in a gateway's process when they have ended."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import servers

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
