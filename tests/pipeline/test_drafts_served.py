"""A server with a draft model, which is the model itself: streams, an engine that is killed,
metrics."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from leftovers import statistics
from streams import TRIES

from held_processes import HeldProcesses
from pipeinfer.demo import copy_task
from pipeinfer.settings import DEMO
from servers import Server

STREAMS, TOKENS, PAGE = 6, 250, 16
DRAFTED, ACCEPTED = "pipeinfer_draft_tokens_total", "pipeinfer_accepted_draft_tokens_total"


@pytest.fixture(scope="module")
def server():
    with Server("--speculate", DEMO, "--kv-pages", "600", "--page-size", str(PAGE)) as running:
        yield running


def ask(server: Server, number: int) -> dict:
    body = {
        "prompt": copy_task(random.Random(number), 40)[0], "temperature": 0.8 * (number % 2),
        "seed": number, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(server: Server, pool: ThreadPoolExecutor) -> list[Future[dict]]:
    return [pool.submit(ask, server, number) for number in range(STREAMS)]


def texts(answers: list[Future[dict]]) -> list[tuple[str, int, int]]:
    found = []
    for answer in answers:
        [choice], usage = answer.result()["choices"], answer.result()["usage"]
        tokens = len(choice["logprobs"]["token_logprobs"])
        found.append((choice["text"], tokens, usage["completion_tokens"]))
    return found


def values(server: Server, *names: str) -> list[list[float]]:
    """Of metrics with labels, all of one scrape."""
    lines = server.get("/metrics")[1].splitlines()
    return [
        [float(line.split()[-1]) for line in lines if line.startswith(name + "{")] for name in names
    ]


def mostly_right(server: Server, before: float) -> bool:
    """Whether more than `before` drafts were told of, and most of all were accepted."""
    [drafted], accepted = values(server, DRAFTED, ACCEPTED)
    return drafted > before and drafted >= sum(accepted) > 0.8 * drafted


def killed_amid(server: Server, pool: ThreadPoolExecutor) -> list[Future[dict]]:
    """Answers whose engine was killed when it had made a good part of them.

    It computes for moments only, since a busy machine may let all of them end before the kill."""
    for _ in range(TRIES):
        victim, before = server.pid("engine"), server.metric("pipeinfer_generated_tokens_total")

        def made() -> float:
            """A share of all tokens."""
            now = server.metric("pipeinfer_generated_tokens_total")
            return (now - before) / (STREAMS * TOKENS)  # noqa: B023

        with HeldProcesses(victim) as engine:
            answers = asked(server, pool)
            engine.compute_until(lambda: made() > 0.25)
            amid = made() < 0.75
            if amid:
                os.kill(victim, signal.SIGKILL)
        if amid:
            return answers
        texts(answers)
    raise AssertionError("all answers were there too soon")


def test_streams_go_on_with_the_same_tokens_when_their_engine_is_killed(server):
    victim = server.pid("engine")
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = texts(asked(server, pool))
        assert [(n, m) for _, n, m in undisturbed] == [(TOKENS, TOKENS)] * STREAMS
        server.wait(lambda: mostly_right(server, 0), "the metrics have come")
        [drafted], by_position = values(server, DRAFTED, ACCEPTED)
        assert len(by_position) == 4 and by_position[0] >= by_position[-1] > 0
        assert texts(killed_amid(server, pool)) == undisturbed
        # Also of those that an engine has verified which found the pages of the one before.
        server.wait(lambda: mostly_right(server, drafted + STREAMS), "drafts are right again")
    server.wait(lambda: server.pid("engine") != victim, "the gateway has heard of it")
    # At most one page and what was under way is computed again of each.
    again = statistics(server, "scheduler-0")["recomputed_tokens_total"]
    assert 0 < again <= STREAMS * (PAGE + 2 * 5)
