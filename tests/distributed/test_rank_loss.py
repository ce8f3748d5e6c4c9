"""Ranks that are killed or hang: their group starts anew by itself, and every stream goes on. And
ranks that nobody disturbs agree, whatever forms are asked for."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
from chat_streams import Chats, engines, hurt, questions

from grammars.costly_grammars import LATE, late_growing
from servers import Server

WATCHDOG = 8  # seconds; on a busy machine a restart may take longer, and is begun anew then
ASKED = questions(6)
TOKENS, PAGE = 90, 16


@pytest.fixture(scope="module")
def server():
    with Server(
        "--tp", "2", "--kv-pages", "400", "--threads", "1", "--watchdog", str(WATCHDOG),
        "--grammar-cache-mib", "5",
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


@pytest.mark.parametrize(
    ("rank", "how", "freeze", "said"),
    [
        (1, signal.SIGKILL, False, "engine rank 1: its process ended (SIGKILL)"),
        (0, signal.SIGKILL, True, "engine rank 0: its process ended (SIGKILL)"),
        (1, signal.SIGSTOP, False, f"in {WATCHDOG} s"),
    ],
    ids=["rank-1-killed", "rank-0-killed-while-rank-1-hangs", "rank-1-hangs"],
)
def test_streams_survive_a_rank_that_is_lost(server, undisturbed, rank, how, freeze, said):
    before, reasons = len(server.log), set()
    texts = Chats(server, ASKED, TOKENS).run(
        lambda: reasons.update(hurt(server, rank, how, freeze_others=freeze))
    )
    assert texts == undisturbed
    if sample(server, "pipeinfer_takeovers_total") == 1:  # pages outlive a first loss alone
        recomputed = sample(server, "pipeinfer_recomputed_tokens_total")
        assert 0 < recomputed <= len(ASKED) * (PAGE + 4), "a page and two steps of each"
    log = server.log[before:]
    late = [line for line in log if f"in {WATCHDOG} s; restarting" in line]
    assert late or any(said in line for line in log), "\n".join(log)
    # The reason stays until the ranks are back.
    assert late or any(said in reason for reason in reasons), reasons
    ends = [line for line in log if "starting it again" in line]
    if freeze:  # the death of one ends them all, long before the scheduler loses patience
        other = next(n for n, line in enumerate(log) if "engine-0-1 ended (SIGKILL)" in line)
        assert not any("restarting its engines" in line for line in log[:other]), "\n".join(log)
    if len(late) <= (how == signal.SIGSTOP):
        assert len(ends) == len(engines(server)), f"every rank is started once more: {ends}"


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
