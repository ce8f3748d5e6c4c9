"""`sleep`: seconds to sleep and to wake up at each level beside those of a start, and the memory of
the GPU that is taken meanwhile.

One greedy answer is asked for before each sleep and after it. Knows HTTP and nvidia-smi.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from bench import shapes
from harness.processes import used_gpu_mib
from pipeinfer.runtime.supervisor import LocalServer

LEVELS = (1, 2)
PROMPT = [index % 90 + 2 for index in range(200)]  # ids that every model has
TOKENS = 16
PATIENCE = aiohttp.ClientTimeout(total=600)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="sleeps at each level")
    shapes.add_config(parser)


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, and what was broken: answers that a sleep changed."""
    with shapes.settings_of(options.config, settings) as chosen:
        _served(chosen, 0)  # compiles what the next start finds
        start, levels = _served(chosen, options.rounds)
    return {
        "start_seconds": start,
        **{f"level {level}": found for level, found in levels.items()},
        "broken": [
            f"level {level}: {found['other_answers']} answers are others after a sleep"
            for level, found in levels.items()
            if found["other_answers"]
        ],
    }


def _served(settings: Mapping[str, Any], rounds: int) -> tuple[float, dict[int, dict[str, Any]]]:
    """Seconds of a start, and what _levels says of that server."""
    with tempfile.TemporaryFile("w+", prefix="pipeinfer-bench-") as log:
        began = time.perf_counter()
        with LocalServer(dict(settings), log) as server:
            seconds = time.perf_counter() - began
            return seconds, asyncio.run(_levels(server.url, rounds)) if rounds else {}


async def _levels(url: str, rounds: int) -> dict[int, dict[str, Any]]:
    """For each level medians of seconds, the most MiB of all GPUs, and how many answers differ."""
    found: dict[int, dict[str, Any]] = {}
    async with aiohttp.ClientSession(url, timeout=PATIENCE) as api:
        wanted = await _answer(api)
        for level in LEVELS:
            sleeps: list[float] = []
            wakes: list[float] = []
            asleep: list[int] = []
            answers: list[str] = []
            awake = used_gpu_mib()
            for _ in range(rounds):
                sleeps.append(await _post(api, f"/sleep?level={level}"))
                asleep.append(used_gpu_mib())
                wakes.append(await _post(api, "/wake_up"))
                answers.append(await _answer(api))
            found[level] = {
                "sleep_seconds": _spread(sleeps),
                "wake_seconds": _spread(wakes),
                "gpu_mib_awake": awake,
                "gpu_mib_asleep": max(asleep),
                "other_answers": sum(answer != wanted for answer in answers),
            }
    return found


async def _post(api: aiohttp.ClientSession, path: str) -> float:
    """Seconds until it is done."""
    began = time.perf_counter()
    async with api.post(path) as answer:
        answer.raise_for_status()
    return time.perf_counter() - began


async def _answer(api: aiohttp.ClientSession) -> str:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with api.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return (await answer.json())["choices"][0]["text"]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "p50": statistics.median(values), "max": max(values)}
