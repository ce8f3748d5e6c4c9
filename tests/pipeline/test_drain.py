"""A server that was told to stop finishes its streams, whatever dies or is swapped meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import openai

from pipeinfer.runtime.servers import running_servers
from servers import Server, alive, environment

STREAMS, TOKENS = 4, 900  # long enough for an engine to start meanwhile


async def _streams(server: Server, disturb: Callable[[], None] | None = None) -> list[str]:
    """The texts; `disturb()` runs in a thread when every stream has begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]

    async def ask(api: openai.AsyncOpenAI, index: int) -> str:
        text, finish = "", None
        async for chunk in await api.completions.create(
            model="pipeinfer-demo", prompt=f"go on {index} " * 5, temperature=0.9, seed=index,
            max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True},
        ):  # fmt: skip
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason or finish
            begun[index].set()
        assert finish == "length"
        return text

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
    ) as api:
        tasks = [asyncio.create_task(ask(api, index)) for index in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        if disturb is not None:
            assert not any(task.done() for task in tasks)
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


def _swap(server: Server, stage: str) -> subprocess.Popen[str]:
    file = next(s.file for s in running_servers() if s.pid == server.process.pid)
    return subprocess.Popen(
        [sys.executable, "-m", "pipeinfer", "swap", stage, "--topology", str(file)],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_streams_finish_though_stages_are_swapped_and_killed_while_the_server_drains() -> None:
    with Server("--drain-timeout", "200") as server:
        undisturbed = asyncio.run(_streams(server))
        pids = {stage["name"]: stage["pid"] for stage in server.health()["stages"]}

        def disturb() -> None:
            swapping = _swap(server, "engine")
            assert swapping.stderr is not None and "starts" in swapping.stderr.readline()
            server.process.send_signal(signal.SIGTERM)
            server.wait(lambda: server.health()["status"] == "draining", "it drains")
            for name in ("tokenizer", "scheduler", "detokenizer"):
                os.kill(pids[name], signal.SIGKILL)
            late = _swap(server, "tokenizer")
            said = swapping.communicate(timeout=60)[1]
            assert swapping.returncode == 0, f"a swap that had begun is finished: {said}"
            assert "the server is stopping" in late.communicate(timeout=60)[1]

        assert asyncio.run(_streams(server, disturb)) == undisturbed
        assert server.process.wait(60) == 0, "\n".join(server.log)
        assert not alive(pids["gateway"])
        assert sum("starting it again" in line for line in server.log) == 3
        assert any(re.search(r"stopping: \d+ requests? left, at most 200 s more", line)
                   for line in server.log)  # fmt: skip
