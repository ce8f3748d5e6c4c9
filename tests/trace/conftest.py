"""A recorded session: every stage's trace of a busy minute of the demo model, made once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer.offline.outputs import RequestError
from pipeinfer.trace.format import Trace

WORDS = ("count", "from 3", "what is", "pipeinfer", "é 🙂", "copy: abc", "7 8 9", "the engine")


async def _one(llm: AsyncLLM, source: random.Random, index: int) -> None:
    """A request that streams, stops at a string, or is abandoned after a few tokens."""
    length = source.randint(16, 90)
    params = SamplingParams(
        max_tokens=length,
        temperature=source.choice((0.0, 1.0)),
        seed=index,
        stop=source.choice(((), ("e",), ("3", "zz"))),
        min_tokens=source.choice((0, 4)),
        ignore_eos=source.random() < 0.5,
        logprobs=2 if index % 3 == 0 else None,
        prompt_logprobs=1 if index % 4 == 0 else None,
    )
    prompt = "count from 1 to 9 " * source.randint(0, 3) + " ".join(source.choices(WORDS, k=6))
    leave_after = source.randint(1, 6) if source.random() < 0.2 else 10_000
    stream = llm.generate(prompt, params)
    seen = 0
    async for _ in stream:
        seen += 1
        if seen >= leave_after:
            break
    await stream.aclose()


async def _long(llm: AsyncLLM) -> None:
    """Prompts that the tokenizer encodes in a process beside it: one is passed on, and is then too
    long for the small memory; one is refused."""
    for prompt, reason in (("<|reserved_0|>ab" * 600, "KV pool"), ("x" * 10_000, "context length")):
        with pytest.raises(RequestError, match=reason):
            async for _ in llm.generate(prompt, SamplingParams(max_tokens=4)):
                continue


async def _session(folder: Path, requests: int) -> None:
    source = random.Random(7)
    async with AsyncLLM(kv_pages=18, threads=1, max_running=12, record=str(folder)) as llm:
        short = (_one(llm, source, index) for index in range(requests))
        await asyncio.gather(_long(llm), *short)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Traces by stage name. Small memory, so that requests are preempted."""
    folder = tmp_path_factory.mktemp("session")
    asyncio.run(_session(folder, 30))
    traces = [Trace(path) for path in sorted(folder.glob("*.pitrace"))]
    return {trace.header.name: trace for trace in traces}
