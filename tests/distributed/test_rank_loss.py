"""Ranks that are killed: their group starts anew by itself, every stream goes on, and a group that
sleeps sleeps on. And ranks that nobody disturbs agree, whatever forms are asked for."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
from chat_streams import Chats, engines, hurt, questions

from grammars.costly_grammars import LATE, late_growing
from servers import Server, fetch

ASKED = questions(5)
TOKENS, PAGE = 60, 16


@pytest.fixture(scope="module")
def server():
    with Server(
        "--tp", "2", "--kv-pages", "400", "--threads", "1", "--grammar-cache-mib", "5",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def undisturbed(server):
    return Chats(server, ASKED, TOKENS).run()


def sample(server, name) -> float:
    """The value of a metric of the only group."""
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}{{"))


def test_streams_survive_a_rank_that_is_killed_while_another_hangs(server, undisturbed):
    before, reasons, pids = len(server.log), set(), engines(server)

    def kill() -> None:
        reasons.update(hurt(server, 0, signal.SIGKILL, freeze_others=True, before=pids))

    texts = Chats(server, ASKED, TOKENS).run(kill)
    assert texts == undisturbed
    if sample(server, "pipeinfer_takeovers_total") == 1:  # pages outlive a first loss alone
        recomputed = sample(server, "pipeinfer_recomputed_tokens_total")
        assert 0 < recomputed <= len(ASKED) * (PAGE + 4), "a page and two steps of each"

    def all_started_again() -> bool:
        begun = sum("starting it again" in line for line in server.log[before:])
        return begun >= len(engines(server))

    server.wait(all_started_again, "the log says that all ranks were started again")
    said, log = "engine rank 0: its process ended (SIGKILL)", server.log[before:]
    assert any(said in line for line in log), "\n".join(log)
    assert any(said in reason for reason in reasons), reasons  # it stays until the ranks are back
    # The death of one ends them all, long before the scheduler loses patience.
    other = next(n for n, line in enumerate(log) if "engine-0-1 ended (SIGKILL)" in line)
    assert not any("restarting its engines" in line for line in log[:other]), "\n".join(log)
    assert sum("starting it again" in line for line in log) == len(engines(server))


FORMS = [  # each with what a whole answer matches
    ({"grammar": LATE}, "Z+[a-z]*"),
    ({"grammar": late_growing("a")}, "Z+[a-z]*"),
    ({"grammar": late_growing("b")}, "Z+[a-z]*"),
    ({"choice": ["apples", "pears"]}, "apples|pears"),
    ({"json": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}}, r"\[[12, ]*\]?"),
]


def test_ranks_agree_on_costly_forms_and_on_those_that_fail(server):
    """The memory for grammars is too small for all of them, and some come to a limit."""

    def ask(at: int) -> tuple[int, dict]:
        body = {"prompt": ASKED[at], "max_tokens": 12, "seed": at, "temperature": 0.8 * (at % 2)}
        form = {"structured_outputs": FORMS[at][0], "logit_bias": {"90": 100.0 * (at < 3)}}
        return server.post("/v1/completions", {"model": "pipeinfer-demo", **body, **form})

    before, log = engines(server), len(server.log)
    with ThreadPoolExecutor(len(FORMS)) as pool:
        rounds = [list(pool.map(ask, range(len(FORMS)))) for _ in range(2)]
    for answers in rounds:
        for (_, pattern), (status, answer) in zip(FORMS, answers, strict=True):
            if status == 200:
                assert re.fullmatch(pattern, answer["choices"][0]["text"]), (pattern, answer)
            else:
                assert "grammar" in answer["error"]["message"], answer
    assert engines(server) == before
    assert not any("differ" in line or "restarting" in line for line in server.log[log:])


def post(server: Server, path: str) -> None:
    status, text = fetch(server.url + path, b"")
    assert (status, text) == (200, ""), text


def all_asleep(server: Server) -> bool:
    rows = server.health()["stages"]
    return {row["state"] for row in rows if row["name"] in ("engine", "scheduler")} == {"asleep"}


def test_a_rank_that_dies_asleep_comes_back_asleep_with_all(server, undisturbed):
    post(server, "/sleep?level=1")
    server.wait(lambda: all_asleep(server), "all sleep")
    before = engines(server)
    os.kill(before[1], signal.SIGKILL)

    def all_asleep_again() -> bool:
        now = engines(server)
        others = now.keys() == before.keys() and not {*now.values()} & {*before.values()}
        return others and all_asleep(server)

    server.wait(all_asleep_again, "all ranks are others, and sleep")
    post(server, "/wake_up")
    assert Chats(server, ASKED, TOKENS).run() == undisturbed
