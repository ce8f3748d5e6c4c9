"""What one request must not do to others, on a real server of two ranks: its logits are no numbers,
or the scheduler slept while it was computed. No process restarts, and every good stream is whole.
At last both ranks are swapped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import openai
import pytest
from swaps import swap

from checkpoints import make_checkpoint
from servers import Server

POISON = 261
WATCHDOG = 4
STREAMS, TOKENS = 6, 40
SHARED = [10 + n for n in range(40)]  # of good and bad prompts
BAD = ([POISON], [*SHARED, POISON, 7], [*SHARED[:20], POISON, *range(60)])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("poisoned"), "Qwen3ForCausalLM", poison=POISON)
    with Server(
        str(folder), "--served-model-name", "poisoned", "--tp", "2", "--threads", "1",
        "--kv-pages", "400", "--watchdog", str(WATCHDOG), "--page-size", "16",
    ) as running:  # fmt: skip
        yield running


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
    )


async def stream(api: openai.AsyncOpenAI, index: int, begun: asyncio.Event) -> str:
    text = finish = ""
    async for chunk in await api.completions.create(
        model="poisoned", prompt=[*SHARED, 3 * index, 5], max_tokens=TOKENS, stream=True,
        temperature=0.8 * (index % 2), seed=index, extra_body={"ignore_eos": True},
    ):  # fmt: skip
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason or finish
        begun.set()
    assert finish == "length"
    return text


async def streams(server: Server, disturb=None) -> list[str]:
    """The texts; `disturb(api, over)` begins when all streams have, until they are `over`."""
    async with client(server) as api:
        begun = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [asyncio.create_task(stream(api, n, begun[n])) for n in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        over = lambda: all(task.done() for task in tasks)  # noqa: E731
        if disturb is not None:
            assert not over()
            await disturb(api, over)
        return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def undisturbed(server) -> list[str]:
    return asyncio.run(streams(server))


def processes(server: Server) -> dict[tuple[str, int], int]:
    return {(s["name"], s["rank"]): s["pid"] for s in server.health()["stages"]}


def test_requests_with_bad_logits_fail_by_themselves_again_and_again(server, undisturbed):
    before, failed = processes(server), []

    async def ask(api, over) -> None:
        while not over() or len(failed) < 12:
            for prompt in BAD:
                with pytest.raises(openai.InternalServerError) as caught:
                    await api.completions.create(model="poisoned", prompt=prompt, max_tokens=8)
                failed.append(str(caught.value))
            assert (await asyncio.to_thread(server.get, "/health/ready"))[0] == 200

    assert asyncio.run(streams(server, ask)) == undisturbed
    assert len(failed) >= 12 and all("not finite" in message for message in failed)
    assert asyncio.run(streams(server)) == undisturbed, "nothing of them lies in the prefix cache"
    assert processes(server) == before
    assert not any("starting it again" in line for line in server.log)


def test_a_scheduler_that_was_stopped_longer_than_the_watchdog_does_not_restart_its_engines(
    server, undisturbed
):
    before, pid = processes(server), server.pid("scheduler")

    async def sleep(api, over) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            await asyncio.sleep(WATCHDOG + 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - stopped > WATCHDOG and not over()

    assert asyncio.run(streams(server, sleep)) == undisturbed
    assert processes(server) == before
    assert not any("restarting" in line for line in server.log), "\n".join(server.log)


def test_all_ranks_of_an_engine_are_swapped_together(server):
    asked = {"prompt": "count", "max_tokens": 8, "seed": 1}
    before, expected = processes(server), server.post("/v1/completions", asked)
    done = swap(server, "engine-0-1")
    assert done.returncode == 0, done.stderr + "\n".join(server.log)
    server.wait(lambda: server.health()["status"] == "ready", "the gateway heard of it")
    after = processes(server)
    changed = {stage for stage, pid in before.items() if after[stage] != pid}
    assert changed == {("engine", 0), ("engine", 1)}
    again = server.post("/v1/completions", asked)
    assert again[1]["choices"] == expected[1]["choices"]
