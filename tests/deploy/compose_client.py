"""Chats that stream without end while something is done to their deployment; compose.sh runs this
in a container of the image `slim`.

Each question is asked once in calm, which says what its text must be ever after. Then all of them
are asked again and again, until SIGTERM. SIGUSR1 says that something is done now.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

PAUSE = 1.0  # seconds without a piece by which a stream shows that it was hit
RETRY = 0.2  # seconds until a lost connection is tried again
PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=150)
CUT = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


class LostError(Exception):
    """A stream that has no end, or ends with an error."""


@dataclass(eq=False)
class Stream:
    """text: what came so far. piece_at: when its last piece came, seconds. connections: how many it
    had. was_under_way: whether it had begun at SIGUSR1. longest: its longest pause since then."""

    text: str = ""
    piece_at: float = 0.0
    connections: int = 0
    was_under_way: bool = False
    longest: float = 0.0

    def add(self, piece: str) -> None:
        now = time.monotonic()
        if self.was_under_way:
            self.longest = max(self.longest, now - self.piece_at)
        self.text, self.piece_at = self.text + piece, now


@dataclass
class Client:
    """url: of the gateway. resumed: streams outlive their connections, and are read on.

    whole: streams that ended. lost: why others did not. different: texts that calm has otherwise.
    hit: streams that were under way at SIGUSR1 and paused, or lost their connection, after that."""

    url: str
    key: str
    streams: int
    tokens: int
    resumed: bool
    whole: int = 0
    different: int = 0
    lost: list[str] = field(default_factory=list)
    hit: list[Stream] = field(default_factory=list)

    async def run(self) -> None:
        over, running = asyncio.Event(), [Stream() for _ in range(self.streams)]

        def mark() -> None:
            for stream in running:
                stream.was_under_way = bool(stream.text)

        async with aiohttp.ClientSession(timeout=PATIENCE) as http:

            async def ask(number: int, expected: str) -> None:
                while not over.is_set():
                    running[number] = stream = Stream()
                    await self._judge(http, number, stream, expected)

            await asyncio.gather(*(self._read(http, n, one) for n, one in enumerate(running)))
            expected = [stream.text for stream in running]
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, mark)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
            print("under way", flush=True)
            await asyncio.gather(*(ask(n, text) for n, text in enumerate(expected)))

    async def _judge(
        self, http: aiohttp.ClientSession, number: int, stream: Stream, expected: str
    ) -> None:
        try:
            await self._read(http, number, stream)
        except (aiohttp.ClientError, TimeoutError, LostError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(RETRY)
            return
        self.whole += 1
        self.different += stream.text != expected
        if stream.was_under_way and (stream.longest > PAUSE or stream.connections > 1):
            self.hit.append(stream)

    async def _read(self, http: aiohttp.ClientSession, number: int, stream: Stream) -> None:
        """All of it, over as many connections as it takes."""
        headers = {"Authorization": f"Bearer {self.key}"}
        if self.resumed:
            headers["x-pipeinfer-detached"] = "120"
        method, path = "POST", "/v1/chat/completions"
        while True:
            try:
                async with http.request(
                    method, self.url + path, json=self._question(number), headers=headers
                ) as answer:
                    answer.raise_for_status()
                    stream.connections += 1
                    if self.resumed:
                        method, path = "GET", f"/v1/streams/{answer.headers['x-pipeinfer-stream']}"
                    async for line in answer.content:
                        name, _, value = line.decode().rstrip("\n").partition(": ")
                        if name == "id":
                            headers["Last-Event-ID"] = value
                        elif (name, value) == ("data", "[DONE]"):
                            return
                        elif name == "data":
                            stream.add(_piece(value))
                raise LostError(f"no end after {len(stream.text)} characters")
            except CUT:
                if not self.resumed:
                    raise
            except aiohttp.ClientResponseError as error:
                if not self.resumed or error.status != 503:
                    raise
            await asyncio.sleep(RETRY)

    def _question(self, number: int) -> dict[str, object]:
        """Every other one is greedy; the others draw from a seed of their own."""
        return {
            "model": "pipeinfer-demo",
            "messages": [{"role": "user", "content": f"Repeat: {number * 7919 + 104729}stream"}],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.8 * (number % 2),
            "seed": number,
        }


def _piece(data: str) -> str:
    event = json.loads(data)
    if "error" in event:
        raise LostError(data)
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Holds streams to their texts.")
    parser.add_argument("url")
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--resumed", action="store_true", help="streams outlive connections")
    parser.add_argument("--hit", type=int, default=0, help="so many streams must have been hit")
    asked = parser.parse_args()
    key = asked.key_file.read_text().strip()
    client = Client(asked.url, key, asked.streams, asked.tokens, asked.resumed)
    asyncio.run(client.run())
    pause = max((stream.longest for stream in client.hit), default=0.0)
    print(
        f"{client.whole} streams of {client.tokens} tokens, {len(client.lost)} lost, "
        f"{client.different} with another text; {len(client.hit)} were hit, "
        f"with pauses of {pause:.1f} s at most"
    )
    for why in client.lost[:5]:
        print(f"lost: {why}")
    return int(bool(client.lost or client.different or len(client.hit) < asked.hit))


if __name__ == "__main__":
    sys.exit(main())
