"""One deployment on three hosts, over a network with delay and loss that is cut and mended.

Network namespaces stand for the hosts, see hosts.py. PIPEINFER_TEST_CUT=20 cuts for that long.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from held_processes import HeldProcesses
from hosts import Hosts, missing
from pipeinfer.bus import curve
from servers import environment

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

CUT = float(os.environ.get("PIPEINFER_TEST_CUT", "0"))  # seconds at least; 0: until it is noticed
STAGES = (
    ("gateway", 0, "front"), ("tokenizer", 0, "front"), ("detokenizer", 0, "front"),
    ("gateway", 1, "gpu-a"),
    ("scheduler", 0, "gpu-a"), ("engine", 0, "gpu-a"),
    ("scheduler", 1, "gpu-b"), ("engine", 1, "gpu-b"),
)  # fmt: skip


class Deployment:
    """`pipeinfer serve --on HOST` on each of three hosts, each with its own key."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, folder
        self.file = folder / "pipeinfer.toml"
        lines = ['keys = "keys"', "[settings]", 'routing = "round-robin"', "kv_pages = 2000"]
        # Streams wait for their host, however slow this machine makes the cut.
        lines += ["threads = 1", "host_loss = 600"]
        for place, (name, number, host) in enumerate(STAGES):
            address = f"{hosts.addresses[host]}:{7000 + 10 * place}"
            lines += ["[[stage]]", f'name = "{name}"', f'host = "{host}"', f'key = "{host}"']
            lines += [f'address = "tcp://{address}"']
            if name == "gateway":
                lines += [f"index = {number}", f'http = "{self.url(host)}"']
            else:
                lines += [f"group = {number}"]
        self.file.write_text("\n".join(lines))
        for host in hosts.addresses:
            curve.create_key_pair(folder / "keys", host)
        self.processes = {host: self.start(host) for host in hosts.addresses}

    def url(self, host: str) -> str:
        """Of the gateway there."""
        return f"http://{self.hosts.addresses[host]}:8000"

    def start(self, host: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "pipeinfer", "serve", "--topology", str(self.file)]
        command += ["--on", host, "--host", "0.0.0.0"]
        return subprocess.Popen(
            self.hosts.command(host, *command), env={**environment(), "TMPDIR": str(self.folder)}
        )

    def held_engines(self, *hosts: str) -> HeldProcesses:
        """The engines there."""
        pids = [
            pid
            for host in hosts
            for pid in self.hosts.pids(host)
            if {"pipeinfer.runtime", "engine"} <= {*psutil.Process(pid).cmdline()}
        ]
        assert len(pids) == len(hosts)
        return HeldProcesses(*pids)

    def power_off(self, host: str) -> None:
        for pid in self.hosts.pids(host):
            os.kill(pid, signal.SIGKILL)
        self.processes[host].wait(10)

    def ask(self, path: str, body: dict | None = None) -> tuple[int, dict]:
        """A client on host `front`. (0, {}) while nobody listens."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url("front") + path, data, {"content-type": "application/json"}
        )

        def there() -> tuple[int, dict]:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return answer.status, json.loads(answer.read() or b"{}")
            except urllib.error.HTTPError as error:
                return error.code, {}
            except OSError:
                return 0, {}

        return self.hosts.call("front", there)

    def state(self, stage: str, group: int) -> str:
        stages = self.ask("/health")[1].get("stages", [])
        return next(s["state"] for s in stages if (s["name"], s["group"]) == (stage, group))

    def wait(self, condition, what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def stop(self) -> list[int]:
        for process in self.processes.values():
            process.terminate()
        return [process.wait(60) for process in self.processes.values()]


class Stream(threading.Thread):
    """A streamed completion from host `front`, with the time of each piece."""

    def __init__(self, deployment: Deployment, body: dict) -> None:
        super().__init__(daemon=True)
        self._deployment, self._body = deployment, body
        self.times: list[float] = []
        self.text, self.finish = "", None
        self.start()

    def run(self) -> None:
        self._deployment.hosts.call("front", self._read)

    def _read(self) -> None:
        data = json.dumps({**self._body, "stream": True}).encode()
        url = self._deployment.url("front") + "/v1/completions"
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    self.times.append(time.monotonic())
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish

    def pause(self) -> float:
        """The longest time between two pieces."""
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


@pytest.fixture(scope="module")
def deployment():
    with (
        tempfile.TemporaryDirectory(prefix="pi-net-") as folder,
        Hosts("front", "gpu-a", "gpu-b") as hosts,
    ):
        running = Deployment(Path(folder), hosts)
        try:
            running.wait(lambda: running.ask("/health/ready")[0] == 200, "never ready")
            yield running
            assert running.stop() == [0, 0, 0]
        finally:
            for process in running.processes.values():
                process.kill()
                process.wait()


def test_streams_survive_the_cut_of_an_engine_host_and_new_requests_go_elsewhere(deployment):
    chat = {"messages": [{"role": "user", "content": "count from 3 to 12"}], "temperature": 0}
    status, answer = deployment.ask("/v1/chat/completions", chat)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "3 4 5 6 7 8 9 10 11 12"

    greedy = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    bodies = [{**greedy, "prompt": "one, two, " * (n + 1)} for n in range(4)]
    with deployment.held_engines("gpu-b") as held:  # no stream of theirs ends before the cut
        streams = [Stream(deployment, body) for body in bodies]
        held.compute_until(lambda: all(len(s.times) > 5 for s in streams))
        deployment.hosts.cut("gpu-b")
    began = time.monotonic()
    deployment.wait(lambda: deployment.state("scheduler", 1) == "lost", "the cut is not noticed")
    served = 0
    while served < 4 or time.monotonic() - began < CUT:
        assert deployment.ask("/v1/completions", {"prompt": "a b", "max_tokens": 4})[0] == 200
        served += 1
    deployment.wait(lambda: sum(s.finish is not None for s in streams) == 2, "no stream goes on")
    waiting = [s for s in streams if s.finish is None]  # round-robin gave two to each host
    deployment.hosts.join("gpu-b")
    cut = time.monotonic() - began
    for stream in streams:
        stream.join(120)
    assert [s.finish for s in streams] == ["length"] * 4
    assert all(s.pause() > cut for s in waiting)
    pauses = {n: round(s.pause(), 2) for n, s in enumerate(streams)}
    print(f"cut for {cut:.1f} s, {served} new requests meanwhile, longest pauses {pauses}")
    deployment.wait(lambda: deployment.ask("/health")[1].get("status") == "ready", "not well again")
    again = [deployment.ask("/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]
    assert again == [s.text for s in streams]


def test_a_stream_goes_on_at_the_gateway_of_another_host(deployment):
    """As behind a load balancer, which knows nothing of streams."""
    said = {"prompt": "a story", "max_tokens": 150, "ignore_eos": True, "seed": 7, "stream": True}
    headers = {"content-type": "application/json", "x-pipeinfer-detached": "60"}
    data = json.dumps(said).encode()

    def begin(most: int) -> list[bytes]:
        url = deployment.url("front") + "/v1/completions"
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [line for line, _ in zip(answer, range(most), strict=False)]

    def go_on(last: str) -> list[bytes]:
        url = f"{deployment.url('gpu-a')}/v1/streams/{last.rpartition('/')[0]}"
        request = urllib.request.Request(url, headers={"Last-Event-ID": last})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [*answer]

    def text(lines: list[bytes]) -> str:
        found = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return "".join(one["choices"][0]["text"] for one in found)

    begun = deployment.hosts.call("front", lambda: begin(12))
    whole = begun[: max(n for n, line in enumerate(begun) if not line.strip())]  # to an event's end
    last = [line for line in whole if line.startswith(b"id: ")][-1].decode()[4:].strip()
    rest = deployment.hosts.call("front", lambda: go_on(last))
    expected = text(deployment.hosts.call("front", lambda: begin(1 << 20)))
    assert len(text(whole)) < len(expected) and text(whole + rest) == expected
    with pytest.raises(urllib.error.HTTPError, match="404"):
        deployment.hosts.call("front", lambda: go_on("nobody-knows-it/1"))


def test_streams_survive_the_loss_of_power_of_an_engine_host(deployment):
    """Its processes end while it is cut off, so that nobody hears of their end, and start again."""
    greedy = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
    bodies = [{**greedy, "prompt": f"{n}, two, " * 3} for n in range(2)]
    with deployment.held_engines("gpu-b") as held:
        streams = [Stream(deployment, body) for body in bodies]
        held.compute_until(lambda: all(len(s.times) > 5 for s in streams))
        deployment.hosts.cut("gpu-b")
        deployment.power_off("gpu-b")
    deployment.wait(lambda: sum(s.finish is not None for s in streams) == 1, "none goes on")
    deployment.hosts.join("gpu-b")
    deployment.processes["gpu-b"] = deployment.start("gpu-b")
    for stream in streams:
        stream.join(120)
    assert [s.finish for s in streams] == ["length"] * 2
    deployment.wait(lambda: deployment.ask("/health")[1].get("status") == "ready", "not well again")
    again = [deployment.ask("/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]
    assert again == [s.text for s in streams]
