"""A client that asks one question again and again, and keeps every text and when it came.

Knows the chat endpoint and eight ways of sampling; nothing of what happens to the server.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

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


class Broken(AssertionError):
    """A promise to a client that was not kept."""


@dataclass
class StreamClient:
    """`texts`: each with the reason of its end; `moved`: when pieces of its answers came."""

    number: int
    question: str
    tokens: int
    texts: list[tuple[str, str]] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)

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
