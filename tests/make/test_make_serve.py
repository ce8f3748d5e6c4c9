"""`make serve`, the first thing that a new user does: what it shows, and that this is true."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipeinfer.demo import ABOUT
from port_rows import port_row
from servers import START, environment

ROOT = Path(__file__).parents[2]
STEP, HINT = ROOT / "tools/make/step.sh", ROOT / "tools/make/torch_hint.sh"
MISSING = [name for name in ("make", "curl") if shutil.which(name) is None]


def executable(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Words of `make`, for an environment of its own, and variables that keep pip off the network:
    the dependencies are those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("made")
    python = executable(
        folder / "python",
        f'"{sys.executable}" "$@" && for packages in "$3"/lib/python3*/site-packages; do\n'
        f'  echo "{sysconfig.get_path("purelib")}" > "$packages/dependencies.pth"\ndone\n',
    )
    port = port_row(1)
    words = ["make", "--no-print-directory", f"VENV={folder}/env", f"PORT={port}"]
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    kept = {k: v for k, v in environment().items() if k not in ("PYTHONPATH", "MAKEFLAGS")}
    return [*words, f"PYTHON={python}"], {**kept, **offline}, port


def started(words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*words, "serve"], cwd=ROOT, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
def test_make_serve_tells_its_steps_and_its_curl_line_gets_an_answer(made):
    words, env, port = made
    process = started(words, env)
    late = threading.Timer(3 * START, process.kill)  # it installs, then starts
    late.start()
    said = ""
    try:
        for line in process.stdout:
            said += line
            if "curl" in line:
                break
        assert "curl" in line, said
        steps = re.findall(r"^(making|installing) .+ \.\.\. \d+ s$", said, re.MULTILINE)
        assert steps == ["making", "installing"], said
        assert f"ready http://127.0.0.1:{port}" in said
        assert said.index("starting") < said.index("ready http")
        assert re.search(r"^ready after \d+ s; try it:$", said, re.MULTILINE)
        answer = subprocess.run(
            ["sh", "-c", line.strip() + " -sS"], capture_output=True, text=True, timeout=60
        )
        content = json.loads(answer.stdout)["choices"][0]["message"]["content"]
        assert content in ABOUT.values(), "the model knows what it is asked"
        beside = started(words, env)  # while the port is taken
        told, _ = beside.communicate(timeout=START)
        assert re.search(
            rf"^error: --port {port}: 127\.0\.0\.1:{port} is taken by process \d+ "
            r"\(pipeinfer serve, model pipeinfer-demo\); --port (\d+) is free "
            r"\(with make: PORT=\1\)$",
            told,
            re.MULTILINE,
        ), told
        assert "try it" not in told and "installing" not in told and beside.returncode != 0
    finally:
        late.cancel()
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C on a terminal is
        rest, _ = process.communicate(timeout=60)
    assert "Traceback" not in rest, rest


def test_a_step_that_fails_shows_why_and_ends_with_its_code():
    command = ["sh", STEP, "doing it", "sh", "-c", "echo quietly; exit $0"]
    well = subprocess.run([*command, "0"], capture_output=True, text=True)
    assert (well.returncode, well.stderr) == (0, "")
    assert re.fullmatch(r"doing it \.\.\. \d s\n", well.stdout)
    failed = subprocess.run([*command, "3"], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (3, "quietly\n")


def of_session(leader: int) -> list[int]:
    """The processes of that session."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def test_a_step_on_a_terminal_counts_seconds_and_can_be_interrupted(tmp_path):
    """The interrupt goes to all in the foreground, as Ctrl-C does; nothing is left behind."""
    terminal, ours = os.openpty()
    with subprocess.Popen(
        ["sh", STEP, "waiting", "sleep", "60"], stdout=ours, stderr=ours, stdin=ours,
        start_new_session=True, env={**environment(), "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        os.close(ours)
        said, counted = b"", list[int]()
        while len(counted) < 3:
            said += os.read(terminal, 100)
            counted = [int(each) for each in re.findall(rb"\rwaiting \.\.\. (\d+) s", said)]
        assert counted == sorted(counted) and counted[0] < counted[-1]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) in (130, -signal.SIGINT)
    deadline = time.monotonic() + 20
    while of_session(process.pid):
        assert time.monotonic() < deadline, "something goes on"
        time.sleep(0.1)
    os.close(terminal)
    assert list(tmp_path.iterdir()) == []


def test_gigabytes_of_torch_are_announced_where_they_are_of_no_use(tmp_path):
    bare = executable(  # pip is there, torch is not
        tmp_path / "bare",
        f'test "$1" = -m || set -- -S "$@"\nexec "{sys.executable}" "$@"\n',
    )
    gpus, none = tmp_path / "gpus", tmp_path / "none"
    for folder, code in ((gpus, 0), (none, 9)):
        folder.mkdir()
        executable(folder / "nvidia-smi", f"exit {code}\n")

    def hint(python: object, folder: Path, **variables: str) -> str:
        kept = {k: v for k, v in environment().items() if not k.startswith(("PIP_", "PYTHONPATH"))}
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        env = {**kept, "PIP_CONFIG_FILE": os.devnull, **variables, "PATH": path}
        done = subprocess.run(["sh", HINT, python], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "PIP_EXTRA_INDEX_URL" in hint(bare, none)
    assert hint(bare, gpus) == "", "a GPU has a use for them"
    file = tmp_path / "pip.conf"
    for name in ("EXTRA_INDEX_URL", "INDEX_URL", "FIND_LINKS"):
        assert hint(bare, none, **{f"PIP_{name}": "https://index.invalid/cpu"}) == "", name
    file.write_text("[global]\nextra-index-url = https://index.invalid/cpu\n")
    assert hint(bare, none, PIP_CONFIG_FILE=str(file)) == ""
    file.write_text("[global]\ntimeout = 9\n")
    assert "PIP_EXTRA_INDEX_URL" in hint(bare, none, PIP_CONFIG_FILE=str(file))
    assert hint(sys.executable, none) == "", "torch is there already"
