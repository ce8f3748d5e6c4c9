"""Topologies from variables, beside a file or instead of one; and which stage a process claims."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeinfer import topology as topologies
from pipeinfer.bus import curve
from pipeinfer.runtime.entry import elect_instance, instance_file
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import StageEntry, deployed_topology
from servers import environment

FIVE = (
    "gateway-0=tcp://front:7000,host=front tokenizer-0=tcp://front:7010,host=front\n"
    "scheduler-0=tcp://[fd00::2]:7030,host=gpu-a,key=a engine-0-0=tcp://10.0.0.2:7040,device=cuda:1"
    ",host=gpu-a,bind=0.0.0.0 detokenizer-0=tcp://front:7020,host=front"
)


def test_variables_say_what_a_file_says():
    found = deployed_topology(None, {"PIPEINFER_STAGES": FIVE, "PIPEINFER_KEYS": "/keys"})
    assert found.entries[2] == StageEntry(
        "scheduler", "tcp://[fd00::2]:7030", host="gpu-a", key="a", group=0
    )
    assert found.entries[3] == StageEntry(
        "engine", "tcp://10.0.0.2:7040", host="gpu-a", device="cuda:1", bind="0.0.0.0"
    )
    assert found.keys == "/keys"
    assert found.hosts() == ["front", "gpu-a"]


def test_variables_go_before_the_file_and_leave_its_settings(tmp_path):
    file = tmp_path / "pipeinfer.toml"
    local = topologies.local(Settings(), "ipc:///x/")
    file.write_text(topologies.Topology(local.entries, {"kv_pages": 7}, keys="here").to_toml())
    assert deployed_topology(str(file), {}) == topologies.load(file)
    assert topologies.load(file).keys == str(tmp_path / "here")
    changed = deployed_topology(str(file), {"PIPEINFER_STAGES": FIVE, "PIPEINFER_BIND": "*"})
    assert changed.settings == {"kv_pages": 7}
    assert [e.bind for e in changed.entries] == ["*", "*", "*", "0.0.0.0", "*"]


def test_a_secret_in_the_environment_is_enough_and_stands_in_no_file():
    found = deployed_topology(None, {"PIPEINFER_STAGES": FIVE, "PIPEINFER_CURVE_KEY": "s" * 40})
    assert found.keyed
    assert "ssss" not in found.to_toml() + repr(found)


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ("", "no topology: name its file"),
        ("gatewax-0=tcp://a:1", "gatewax-0=tcp://a:1: must be ID=ADDRESS"),
        ("gateway=tcp://a:1", "must be ID=ADDRESS"),
        ("engine-0=tcp://a:1", "must be ID=ADDRESS"),
        ("gateway-x=tcp://a:1", "must be ID=ADDRESS"),
        ("gateway-0", "must be ID=ADDRESS"),
        ("gateway-0=tcp://a:1,colour=red", "'colour' is none of host, device, key, bind"),
        ("gateway-0=tcp://a:1", "PIPEINFER_STAGES: .*tokenizers must have indices"),
        (FIVE.replace("tcp://front:7000", "ipc:///x"), "gateway-0 at ipc:///x: other hosts cannot"),
        (FIVE.replace("tcp://front:7000", "tcp://127.0.0.1:1"), "other hosts cannot reach it"),
        (FIVE.replace("tcp://front:7000", "tcp://*:7000"), "others cannot connect to"),
        (FIVE.replace("tcp://front:7000", "tcp://[::]:7000"), "others cannot connect to"),
        (FIVE.replace("tcp://front:7000", "tcp://front:7010"), "both take tcp://front:7010"),
    ],
)
def test_each_mistake_is_one_clear_line(stages, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        deployed_topology(None, {"PIPEINFER_STAGES": stages, "PIPEINFER_KEYS": "/keys"})
    assert "\n" not in str(caught.value)


def test_other_hosts_need_keys():
    with pytest.raises(ConfigurationError, match=r"tcp://front:7000: .* need CURVE keys"):
        deployed_topology(None, {"PIPEINFER_STAGES": FIVE})


CLAIMS = """
import sys
from pathlib import Path
from pipeinfer import topology as topologies
from pipeinfer.runtime.entry import elect_instance
from pipeinfer.settings import ConfigurationError
try:
    mine = elect_instance(topologies.load(sys.argv[1]), "engine", sys.argv[2], Path(sys.argv[3]))
except ConfigurationError as error:
    print(error, flush=True)
else:
    print(mine.identity.id, flush=True)
    sys.stdin.readline()
"""


def test_processes_that_are_started_alike_become_different_stages(tmp_path):
    """As containers of one service: the third finds nothing left, until one of the others dies."""
    curve.create_key_pair(tmp_path / "keys", curve.DEFAULT_KEY)
    file = tmp_path / "pipeinfer.toml"
    text = FIVE + " scheduler-1=tcp://10.0.0.2:7050,host=gpu-a engine-1-0=tcp://10.0.0.2:7060"
    made = deployed_topology(
        None, {"PIPEINFER_STAGES": text + ",host=gpu-a", "PIPEINFER_KEYS": "keys"}
    )
    file.write_text(made.to_toml())

    def start(number: int) -> subprocess.Popen:
        own = tmp_path / f"container-{number}"
        own.mkdir()
        return subprocess.Popen(
            [sys.executable, "-c", CLAIMS, str(file), "gpu-a", str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment(), "TMPDIR": str(own)},
        )  # fmt: skip

    running = [start(0)]
    assert running[0].stdout.readline() == "engine-0-0\n"
    running.append(start(1))
    assert running[1].stdout.readline() == "engine-1-0\n"
    assert (tmp_path / "container-1" / instance_file().name).read_text() == "engine-1-0"
    with start(2) as third:
        assert "all of them run" in third.stdout.readline()
    running[0].kill()
    running[0].wait()
    running.append(start(3))
    assert running[2].stdout.readline() == "engine-0-0\n"
    for process in running:
        process.kill()
        process.wait()
    with pytest.raises(ConfigurationError, match="no stage 'engine' on host front"):
        elect_instance(topologies.load(file), "engine", "front", tmp_path)
