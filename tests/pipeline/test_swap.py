"""Stages that are replaced while they serve: what clients see is at most a pause."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import openai
import pytest
from streams import TRIES, Streams, chats
from swaps import begun_swap, swap

import pipeinfer
from held_processes import held_engines
from pipeinfer.demo import copy_task
from servers import STAGES, Server, alive

CLIENTS, TOKENS = 4, 100
LONG = 500  # tokens of streams that go on while stages begin


@pytest.fixture(scope="module")
def served():
    """Its gateway may take long to finish its streams: machines differ."""
    with Server("--drain-timeout", "240") as running:
        yield running


async def _ask(api: openai.AsyncOpenAI, question: str) -> str:
    text = ""
    async for chunk in await api.chat.completions.create(
        model="pipeinfer-demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        text += chunk.choices[0].delta.content or ""
    return text


async def _everybody(server: Server, questions: list[str], stages: tuple[str, ...], *command: str):
    """All texts; each client asks again and again while the stages are swapped in turn."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
    ) as api:
        swapped = asyncio.Event()

        async def client(question: str) -> set[tuple[str, str]]:
            texts = {(question, await _ask(api, question))}
            while not swapped.is_set():
                texts.add((question, await _ask(api, question)))
            return texts

        tasks = [asyncio.create_task(client(question)) for question in questions]
        for stage in stages:
            done = await asyncio.to_thread(swap, server, stage, *command)
            assert done.returncode == 0, done.stderr + "\n".join(server.log)
        swapped.set()
        return set[tuple[str, str]]().union(*await asyncio.gather(*tasks))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Another copy of the source, whose stages say that they are of it."""
    folder = tmp_path_factory.mktemp("checkout")
    source = Path(pipeinfer.__file__).parent
    shutil.copytree(source, folder / "pipeinfer")  # with what is compiled of it
    for stage in STAGES:
        core = folder / "pipeinfer" / stage / "core.py"
        core.write_text(core.read_text() + f'\n\nprint("planted {stage}", flush=True)\n')
    return folder


def said(server: Server) -> list[str]:
    """The lines that it printed since the last call."""
    lines: list[str] = []
    while not server.lines.empty():
        lines.append(server.lines.get())
    return lines


def test_no_stream_breaks_while_every_stage_is_swapped(served, checkout):
    rng = random.Random(9)
    questions = [copy_task(rng, rng.randint(10, 40))[0] for _ in range(CLIENTS)]
    before = {stage["name"]: stage["pid"] for stage in served.health()["stages"]}
    undisturbed = asyncio.run(_everybody(served, questions, ()))
    order = ("tokenizer", "detokenizer", "scheduler", "engine", "gateway")
    command = ("env", f"PYTHONPATH={checkout}", sys.executable, "-m", "pipeinfer.runtime")
    disturbed = asyncio.run(_everybody(served, questions, order, *command))
    assert disturbed == undisturbed and len(undisturbed) == CLIENTS
    served.wait(
        lambda: all(row["pid"] != before[row["name"]] for row in served.health()["stages"]),
        "the gateway hears of all others",
    )
    lines: set[str] = set()

    def printed() -> bool:
        lines.update(said(served))
        return {f"planted {stage}" for stage in STAGES} <= lines

    served.wait(printed, "each stage is of the other copy")


def test_requests_wait_while_the_gateway_is_swapped(served):
    api = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=120, max_retries=0)

    def request() -> int:
        return len(api.completions.create(model="pipeinfer-demo", prompt="x", max_tokens=2).id)

    assert request()  # its connection is kept, and must not be found dead after the swap
    asked = 0
    for _ in range(TRIES):  # this process may stand still during a whole swap
        with begun_swap(served, "gateway") as swapping:
            while swapping.poll() is None:
                assert request()
                asked += 1
        assert swapping.returncode == 0
        assert request()
        if asked > 0:
            break
    assert asked > 0


def test_a_command_behind_a_wrapper_stays_when_its_stage_dies(served, checkout):
    """A wrapper as a profiler or a debugger would be."""
    command = f'PYTHONPATH={checkout} {sys.executable} -m pipeinfer.runtime "$@"; echo ended'
    said(served)
    before = served.pid("tokenizer")
    done = swap(served, "tokenizer", "bash", "-c", command, "wrapper")
    assert done.returncode == 0, done.stderr
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    served.wait(lambda: served.pid("tokenizer") != before, "the health of the new one")
    os.kill(served.pid("tokenizer"), signal.SIGKILL)
    lines: list[str] = []

    def printed_twice() -> bool:
        lines.extend(said(served))
        return lines.count("planted tokenizer") == 2

    served.wait(printed_twice, "the command stayed for the restart")
    served.wait(lambda: served.health()["status"] == "ready", "ready again")
    assert swap(served, "tokenizer", sys.executable, "-m", "pipeinfer.runtime").returncode == 0
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/no/such/program",), "cannot start /no/such/program"),
        (("false",), "ended before it was ready (code 1)"),
        ((sys.executable, "-m", "pipeinfer.runtime", "--kv-pages", "x"), "(code 2)"),
    ],
)
def test_a_command_that_fails_gives_way_to_the_one_before(served, command, why):
    done = swap(served, "scheduler", *command)
    assert done.returncode == 1
    assert why in done.stderr and "is started again" in done.stderr
    served.wait(lambda: served.health()["status"] == "ready", "the old command is back")
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_what_cannot_be_swapped_is_said(served):
    done = swap(served, "nobody")
    assert done.returncode == 2
    assert "which stage is 'nobody'?" in done.stderr and "engine-0-0" in done.stderr


def test_streams_finish_though_stages_are_swapped_and_killed_while_the_server_drains(served):
    """The last test of this server. The engine stands still until it is killed: the streams do not
    end before."""
    undisturbed = asyncio.run(Streams(served, chats(4), LONG).run())
    pids = {stage["name"]: stage["pid"] for stage in served.health()["stages"]}
    before, engines = len(served.log), held_engines(served)

    def disturb() -> None:
        with begun_swap(served, "detokenizer") as swapping:
            assert swapping.stderr is not None and "starts" in swapping.stderr.readline()
            served.process.send_signal(signal.SIGTERM)
            served.wait(lambda: served.health()["status"] == "draining", "it drains")
            for name in ("tokenizer", "scheduler", "engine"):
                os.kill(pids[name], signal.SIGKILL)
            late = swap(served, "tokenizer")
            said = swapping.communicate(timeout=60)[1]
        assert swapping.returncode == 0, f"a swap that had begun is finished: {said}"
        assert "the server is stopping" in late.stderr

    assert asyncio.run(Streams(served, chats(4), LONG).run(disturb, engines)) == undisturbed
    assert served.process.wait(60) == 0, "\n".join(served.log)
    assert not alive(pids["gateway"])
    said = served.whole_log()[before:]
    assert sum("starting it again" in line for line in said) == 3
    assert any(re.search(r"stopping: \d+ requests? left, at most 240 s more", one) for one in said)
