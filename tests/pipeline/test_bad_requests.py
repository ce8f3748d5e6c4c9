"""What one request must not do to others, on a real server of two ranks: its logits are no numbers,
or the scheduler slept while it was computed. No process restarts, and every good stream is whole.
At last both ranks are swapped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import openai
import pytest
from streams import TRIES
from swaps import swap

from checkpoints import make_checkpoint
from held_processes import HeldProcesses
from servers import Server

POISON = 261
WATCHDOG = 10  # seconds; a busy machine lets an engine wait for some
STREAMS, TOKENS = 6, 200
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


@dataclass(frozen=True)
class Running:
    """Streams that run: `begun()` waits for the first token of each, `over()` says whether all have
    ended."""

    api: openai.AsyncOpenAI
    begun: Callable[[], Awaitable[object]]
    over: Callable[[], bool]


async def streams(
    server: Server, disturb: Callable[[Running], Awaitable[None]] | None = None
) -> list[str]:
    """The texts; `disturb` begins with the streams."""
    async with client(server) as api:
        begun = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [asyncio.create_task(stream(api, n, begun[n])) for n in range(STREAMS)]
        running = Running(
            api,
            begun=lambda: asyncio.gather(*(event.wait() for event in begun)),
            over=lambda: all(task.done() for task in tasks),
        )
        if disturb is not None:
            await disturb(running)
        return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def undisturbed(server) -> list[str]:
    return asyncio.run(streams(server))


def processes(server: Server) -> dict[tuple[str, int], int]:
    return {(s["name"], s["rank"]): s["pid"] for s in server.health()["stages"]}


def test_requests_with_bad_logits_fail_by_themselves_again_and_again(server, undisturbed):
    before, failed = processes(server), []

    def ready() -> bool:
        return server.get("/health/ready")[0] == 200

    async def ask(running: Running) -> None:
        while not running.over() or len(failed) < 12:
            for prompt in BAD:
                with pytest.raises(openai.InternalServerError) as caught:
                    await running.api.completions.create(
                        model="poisoned", prompt=prompt, max_tokens=8
                    )
                failed.append(str(caught.value))
            await asyncio.to_thread(server.wait, ready, "it is ready")

    assert asyncio.run(streams(server, ask)) == undisturbed
    assert len(failed) >= 12 and all("not finite" in message for message in failed)
    assert asyncio.run(streams(server)) == undisturbed, "nothing of them lies in the prefix cache"
    assert processes(server) == before
    assert not any("starting it again" in line for line in server.log)


def test_a_scheduler_that_was_stopped_longer_than_the_watchdog_does_not_restart_its_engines(
    server, undisturbed
):
    before = processes(server)
    amid: list[bool] = []

    async def sleep(running: Running) -> None:
        await running.begun()
        with HeldProcesses(before["scheduler", 0]):
            await asyncio.sleep(WATCHDOG + 2)
            amid.append(not running.over())

    for _ in range(TRIES):  # until some stream was under way
        assert asyncio.run(streams(server, sleep)) == undisturbed
        if amid[-1]:
            break
    assert amid[-1]
    assert processes(server) == before
    assert not any("restarting" in line for line in server.log), "\n".join(server.log)


def test_all_ranks_of_an_engine_are_swapped_together(server):
    asked = {"prompt": "count", "max_tokens": 8, "seed": 1}
    before, expected = processes(server), server.post("/v1/completions", asked)
    done = swap(server, "engine-0-1")
    assert done.returncode == 0, done.stderr + "\n".join(server.log)

    def ranks_alone_are_others() -> bool:
        after = processes(server)
        changed = {stage for stage, pid in before.items() if after[stage] != pid}
        return changed == {("engine", 0), ("engine", 1)} and server.health()["status"] == "ready"

    server.wait(ranks_alone_are_others, "the gateway heard of both ranks, and of no other stage")
    again = server.post("/v1/completions", asked)
    assert again[1]["choices"] == expected[1]["choices"]
