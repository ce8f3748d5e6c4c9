"""`pipeinfer keys` and `pipeinfer topology check` on two hosts: what is said, and exit codes."""

from __future__ import annotations

import contextlib
import io
import stat
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeinfer.bus import curve
from pipeinfer.cli.main import main
from servers import environment

TWO_HOSTS = """
keys = "keys"

[[stage]]
name = "gateway"
host = "front"
address = "tcp://front:7000"

[[stage]]
name = "tokenizer"
host = "front"
address = "tcp://front:7010"

[[stage]]
name = "detokenizer"
host = "front"
address = "tcp://front:7020"

[[stage]]
name = "scheduler"
host = "gpu"
address = "tcp://[fd00::2]:7030"
bind = "::"

[[stage]]
name = "engine"
host = "gpu"
device = "cuda:1"
address = "tcp://10.0.0.2:7040"
"""

DRAWING = """\
front
  ├─ gateway-0      tcp://front:7000  key pipeinfer
  ├─ tokenizer-0    tcp://front:7010  key pipeinfer
  └─ detokenizer-0  tcp://front:7020  key pipeinfer
gpu
  ├─ scheduler-0  tcp://[fd00::2]:7030  listens on ::  key pipeinfer
  └─ engine-0-0   tcp://10.0.0.2:7040  device cuda:1  key pipeinfer

gateway-0 ─► tokenizer-0 ──► scheduler-0 ═► engine-0-0 ──► detokenizer-0 ─► gateway-0
keys: 1 public, the secret of 'pipeinfer' is here
the topology holds
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def pipeinfer(folder: Path, *words: str) -> Done:
    """The command, with `folder` as its working directory."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pipeinfer.toml").write_text(TWO_HOSTS)
    return tmp_path


def test_keys_are_made_and_a_topology_with_them_is_drawn(folder):
    made = pipeinfer(folder, "keys")
    assert made.returncode == 0, made.stderr
    secret = folder / "keys" / f"{curve.DEFAULT_KEY}.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_text().strip() not in made.stdout + made.stderr
    checked = pipeinfer(folder, "topology", "check", "pipeinfer.toml")
    assert (checked.returncode, checked.stdout) == (0, DRAWING), checked.stderr


def test_a_pair_that_is_there_is_left_alone(folder):
    assert pipeinfer(folder, "keys", "front", "gpu", "--out", "k").returncode == 0
    before = {file.name: file.read_bytes() for file in (folder / "k").iterdir()}
    assert set(before) == {"front.key", "front.pub", "gpu.key", "gpu.pub"}
    again = pipeinfer(folder, "keys", "gpu", "--out", "k")
    assert (again.returncode, again.stderr) == (
        2,
        "error: k/gpu.key exists; a key is never overwritten\n",
    )
    assert {file.name: file.read_bytes() for file in (folder / "k").iterdir()} == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("", ""), "keys/pipeinfer.key is not there"),
        (('keys = "keys"', ""), "tcp://front:7000: tcp addresses other than loopback need CURVE"),
        (('name = "engine"', 'name = "engin"'), "; did you mean 'engine'"),
        (("tcp://front:7020", "ipc:///run/x"), "other hosts cannot reach it there"),
        (("tcp://front:7020", "tcp://front"), "must be tcp://HOST:PORT"),
        (("[[stage]]", "[settings]\nkv_pages = -1\n[[stage]]"), "--kv-pages"),
        (("[[stage]]", "[[stage]"), "pipeinfer.toml"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(folder, change, why):
    (folder / "pipeinfer.toml").write_text(TWO_HOSTS.replace(*change, 1))
    checked = pipeinfer(folder, "topology", "check", "pipeinfer.toml")
    assert checked.returncode == 2
    assert why in checked.stderr
    assert checked.stderr.startswith("error: ") and checked.stderr.count("\n") == 1
    assert checked.stdout == ""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "--on must say which host this is: front, gpu"),
        (("--on", "moon"), "no such host; there is front, gpu"),
    ],
)
def test_serve_asks_which_host_this_is(folder, words, why):
    pipeinfer(folder, "keys")
    refused = pipeinfer(folder, "serve", "--topology", "pipeinfer.toml", *words)
    assert refused.returncode == 2
    assert why in refused.stderr


def test_a_stage_without_its_key_ends_with_one_line(folder):
    command = [sys.executable, "-m", "pipeinfer.runtime", "gateway", "--topology", "pipeinfer.toml"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pipeinfer.key is not there" in done.stderr
