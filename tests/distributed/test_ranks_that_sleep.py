"""Ranks of a group, and groups, sleep and wake together, whatever they were doing."""

from __future__ import annotations

import os
import signal

import pytest
from chat_streams import Chats, questions

from servers import Server, fetch

ASKED = questions(4)
TOKENS = 100


@pytest.fixture(scope="module", params=[("--tp", "2"), ("--dp", "2")], ids=" ".join)
def server(request):
    with Server(*request.param, "--kv-pages", "400", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server):
    return Chats(server, ASKED, TOKENS).run()


def post(server: Server, path: str) -> None:
    status, text = fetch(server.url + path, b"")
    assert (status, text) == (200, ""), text


def states(server: Server) -> dict[tuple, str]:
    rows = server.health()["stages"]
    return {
        (row["name"], row["group"], row["rank"]): row["state"]
        for row in rows
        if row["name"] in ("engine", "scheduler")
    }


def all_are(server: Server, state: str) -> bool:
    return set(states(server).values()) == {state}


def test_streams_go_on_after_a_sleep_in_their_midst(server, undisturbed):
    def sleep_and_wake() -> None:
        post(server, "/sleep?level=2&mode=keep")
        server.wait(lambda: all_are(server, "asleep"), "all sleep")
        post(server, "/wake_up")
        server.wait(lambda: all_are(server, "ready"), "all are awake")

    assert Chats(server, ASKED, TOKENS).run(sleep_and_wake) == undisturbed


def test_a_rank_that_dies_asleep_comes_back_asleep_with_all(server, undisturbed):
    post(server, "/sleep?level=1")
    server.wait(lambda: all_are(server, "asleep"), "all sleep")
    victim = [row for row in server.health()["stages"] if row["name"] == "engine"][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    server.wait(lambda: not all_are(server, "asleep"), "the loss is known")
    server.wait(lambda: all_are(server, "asleep"), "all sleep again")
    post(server, "/wake_up")
    assert Chats(server, ASKED, TOKENS).run() == undisturbed
