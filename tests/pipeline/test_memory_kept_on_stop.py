"""A whole server that is stopped and started again finds its prefix cache."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

import pipeinfer.demo
from child_processes import children_with
from pipeinfer.demo import copy_task
from pipeinfer.runtime.memory_holder import FOLDER
from port_rows import port_row
from servers import Server, alive, environment, memfds

HOLDER = "pipeinfer.runtime.memory_holder"
QUESTION = copy_task(random.Random(47), 60)[0]
PAGES = ("--kv-pages", "400")
KEEP = (*PAGES, "--keep-memory-on-stop")
CACHED = 32  # tokens at least, of the question's


@pytest.fixture
def port() -> int:
    """Which nobody takes between two servers."""
    return port_row(1)


def ask(server: Server) -> tuple[str, int]:
    """The answer's text, and how many tokens of the question were cached."""
    body = {"prompt": QUESTION, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    return whole["choices"][0]["text"], cached


def holder(server: Server) -> psutil.Process:
    return children_with(HOLDER, server.process.pid)[0]


def stop(server: Server) -> None:
    assert server.stop() == 0


def wait_gone(process: psutil.Process, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while alive(process.pid):
        assert time.monotonic() < deadline, process
        time.sleep(0.05)


def memory_files(process: psutil.Process) -> int:
    """Different pieces of memory that it keeps."""
    return len({file.st_ino for file in memfds(process.pid)})


@pytest.fixture
def temporary(short_path, monkeypatch) -> Path:
    """A folder for temporary files, which servers of other tests do not use."""
    monkeypatch.setenv("TMPDIR", str(short_path))
    return short_path


def sockets(temporary: Path) -> list[Path]:
    return list(Path(temporary, f"{FOLDER}-{os.geteuid()}").glob("*/*"))


def other_fine_tune(folder: Path) -> Path:
    """The demo model, of the same sizes, with other numbers."""
    shutil.copytree(Path(pipeinfer.demo.__file__).parent, folder)
    weights = load_file(folder / "model.safetensors")
    noise = np.random.RandomState(1)
    changed = {
        name: one + (0.05 * noise.standard_normal(one.shape)).astype(one.dtype)
        for name, one in weights.items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_next_server_finds_what_is_its_own_and_another_one_frees_it(port, tmp_path, temporary):
    with Server(*KEEP, port=port) as server:
        first, cached = ask(server)
        assert cached == 0
        kept, entries = holder(server), memory_files(holder(server))
        stop(server)
        said = f"is kept for 600 s; to free it now, end process {kept.pid}"
        server.wait(lambda: any(said in line for line in server.log), "it says what it leaves")
    assert alive(kept.pid) and memory_files(kept) == entries >= 2
    with Server(*KEEP, port=port) as server:
        wait_gone(kept)
        text, cached = ask(server)
        assert text == first and cached >= CACHED
        assert memory_files(holder(server)) == entries
        kept = holder(server)
        assert sockets(temporary) != []
        stages = [psutil.Process(row["pid"]) for row in server.health()["stages"]]
        server.process.kill()  # and so it does however it ends
        server.process.wait()
        for stage in stages:  # of which one has its port
            wait_gone(stage)
    assert alive(kept.pid) and memory_files(kept) == entries
    with Server(str(other_fine_tune(tmp_path / "other")), *KEEP, port=port) as server:
        wait_gone(kept)
        other, cached = ask(server)
        assert cached == 0 and other != first
        assert memory_files(holder(server)) <= entries  # its own alone
        kept = holder(server)
        stop(server)
    with Server(*PAGES, "--no-keep-memory", port=port) as server:
        assert not alive(kept.pid)  # before anything was loaded
        answer = httpx.post(f"{server.url}/sleep", timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "cannot_sleep")
        assert ask(server) == (first, 0)
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        stop(server)
    for process in everyone:
        wait_gone(process)
    assert sockets(temporary) == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--no-keep-memory"], "--no-keep-memory"),
        (["--in-process"], "--in-process"),
    ],
)
def test_what_cannot_be_kept_is_refused(port, more, why):
    asked = ("--keep-memory-on-stop", "--port", str(port), *more)
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "serve", *asked],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--keep-memory-on-stop: " in done.stderr
    assert why in done.stderr
