"""A server with a draft model, which is the model itself: streams, an engine that is killed,
metrics."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from pipeinfer.demo import copy_task
from pipeinfer.settings import DEMO
from servers import Server

STREAMS, TOKENS, PAGE = 6, 250, 16


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


def values(server: Server, name: str) -> list[float]:
    """Of a metric with labels."""
    lines = server.get("/metrics")[1].splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(name + "{")]


def test_streams_go_on_with_the_same_tokens_when_their_engine_is_killed(server):
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = texts(asked(server, pool))
        assert [(n, m) for _, n, m in undisturbed] == [(TOKENS, TOKENS)] * STREAMS
        accepted = "pipeinfer_accepted_draft_tokens_total"
        server.wait(lambda: sum(values(server, accepted)) > 0, "the metrics have come")
        by_position = values(server, accepted)
        assert len(by_position) == 4 and by_position[0] >= by_position[-1] > 0
        [drafted] = values(server, "pipeinfer_draft_tokens_total")
        assert drafted >= sum(by_position) > 0.8 * drafted
        produced = server.metric("pipeinfer_generated_tokens_total")
        running, victim = asked(server, pool), server.pid("engine")
        server.wait(
            lambda: (
                server.metric("pipeinfer_generated_tokens_total") > produced + STREAMS * TOKENS / 4
            ),
            "a good part of them is there",
        )
        os.kill(victim, signal.SIGKILL)
        assert texts(running) == undisturbed
        # Also of those that an engine has verified which found the pages of the one before.
        begun = drafted + STREAMS

        def mostly_right() -> bool:
            [now] = values(server, "pipeinfer_draft_tokens_total")
            return now > begun and sum(values(server, accepted)) > 0.8 * now

        server.wait(mostly_right, "drafts are right after the kill")
    assert server.pid("engine") != victim
    # At most one page and what was under way is computed again of each.
    again = sum(values(server, "pipeinfer_recomputed_tokens_total"))
    assert 0 < again <= STREAMS * (PAGE + 2 * 5)
