"""Sleep and waking of a whole server: memory is really given back, nobody's answer is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from swaps import swap

from held_processes import HeldProcesses, held_engines
from pipeinfer.demo import copy_task
from servers import Server, memfds

QUESTION = copy_task(random.Random(21), 40)[0]
TOKENS = 30


@pytest.fixture(scope="module")
def server():
    with Server("--kv-pages", "2000") as running:
        yield running


def post(server: Server, path: str, seconds: float = 60) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", timeout=seconds)


def ask(server: Server, question: str = QUESTION, tokens: int = TOKENS, **more) -> dict:
    body = {"prompt": question, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(answer: dict) -> str:
    return answer["choices"][0]["text"]


def sleeps(server: Server) -> bool:
    return httpx.get(f"{server.url}/is_sleeping", timeout=30).json()["is_sleeping"]


def fall_asleep(server: Server, level: int = 1, **query) -> None:
    words = "&".join(f"{name}={value}" for name, value in {"level": level, **query}.items())
    answer = post(server, f"/sleep?{words}")
    assert (answer.status_code, answer.content) == (200, b"")
    assert sleeps(server) and server.health()["status"] == "asleep"


def wake_up(server: Server) -> None:
    answer = post(server, "/wake_up")
    assert (answer.status_code, answer.content) == (200, b"")
    assert not sleeps(server) and server.health()["status"] == "ready"


def pool_bytes(server: Server) -> int:
    """Real memory of the engine's pool, its largest memfd."""
    return max(memfds(server.pid("engine")), key=lambda stat: stat.st_size).st_blocks * 512


@pytest.mark.parametrize("level", [1, 2])
def test_pages_and_weights_are_given_back_and_texts_are_the_same_afterwards(server, level):
    before = ask(server)
    pool = pool_bytes(server)
    fall_asleep(server, level)
    assert pool_bytes(server) == 0 < pool
    wake_up(server)
    after = ask(server)
    assert text(after) == text(before)
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(server)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_requests_that_come_meanwhile_wait(server):
    expected = text(ask(server))
    fall_asleep(server)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, server) for _ in range(5)]
        server.wait(lambda: server.metric("pipeinfer_requests_waiting") == 5, "they wait")
        wake_up(server)
        assert [text(one.result()) for one in waiting] == [expected] * 5


def test_what_comes_meanwhile_is_refused_if_so_asked(server):
    fall_asleep(server, wait="false")
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 503 and answer.headers["Retry-After"]
    assert answer.json()["error"]["code"] == "asleep"
    fall_asleep(server)  # asked again, and otherwise
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, server)
        server.wait(lambda: server.metric("pipeinfer_requests_waiting") == 1, "it waits")
        wake_up(server)
        assert waiting.result()["usage"]["completion_tokens"] == TOKENS


LONG = 250  # tokens of an answer that runs when the server is put to sleep
ANSWER = {"prompt": QUESTION, "temperature": 0, "max_tokens": LONG, "ignore_eos": True}


def begun(
    server: Server, pool: ThreadPoolExecutor, engines: HeldProcesses, many: int = 1
) -> list[Future[tuple[str, str]]]:
    """The text and the end of each, when all have begun."""
    events = [threading.Event() for _ in range(many)]

    def read(event: threading.Event) -> tuple[str, str]:
        said, url = "", f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json={**ANSWER, "stream": True}, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    said += choice["text"]
                    event.set()
                    if choice["finish_reason"]:
                        return said, choice["finish_reason"]
        raise AssertionError(f"no end behind {said!r}")

    asked = [pool.submit(read, event) for event in events]
    engines.compute_until(lambda: all(event.is_set() for event in events))
    return asked


@pytest.fixture(scope="module")
def undisturbed(server) -> str:
    return text(ask(server, tokens=LONG))


def test_requests_that_run_are_answered_first(server, undisturbed):
    with ThreadPoolExecutor() as pool, held_engines(server) as engines:
        [first] = begun(server, pool, engines)
        sleep = pool.submit(fall_asleep, server)
        engines.release()
        assert first.result() == (undisturbed, "length")
        sleep.result()
        wake_up(server)


def scheduler_state(server: Server) -> str:
    return next(row["state"] for row in server.health()["stages"] if row["name"] == "scheduler")


def test_or_go_on_at_waking(server, undisturbed):
    with ThreadPoolExecutor() as pool, held_engines(server) as engines:
        asked = begun(server, pool, engines, 4)
        sleep = pool.submit(fall_asleep, server, level=2, mode="keep")
        server.wait(lambda: scheduler_state(server) == "waiting", "it waits for its engine")
        engines.release()
        sleep.result()
        assert not any(one.done() for one in asked)
        wake_up(server)
        assert [one.result() for one in asked] == [(undisturbed, "length")] * 4


def test_or_end_with_what_they_have(server, undisturbed):
    with ThreadPoolExecutor() as pool, held_engines(server) as engines:
        [asked] = begun(server, pool, engines)
        sleep = pool.submit(fall_asleep, server, mode="abort")
        said, finish = asked.result()
        engines.release()
        sleep.result()
        assert finish == "abort"
        assert undisturbed.startswith(said) and len(said) < len(undisturbed)
        wake_up(server)


def kill(server: Server, *stages: str) -> None:
    """Kills them at once, and waits until others have taken their places."""
    pids = {stage: server.pid(stage) for stage in stages}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    server.wait(lambda: all(server.pid(stage) != pid for stage, pid in pids.items()), "others come")


def all_asleep(server: Server) -> bool:
    health = server.health()
    states = {row["name"]: row["state"] for row in health["stages"]}
    return states["engine"] == states["scheduler"] == health["status"] == "asleep"


@pytest.mark.parametrize(
    ("stages", "level"),
    [
        (["engine"], 2),
        (["scheduler"], 2),
        (["tokenizer", "scheduler", "engine", "detokenizer"], 1),
    ],
)
def test_who_comes_back_is_asleep(server, stages, level):
    expected = text(ask(server))
    fall_asleep(server, level)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, server)
        server.wait(lambda: server.metric("pipeinfer_requests_waiting") == 1, "it waits")
        kill(server, *stages)
        server.wait(lambda: all_asleep(server), "all sleep again")
        assert sleeps(server) and not waiting.done() and pool_bytes(server) == 0
        assert f'pipeinfer_sleep_level{{group="0"}} {level}.0' in server.get("/metrics")[1]
        wake_up(server)
        assert text(waiting.result()) == expected


def test_who_comes_back_awake_is_awake(server):
    expected = text(ask(server))
    fall_asleep(server)
    wake_up(server)
    kill(server, "scheduler")
    assert text(ask(server)) == expected


def test_whoever_comes_back_refuses_what_it_was_told_to_refuse(server):
    fall_asleep(server)
    fall_asleep(server, wait="false")
    kill(server, "scheduler", "engine")
    server.wait(lambda: all_asleep(server), "all sleep again")
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
    wake_up(server)


def test_who_was_woken_while_nobody_was_there_is_awake(server):
    fall_asleep(server)
    before = {stage: server.pid(stage) for stage in ("scheduler", "engine")}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wake_up(server)
    assert all(server.pid(stage) != pid for stage, pid in before.items())
    assert ask(server)["usage"]["completion_tokens"] == TOKENS


def test_a_sleeping_gateway_that_comes_back_wakes_the_others(server):
    fall_asleep(server)
    before = server.pid("gateway")
    os.kill(before, signal.SIGKILL)
    server.wait(lambda: server.pid("gateway") != before, "another comes")
    server.wait(lambda: server.health()["status"] == "asleep", "it knows")
    wake_up(server)
    assert ask(server)["usage"]["completion_tokens"] == TOKENS


def test_an_engine_is_swapped_while_it_sleeps(server):
    fall_asleep(server)
    before = server.pid("engine")
    done = swap(server, "engine")
    assert done.returncode == 0, done.stderr
    server.wait(lambda: server.pid("engine") != before, "the gateway heard of it")
    server.wait(lambda: all_asleep(server), "it sleeps, too")
    wake_up(server)
    assert ask(server)["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize(
    "path",
    ["/sleep?level=0", "/sleep?level=3", "/sleep?mode=soon", "/sleep?wait=no", "/wake_up?tags=kv"],
)
def test_what_nobody_can_do_is_refused(server, path):
    answer = post(server, path)
    assert answer.status_code == 400, answer.text
    assert not sleeps(server)


def test_a_server_that_sleeps_ends_at_once(server):
    """The last test of this server."""
    fall_asleep(server)
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "max_tokens": 9}
        waiting = pool.submit(server.post, "/v1/completions", body)
        server.wait(lambda: server.metric("pipeinfer_requests_waiting") == 1, "it waits")
        assert server.stop(30) == 0
        status, answer = waiting.result()
        assert (status, answer["error"]["code"]) == (503, "draining")
