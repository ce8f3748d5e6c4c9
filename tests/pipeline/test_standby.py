"""`--standby`: an engine that ends is followed by a process that was ready before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import httpx
import psutil
import pytest
from streams import TRIES, Choice, Streams, chats
from swaps import swap, topology_of

from child_processes import children_with
from held_processes import HeldProcesses, held_engines
from pipeinfer.cli.main import main
from pipeinfer.runtime.child import MAX_DEATHS, STANDBY_FLAG
from servers import Server, alive, environment

STREAMS, PAGE = 8, 64
SETTINGS = ("--standby", "--kv-pages", "400")


@pytest.fixture(scope="module")
def server():
    """Each test but the last leaves it with an engine and, sooner or later, a standby."""
    with Server(*SETTINGS) as running:
        yield running


def streams(
    server: Server, disturb: Callable[[], None] | None = None, held: HeldProcesses | None = None
) -> list[Choice]:
    return asyncio.run(Streams(server, chats(STREAMS)).run(disturb, held))


@pytest.fixture(scope="module")
def undisturbed(server) -> list[Choice]:
    return streams(server)


def standbys(server: Server) -> list[int]:
    """Processes that were started as standbys and are no engine."""
    serving = engines(server)
    started = children_with(STANDBY_FLAG, server.process.pid)
    return [child.pid for child in started if child.pid not in serving]


def engines(server: Server) -> list[int]:
    """Processes of all ranks."""
    return [one["pid"] for one in server.health()["stages"] if one["name"] == "engine"]


def is_ready(server: Server, pid: int) -> bool:
    return any(f"GiB, process {pid}" in line for line in server.log)


def ready_standby(server: Server, but: int = 0) -> int:
    """The standby, once it is ready, which the log and a gauge say."""
    [pid] = server.wait(lambda: [pid for pid in standbys(server) if pid != but], "a standby")
    server.wait(lambda: is_ready(server, pid), "it is ready")
    server.wait(lambda: server.metric("pipeinfer_standbys_ready") == 1, "the gauge says so")
    return pid


def kill(server: Server) -> int:
    """Kills the engine; the process that serves in its place."""
    victim = server.pid("engine")
    os.kill(victim, signal.SIGKILL)
    server.wait(
        lambda: server.pid("engine") != victim and server.health()["status"] == "ready",
        "an engine serves again",
    )
    return server.pid("engine")


def test_a_standby_goes_on_with_the_same_texts_ready_or_not(server, undisturbed):
    """The second death comes while the next one still loads: it goes on where it is. On a machine
    that stalls this process that one may be ready already: then the next death, which may have no
    standby."""
    was_ready: list[bool] = []

    def disturb() -> None:
        first = ready_standby(server)
        assert kill(server) == first
        [loading] = server.wait(lambda: standbys(server), "the next one begins")
        was_ready.append(is_ready(server, loading))
        assert kill(server) == loading

    for _ in range(TRIES):
        assert streams(server, disturb) == undisturbed
        if not was_ready[-1]:
            break
    assert not was_ready[-1], "each was ready before it was looked at"
    ready_standby(server)


def test_a_swap_goes_by_a_new_standby(server, undisturbed, capsys):
    """The one that was there may have read files that have changed since."""
    before = ready_standby(server)
    said: list[str] = []

    def disturb() -> None:
        done = swap(server, "engine")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)

    assert streams(server, disturb) == undisturbed
    server.wait(lambda: str(server.pid("engine")) in said[0], "the gateway heard of it")
    server.wait(lambda: not alive(before), "the one that was there ends")
    ready_standby(server)
    assert main(["top", "--once", "--topology", topology_of(server)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown if "standbys" in line] == [["standbys", "1", "ready"]]


def test_asleep_there_is_no_standby(server):
    standby = ready_standby(server)
    assert httpx.post(f"{server.url}/sleep?level=1", timeout=60).status_code == 200
    server.wait(lambda: not alive(standby) and not standbys(server), "it ends")
    assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 200
    ready_standby(server)


def test_a_standby_that_dies_is_started_again_and_nobody_notices(server, undisturbed):
    """The last test of this server. One more death of its engine could be the third in a minute,
    after which a standby's weights are kept no more."""
    engine, first = server.pid("engine"), ready_standby(server)

    def disturb() -> None:
        os.kill(first, signal.SIGKILL)
        ready_standby(server, but=first)
        assert server.pid("engine") == engine

    assert streams(server, disturb) == undisturbed
    for _ in range(MAX_DEATHS + 1):
        [loading] = server.wait(lambda: standbys(server), "the next one begins")
        os.kill(loading, signal.SIGKILL)
        server.wait(lambda pid=loading: not alive(pid), "it ends")
    server.wait(lambda: any("no standby any more" in line for line in server.log), "given up")
    assert not standbys(server) and server.health()["status"] == "ready"
    everybody = [child.pid for child in psutil.Process(server.process.pid).children()]
    assert server.stop() == 0
    assert not [pid for pid in everybody if alive(pid)]


def recomputed(server: Server) -> float:
    """Tokens, so far."""
    lines = server.get("/metrics")[1].splitlines()
    counted = [one for one in lines if one.startswith("pipeinfer_recomputed_tokens_total")]
    return sum(float(one.split()[-1]) for one in counted)


def test_where_one_rank_is_killed_the_standbys_of_all_ranks_go_on(undisturbed):
    """With the pages that both ranks have left. No standby outlives a server that is killed."""
    with Server(*SETTINGS, "--tp", "2", "--threads", "1") as server:
        server.wait(lambda: server.metric("pipeinfer_standbys_ready") == 1, "they are ready")
        next_ones, before = sorted(standbys(server)), recomputed(server)
        assert len(next_ones) == 2
        held, ranks = held_engines(server), engines(server)

        def disturb() -> None:
            os.kill(ranks[1], signal.SIGKILL)
            held.release()
            server.wait(
                lambda: (
                    sorted(engines(server)) == next_ones and server.health()["status"] == "ready"
                ),
                "they serve",
            )

        assert streams(server, disturb, held) == undisturbed
        assert 0 < recomputed(server) - before <= STREAMS * PAGE
        started = server.wait(lambda: standbys(server), "others begin")
        server.kill()
        server.wait(lambda: not any(map(alive, [*next_ones, *started])), "they end")


def test_one_process_has_no_standby():
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "serve", "--in-process", "--standby", "--port", "0"],
        capture_output=True, text=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--standby: with --in-process there is one process alone" in done.stderr
