"""Chats that stream at the same time from a running server, undisturbed or not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import openai

from held_processes import HeldProcesses
from pipeinfer.demo import copy_task
from servers import Server

TRIES = 5
TOKENS = 80
OTHERWISE: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ["zz"]},
    {"frequency_penalty": 2.0},  # of what an engine has counted
    {"stop": ["zz"]},
    {"logit_bias": {"32": -100, "101": 8, "116": 8}},
)


@dataclass
class Choice:
    """What came of one: its text, its tokens, and their log-probs with those of alternatives."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


def chats(number: int) -> list[dict[str, Any]]:
    """Requests of one choice each: greedy or from a seed, and some by other rules."""
    drawn = random.Random(5)
    made: list[dict[str, Any]] = []
    for index in range(number):
        question = copy_task(drawn, drawn.randint(10, 40))[0]
        usual = {"question": question, "temperature": 0.8 * (index % 2), "seed": index}
        made.append(usual | OTHERWISE[index % len(OTHERWISE)])
    return made


class Streams:
    """Requests that stream at the same time, each with its `question` and so many `tokens`;
    `choices` is filled as the chunks come."""

    def __init__(
        self, server: Server, requests: list[dict[str, Any]], tokens: int = TOKENS
    ) -> None:
        self._server, self._requests, self._tokens = server, requests, tokens
        self.choices: list[Choice] = []

    async def run(
        self, disturb: Callable[[], None] | None = None, engines: HeldProcesses | None = None
    ) -> list[Choice]:
        """All choices; `disturb()` runs in a thread when each of them has begun.

        A machine that stalls this process for a second lets the streams end first: then again.
        Where they must not end before what `disturb` does, `engines` stand still until it releases
        them.
        """
        async with openai.AsyncOpenAI(
            base_url=f"{self._server.url}/v1", api_key="none", timeout=240, max_retries=0
        ) as api:
            for _ in range(TRIES):
                asked = [[Choice() for _ in range(one.get("n", 1))] for one in self._requests]
                self.choices = [choice for several in asked for choice in several]
                tasks = [
                    asyncio.create_task(self._ask(api, mine, **request))
                    for mine, request in zip(asked, self._requests, strict=True)
                ]

                def begun(tasks: list[asyncio.Task[None]] = tasks) -> bool:
                    return all(one.text for one in self.choices) or any(t.done() for t in tasks)

                with engines or nullcontext():
                    if engines is not None:
                        await asyncio.to_thread(engines.compute_until, begun)
                    while not begun():
                        await asyncio.sleep(0.01)
                    under_way = sum(one.finish is None for one in self.choices)
                    disturbed = disturb is not None and under_way > len(self.choices) / 2
                    if disturbed:
                        await asyncio.to_thread(disturb)
                await asyncio.gather(*tasks)
                assert all(one.finish in ("stop", "length") for one in self.choices)
                if disturbed or disturb is None:
                    return self.choices
        raise AssertionError(f"in none of {TRIES} tries were enough streams left to disturb")

    async def _ask(
        self, api: openai.AsyncOpenAI, mine: list[Choice], question: str, **more: Any
    ) -> None:
        async for chunk in await api.chat.completions.create(
            model="pipeinfer-demo",
            messages=[{"role": "user", "content": question}],
            max_tokens=self._tokens,
            stream=True,
            **{"extra_body": {"ignore_eos": True}, **more},
        ):
            for said in chunk.choices:
                one = mine[said.index]
                assert one.finish is None
                one.text += said.delta.content or ""
                one.finish = said.finish_reason
                for token in said.logprobs.content if said.logprobs else ():
                    one.tokens.append(token.token)
                    one.logprobs += [t.logprob for t in (token, *token.top_logprobs)]
