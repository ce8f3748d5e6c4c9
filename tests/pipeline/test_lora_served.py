"""A real server with adapters: their names, loading and unloading under streams, lost engines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from leftovers import statistics

from adapter_files import checkpoint_with_adapters, peft_logits, write_adapter
from checkpoints import load_reference, make_checkpoint
from servers import Server

KEY = {"authorization": "Bearer secret"}
PROMPT = [*range(40, 60)]
TOKENS, LONG = 12, 400
TRIES = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, and adapters of it."""
    return checkpoint_with_adapters(tmp_path_factory.mktemp("lora"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    """Two ranks, and two slots for three adapters."""
    flags = (
        *("--served-model-name", "base", "--dtype", "float32", "--threads", "1"),
        *("--kv-pages", "256", "--tp", "2", "--api-key", "secret", "--log-level", "warning"),
        *("--enable-lora", "--max-loras", "2"),
        *("--lora-modules", f"one={folders['one']}", f"two={folders['two']}"),
    )
    with Server(str(folders["model"]), *flags) as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=KEY, timeout=120)


def completed(server: Server, model: str, tokens: int = TOKENS) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    answer = post(server, "/v1/completions", {**body, "return_token_ids": True, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def expected(folders: dict[str, Path], name: str, given: list[int]) -> list[int]:
    """The likeliest token at each position, by PEFT."""
    ids, reference = torch.tensor(PROMPT + given), load_reference(folders["model"])
    logits = peft_logits(reference, folders[name], ids)
    return logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def names(server: Server) -> dict[str, Any]:
    cards = httpx.get(f"{server.url}/v1/models", headers=KEY, timeout=120).json()["data"]
    return {card["id"]: card for card in cards}


def test_adapters_are_models_of_every_dialect(server: Server, folders: dict[str, Path]) -> None:
    cards = names(server)
    assert [*cards] == ["base", "one", "two"]
    assert (cards["base"]["parent"], cards["base"]["root"]) == (None, "base")
    assert (cards["one"]["parent"], cards["one"]["root"]) == ("base", str(folders["one"]))
    found = {name: completed(server, name) for name in cards}
    assert found["one"] == expected(folders, "one", found["one"])
    assert found["two"] == expected(folders, "two", found["two"])
    assert len({tuple(ids) for ids in found.values()}) == 3
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    prints: set[str] = set()
    for name in cards:
        asked = {**chat, "model": name, "max_tokens": 8}
        answer = post(server, "/v1/chat/completions", asked).json()
        text = answer["choices"][0]["message"]["content"]
        prints.add(answer["system_fingerprint"])
        message = post(server, "/v1/messages", asked).json()
        assert message["model"] == name and message["content"][0]["text"] == text
        body = {"model": name, "input": "hello", "max_output_tokens": 8, "temperature": 0}
        response = post(server, "/v1/responses", body).json()
        assert response["model"] == name
        assert response["output"][0]["content"][0]["text"] == text
    assert len(prints) == 3
    refused = post(server, "/v1/completions", {"model": "four", "prompt": "a"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert "'base', 'one', 'two'" in refused.text


def streamed(server: Server, model: str, tokens: int) -> Iterator[list[int]]:
    """The ids of each event of a stream."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    more = {"stream": True, "return_token_ids": True, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, **more}, headers=KEY, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield choice.get("token_ids") or []


def test_adapters_come_and_go_while_a_stream_has_one(
    server: Server, folders: dict[str, Path]
) -> None:
    whole = completed(server, "one", LONG)
    stream = streamed(server, "one", LONG)
    ids = [*next(stream)]
    load = {"lora_name": "three", "lora_path": str(folders["three"])}
    assert post(server, "/v1/load_lora_adapter", load).status_code == 200
    assert "three" in names(server)
    again = post(server, "/v1/load_lora_adapter", load)
    assert again.status_code == 400 and "is taken" in again.text
    three = completed(server, "three")
    assert three == expected(folders, "three", three)
    for name in ("three", "one"):
        answer = post(server, "/v1/unload_lora_adapter", {"lora_name": name})
        assert answer.status_code == 200, answer.text
    assert [*names(server)] == ["base", "two"]
    for event in stream:
        ids += event
    assert ids == whole
    assert post(server, "/v1/completions", {"model": "one", "prompt": "a"}).status_code == 404
    gone = post(server, "/v1/unload_lora_adapter", {"lora_name": "one"})
    assert gone.status_code == 404
    back = {"lora_name": "one", "lora_path": str(folders["one"])}
    assert post(server, "/v1/load_lora_adapter", back).status_code == 200


def kill(server: Server, stage: str) -> None:
    """Returns when another process serves in its place."""
    pid = server.pid(stage)
    os.kill(pid, signal.SIGKILL)
    server.wait(
        lambda: server.pid(stage) != pid and server.health()["status"] == "ready",
        f"{stage} is back",
    )


def test_adapters_that_were_loaded_outlive_the_gateway_and_a_tokenizer(
    server: Server, folders: dict[str, Path]
) -> None:
    load = {"lora_name": "more", "lora_path": str(folders["three"])}
    assert post(server, "/v1/load_lora_adapter", load).status_code == 200
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "one"}).status_code == 200
    before = completed(server, "more")
    for stage in ("gateway", "tokenizer", "gateway"):
        kill(server, stage)
        server.wait(lambda: [*names(server)] == ["base", "two", "more"], "names are known")
    assert completed(server, "more") == before
    load = {"lora_name": "one", "lora_path": str(folders["one"])}
    assert post(server, "/v1/load_lora_adapter", load).status_code == 200
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "more"}).status_code == 200


def test_what_cannot_be_loaded_is_refused(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "LlamaForCausalLM", hidden_size=32)
    write_adapter(tmp_path / "wide", load_reference(other), 0)
    for path, message in ((tmp_path, "adapter_config.json"), (tmp_path / "wide", "the model's is")):
        body = {"lora_name": "x", "lora_path": str(path)}
        answer = post(server, "/v1/load_lora_adapter", body)
        assert answer.status_code == 400 and message in answer.text
        assert answer.json()["error"]["code"] == "adapter_not_loaded"
    body = {"lora_name": "x", "lora_path": str(folders["one"])}
    url = f"{server.url}/v1/load_lora_adapter"
    assert httpx.post(url, json=body, timeout=60).status_code == 401
    assert completed(server, "two", 4) == completed(server, "two", 4)


def test_a_stream_with_an_adapter_outlives_a_scheduler_and_then_an_engine(
    server: Server, folders: dict[str, Path]
) -> None:
    whole = completed(server, "two", LONG)
    assert whole == expected(folders, "two", whole)
    for _ in range(TRIES):  # until the stream was under way, and not at the end of a page
        stream = streamed(server, "two", LONG)
        ids = [*next(stream)]
        kill(server, "scheduler")
        ids += next(stream)
        kill(server, "engine")
        for event in stream:
            ids += event
        assert ids == whole
        if recomputed(server) > 0:
            break
    else:
        raise AssertionError("no stream was under way when its engine was killed")
    one = completed(server, "one")
    assert one == expected(folders, "one", one)


def recomputed(server: Server) -> float:
    """Tokens that were computed again because an engine was lost."""
    return statistics(server, "scheduler-0")["recomputed_tokens_total"]
