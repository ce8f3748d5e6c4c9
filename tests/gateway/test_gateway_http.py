"""The HTTP side over real connections, mostly through the official client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest
from gateway_pipeline import STAGES, Gateway, StartGateway, heartbeat

from pipeinfer.core import Drain
from pipeinfer.messages import TextRow
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import pack

PROMPT = "one two three vier fünf 🦀"
ANSWER = "one two three vier fünf 🦀 "


def user(content: str) -> Any:
    return [{"role": "user", "content": content}]


async def sse(gateway: Gateway, path: str, body: dict[str, Any]) -> list[str]:
    """The data of all events of a stream."""
    async with httpx.AsyncClient() as http:
        response = await http.post(f"{gateway.url}{path}", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def test_chat_answers_at_once_or_as_a_stream_with_the_same_text(gateway: Gateway) -> None:
    client = gateway.client()
    whole = await client.chat.completions.create(model="test", messages=user(PROMPT))
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
    [choice] = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 6)
    assert (whole.usage.total_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (12, 2)
    stream = await client.chat.completions.create(model="test", messages=user(PROMPT), stream=True)
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends == [None] * 6 + ["stop"]
    assert chunks[-1].choices[0].delta.content == "🦀 ", "the end comes with the last text"


async def test_a_stream_ends_with_usage_if_asked_and_done(gateway: Gateway) -> None:
    body = {"messages": user("a b"), "stream_options": {"include_usage": True}}
    events = await sse(gateway, "/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    *chunks, last = [json.loads(event) for event in events[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert last["object"] == "chat.completion.chunk" and last["model"] == "test"
    events = await sse(gateway, "/v1/chat/completions", {"messages": user("a b")})
    assert "usage" not in "".join(events)


async def test_several_prompts_give_several_choices(gateway: Gateway) -> None:
    client = gateway.client()
    prompts = ["a b c", "d", "e f"]
    whole = await client.completions.create(model="test", prompt=prompts, max_tokens=2)
    assert [(c.index, c.text, c.finish_reason) for c in whole.choices] == [
        (0, "a b ", "length"),
        (1, "d ", "stop"),
        (2, "e f ", "length"),
    ]
    assert whole.usage is not None and whole.usage.completion_tokens == 5
    stream = await client.completions.create(
        model="test", prompt=[[7, 8], [9]], stream=True, stream_options={"include_usage": True}
    )
    texts, ends, usage = ["", ""], {}, None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == ["7 8 ", "9 "] and ends == {0: "stop", 1: "stop"}
    assert usage is not None and usage.prompt_tokens == 3


async def test_200_streams_at_once_are_complete_and_not_mixed(gateway: Gateway) -> None:
    client = gateway.client()

    async def one(i: int) -> str:
        prompt = " ".join(f"{i}.{k}" for k in range(10))
        stream = await client.chat.completions.create(
            model="test", messages=user(prompt), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(one(i) for i in range(200)))
    assert texts == ["".join(f"{i}.{k} " for k in range(10)) for i in range(200)]
    assert gateway.core.idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": "a"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": "refuse me"}, 400, "prompt"),
        ("/v1/completions", {"prompt": "refuse me", "stream": True}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "model": "gpt"}, 404, "model"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/nothing", {}, 404, None),
        ("/nothing%ff\u00e9", {}, 404, None),
        ("/v1/models", {}, 405, None),
    ],
)
async def test_errors_have_the_json_form_of_openai(
    gateway: Gateway, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with httpx.AsyncClient() as http:
        response = await http.post(gateway.url + path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["param"] == param
    assert response.headers["x-request-id"]
    assert gateway.core.idle()


async def test_the_client_raises_the_matching_error(gateway: Gateway) -> None:
    client = gateway.client()
    with pytest.raises(openai.BadRequestError, match="too long") as caught:
        await client.completions.create(model="test", prompt="refuse")
    assert caught.value.param == "prompt" and caught.value.code == "length"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")


async def test_one_failed_prompt_of_several_fails_the_request_and_aborts_the_rest(
    gateway: Gateway,
) -> None:
    with pytest.raises(openai.BadRequestError):
        await gateway.client().completions.create(model="test", prompt=["hang", "refuse"])
    abort = await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert abort.request_id.endswith("-0") and gateway.core.idle()


async def test_a_stream_that_breaks_says_so_and_ends(gateway: Gateway) -> None:
    events = await sse(gateway, "/v1/completions", {"prompt": "break now"})
    assert json.loads(events[0])["choices"][0]["text"] == "break "
    assert json.loads(events[-1])["error"]["message"] == "the engine is on fire"
    assert len(events) == 2, "no [DONE] after an error"
    with pytest.raises(openai.InternalServerError, match="on fire"):
        await gateway.client().completions.create(model="test", prompt="break now")
    with pytest.raises(openai.APIError, match="on fire"):
        stream = await gateway.client().completions.create(
            model="test", prompt="break now", stream=True
        )
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["hang", "pause here"])
async def test_a_client_that_leaves_is_noticed_at_once(
    gateway: Gateway, prompt: str, stream: bool
) -> None:
    """Also before any output, where nothing that is written could tell."""
    body = json.dumps({"prompt": prompt, "stream": stream}).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream and prompt != "hang":
        await reader.readuntil(b"pause ")
    while not gateway.pipeline.submits:
        await asyncio.sleep(0.001)
    assert not gateway.core.idle()
    writer.close()
    abort = await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert abort.request_id == gateway.pipeline.submits[0].request_id
    assert gateway.core.idle()


async def test_a_cancelled_stream_of_the_official_client_is_aborted(gateway: Gateway) -> None:
    stream = await gateway.client().chat.completions.create(
        model="test", messages=user("pause here"), stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert gateway.core.idle()


async def test_a_client_that_never_reads_is_hung_up(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = b'{"prompt": "pause here", "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"pause ")
    name, text, offset = gateway.pipeline.submits[0].request_id, "x" * 2**20, len("pause ")
    for i in range(64):
        gateway.pipeline.rows(TextRow(name, 1, text, offset + i * len(text), 1 + i, pack([1])))
        await asyncio.sleep(0)
        if gateway.core.idle():
            break
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert gateway.core.idle()
    writer.close()


async def test_http_1_0_streams_without_chunked_framing(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "a b", "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    raw = await asyncio.wait_for(reader.read(), 60)
    headers, _, content = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in headers.lower()
    assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_a_connection_is_kept_after_a_stream(gateway: Gateway) -> None:
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(limits=limits) as http:
        ports = set()
        for _ in range(3):
            body = {"prompt": "a b", "stream": True}
            async with http.stream("POST", f"{gateway.url}/v1/completions", json=body) as response:
                text = "".join([part async for part in response.aiter_text()])
                extra = response.extensions["network_stream"].get_extra_info("client_addr")
                ports.add(extra)
            assert text.endswith("[DONE]\n\n")
    assert len(ports) == 1


async def test_the_api_key_guards_v1_only(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="s3cret")
    assert await gateway.client("s3cret").models.list()
    for key in ("wrong", "s3cre", "s3cret0"):
        with pytest.raises(openai.AuthenticationError):
            await gateway.client(key).models.list()
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        basic = {"authorization": "Basic s3cret"}
        assert (await http.get("/v1/models", headers=basic)).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/nothing")).status_code == 401
        for path in ("/tokenize", "/detokenize"):
            assert (await http.post(path, json={"prompt": "a"})).status_code == 401
        strange = {"authorization": b"Bearer \xff\xe9"}
        assert (await http.get("/v1/models", headers=strange)).status_code == 401
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200, path


async def test_limits_of_body_and_queue(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_body_mib=1, max_queue=1)
    client = gateway.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="test", prompt="x" * 2**20)
    assert caught.value.status_code == 413
    waiting = asyncio.create_task(client.completions.create(model="test", prompt="hang"))
    while not gateway.pipeline.submits:
        await asyncio.sleep(0.001)
    with pytest.raises(openai.RateLimitError) as limited:
        await client.completions.create(model="test", prompt="x")
    assert limited.value.response.headers["retry-after"] == "1"
    waiting.cancel()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert await client.completions.create(model="test", prompt="x")


async def test_request_id_is_the_clients_if_sane(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:

        async def named(path: str, given: Any, **body: object) -> str:
            headers = {} if given is None else {"x-request-id": given}
            response = await http.post(path, json=body, headers=headers)
            return response.headers["x-request-id"]

        for stream in (False, True):
            assert await named("/v1/completions", "my-1.2", prompt="a", stream=stream) == "my-1.2"
        assert await named("/v1/completions", "my-1") == "my-1", "of an error as well"
        for strange in (None, "a b", "x" * 200, b"\xff", ""):
            name = await named("/v1/completions", strange, prompt="a")
            assert re.fullmatch("[0-9a-f]{32}", name)


async def test_a_strange_traceparent_does_not_reach_the_pipeline(gateway: Gateway) -> None:
    good = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for given in (good, b"\xff\xfe", "nonsense"):
            headers: Any = {"traceparent": given}
            await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert [submit.trace for submit in gateway.pipeline.submits] == [good, "", ""]


async def test_health_and_models_follow_the_pipeline(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await start_gateway(ready=False)
    async with httpx.AsyncClient(base_url=gateway.url) as http:

        async def statuses() -> list[int]:
            paths = ("/health/live", "/health/ready", "/health", "/v1/models")
            return [(await http.get(path)).status_code for path in paths]

        assert await statuses() == [200, 503, 503, 503]
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "ready" not in capsys.readouterr().out
        gateway.pipeline.beat()
        assert await statuses() == [200, 200, 200, 200]
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["test"]
        assert models[0]["max_model_len"] == 2048, "of the demo model"
        assert (await http.get("/v1/models/test")).json() == models[0]
        assert (await http.get("/v1/models/other")).status_code == 404
        gateway.pipeline.feed(heartbeat("engine-0-0", "loading", 2))
        assert await statuses() == [200, 503, 200, 503]
        health = (await http.get("/health")).json()
        assert health["status"] == "degraded"
        engine = next(stage for stage in health["stages"] if stage["name"] == "engine")
        assert engine == {
            "stage": "engine-0-0", "name": "engine", "group": 0, "rank": 0, "state": "loading",
            "pid": 7, "reason": "",
        }  # fmt: skip
        assert len(health["stages"]) == len(STAGES) + 1, "the gateway is in the list as well"
        gateway.pipeline.feed(heartbeat("engine-0-0", incarnation=2, kv_fp8=1))
        stages = (await http.get("/health")).json()["stages"]
        pages = {stage["name"]: stage.get("kv_cache_dtype") for stage in stages}
        assert {name: held for name, held in pages.items() if held} == {"engine": "fp8_e4m3"}
        gateway.pipeline.feed(Drain())
        assert await statuses() == [200, 503, 503, 503]
    assert capsys.readouterr().out == f"ready {gateway.url}\n", "said once"


async def test_metrics_count_requests_and_tokens(gateway: Gateway) -> None:
    client = gateway.client()
    await client.completions.create(model="test", prompt="a b c")
    await client.completions.create(model="test", prompt="a b c", max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="test", prompt="refuse")
    gateway.pipeline.feed(heartbeat("scheduler-0", running=3, waiting=4))
    stats = {"pages_free": 5, "pages_total": 9, "cached_tokens_total": 1, "prompt_tokens_total": 4}
    gateway.pipeline.feed(heartbeat("engine-0-0", **stats))
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = dict(re.findall(r"^(pipeinfer_\S+) (\S+)$", response.text, re.MULTILINE))
    expected = {
        'requests_total{outcome="stop"}': 1,
        'requests_total{outcome="length"}': 1,
        'requests_total{outcome="refused"}': 1,
        'requests_total{outcome="abort"}': 0,
        "prompt_tokens_total": 5,
        "generated_tokens_total": 5,
        "time_to_first_token_seconds_count": 2,
        "inter_token_seconds_count": 3,
        "requests_running": 3,
        "requests_waiting": 4,
        "pages_free": 5,
        "pages": 9,
        'kv_usage_ratio{group="0"}': 1 - 5 / 9,
        "prefix_cache_hit_ratio": 0.25,
    }
    assert {name: float(values[f"pipeinfer_{name}"]) for name in expected} == expected


async def test_a_drained_gateway_finishes_streams_and_refuses_new_ones(gateway: Gateway) -> None:
    client = gateway.client()
    stream = await client.completions.create(model="test", prompt="pause here", stream=True)
    texts = [(await anext(stream)).choices[0].text]
    gateway.pipeline.feed(Drain())
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="test", prompt="x")
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "5"
    name = gateway.pipeline.submits[0].request_id
    gateway.pipeline.rows(TextRow(name, 1, "here ", 6, 1, pack([1]), "stop", None, 2))
    assert gateway.core.idle()
    await gateway.driver.stop()  # at once: the last bytes are still on their way
    texts += [chunk.choices[0].text async for chunk in stream]
    assert texts == ["pause ", "here "]


async def test_a_stopped_gateway_ends_running_streams_with_an_error(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.gateway.stage.SHUTDOWN_TIMEOUT", 600.0)  # which it is not for
    gateway = await start_gateway()
    client = gateway.client()
    stream = await client.completions.create(model="test", prompt="pause here", stream=True)
    await anext(stream)
    whole = asyncio.create_task(client.completions.create(model="test", prompt="hang"))
    while len(gateway.pipeline.submits) < 2:
        await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        await gateway.driver.stop()
    with pytest.raises(openai.APIError, match="shutting down"):
        await anext(stream)
    with pytest.raises(openai.APIStatusError) as caught:
        await whole
    assert caught.value.status_code == 503


async def test_a_taken_port_is_one_clear_error(
    gateway: Gateway, start_gateway: StartGateway
) -> None:
    port = int(gateway.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port} is taken by process"):
        await start_gateway(port=port)
