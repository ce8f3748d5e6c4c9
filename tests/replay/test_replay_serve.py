"""A recorded stage takes its place on a live bus: the stages beside it are real processes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from replay_tool import processes, tool

import servers
from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.settings import Settings

FLAGS = {"kv_pages": 60, "page_size": 16, "threads": 1, "dtype": "float32", "device": "cpu"}
REQUESTS = [
    {"prompt": "count from 1 to 9", "max_tokens": 6, "temperature": 0},
    {"prompt": "a pipeline", "max_tokens": 9, "temperature": 1.0, "ignore_eos": True},
    {"prompt": "count from 1 to 9", "max_tokens": 12, "temperature": 0.7, "seed": 7},
]


def ask(url: str, body: dict) -> str:
    status, text = servers.fetch(
        url + "/v1/completions", json.dumps({"model": None, **body}).encode()
    )
    assert status == 200, text
    return json.loads(text)["choices"][0]["text"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(folder of traces, texts): one request after the other, so that time changes no plan."""
    folder = tmp_path_factory.mktemp("serve")
    words = [w for k, v in FLAGS.items() for w in ("--" + k.replace("_", "-"), str(v))]
    with servers.Server("--record", str(folder), *words) as server:
        texts = [ask(server.url, body) for body in REQUESTS]
    return folder, texts


def trace(folder, stage: str):
    return next(folder.glob(f"{stage}-*.pitrace"))


@pytest.fixture
def topology(tmp_path, short_path):
    """A topology file on ipc sockets, whose [settings] are those of the recording."""
    local = topologies.local(Settings(), f"ipc://{short_path}/")
    settings = {**FLAGS, "model": "pipeinfer-demo", "port": 0, "served_model_name": "demo"}
    file = tmp_path / "pipeinfer.toml"
    file.write_text(topologies.Topology(local.entries, settings).to_toml())
    assert config.build(settings)
    return file


def stage(name: str, topology) -> list[object]:
    return ["-m", "pipeinfer.runtime", name, "--topology", topology]


def player(name: str, folder, topology, *options: str) -> list[object]:
    return ["tools/replay", "serve", name, trace(folder, name), "--topology", topology, *options]


def ready(gateway) -> str:
    for line in gateway.stdout:
        if line.startswith("ready "):
            return line.split()[1]
    raise AssertionError("the gateway ended")


LIGHT = ("tokenizer", "scheduler", "detokenizer", "gateway")


def test_recorded_engine_answers_a_live_scheduler(recorded, topology):
    """As fast as it was; where the first plan differs, at once."""
    folder, texts = recorded
    paced = player("engine", folder, topology, "--realtime")
    commands = [paced, *(stage(n, topology) for n in LIGHT)]
    with processes(*commands) as (engine, *_, gateway):
        url = ready(gateway)
        assert [ask(url, body) for body in REQUESTS] == texts
        said = engine.communicate(timeout=120)[0]
        assert engine.returncode == 0, said
    assert "played to its end" in said


def test_first_plan_that_differs_is_named(recorded, topology):
    folder, _ = recorded
    commands = [player("engine", folder, topology), *(stage(n, topology) for n in LIGHT)]
    with ThreadPoolExecutor(1) as pool, processes(*commands) as (engine, *_, gateway):
        url = ready(gateway)
        body = {"model": None, **REQUESTS[0], "prompt": "count from 1 to 8"}
        pool.submit(servers.fetch, url + "/v1/completions", json.dumps(body).encode())
        said = engine.communicate(timeout=120)[0]  # nobody answers; the gateway's end ends it
        assert engine.returncode == 1, said
    assert (
        "the live side diverges: plan 0 is the first that differs: admits[0].token_ids[16]" in said
    )


def test_recorded_scheduler_drives_a_live_engine(recorded, topology):
    folder, _ = recorded
    commands = player("scheduler", folder, topology), stage("engine", topology)
    with processes(*commands) as (scheduler, _):
        said = scheduler.communicate(timeout=120)[0]
        assert scheduler.returncode == 0, said
    assert "the live side did the same" in said


def test_engine_of_another_size_is_told_apart(recorded, topology):
    folder, _ = recorded
    smaller = [*stage("engine", topology), "--kv-pages", "50"]
    with processes(player("scheduler", folder, topology), smaller) as (scheduler, _):
        said = scheduler.communicate(timeout=120)[0]
        assert scheduler.returncode == 1, said
    assert "the recorded engine had pages 60, this one has 50" in said


def test_detokenizer_is_not_played(recorded, topology):
    folder, _ = recorded
    done = tool("serve", "detokenizer", trace(folder, "detokenizer"), "--topology", topology)
    assert done.returncode == 2
    assert "a real one needs neither weights nor a device" in done.stderr
