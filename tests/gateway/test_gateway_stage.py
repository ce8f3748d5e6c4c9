"""The gateway stage: its fingerprint, its URL for users, and how it leaves its sockets."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_pipeline import Gateway, StartGateway, heartbeat
from test_harmony_http import events, post

from pipeinfer.demo import demo_path
from pipeinfer.gateway import stage as module
from pipeinfer.gateway.stage import (
    FILE_SETTINGS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_IF_EXACT,
    fingerprint,
    server_url,
)
from pipeinfer.messages import TextRow
from pipeinfer.settings import Settings
from pipeinfer.wire import pack
from waiting import until

# Another value of each setting that is counted.
OTHERS: dict[str, Any] = {
    "all_reduce": "nccl", "allow_additional_properties": True, "attention": "torch",
    "cache": "naive", "compile": True, "control_tokens_in_messages": True,
    "cuda_graph_max_batch": 8, "device": "cpu", "dtype": "float32",
    "enable_expert_parallel": True, "enable_lora": True, "exact": True, "grammar_backend": "none",
    "kv_cache_dtype": "fp8_e4m3",
    "load_format": "dummy", "max_lora_rank": 8, "max_model_len": 64, "max_running": 4,
    "max_step_tokens": 64,
    "mixed_step_tokens": 64, "model_impl": "transformers", "moe_backend": "torch",
    "no_cuda_graph": True, "num_speculative_tokens": 2, "page_size": 4,
    "speculate": "ngram", "speculative_max_requests": 2, "synthetic_acceptance_rate": 0.5,
    "quantization": "fp8", "reasoning_parser": "none", "task": "embed", "threads": 1,
    "tool_parser": "none", "tp": 2, "trust_request_chat_template": True,
}  # fmt: skip


def test_every_setting_changes_answers_or_does_not() -> None:
    fields = set(Settings.__struct_fields__)
    assert WITHOUT_EFFECT | FILE_SETTINGS | OTHERS.keys() == fields
    assert not WITHOUT_EFFECT & OTHERS.keys() and not FILE_SETTINGS & (
        WITHOUT_EFFECT | OTHERS.keys()
    )


def test_what_changes_answers_changes_the_fingerprint(tmp_path: Path) -> None:
    folder, settings = demo_path(), Settings()
    found = {fingerprint(settings, folder)}
    for name, value in OTHERS.items():
        assert getattr(settings, name) != value, name
        found.add(fingerprint(msgspec.structs.replace(settings, **{name: value}), folder))
    template = tmp_path / "own.jinja"
    for text in ("a", "b"):
        template.write_text(text)
        found.add(fingerprint(Settings(chat_template=str(template)), folder))
    assert len(found) == len(OTHERS) + 3
    assert all(one.startswith("fp_") and len(one) == 19 for one in found)


def test_in_exact_mode_how_steps_are_computed_changes_nothing() -> None:
    assert OTHERS.keys() > WITHOUT_EFFECT_IF_EXACT
    usual = fingerprint(Settings(exact=True), demo_path())
    assert usual != fingerprint(Settings(), demo_path())
    for name, value in OTHERS.items():
        if name != "exact":
            other = msgspec.structs.replace(Settings(exact=True), **{name: value})
            same = fingerprint(other, demo_path()) == usual
            assert same == (name in WITHOUT_EFFECT_IF_EXACT), name


def test_keys_ports_and_logs_do_not(tmp_path: Path) -> None:
    usual = fingerprint(Settings(), demo_path())
    other = Settings(api_key="s", port=1, host="0.0.0.0", log_level="debug", record="/tmp/x", dp=3)
    assert fingerprint(other, demo_path()) == usual
    copy = tmp_path / "elsewhere"
    shutil.copytree(demo_path(), copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    assert fingerprint(Settings(model=str(copy), revision="main"), copy) == usual


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors",
                                  "chat_template.jinja", "generation_config.json"])  # fmt: skip
def test_another_checkpoint_has_another_one(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "m"
    shutil.copytree(demo_path(), copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    usual = fingerprint(Settings(), copy)
    raw = bytearray((copy / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / name).write_bytes(raw)
    assert fingerprint(Settings(), copy) != usual


def test_another_version_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = fingerprint(Settings(), demo_path())
    monkeypatch.setattr(module, "__version__", "9.9.9")
    assert fingerprint(Settings(), demo_path()) != usual


def test_large_files_count_by_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WHOLE_FILE", 1024)
    weights = tmp_path / "m.gguf"
    weights.write_bytes(bytes(100_000))
    found = [fingerprint(Settings(), weights)]
    for change in (b"\1" + bytes(99_999), bytes(99_999) + b"\1", bytes(100_001)):
        weights.write_bytes(change)
        found.append(fingerprint(Settings(), weights))
    assert len(set(found)) == 4


@pytest.fixture
async def two(start_gateway: StartGateway) -> list[Gateway]:
    """Gateways of one server."""
    return [await start_gateway(), await start_gateway()]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}]}),
     ("/v1/completions", {"prompt": ["one two", "three"]})],
)  # fmt: skip
async def test_every_answer_and_every_chunk_says_it(
    two: list[Gateway], path: str, body: dict[str, Any]
) -> None:
    found = set[Any]()
    for gateway in two:
        found.add(json.loads(await post(gateway, path, body))["system_fingerprint"])
        more = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await post(gateway, path, {**body, **more}))
        assert len(chunks) > 3
        found |= {chunk["system_fingerprint"] for chunk in chunks}
    assert found == {fingerprint(Settings(port=0, served_model_name="test"), demo_path())}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "http://127.0.0.1:8001"),
        ({"host": "::1"}, "http://[::1]:8001"),
        ({"host": "0.0.0.0", "tls_cert": "x.pem"}, "https://0.0.0.0:8001"),
        ({"host": "0.0.0.0", "public_address": "127.0.0.1:8600"}, "http://127.0.0.1:8600"),
        ({"public_address": "8600", "tls_cert": "x.pem"}, "https://127.0.0.1:8600"),
        ({"public_address": "0.0.0.0:8600"}, "http://127.0.0.1:8600"),
        ({"public_address": "[::]:8600"}, "http://127.0.0.1:8600"),
        ({"public_address": "[::1]:8600"}, "http://[::1]:8600"),
        ({"public_address": "https://models.example.org/"}, "https://models.example.org"),
    ],
)
def test_a_public_address_stands_in_place_of_the_one_that_is_listened_on(settings, said):
    assert server_url(Settings(**settings), 8001) == said


BODY = {"prompt": "one two"}


async def test_a_kept_connection_is_told_that_it_ends_and_an_idle_one_is_closed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 600.0)
    async with httpx.AsyncClient(base_url=gateway.url) as kept, httpx.AsyncClient() as idle:
        assert (await idle.get(f"{gateway.url}/health")).status_code == 200
        before = await kept.post("/v1/completions", json=BODY)
        assert "connection" not in before.headers
        leaving = asyncio.create_task(gateway.driver.leave(60))
        await asyncio.sleep(0)  # it has begun
        answered = await kept.post("/v1/completions", json=BODY)
        assert answered.status_code == 200
        assert answered.headers["connection"] == "close"
        assert not leaving.done()
        monkeypatch.setattr(module, "QUIET_SECONDS", 0.1)
        await asyncio.wait_for(leaving, 60)


async def test_what_runs_is_finished_however_long_nothing_comes(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        body = {"prompt": "hang"}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        while not gateway.pipeline.submits:
            await asyncio.sleep(0.005)
        leaving = asyncio.create_task(gateway.driver.leave(60))
        await asyncio.wait({leaving}, timeout=2.5)  # longer than an idle gateway waits
        assert not leaving.done() and not answer.done()
        [submit] = gateway.pipeline.submits
        ended = TextRow(
            submit.request_id, submit.attempt, "late", 0, 0, pack([1]), "length", output_tokens=1
        )
        gateway.pipeline.rows(ended)
        assert (await answer).json()["choices"][0]["text"] == "late"
        await asyncio.wait_for(leaving, 60)


async def test_the_server_is_said_to_be_ready_when_each_gateway_takes_requests(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client may reach any of them, and one that has not heard of all stages refuses requests."""
    gateway = await start_gateway(gateways=2)
    gateway.pipeline.feed(heartbeat("gateway-1", "waiting"))
    await until(lambda: gateway.driver._open)
    await asyncio.sleep(2 * module.SIBLINGS_POLL)
    assert "ready" not in capsys.readouterr().out
    gateway.pipeline.feed(heartbeat("gateway-1"))
    said: list[str] = []
    await until(lambda: said.append(capsys.readouterr().out) or any(said))
    assert "".join(said) == f"ready {gateway.url}\n"
