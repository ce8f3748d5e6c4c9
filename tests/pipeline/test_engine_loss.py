"""An engine that is killed under running streams: every stream completes with its own text."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import openai

from pipeinfer.demo import copy_task
from servers import Server

STREAMS = 12


async def _ask(api: openai.AsyncOpenAI, question: str, changed: int, started: asyncio.Event) -> str:
    text = ""
    async for chunk in await api.chat.completions.create(
        model="pipeinfer-demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=120,
        stream=True,
        frequency_penalty=2.0 * (changed == 0),  # of what the engine that is gone has counted
        logit_bias={"32": -100, "101": 8, "116": 8} if changed == 1 else {},
        extra_body={"ignore_eos": True},
    ):
        text += chunk.choices[0].delta.content or ""
        started.set()
    return text


async def _everybody(server: Server, questions: list[str], kills: int) -> list[str]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
    ) as api:
        started = [asyncio.Event() for _ in questions]
        tasks = [
            asyncio.create_task(_ask(api, question, index % 3, one))
            for index, (question, one) in enumerate(zip(questions, started, strict=True))
        ]
        await asyncio.gather(*(event.wait() for event in started))
        for _ in range(kills):
            victim = await asyncio.to_thread(server.pid, "engine")
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(
                server.wait,
                lambda v=victim: server.pid("engine") != v and server.health()["status"] == "ready",
                "the engine came back",
            )
        return await asyncio.gather(*tasks)


def test_streams_survive_an_engine_killed_twice():
    rng = random.Random(5)
    questions = [copy_task(rng, rng.randint(10, 40))[0] for _ in range(STREAMS)]
    with Server("--kv-pages", "400") as server:
        undisturbed = asyncio.run(_everybody(server, questions, kills=0))
        disturbed = asyncio.run(_everybody(server, questions, kills=2))
        assert disturbed == undisturbed
        server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "nothing runs")
        assert any("scheduler-0 ready again" in line for line in server.log)
        assert server.stop() == 0
