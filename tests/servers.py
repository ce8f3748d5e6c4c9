"""A real `pipeinfer serve` for tests: its processes, its ready line, its end."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

START = 120.0  # seconds; generous, for a loaded machine
STAGES = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")


def environment() -> dict[str, str]:
    """Without settings of whoever runs the tests, and with few threads."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIPEINFER_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Server:
    """Starts `pipeinfer serve *arguments --port PORT`, with the pipeinfer of `python`; use it as a
    context manager."""

    def __init__(self, *arguments: str, python: str = sys.executable, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "pipeinfer", "serve", *arguments, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.log: list[str] = []
        self.lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(stream, sink), daemon=True)
            for stream, sink in (
                (self.process.stdout, self.lines.put),
                (self.process.stderr, self.log.append),
            )
        ]
        for thread in self._threads:
            thread.start()
        self.url = ""

    def _read(self, stream, sink) -> None:
        for line in stream:
            sink(line.rstrip("\n"))

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                if self.process.poll() is not None:
                    break
                continue
            if line.startswith("ready "):
                self.url = line.split()[1]
                return self
        raise AssertionError(f"not ready: {self.process.poll()}\n" + "\n".join(self.log))

    def __enter__(self) -> Server:
        try:
            return self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def whole_log(self) -> list[str]:
        """All lines, of a server all of whose processes have ended or end now."""
        self._threads[1].join(START)
        assert not self._threads[1].is_alive(), "a process goes on"
        return self.log

    def get(self, path: str) -> tuple[int, str]:
        return fetch(self.url + path)

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        status, text = fetch(self.url + path, json.dumps(body).encode())
        return status, json.loads(text)

    def health(self) -> dict:
        return json.loads(self.get("/health")[1])

    def pid(self, stage: str) -> int:
        """Of a stage's process: by its id, or of the first one with that name. A gateway that was
        just started may not have heard of it yet."""

        def known() -> int:
            stages = self.health()["stages"]
            return next(s["pid"] for s in stages if stage in (s["stage"], s["name"]))

        return self.wait(known, f"the process of {stage} is known")

    def metric(self, name: str) -> float:
        """Value of a metric without labels."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        raise KeyError(name)

    def wait(self, condition, what: str, seconds: float = START):
        """Polls until `condition()` is true; it is returned."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never happened: {what}\n" + "\n".join(self.log))


def fetch(url: str, body: bytes | None = None) -> tuple[int, str]:
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers), timeout=120
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def memfds(pid: int) -> list[os.stat_result]:
    """Of the process' open memory files; it may open and close files meanwhile."""
    found = list[os.stat_result]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:" in str(file.readlink()):
                found.append(file.stat())
    return found


def alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False
