"""What a promoted standby recorded is replayed; before its promotion it records nothing."""

from __future__ import annotations

import os
import signal

import pytest
from replay_tool import tool
from test_replay_serve import REQUESTS, ask

import servers

WORDS = ("--standby", "--kv-pages", "60", "--threads", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Of the engine that was killed, and of the one that was a standby."""
    folder, pids = tmp_path_factory.mktemp("standby"), []
    with servers.Server("--record", str(folder), *WORDS) as server:
        before = ask(server.url, REQUESTS[0])
        server.wait(lambda: server.metric("pipeinfer_standbys_ready") == 1, "a standby")
        pids.append(server.pid("engine"))
        os.kill(pids[0], signal.SIGKILL)
        server.wait(lambda: server.pid("engine") != pids[0], "it took over")
        server.wait(lambda: server.health()["status"] == "ready", "it serves")
        assert ask(server.url, REQUESTS[0]) == before
        pids.append(server.pid("engine"))
    found = {file.stem.rpartition("-")[2]: file for file in folder.glob("engine-*.pitrace")}
    assert found.keys() == {str(pid) for pid in pids}
    return [found[str(pid)] for pid in pids]


@pytest.mark.parametrize("which", [0, 1], ids=["killed", "promoted"])
def test_an_engine_gives_what_was_recorded(traces, which):
    played = tool("run", "engine", traces[which])
    assert played.returncode == 0, played.stdout + played.stderr
    assert "0 differences" in played.stdout
