"""`storm`: what running streams feel while long prompts arrive, under one policy after another.

Through the whole pipeline, without HTTP. Knows requests and the times of their tokens; what a
policy does about it is the scheduler's affair.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from bench import shapes
from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer.bench.client import percentiles
from pipeinfer.checkpoint.config import read_outline
from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.settings import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    shapes.add_config(parser)
    add("--policies", default="mixed,prefill-first", metavar="P,P", help="one run with each")
    add("--streams", type=int, default=64, help="requests that are running when the storm comes")
    add("--stream-prompt", type=int, default=128, help="tokens of each stream's prompt")
    add("--calm-tokens", type=int, default=200, help="of each stream, before the storm")
    add("--prompts", type=int, default=32, help="requests of the storm")
    add("--prompt-tokens", type=int, default=4000, help="of each of them; one token is generated")
    add("--every", type=float, default=0.0, metavar="S", help="seconds between them; 0: at once")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    if "policy" in settings:
        raise ConfigurationError("storm takes --policies, a list, instead of --policy")
    policies = {}
    with shapes.settings_of(options.config, settings) as chosen:
        for policy in options.policies.split(","):
            measured = asyncio.run(_storm(options, {**chosen, "policy": policy}))
            policies[policy] = measured.metrics()
            _show(policy, policies[policy])
    return {"streams": options.streams, "prompts": options.prompts,
            "prompt_tokens": options.prompt_tokens, "policies": policies}  # fmt: skip


@dataclass
class Stream:
    """One running request: when each piece of its output came, in seconds of one clock."""

    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between pieces, of the gaps that lie in that time, in part or wholly."""
        times = [*self.pieces, *([] if self.ended else [end])]  # one may still wait
        return [late - early for early, late in pairwise(times) if late > begin and early < end]


Span = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class Measured:
    """Streams, and the time of the storm; and others that nothing disturbed, with the time in which
    they made the tokens that those made in the storm.
    """

    streams: Sequence[Stream]
    storm: Span
    firsts: Sequence[float]  # seconds to the first token of each request of the storm
    others: Sequence[Stream]
    same: Span

    def metrics(self) -> dict[str, Any]:
        """ratio: 99th percentile in the storm over the median of the same tokens without it."""
        storm = [gap for stream in self.streams for gap in stream.gaps(*self.storm)]
        same = [gap for stream in self.others for gap in stream.gaps(*self.same)]
        loud, undisturbed = percentiles(storm), percentiles(same)
        worst = max(np.percentile(stream.gaps(*self.storm), 99) for stream in self.streams)
        return {
            "storm_itl_ms": loud | {"longest": max(storm) * 1e3},
            "undisturbed_itl_ms": undisturbed,
            "ratio": loud["p99"] / undisturbed["p50"],
            "worst_stream_ratio": float(worst) * 1e3 / undisturbed["p50"],
            "storm_seconds": self.storm[1] - self.storm[0],
            "storm_ttft_ms": percentiles(self.firsts),
        }


@dataclass(frozen=True)
class Run:
    """How streams are begun, each with a prompt of its own."""

    llm: AsyncLLM
    prompt: Callable[[int], list[int]]
    options: argparse.Namespace
    limit: int

    def streams(self) -> tuple[list[Stream], list[asyncio.Task[None]]]:
        """As many as asked for, and the tasks that read them."""
        streams = [Stream() for _ in range(self.options.streams)]
        length = self.options.stream_prompt
        reading = (_follow(self.llm, self.prompt(length), self.limit, one) for one in streams)
        return streams, [asyncio.create_task(one) for one in reading]

    async def undisturbed(self, begin: int, end: int) -> tuple[list[Stream], Span]:
        """Streams that nothing disturbs, and when they made their tokens from `begin` to `end`."""
        streams, tasks = self.streams()
        await _reached(streams, begin, tasks)
        began = time.perf_counter()
        await _reached(streams, end, tasks)
        ended = time.perf_counter()
        await _abandon(tasks)
        return streams, (began, ended)


async def _storm(options: argparse.Namespace, settings: dict[str, Any]) -> Measured:
    config = read_outline(resolve_model(str(settings.get("model", ""))))
    highest = shapes.highest_id(settings)
    limit = int(settings.get("max_model_len") or config.context_length)
    source = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [source.randint(0, highest) for _ in range(length)]

    # Made ready before anything is measured: this process reads the streams, too.
    storm: list[Any] = [np.array(prompt(options.prompt_tokens)) for _ in range(options.prompts)]
    gc.collect()
    gc.freeze()
    async with AsyncLLM(**settings) as llm:
        await _first_token(llm, prompt(min(options.prompt_tokens, limit - 2)), 0.0)
        run = Run(llm, prompt, options, limit)
        streams, tasks = run.streams()
        await _reached(streams, options.calm_tokens, tasks)
        begin, first = time.perf_counter(), min(one.tokens for one in streams)
        arrivals = [
            _first_token(llm, ids, begin + index * options.every) for index, ids in enumerate(storm)
        ]
        firsts = await asyncio.gather(*arrivals)
        end = time.perf_counter()
        if any(stream.ended for stream in streams):
            raise RuntimeError(
                "streams ended before the storm did: they need a longer context, or a shorter calm"
            )
        stormy = max(one.tokens for one in streams)
        await _abandon(tasks)
        others, same = await run.undisturbed(first, stormy)
    return Measured(streams, (begin, end), firsts, others, same)


async def _follow(llm: AsyncLLM, prompt: list[int], limit: int, stream: Stream) -> None:
    """Reads a stream to its end, which is the context's, or until it is cancelled."""
    params = SamplingParams(
        temperature=0.6, max_tokens=limit - len(prompt), ignore_eos=True, seed=0
    )
    async with aclosing(llm.generate(prompt, params)) as deltas:
        async for delta in deltas:
            stream.pieces.append(time.perf_counter())
            stream.tokens += len(delta.token_ids)
            if delta.error:
                raise RuntimeError(delta.error)
    stream.ended = True


async def _first_token(llm: AsyncLLM, prompt: Any, due: float) -> float:
    """Seconds from `due` until the one token of a request that is sent then."""
    await asyncio.sleep(due - time.perf_counter())
    params = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True, seed=0)
    async for delta in llm.generate(prompt, params):
        if delta.error:
            raise RuntimeError(delta.error)
    return time.perf_counter() - due


async def _abandon(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels what follows the streams; raises what one of them has raised."""
    for task in tasks:
        if not task.cancel():
            task.result()  # it is over: by an error
    await asyncio.gather(*tasks, return_exceptions=True)


async def _reached(
    streams: Sequence[Stream], tokens: int, tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Waits until every stream has that many tokens; raises what a stream raises."""
    while min(stream.tokens for stream in streams) < tokens:
        for task in tasks:
            if task.done():
                task.result()
        if any(stream.ended for stream in streams):
            raise RuntimeError(f"a stream ended before all had {tokens} tokens")
        await asyncio.sleep(0.002)


def _show(policy: str, metrics: Mapping[str, Any]) -> None:
    quiet, loud = metrics["undisturbed_itl_ms"], metrics["storm_itl_ms"]
    print(
        f"{policy:>14}: between tokens {quiet['p50']:.2f} ms (p99 {quiet['p99']:.2f}); in a storm"
        f" of {metrics['storm_seconds']:.2f} s {loud['p50']:.2f} ms, p99 {loud['p99']:.2f}, longest"
        f" {loud['longest']:.2f}: {metrics['ratio']:.2f} times the median of the same tokens"
        f" without it",
        flush=True,
    )
