"""Which server a command means: the file it was given, or the only one that runs here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeinfer import topology as topologies
from pipeinfer.cli.main import main
from pipeinfer.cli.operate import chosen_stage
from pipeinfer.runtime.servers import (
    FOLDER_PREFIX,
    TOPOLOGY,
    ServerInfo,
    publish_served_model,
    record_running,
    running_servers,
    running_topology,
    url_from_here,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import StageEntry, Topology


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """A folder for temporary folders in which no server runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def server(temporary: Path, name: str) -> Path:
    """What a server leaves in its temporary folder; its topology file."""
    folder = temporary / (FOLDER_PREFIX + name)
    folder.mkdir()
    stages = topologies.local(Settings(), f"ipc://{name}/").entries
    file = folder / TOPOLOGY
    file.write_text(Topology(stages, supervisor=f"ipc://{name}/supervisor").to_toml())
    return file


def test_the_only_running_server_is_found(temporary):
    file = server(temporary, "one")
    with pytest.raises(ConfigurationError, match="no server of this user runs"):
        running_topology()
    with record_running(file):
        assert running_topology() == topologies.load(file)
        assert running_topology().supervisor == "ipc://one/supervisor"
    with pytest.raises(ConfigurationError, match="no server of this user runs"):
        running_topology()


def test_of_several_servers_one_is_chosen_by_its_port(temporary):
    files = [server(temporary, name) for name in ("one", "two", "three")]
    with ExitStack() as all_of_them:
        for file in files:
            all_of_them.enter_context(record_running(file))
        for port, file in ((8123, files[0]), (8124, files[1])):
            publish_served_model(
                file, ServerInfo(f"http://127.0.0.1:{port}", f"model-{port}", "/models")
            )
        assert running_topology(port=8124) == topologies.load(files[1])
        assert running_topology(str(files[2])) == topologies.load(files[2])
        for port, why in ((None, "which server?"), (8125, "no server .* listens at port 8125")):
            with pytest.raises(ConfigurationError, match=why) as error:
                running_topology(port=port)
            first, *lines = str(error.value).splitlines()
            assert first.endswith(" There are")
            assert sorted(lines) == sorted(
                [
                    f"  --port 8123  model-8123, process {os.getpid()}",
                    f"  --port 8124  model-8124, process {os.getpid()}",
                    f"  --topology {files[2]}  without HTTP here, process {os.getpid()}",
                ]
            )


@pytest.mark.parametrize(
    "words", [["top", "--once"], ["record", "--out", "traces"], ["swap", "scheduler"]]
)
def test_every_command_that_talks_to_a_server_says_port(temporary, capsys, words):
    files = [server(temporary, name) for name in ("one", "two")]
    with record_running(files[0]), record_running(files[1]):
        publish_served_model(files[0], ServerInfo("http://[::1]:8123", "tiny", "/models/tiny"))
        assert main([*words]) == 2
        assert "\n  --port 8123  tiny, process " in capsys.readouterr().err
        assert main([*words, "--port", "8001"]) == 2
        assert "no server of this user listens at port 8001" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["record", "--out", "traces", "--stage", "none"], ["swap", "none"]]
)
def test_a_command_that_changes_a_server_says_first_which_it_found(temporary, capsys, words):
    file = server(temporary, "one")
    with record_running(file):
        for chosen in ([], ["--port", "8123"]):
            publish_served_model(file, ServerInfo("http://[::1]:8123", "tiny", "/models/tiny"))
            assert main([*words, *chosen]) == 2  # there is no such stage, which is found out later
            first, *_ = capsys.readouterr().err.splitlines()
            assert first == f"the server at port 8123, which serves tiny (process {os.getpid()})"
        assert main([*words, "--topology", str(file)]) == 2
        assert "the server" not in capsys.readouterr().err, "it was named"


def test_a_server_that_was_killed_does_not_run(temporary):
    file = server(temporary, "one")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pipeinfer.runtime.servers import record_running\n"
        "with record_running(Path(sys.argv[1])):\n"
        "    print('alive', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [one.pid for one in running_servers()] == [process.pid]
        process.kill()
    assert running_servers() == []


def test_what_a_running_server_serves_is_known_once_it_has_a_port(temporary):
    file = server(temporary, "one")
    with record_running(file):
        assert [one.served for one in running_servers()] == [None]
        served = ServerInfo(url="http://127.0.0.1:8123", model="tiny", path="/models/tiny")
        publish_served_model(file, served)
        [one] = running_servers()
        assert one.served == served and one.served.port == 8123


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("gpu-a", "http://gpu-a:80"),
    ],
)
def test_an_address_that_listens_everywhere_is_reached_from_here(host, url):
    assert url_from_here(host, 80, secure=False) == url
    assert url_from_here(host, 80, secure=True) == url.replace("http", "https")


def test_a_file_written_by_hand_leads_to_the_server_that_serves_it(temporary):
    file = server(temporary, "one")
    by_hand = temporary / "mine.toml"
    by_hand.write_text(Topology(topologies.load(file).entries).to_toml())
    assert running_topology(str(by_hand)).supervisor == ""
    with record_running(file):
        assert running_topology(str(by_hand)).supervisor == "ipc://one/supervisor"


def test_without_a_supervisor_swap_says_what_to_do_by_hand(temporary, capsys):
    file = temporary / "mine.toml"
    file.write_text(Topology(topologies.local(Settings(), "ipc://mine/").entries).to_toml())
    assert main(["swap", "scheduler", "--topology", str(file), "--", "python"]) == 2
    said = capsys.readouterr().err
    assert "no supervisor" in said and "SIGUSR1" in said and "scheduler-0" in said


def test_a_supervisor_that_is_gone_does_not_answer(temporary, capsys, monkeypatch):
    monkeypatch.setattr("pipeinfer.cli.operate.SUPERVISOR_TIMEOUT", 0.3)
    assert main(["swap", "scheduler", "--topology", str(server(temporary, "gone"))]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_stage_is_named_by_its_id_or_by_a_name_that_only_one_group_has():
    engines = [StageEntry("engine", f"ipc://e{g}{r}", g, r) for g in (0, 1) for r in (0, 1)]
    topology = Topology((StageEntry("scheduler", "ipc://s0", 0), *engines[:2]))
    assert chosen_stage(topology, "scheduler") == "scheduler-0"
    assert chosen_stage(topology, "engine") == "engine-0-0"
    assert chosen_stage(topology, "engine-0-1") == "engine-0-1"
    with pytest.raises(ConfigurationError, match=r"'engine'\? There are engine-0-0, .*engine-1-1"):
        chosen_stage(Topology(tuple(engines)), "engine")
    with pytest.raises(ConfigurationError, match=r"'gateway'\? There are scheduler-0"):
        chosen_stage(topology, "gateway")
