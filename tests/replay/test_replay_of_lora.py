"""Requests with adapters, and what slept, are replayed: the cores alone, and an engine that loads
adapters again and computes every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from replay_tool import tool
from test_replay_serve import trace

import servers
from adapter_files import write_adapter
from checkpoints import load_reference, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of traces of a server with two adapters that take turns in a slot; it slept between two
    requests, and found nothing of those before."""
    root = tmp_path_factory.mktemp("lora")
    model = make_checkpoint(root / "model", "LlamaForCausalLM")
    modules = []
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, load_reference(model), seed)
        modules.append(f"{name}={root / name}")
    words = ("--kv-pages", "60", "--threads", "1", "--dtype", "float32", "--device", "cpu")
    lora = ("--enable-lora", "--max-loras", "1", "--lora-modules", *modules)
    record = ("--record", str(root / "trace"), "--served-model-name", "base")
    texts = set()
    with servers.Server(str(model), *record, *words, *lora) as server:
        for name in ("one", "base", "two", "one"):
            body = {"model": name, "prompt": "hello", "max_tokens": 6, "temperature": 0}
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            texts.add((name, answer["choices"][0]["text"]))
        for path in ("/reset_prefix_cache", "/sleep?level=2", "/wake_up"):
            assert servers.fetch(server.url + path, b"{}")[0] == 200
        _, again = server.post("/v1/completions", body)
    assert len(texts) == 3 and ("one", again["choices"][0]["text"]) in texts
    return root / "trace"


@pytest.mark.parametrize(
    ("stage", "words"),
    [("engine", ["--core-only"]), ("engine", []), ("scheduler", []), ("gateway", [])],
)
def test_a_stage_gives_what_was_recorded(folder: Path, stage: str, words: list[str]) -> None:
    played = tool("run", stage, trace(folder, stage), *words)
    assert played.returncode == 0, played.stdout + played.stderr
