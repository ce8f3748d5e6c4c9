"""/sleep, /wake_up and /is_sleeping: who may, what groups are asked, and what is waited for."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway, heartbeat

from pipeinfer.gateway import sessions
from pipeinfer.messages import SetSleep
from waiting import until


async def post(gateway: Gateway, path: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient() as http:
        return await http.post(f"{gateway.url}{path}", headers=headers)


async def get(gateway: Gateway, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(f"{gateway.url}{path}")


def beat(gateway: Gateway, level: int, refuses: bool = False) -> None:
    """The group sleeps at `level`; 0: it is awake. refuses: whether its engine keeps in mind that
    requests are refused meanwhile."""
    state = "asleep" if level else "ready"
    gateway.pipeline.feed(heartbeat("engine-0-0", state, can_sleep=1.0, sleep_refuses=refuses))
    gateway.pipeline.feed(heartbeat("scheduler-0", state, running=0, sleep_level=level))


async def started(start_gateway: StartGateway, **settings: object) -> Gateway:
    """A gateway before a group that is awake, and can sleep."""
    gateway = await start_gateway(**settings)
    beat(gateway, 0)
    return gateway


async def asleep(gateway: Gateway, level: int = 1, words: str = "") -> None:
    asked = asyncio.create_task(post(gateway, f"/sleep?level={level}{words}"))
    await until(lambda: len(gateway.pipeline.sleeps) > 0)
    beat(gateway, level)
    assert (await asked).status_code == 200


async def test_it_answers_when_the_group_sleeps_as_deep_as_was_asked(
    start_gateway: StartGateway,
) -> None:
    gateway = await started(start_gateway)
    asked = asyncio.create_task(post(gateway, "/sleep?level=2&mode=keep&wait=false"))
    await until(lambda: len(gateway.pipeline.sleeps) > 0)
    assert gateway.pipeline.sleeps == [SetSleep(2, "keep", refuses=True)]
    for level, refuses in ((1, True), (2, False)):
        beat(gateway, level, refuses)
        await asyncio.sleep(3 * sessions.LOOK_SECONDS)
        assert not asked.done(), (level, refuses)
    beat(gateway, 2, refuses=True)
    answer = await asked
    assert (answer.status_code, answer.content) == (200, b"")
    assert (await get(gateway, "/is_sleeping")).json() == {"is_sleeping": True}
    gateway.pipeline.sleeps.clear()
    woken = asyncio.create_task(post(gateway, "/wake_up?tags=weights&tags=kv_cache"))
    await until(lambda: len(gateway.pipeline.sleeps) > 0)
    assert gateway.pipeline.sleeps == [SetSleep(0)] and not woken.done()
    beat(gateway, 0)
    assert (await woken).status_code == 200
    assert (await get(gateway, "/is_sleeping")).json() == {"is_sleeping": False}


async def test_what_a_stage_may_have_missed_is_asked_again(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REPEAT_SECONDS", 0.05)
    gateway = await started(start_gateway)
    asked = asyncio.create_task(post(gateway, "/sleep"))
    await until(lambda: len(gateway.pipeline.sleeps) > 2)
    beat(gateway, 1)
    assert (await asked).status_code == 200
    assert set(gateway.pipeline.sleeps) == {SetSleep(1)}


async def test_asleep_it_is_healthy_and_not_ready_and_names_its_model(
    start_gateway: StartGateway,
) -> None:
    gateway = await started(start_gateway)
    await asleep(gateway)
    for path, status in (("/health", 200), ("/health/ready", 503), ("/v1/models", 200)):
        answer = await get(gateway, path)
        assert answer.status_code == status, path
        assert answer.json().get("status", "asleep") == "asleep"
    assert 'pipeinfer_sleep_level{group="0"} 1.0' in (await get(gateway, "/metrics")).text


async def test_a_gateway_that_starts_in_front_of_a_group_that_sleeps_can_wake_it(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(ready=False)
    for stage in ("tokenizer-0", "detokenizer-0"):
        gateway.pipeline.feed(heartbeat(stage))
    assert (await post(gateway, "/wake_up")).status_code == 503
    beat(gateway, 1)
    woken = asyncio.create_task(post(gateway, "/wake_up"))
    await until(lambda: len(gateway.pipeline.sleeps) > 0)
    beat(gateway, 0)
    assert (await woken).status_code == 200


async def test_where_keys_are_marked_only_an_operators_puts_a_server_to_sleep(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    def line(name: str, mark: str = "") -> str:
        return f"{name} sha256:{hashlib.sha256(name.encode()).hexdigest()} {mark}\n"

    file = tmp_path / "keys"
    file.write_text(line("client") + line("operator", "admin"))
    gateway = await started(start_gateway, api_key_file=str(file))
    for path in ("/sleep", "/wake_up"):
        assert (await post(gateway, path)).status_code == 401
        answer = await post(gateway, path, "client")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operators_only")
    assert (await get(gateway, "/is_sleeping")).status_code == 401
    asked = asyncio.create_task(post(gateway, "/sleep", "operator"))
    await until(lambda: len(gateway.pipeline.sleeps) > 0)
    beat(gateway, 1)
    assert (await asked).status_code == 200


async def test_an_engine_that_cannot_give_its_memory_back_is_not_asked(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway()
    for stats, refusal in (({}, (503, "starting")), ({"can_sleep": 0.0}, (501, "cannot_sleep"))):
        gateway.pipeline.feed(heartbeat("engine-0-0", **stats))
        answer = await post(gateway, "/sleep")
        assert (answer.status_code, answer.json()["error"]["code"]) == refusal
    assert not gateway.pipeline.sleeps
