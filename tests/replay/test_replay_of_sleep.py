"""What slept is replayed: the cores alone, and an engine whose steps are computed again."""

from __future__ import annotations

import pytest
from replay_tool import tool
from test_replay_serve import REQUESTS, ask, trace

import servers

WORDS = ("--kv-pages", "60", "--threads", "1", "--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of traces of a server that slept between two requests, and found nothing of the first."""
    made = tmp_path_factory.mktemp("sleep")
    with servers.Server("--record", str(made), *WORDS) as server:
        before = [ask(server.url, body) for body in REQUESTS[:2]]
        for path in ("/reset_prefix_cache", "/sleep?level=2", "/wake_up"):
            assert servers.fetch(server.url + path, b"{}")[0] == 200
        assert ask(server.url, REQUESTS[0]) == before[0]
    return made


@pytest.mark.parametrize(
    ("stage", "words"),
    [("engine", ["--core-only"]), ("engine", []), ("scheduler", []), ("gateway", [])],
)
def test_a_stage_gives_what_was_recorded(folder, stage, words):
    played = tool("run", stage, trace(folder, stage), *words)
    assert played.returncode == 0, played.stdout + played.stderr
