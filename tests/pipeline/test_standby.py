"""`--standby`: an engine that ends is followed by a process that was ready before."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest
from swaps import swap, topology_of

from child_processes import children_with
from pipeinfer.demo import copy_task
from pipeinfer.runtime.child import MAX_DEATHS
from pipeinfer.runtime.standby import STANDBY_FLAG
from servers import Server, alive, environment

STREAMS, TOKENS, PAGE = 12, 150, 64


SETTINGS = ("--standby", "--kv-pages", "400")


@pytest.fixture(scope="module")
def server():
    """Each test leaves it with an engine and, sooner or later, a standby."""
    with Server(*SETTINGS) as running:
        yield running


@pytest.fixture
def own():
    """One that a test may end, or leave without a standby."""
    with Server(*SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server) -> list[str]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return texts(asked(server, pool))


def standbys(server: Server) -> list[int]:
    """Processes that were started as standbys and are no engine."""
    serving = engines(server)
    started = children_with(STANDBY_FLAG, server.process.pid)
    return [child.pid for child in started if child.pid not in serving]


def engines(server: Server) -> list[int]:
    """Processes of all ranks."""
    return [one["pid"] for one in server.health()["stages"] if one["name"] == "engine"]


def ready_standby(server: Server, but: int = 0) -> int:
    """The standby, once it is ready, which the log and a gauge say."""
    [pid] = server.wait(lambda: [pid for pid in standbys(server) if pid != but], "a standby")
    server.wait(lambda: any(f"GiB, process {pid}" in line for line in server.log), "it is ready")
    server.wait(lambda: server.metric("pipeinfer_standbys_ready") == 1, "the gauge says so")
    return pid


def ask(server: Server, number: int) -> str:
    question = copy_task(random.Random(number), 40)[0]
    body = {"prompt": question, "temperature": 0.8, "seed": number, "max_tokens": TOKENS}
    answer = httpx.post(
        f"{server.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def asked(server: Server, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Requests that run."""
    found = [pool.submit(ask, server, number) for number in range(STREAMS)]
    server.wait(lambda: server.metric("pipeinfer_requests_running") == STREAMS, "all run")
    return found


def kill(server: Server) -> int:
    """Kills the engine; the process that serves in its place."""
    victim = server.pid("engine")
    os.kill(victim, signal.SIGKILL)
    server.wait(
        lambda: server.pid("engine") != victim and server.health()["status"] == "ready",
        "an engine serves again",
    )
    return server.pid("engine")


def texts(answers: list[Future[str]]) -> list[str]:
    return [one.result() for one in answers]


def test_the_standby_goes_on_with_the_same_texts_and_another_one_comes(own, undisturbed):
    with ThreadPoolExecutor(STREAMS) as pool:
        first = ready_standby(own)
        running = asked(own, pool)
        assert kill(own) == first
        second = ready_standby(own, but=first)
        assert texts(running) == undisturbed
        running = asked(own, pool)
        assert kill(own) == second
        assert texts(running) == undisturbed
    everybody = [child.pid for child in psutil.Process(own.process.pid).children()]
    assert own.stop() == 0
    assert not [pid for pid in everybody if alive(pid)]


def test_a_standby_that_is_not_ready_goes_on_where_it_is(server, undisturbed):
    """The second death comes while it still loads."""
    with ThreadPoolExecutor(STREAMS) as pool:
        ready_standby(server)
        running = asked(server, pool)
        kill(server)
        [loading] = server.wait(lambda: standbys(server), "the next one begins")
        server.wait(lambda: server.metric("pipeinfer_standbys_ready") == 0, "none is ready")
        assert kill(server) == loading
        assert texts(running) == undisturbed
    ready_standby(server)


def test_a_standby_that_dies_is_started_again_and_nobody_notices(own, undisturbed):
    with ThreadPoolExecutor(STREAMS) as pool:
        engine, first = own.pid("engine"), ready_standby(own)
        running = asked(own, pool)
        os.kill(first, signal.SIGKILL)
        second = ready_standby(own, but=first)
        assert texts(running) == undisturbed
        assert own.pid("engine") == engine and kill(own) == second
    for _ in range(MAX_DEATHS + 1):
        [loading] = own.wait(lambda: standbys(own), "the next one begins")
        os.kill(loading, signal.SIGKILL)
        own.wait(lambda pid=loading: not alive(pid), "it ends")
    own.wait(lambda: any("no standby any more" in line for line in own.log), "given up")
    assert not standbys(own) and own.health()["status"] == "ready"


def test_a_swap_goes_by_a_new_standby(server, undisturbed):
    """The one that was there may have read files that have changed since."""
    with ThreadPoolExecutor(STREAMS) as pool:
        before = ready_standby(server)
        running = asked(server, pool)
        done = swap(server, "engine")
        assert done.returncode == 0, done.stderr
        assert texts(running) == undisturbed
    server.wait(lambda: str(server.pid("engine")) in done.stdout, "the gateway heard of it")
    assert not alive(before)
    ready_standby(server)
    command = [sys.executable, "-m", "pipeinfer", "top", "--once", "--topology"]
    shown = subprocess.check_output([*command, topology_of(server)], env=environment(), text=True)
    assert [line.split() for line in shown.splitlines() if "standbys" in line] == [
        ["standbys", "1", "ready"]
    ]


def test_asleep_there_is_no_standby(server):
    standby = ready_standby(server)
    assert httpx.post(f"{server.url}/sleep?level=1", timeout=60).status_code == 200
    server.wait(lambda: not alive(standby) and not standbys(server), "it ends")
    assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 200
    ready_standby(server)


def recomputed(server: Server) -> float:
    """Tokens, so far."""
    lines = server.get("/metrics")[1].splitlines()
    counted = [one for one in lines if one.startswith("pipeinfer_recomputed_tokens_total")]
    return sum(float(one.split()[-1]) for one in counted)


def test_where_one_rank_is_killed_the_standbys_of_all_ranks_go_on(undisturbed):
    """With the pages that both ranks have left; a second loss so soon drops them."""
    with (
        Server("--standby", "--kv-pages", "400", "--tp", "2", "--threads", "1") as server,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        for rank in (1, 0):
            server.wait(lambda: server.metric("pipeinfer_standbys_ready") == 1, "they are ready")
            next_ones = sorted(standbys(server))
            assert len(next_ones) == 2
            running, before = asked(server, pool), recomputed(server)
            os.kill(engines(server)[rank], signal.SIGKILL)
            server.wait(
                lambda ids=next_ones: (
                    sorted(engines(server)) == ids and server.health()["status"] == "ready"
                ),
                "they serve",
            )
            assert texts(running) == undisturbed
            if rank == 1:
                assert 0 < recomputed(server) - before <= STREAMS * PAGE


def test_no_standby_outlives_a_server_that_is_killed(own):
    standby = ready_standby(own)
    own.kill()
    own.wait(lambda: not alive(standby), "it ends")


def test_one_process_has_no_standby():
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "serve", "--in-process", "--standby", "--port", "0"],
        capture_output=True, text=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--standby: with --in-process there is one process alone" in done.stderr
