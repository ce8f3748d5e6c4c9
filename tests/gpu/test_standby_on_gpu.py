"""A standby on a GPU: it shares the weights, and goes on with the pages of an engine that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import aiohttp
import psutil
import pytest
from greedy_answers import ask, settings_of_small_model  # which puts tools on the path

from bench.takeover import forget_losses
from harness.server import ServerUnderTest

pytestmark = pytest.mark.gpu

PROMPTS = [[index * step % 90 + 2 for index in range(200)] for step in (1, 7)]


def engine_with_standby(server: ServerUnderTest, killed: list[int]) -> int:
    """The process that serves after these, once its standby is ready."""
    wanted = len(killed) + 1
    server.wait(lambda: server.log().count("has a standby of") == wanted, "a standby is ready")
    server.wait(lambda: server.pids()["engine-0-0"] not in killed, "its engine is known")
    return server.pids()["engine-0-0"]


def taken_mib(server: ServerUnderTest) -> list[int]:
    """Of the GPU, by process of the server."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.check_output(query, text=True).splitlines()
    found = {int(line.split(",")[0]): int(line.split(",")[1]) for line in lines}
    children = psutil.Process(server.process.pid).children()
    return [found[child.pid] for child in children if child.pid in found]


async def test_killed_engines_are_followed_by_standbys_with_the_same_answers(
    gpu_checkpoints, tmp_path
):
    """Log-probs too, and from the pages that the first engine has filled, until a second loss drops
    them; with a third one the weights go, which the standby has been lent. A prompt whose begin is
    cached rounds differently, so there are answers of both kinds to compare with."""
    settings = settings_of_small_model(gpu_checkpoints, tmp_path, kv_pages=2000, standby=True)
    with ServerUnderTest(settings, "-v") as server:
        try:
            patience = aiohttp.ClientTimeout(total=120)
            async with aiohttp.ClientSession(server.url, timeout=patience) as api:

                async def ask_all():
                    found = [await ask(api, settings["model"], prompt, 12) for prompt in PROMPTS]
                    answers = [(text, logprobs) for text, logprobs, _ in found]
                    return answers, min(tokens for _, _, tokens in found)

                computed, cached = await ask_all(), await ask_all()
                assert computed[1] == 0 and cached[1] >= 128
                killed: list[int] = []
                engine = await asyncio.to_thread(engine_with_standby, server, killed)
                first = taken_mib(server)
                for losses, expected in ((1, cached), (1, cached), (2, computed), (3, computed)):
                    if losses == 1:
                        forget_losses(server.process.pid)
                        await asyncio.sleep(4.0)  # the next holder gets what the engine keeps
                    os.kill(engine, signal.SIGKILL)
                    killed.append(engine)
                    assert await ask_all() == expected
                    engine = await asyncio.to_thread(engine_with_standby, server, killed)
                last = taken_mib(server)
                print(f"STANDBY: {first} MiB by process, after four deaths {last}")
                assert len(last) == len(first) == 2 and sum(last) < sum(first) + 512
        finally:
            print(server.log())
        log = server.log()
    assert log.count("is promoted") == 4
    assert log.count("dropped after 3 losses") == 1
