"""Exact mode at real shapes: many requests, computed in many ways, must have the same tokens and
log-probs, bit by bit. Not a test: a tool beside the tests.

    python tests/gpu/exact_shapes.py qwen3-0.6b qwen3-14b [--requests N] [--device cpu]
    python tests/gpu/exact_shapes.py qwen3-0.6b --only usual,keep,no-keep,two-groups

Random weights. Each way that needs an engine of its own is a process of its own, since a process
gives a GPU's memory back only when it ends; those of SERVERS are asked over HTTP, and their engines
are killed and swapped meanwhile. On a CPU tokens alone are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tools")]

from bench import shapes  # noqa: E402
from bench.takeover import forget_losses, swap_engine  # noqa: E402
from harness.server import ServerUnderTest  # noqa: E402
from pipeinfer import LLM, SamplingParams, topology  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402

# Of each engine, beside --exact: which answers are compared with the first one's.
ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks of 64": {"max_step_tokens": 64},
    "chunks of 2048": {"max_step_tokens": 2048, "overlap_depth": 1},
    "no graphs": {"no_cuda_graph": True},
    "few pages": {"kv_pages": 700, "page_size": 16},
}
# Of each server: what happens to its first engine in each round of all requests.
SERVERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "keep": ({}, ("nothing", "kill", "swap")),
    "no-keep": ({"no_keep_memory": True}, ("kill",)),
    "two-groups": ({"dp": 2}, ("nothing", "kill")),
}
ALONE = 16  # tokens, at most, of each request that is computed again with no other beside it
GENERATED = "pipeinfer_generated_tokens_total"
# Of each request, by its number: its tokens, and their log-probs.
Answers = dict[int, tuple[list[int], list[float]]]


def requests(
    count: int, highest: int, longest: int = 200
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 1,024 tokens, a third of them with one beginning; greedy, sampled, top-p.
    longest: tokens of an answer."""
    source = random.Random(0)
    common = [source.randint(0, highest) for _ in range(300)]
    found = []
    for number in range(count):
        own = [source.randint(0, highest) for _ in range(source.randint(1, 724))]
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.3)[number % 3],
            top_p=0.9 if number % 5 == 0 else 1.0,
            max_tokens=min(source.randint(16, 200), longest),
            ignore_eos=True,
            seed=number,
            logprobs=0,
        )
        found.append(((common if number % 3 == 0 else []) + own, params))
    return found


def answers(llm: LLM, asked: list[tuple[list[int], SamplingParams]], order: list[int]) -> Answers:
    """Of all requests of `order`, at once."""
    prompts = [{"prompt_token_ids": asked[number][0]} for number in order]
    outputs = llm.generate(prompts, [asked[number][1] for number in order], use_tqdm=False)
    found: Answers = {}
    for number, output in zip(order, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logprobs = output.outputs[0].logprobs or []
        values = [one[token].logprob for one, token in zip(logprobs, tokens, strict=True)]
        found[number] = tokens, values
    return found


def compute(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Answers]:
    """What one engine gives, by way."""
    highest = shapes.highest_id({"model": str(folder)})
    asked, every = requests(options.requests, highest), list(range(options.requests))
    sizes = {"kv_pages": options.kv_pages} | ENGINES[name]
    llm = LLM(str(folder), exact=True, load_format="dummy", device=options.device, **sizes)
    found = {name: answers(llm, asked, every)}
    if name == "usual":
        found["warm"] = answers(llm, asked, every)
        found["reversed"] = answers(llm, asked, every[::-1])
        short = requests(options.requests, highest, ALONE)
        found["alone"] = {n: answers(llm, short, [n])[n] for n in every}
    llm.close()
    return found


def serve(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Answers]:
    """What one server gives, by round; its engine is killed or swapped when about half of all
    tokens are there."""
    given, rounds = SERVERS[name]
    asked = requests(options.requests, shapes.highest_id({"model": str(folder)}))
    settings = {"exact": True, "load_format": "dummy", "device": options.device}
    settings |= {"kv_pages": options.kv_pages, "model": str(folder), **given}
    # All engines take the one GPU there is.
    made = topology.local(Settings(dp=given.get("dp", 1)), f"ipc://{folder}/")
    entries = [
        msgspec.structs.replace(entry, device="cuda:0" if entry.name == "engine" else "")
        for entry in made.entries
    ]
    file = Path(folder, "stages.toml")
    file.write_text(replace(made, entries=tuple(entries)).to_toml())
    settings = {key: value for key, value in settings.items() if key != "dp"}
    found: dict[str, Answers] = {}
    with ServerUnderTest({**settings, "topology": str(file)}) as server:
        for number, what in enumerate(rounds):
            if number:
                forget_losses(server.process.pid)
            way = f"{name}, {what}"
            found[way] = asyncio.run(ask_all(server, asked, way, what))
    return found


async def ask_all(
    server: ServerUnderTest, asked: list[tuple[list[int], SamplingParams]], salt: str, what: str
) -> Answers:
    """The answers over HTTP. salt: keeps what rounds before have computed out of the way."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as api:
        begun = await generated(api)
        calls = [
            asyncio.create_task(ask(api, number, asked[number], salt))
            for number in range(len(asked))
        ]
        half = sum(params.max_tokens or 0 for _, params in asked) / 2
        if what != "nothing":
            while await generated(api) < begun + half:
                if all(call.done() for call in calls):
                    raise RuntimeError(f"{salt}: all answers came before half of their tokens")
                await asyncio.sleep(0.05)
            await asyncio.to_thread(HARMS[what], server)
        return dict(await asyncio.gather(*calls))


async def ask(
    api: aiohttp.ClientSession, number: int, request: tuple[list[int], SamplingParams], salt: str
) -> tuple[int, tuple[list[int], list[float]]]:
    """One answer, and its number."""
    ids, params = request
    body = {
        "prompt": ids,
        "cache_salt": salt,
        "return_token_ids": True,
        **{
            name: getattr(params, name)
            for name in ("temperature", "top_p", "max_tokens", "ignore_eos", "seed", "logprobs")
        },
    }
    async with api.post("/v1/completions", json=body) as answer:
        given = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"request {number}: {answer.status}: {given}")
    [choice] = given["choices"]
    return number, (choice["token_ids"], choice["logprobs"]["token_logprobs"])


async def generated(api: aiohttp.ClientSession) -> float:
    """Tokens of all answers since the server started."""
    async with api.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(GENERATED))


def kill_engine(server: ServerUnderTest) -> None:
    """-9, of the first group's engine."""
    os.kill(server.pids()["engine-0-0"], signal.SIGKILL)


def swap(server: ServerUnderTest) -> None:
    """`pipeinfer swap engine`, under all streams."""
    swap_engine(server.process.pid)


HARMS: dict[str, Callable[[ServerUnderTest], None]] = {"kill": kill_engine, "swap": swap}


def compare(shape: str, expected: Answers, found: dict[str, Answers], exactly: bool) -> bool:
    """Whether all ways give what is expected; a line for each."""
    same = True
    for way, given in found.items():
        # Those alone are shorter.
        tokens = [n for n in given if given[n][0] != expected[n][0][: len(given[n][0])]]
        logprobs = [n for n in given if given[n][1] != expected[n][1][: len(given[n][1])]]
        total = sum(len(ids) for ids, _ in given.values())
        print(
            f"EXACT {shape}, {way}: {total} tokens of {len(given)} requests; other tokens in "
            f"{len(tokens)}, other log-probs in {len(logprobs)}",
            flush=True,
        )
        same &= not tokens and not (exactly and logprobs)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-pages", type=int, default=0, help="0: from free memory")
    parser.add_argument("--only", help="ways, with commas; default: all engines, then all servers")
    parser.add_argument("--engine", choices=[*ENGINES, *SERVERS], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:  # in a process of its own; `shapes` is the folder
        work = compute if options.engine in ENGINES else serve
        found = work(Path(options.shapes[0]), options.engine, options)
        options.out.write_bytes(pickle.dumps(found))
        return 0
    same, ways = True, options.only.split(",") if options.only else [*ENGINES, *SERVERS]
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            shapes.write_folder(Path(folder), shapes.shape(shape))
            expected: Answers = {}
            for name in ways:
                out = Path(folder) / "answers"
                command = [sys.executable, __file__, folder, "--engine", name, "--out", str(out)]
                rest = ["--requests", str(options.requests), "--device", options.device]
                rest += ["--kv-pages", str(options.kv_pages)]
                subprocess.run([*command, *rest], check=True)
                found: dict[str, Answers] = pickle.loads(out.read_bytes())  # written above
                expected = expected or found[next(iter(found))]
                same &= compare(shape, expected, found, exactly=options.device != "cpu")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
