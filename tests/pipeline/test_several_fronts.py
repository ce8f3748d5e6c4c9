"""Several gateways, tokenizers and detokenizers: requests stay with their own, and the loss of one
costs what the loss of the only one costs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPException
from urllib.error import URLError
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from leftovers import leftovers, statistics
from streams import TRIES, Choice, Streams, chats
from swaps import swap

from held_processes import HeldProcesses, held_engines
from servers import Server

STREAMS = 12
CONNECTIONS = 40  # among which each gateway has some
FRONTS = ("--gateways", "2", "--tokenizers", "2", "--detokenizers", "2")
VICTIMS = (
    ("tokenizer-1",),
    ("tokenizer-0", "tokenizer-1", "detokenizer-1"),
    ("scheduler-1", "detokenizer-0"),
    ("engine-1-0",),  # the other group goes on, and takes its requests over
)
PAUSE = 0.02  # seconds between two questions of one who asks all the time


@pytest.fixture(scope="module")
def server():
    """Its gateways may take long to finish their streams: machines differ."""
    with Server("--kv-pages", "400", "--dp", "2", "--drain-timeout", "240", *FRONTS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Choice]:
    return asyncio.run(Streams(server, chats(STREAMS)).run())


def kill(server: Server, stages: tuple[str, ...]) -> None:
    """-9 for all of them at once; returns when others are in their places and ready."""
    before = {stage: server.pid(stage) for stage in stages}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_for_others(server, before)


def wait_for_others(server: Server, before: dict[str, int]) -> None:
    """Returns when processes other than those of `before` have these stages and are ready."""

    def back() -> bool:
        rows = {row["stage"]: row for row in server.health()["stages"]}
        return all(
            rows[stage]["pid"] != pid and rows[stage]["state"] == "ready"
            for stage, pid in before.items()
        )

    server.wait(back, f"{tuple(before)} came back")


def counted(server: Server, name: str, statistic: str) -> list[float]:
    """A statistic of both stages called `name`."""
    return [statistics(server, f"{name}-{index}")[statistic] for index in (0, 1)]


def ask_each_gateway(server: Server) -> None:
    """Connections that stay open: one gateway may have a few more than the other, not all."""
    with ExitStack() as opened:
        for _ in range(CONNECTIONS):
            client = opened.enter_context(httpx.Client(base_url=server.url, timeout=60))
            asked = {"prompt": "a", "max_tokens": 1}
            assert client.post("/v1/completions", json=asked).status_code == 200
            if all(counted(server, "gateway", "requests_total")):
                return
    raise AssertionError("one gateway has every connection")


def test_each_of_them_has_its_part_of_the_requests(server, undisturbed):
    assert all(one.text for one in undisturbed)
    ask_each_gateway(server)
    for name, statistic in (
        ("gateway", "requests_total"),
        ("tokenizer", "accepted_total"),
        ("detokenizer", "opened_total"),
    ):
        parts = counted(server, name, statistic)
        assert sum(parts) >= STREAMS and all(parts), (name, parts)
    assert leftovers(server) == {}


@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["at once", "one by one"])
def test_connections_are_shared_out_evenly(server, pause):
    """However they come: whichever gateway wakes first would else take most of them. Of one that
    stands still the other one takes them all: then again."""
    for _ in range(TRIES):
        if min(parts := shared_out(server, pause)) >= 10:
            break
    assert min(parts) >= 10, parts


def shared_out(server: Server, pause: float) -> list[float]:
    """How many of 60 connections each gateway has."""

    def connections() -> list[float]:
        return counted(server, "gateway", "connections")

    server.wait(lambda: sum(connections()) < 10, "those before are closed")
    host, port = urlsplit(server.url).netloc.split(":")
    with ExitStack() as opened:
        for _ in range(60):
            opened.enter_context(socket.create_connection((host, int(port))))
            time.sleep(pause)

        def accepted() -> list[float] | None:
            parts = connections()
            return parts if sum(parts) >= 60 else None

        return server.wait(accepted, "all are accepted")


@pytest.mark.parametrize("stages", VICTIMS, ids="+".join)
def test_streams_survive_the_loss_of(server, undisturbed, stages):
    streams = Streams(server, chats(STREAMS))
    assert asyncio.run(streams.run(lambda: kill(server, stages))) == undisturbed
    server.wait(lambda: server.metric("pipeinfer_requests_running") == 0, "nothing runs")


def test_a_server_is_ready_while_one_of_each_is_away(server):
    """SIGSTOP: they are silent, and nobody starts them again."""
    away = {stage: server.pid(stage) for stage in ("tokenizer-0", "detokenizer-1")}
    with HeldProcesses(*away.values()):

        def lost() -> bool:
            rows = {row["stage"]: row["state"] for row in server.health()["stages"]}
            return all(rows[stage] == "lost" for stage in away)

        # A gateway that does not know it yet sends them requests, which wait for their return.
        # Ten new connections: either gateway answers some of them.
        server.wait(
            lambda: all(lost() for _ in range(10)), "both gateways see that they are silent"
        )
        assert {server.get("/health/ready")[0] for _ in range(8)} == {200}
        for number in range(12):
            body = {"prompt": f"{number} is a number", "max_tokens": 4}
            assert server.post("/v1/completions", body)[0] == 200
    server.wait(lambda: server.health()["status"] == "ready", "all are back")


class OwnConnections:
    """A stream for each question, from clients of their own: both gateways have some."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._questions = [one["question"] for one in chats(STREAMS)]
        self.texts = [""] * STREAMS

    async def run(self, disturb) -> list[str | BaseException]:
        """What each ended with; `disturb()` is called when the first token of any has come.

        The engines compute only for moments until then: first the schedulers have all requests, and
        none has ended when it is disturbed, however slow this process is.
        """
        self.texts = [""] * STREAMS
        with await asyncio.to_thread(held_engines, self._server) as engines:
            tasks = [asyncio.create_task(self._ask(index)) for index in range(STREAMS)]
            await asyncio.to_thread(self._server.wait, self._all_came, "the schedulers have all")
            await asyncio.to_thread(engines.compute_until, lambda: any(self.texts))
            disturb()
        return await asyncio.gather(*tasks, return_exceptions=True)

    def _all_came(self) -> bool:
        states = ("running", "waiting")
        return sum(self._server.metric(f"pipeinfer_requests_{at}") for at in states) == STREAMS

    async def _ask(self, index: int) -> str:
        # One after the other: of many at once, a gateway that is awake may take all before the
        # other one wakes on a busy machine.
        await asyncio.sleep(index * PAUSE)
        async with openai.AsyncOpenAI(
            base_url=f"{self._server.url}/v1", api_key="none", max_retries=0
        ) as api:
            async for chunk in await api.chat.completions.create(
                model="pipeinfer-demo",
                messages=[{"role": "user", "content": self._questions[index]}],
                temperature=0.0,
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                self.texts[index] += chunk.choices[0].delta.content or ""
        return self.texts[index]


def cut_off(error: Exception) -> bool:
    """Whether the question reached a gateway that died then: before all of it was sent, before the
    answer, or within the answer. A connection that is refused was taken by none."""
    why = error.reason if isinstance(error, URLError) else error
    lost = isinstance(why, ConnectionError | HTTPException)
    return lost and not isinstance(why, ConnectionRefusedError)


def test_a_killed_gateway_costs_its_own_streams_and_no_others(server):
    """And no connection is refused: what comes meanwhile is taken by the other one."""
    streams = OwnConnections(server)
    whole = asyncio.run(streams.run(lambda: None))
    stop, failed = threading.Event(), list[BaseException]()

    def keep_asking() -> None:
        while not stop.wait(PAUSE):
            try:
                assert server.get("/health/live")[0] == 200
            except Exception as error:
                if not cut_off(error):
                    failed.append(error)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(keep_asking)
        for _ in range(TRIES):  # until each of them had some of the connections
            victim = {"gateway-1": server.pid("gateway-1")}
            ends = asyncio.run(streams.run(partial(os.kill, victim["gateway-1"], signal.SIGKILL)))
            wait_for_others(server, victim)
            if len({isinstance(end, BaseException) for end in ends}) == 2:
                break
        stop.set()
        asked.result()
    assert not failed
    unhurt = [index for index, end in enumerate(ends) if end == whole[index]]
    hurt = [index for index, end in enumerate(ends) if isinstance(end, BaseException)]
    assert sorted(unhurt + hurt) == list(range(STREAMS)) and unhurt and hurt
    assert leftovers(server) == {}


def test_gateways_are_swapped_one_by_one_and_nothing_is_refused(server, undisturbed):
    """Streams that run go on to their ends, and whoever connects meanwhile is served."""
    stop, failed = threading.Event(), list[object]()

    def keep_asking() -> None:
        body = {"prompt": "On and on", "max_tokens": 2}
        while not stop.wait(PAUSE):
            try:
                status, answer = server.post("/v1/completions", body)
                failed.extend([answer] * (status != 200))
            except Exception as error:
                failed.append(error)

    before = {stage: server.pid(stage) for stage in ("gateway-0", "gateway-1")}
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(keep_asking)
        streams = pool.submit(asyncio.run, Streams(server, chats(STREAMS)).run())
        for stage in before:
            done = swap(server, stage)
            assert done.returncode == 0, done.stderr
        found = streams.result()
        stop.set()
        asked.result()
    assert not failed and found == undisturbed
    server.wait(
        lambda: all(server.pid(stage) != pid for stage, pid in before.items()),
        "the gateways hear of each other",
    )
