"""Named keys and their limits over HTTP: 429, headers, metrics, and a file that is read again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from pathlib import Path

import httpx
import openai
import pytest
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient

from pipeinfer.messages import TextRow
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import pack
from waiting import until


def line(name: str, text: str, limits: str = "") -> str:
    return f"{name} sha256:{hashlib.sha256(text.encode()).hexdigest()} {limits}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.txt"


async def ask(gateway: Gateway, key: str, prompt: object = "a b c") -> httpx.Response:
    async with httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {key}"}
        url = f"{gateway.url}/v1/completions"
        return await http.post(url, json={"prompt": prompt}, headers=headers)


async def metrics(gateway: Gateway) -> dict[str, float]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{gateway.url}/metrics")).text
    return {k: float(v) for k, v in re.findall(r"^pipeinfer_(key\S+) (\S+)$", text, re.MULTILINE)}


def limited(response: httpx.Response) -> int:
    """Its Retry-After, 0 if there is none."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    return int(response.headers.get("retry-after", 0))


async def test_a_key_that_has_too_many_requests_running_waits_and_others_do_not(
    start_gateway: StartGateway, file: Path
) -> None:
    file.write_text(line("greedy", "g", "concurrent=2") + line("other", "o"))
    gateway = await start_gateway(api_key_file=str(file))
    running = [asyncio.create_task(ask(gateway, "g", "hang")) for _ in range(2)]
    await until(lambda: len(gateway.pipeline.submits) == 2)
    assert limited(await ask(gateway, "g")) == 1
    assert limited(await ask(gateway, "g", ["a"] * 3)) == 1
    assert (await ask(gateway, "o")).status_code == 200
    running[0].cancel()  # its client leaves
    await until(lambda: gateway.pipeline.gone)
    assert (await ask(gateway, "g")).status_code == 200
    name = gateway.pipeline.submits[1].request_id
    gateway.pipeline.rows(TextRow(name, 1, "x", 0, 0, pack([1]), "stop", None, 1))
    assert (await running[1]).status_code == 200
    assert (await ask(gateway, "g", ["a", "b"])).status_code == 200
    assert limited(await ask(gateway, "g", ["a", "b", "c"])) == 0, "it never may"
    assert (await ask(gateway, "g")).status_code == 200, "what was refused is not running"
    seen = await metrics(gateway)
    assert seen['key_requests_total{key="greedy",outcome="limited"}'] == 3
    assert seen['key_requests_total{key="greedy",outcome="abort"}'] == 1
    assert seen['key_requests_total{key="greedy",outcome="ok"}'] == 4
    assert seen['key_requests_total{key="other",outcome="ok"}'] == 1


async def test_requests_a_minute_count_each_prompt_and_say_when_to_come_again(
    start_gateway: StartGateway,
) -> None:
    gateway, begun = await start_gateway(api_key="k", key_requests_per_minute=6), time.monotonic()

    def passed() -> float:
        """Seconds, and one more to round."""
        return time.monotonic() - begun + 1

    first = await ask(gateway, "k", ["a", "b"])
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "6"
    assert first.headers["x-ratelimit-remaining-requests"] == "4"
    assert "x-ratelimit-limit-tokens" not in first.headers
    wait = limited(await ask(gateway, "k", ["a"] * 5))
    assert 10 - passed() < wait <= 10, "one more of six a minute"
    assert len(gateway.pipeline.submits) == 2, "nothing of it was opened"
    for _ in range(4):
        assert (await ask(gateway, "k")).status_code == 200
    last = await ask(gateway, "k")
    assert 10 - passed() < limited(last) <= 10
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    assert limited(await ask(gateway, "k", ["a"] * 7)) > 0, "it is refused before it is read"
    async with httpx.AsyncClient() as http:
        models = await http.get(f"{gateway.url}/v1/models", headers={"authorization": "Bearer k"})
    assert models.status_code == 200, "only what runs is counted"


async def test_tokens_are_taken_as_they_come_and_then_requests_wait(
    start_gateway: StartGateway, file: Path
) -> None:
    """Six tokens a minute; each request has three of prompt and three of output."""
    file.write_text(line("a", "a", "tokens=6") + line("b", "b"))
    gateway = await start_gateway(api_key_file=str(file))
    client, begun = gateway.client("a"), time.monotonic()
    stream = await client.completions.create(model="test", prompt="pause here", stream=True)
    await anext(stream)  # two tokens of prompt, one of output: three are left
    assert (await ask(gateway, "a")).status_code == 200  # takes six: the level is below zero
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model="test", prompt="x")
    wait = int(caught.value.response.headers["retry-after"])
    assert 39 - (time.monotonic() - begun) < wait <= 40, "three below zero, and one to begin with"
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    assert (await ask(gateway, "b")).status_code == 200
    name = gateway.pipeline.submits[0].request_id
    gateway.pipeline.rows(TextRow(name, 1, "here ", 6, 1, pack([1]), "stop", None, 2))
    assert [c.choices[0].text async for c in stream] == ["here "], "what runs goes on"
    seen = await metrics(gateway)
    assert seen['key_tokens_total{key="a",kind="prompt"}'] == 5
    assert seen['key_tokens_total{key="a",kind="output"}'] == 5
    assert seen['key_tokens_total{key="b",kind="output"}'] == 3


async def test_without_keys_all_clients_together_are_limited(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(key_concurrent=1)
    waiting = asyncio.create_task(ask(gateway, "whoever", "hang"))
    await until(lambda: gateway.pipeline.submits)
    assert limited(await ask(gateway, "somebody else")) == 1
    assert (await metrics(gateway))['key_requests_total{key="anonymous",outcome="limited"}'] == 1
    waiting.cancel()


async def test_key_and_limits_are_checked_before_a_byte_of_the_body_is_read(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(api_key="k", key_requests_per_minute=1)
    assert (await ask(gateway, "k")).status_code == 200
    for key, status in (("wrong", b"401"), ("k", b"429")):
        client = await RawClient.connect(gateway)
        head = f"Host: x\r\nContent-Length: 1000\r\nAuthorization: Bearer {key}\r\n\r\n"
        client.send(f"POST /v1/completions HTTP/1.1\r\n{head}".encode())
        answer = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 60)
        assert answer.startswith(b"HTTP/1.1 " + status)
        await client.close()


async def test_a_file_that_is_read_again_lets_others_in_and_what_runs_goes_on(
    start_gateway: StartGateway, file: Path
) -> None:
    file.write_text(line("old", "o") + line("kept", "k", "requests=3"))
    gateway = await start_gateway(api_key_file=str(file))
    running = asyncio.create_task(ask(gateway, "o", "hang"))
    await until(lambda: gateway.pipeline.submits)
    assert (await ask(gateway, "k")).headers["x-ratelimit-remaining-requests"] == "2"
    file.write_text(line("new", "n") + line("kept", "k2", "requests=4"))
    assert gateway.reload is not None
    gateway.reload()
    statuses = [(await ask(gateway, key)).status_code for key in ("o", "k", "n")]
    assert statuses == [401, 401, 200]
    kept = await ask(gateway, "k2")
    assert kept.headers["x-ratelimit-remaining-requests"] == "2", "one of three, now of four"
    name = gateway.pipeline.submits[0].request_id
    gateway.pipeline.rows(TextRow(name, 1, "x", 0, 0, pack([1]), "stop", None, 1))
    assert (await running).status_code == 200
    assert (await metrics(gateway))['key_requests_total{key="old",outcome="ok"}'] == 1


@pytest.mark.parametrize("content", [None, "", "# nobody\n", "SECRET word\n"])
async def test_a_broken_file_keeps_the_old_keys_and_says_so_once(
    start_gateway: StartGateway,
    file: Path,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
) -> None:
    file.write_text(line("a", "a"))
    gateway = await start_gateway(api_key_file=str(file))
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert gateway.reload is not None
    gateway.reload()
    [error] = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert str(file) in error.getMessage() and "SECRET" not in caplog.text
    assert (await ask(gateway, "a")).status_code == 200
    assert (await ask(gateway, "SECRET")).status_code == 401


async def test_a_broken_file_at_the_start_is_a_wrong_configuration(
    start_gateway: StartGateway, file: Path
) -> None:
    file.write_text("a sha256:SECRET")
    with pytest.raises(ConfigurationError, match=r"keys\.txt: line 1: after the name"):
        await start_gateway(api_key_file=str(file))


async def test_a_key_stands_in_no_metric_log_or_answer(
    start_gateway: StartGateway, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file.write_text(line("a", "pik-s3cret"))
    gateway = await start_gateway(api_key_file=str(file))
    said = []
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for key in ("pik-s3cret", "pik-s3cret-wrong"):
            headers = {"authorization": f"Bearer {key}"}
            for body in ({"prompt": "a"}, {"prompt": 1}):
                response = await http.post("/v1/completions", json=body, headers=headers)
                said.append(response.text + str(response.headers))
        said += [(await http.get(path)).text for path in ("/metrics", "/health")]
    whole = "".join(said) + "\n".join(
        r.getMessage() for r in caplog.records if r.name.startswith(("pipeinfer", "aiohttp"))
    )
    assert "s3cret" not in whole
    assert hashlib.sha256(b"pik-s3cret").hexdigest() not in whole
