"""The services of compose.yaml run without containers: on one host, scaled, and on three hosts."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import IncompleteRead
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from compose import FILE, GPU, HOSTS, ROOT, Compose, variables
from containers import ContainerHost, body

from hosts import Hosts, missing
from pipeinfer.bus import curve
from servers import fetch

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
EXAMPLE = (ROOT / ".env.example").read_text()
URL = "http://127.0.0.1:8000"
TRIES = 5  # of what a stream must not end before


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="pi-compose-"))  # short, for the paths of sockets
    yield made
    shutil.rmtree(made)


def until(condition, what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def ready(network: Hosts, host: str) -> bool:
    def there() -> bool:
        try:
            return fetch(f"{URL}/health/ready")[0] == 200
        except OSError:
            return False  # it does not listen yet

    return network.call(host, there)


def metric(network: Hosts, host: str, name: str) -> float:
    """Of all groups."""
    text = network.call(host, lambda: fetch(f"{URL}/metrics")[1])
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def complete(network: Hosts, host: str) -> None:
    status, text = network.call(
        host, lambda: fetch(f"{URL}/v1/completions", body("count from 1 to 5", 5))
    )
    assert status == 200, text


def test_one_host_runs_as_it_is_checked_out_each_service_alone_in_its_network(folder):
    compose = Compose({})
    active = compose.active()
    with Hosts(*active) as network:
        host = ContainerHost(folder / "h", compose, network.command)
        try:
            for service in active:
                host.start(service)
            until(lambda: ready(network, "gateway"), "never ready")
            complete(network, "gateway")
            assert {n: host.health(n) for n in host.processes} == dict.fromkeys(host.processes, 0)
            assert host.stop("gateway-1") == 0
            assert host.health("gateway-1") != 0
            others = [name for name in active if name not in ("gateway", "memory")]
            assert [host.stop(f"{name}-1") for name in (*others, "memory")] == [0] * 5
            assert host.health("engine-1") != 0
        finally:
            host.kill()


class Stream:
    """A seeded completion that outlives its connection. events: (id, data) of those that came.
    begun: set when some have."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.begun = threading.Event()

    def read(self) -> None:
        """Begins it, or goes on behind the last event, until it ends or its connection is cut."""
        if self.events:
            last = self.events[-1][0]
            name = last.rpartition("/")[0]
            request = Request(f"{URL}/v1/streams/{name}", headers={"Last-Event-ID": last})
        else:
            said = {"prompt": "a story", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            request = Request(f"{URL}/v1/completions", json.dumps(said | {"seed": 7}).encode())
            request.add_header("content-type", "application/json")
            request.add_header("x-pipeinfer-detached", "60")
        name = ""
        with suppress(IncompleteRead, ConnectionError), urlopen(request, timeout=60) as answer:
            for line in map(bytes.decode, answer):
                if line.startswith("id: "):
                    name = line[len("id: ") :].strip()
                elif line.startswith("data: ") and name:
                    self.events.append((name, line[len("data: ") :]))
                    if len(self.events) == 100:
                        self.begun.set()

    def text(self) -> str:
        pieces = [json.loads(data) for _, data in self.events if data[0] == "{"]
        return "".join(piece["choices"][0]["text"] for piece in pieces)


@pytest.fixture(scope="module")
def one_host():
    """(network, host, text of a Stream that nothing disturbed). Each engine is alone in a PID
    namespace, as in a container: the holder of their memory sees none of their numbers."""
    compose = Compose({"PIPEINFER_STANDBY": "1"})
    compose.services["gateway"]["environment"]["PIPEINFER_DRAIN_TIMEOUT"] = "1"
    made = Path(tempfile.mkdtemp(prefix="pi-compose-"))
    with Hosts("host") as network:

        def inside(service: str, *words: str) -> list[str]:
            alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            return network.command("host", *(alone if service == "engine" else ()), *words)

        host = ContainerHost(made / "h", compose, inside)
        try:
            for service in compose.active():
                host.start(service)
            until(lambda: ready(network, "host"), "never ready")
            undisturbed = Stream()
            network.call("host", undisturbed.read)
            yield network, host, undisturbed.text()
        finally:
            host.kill()
            shutil.rmtree(made)


def test_an_engine_leaves_its_memory_to_the_next_container_and_its_place_to_a_standby(one_host):
    """An engine is killed (-9) under a stream, which goes on with the same text."""
    network, host, expected = one_host
    host.start("engine", 2)
    until(partial(host.said, "engine-2", "a standby of"), "no standby is ready")
    stream = Stream()
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(network.call, "host", stream.read)
        assert stream.begun.wait(60)
        host.kill_one("engine-1")
        reading.result()
    assert stream.text() == expected
    assert host.said("engine-2", "its standby is promoted") == 1
    until(lambda: metric(network, "host", "pipeinfer_takeovers_total") == 1, "no takeover is told")
    assert 1 <= metric(network, "host", "pipeinfer_recomputed_tokens_total") <= 96
    host.start("engine", 1)  # as its restart policy does
    until(partial(host.said, "engine-1", "a standby of"), "it is no standby")


def test_a_stream_goes_on_at_the_container_that_replaces_its_gateways(one_host):
    """As `docker compose up` replaces it: it is stopped, then there is another one."""
    network, host, expected = one_host
    for _ in range(TRIES):
        stream = Stream()
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(network.call, "host", stream.read)
            assert stream.begun.wait(60)
            assert host.stop("gateway-1") == 0
            reading.result()
        was_under_way = stream.text() != expected
        host.start("gateway")
        until(lambda: ready(network, "host"), "never ready again")
        if was_under_way:
            break
    assert was_under_way
    network.call("host", stream.read)
    assert stream.text() == expected


@pytest.mark.parametrize("service", ["detokenizer", "scheduler", "engine"])
def test_a_stage_that_is_stopped_under_a_stream_leaves_it_to_the_container_that_comes(
    one_host, service
):
    """It does not wait for the stream's end, which under load is that of another stream again; nor
    does the standby of an engine, which is stopped, too."""
    network, host, expected = one_host
    assert any(outlives(network, host, service, expected) for _ in range(TRIES)), "it had ended"


def outlives(network: Hosts, host: ContainerHost, service: str, expected: str) -> bool:
    """Whether a stream was under way when the service was stopped; it has its text in any case."""
    stream = Stream()
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(network.call, "host", stream.read)
        assert stream.begun.wait(60)
        names = [name for name, one in host.processes.items() if one.poll() is None]
        stopped = [name for name in names if name.rpartition("-")[0] == service]
        assert {name: host.stop(name) for name in stopped} == dict.fromkeys(stopped, 0)
        was_under_way = not reading.done()
        host.start(service)
        reading.result()
    assert stream.text() == expected
    return was_under_way


def test_three_hosts_with_profiles_form_one_deployment(folder):
    """The variables of .env.example, uncommented, with other addresses; two engines on one host."""
    curve.create_key_pair(folder, curve.DEFAULT_KEY)
    names = ("front", "gpu-a", "gpu-b")
    with Hosts(*names) as network:
        running = {
            name: ContainerHost(
                folder / name, _three(network, name, folder),
                lambda _service, *words, name=name: network.command(name, *words),
            )
            for name in names
        }  # fmt: skip
        try:
            for name, host in running.items():
                for service in host.compose.active("front" if name == "front" else "gpu"):
                    scaled = name == "gpu-b" and service != "memory"
                    for copy in range(1 + scaled):  # --scale scheduler=2 --scale engine=2
                        host.start(service, copy + 1)
            until(lambda: ready(network, "front"), "never ready")
            complete(network, "front")
            stages = json.loads(network.call("front", lambda: fetch(f"{URL}/health")[1]))["stages"]
            assert [s["group"] for s in stages if s["name"] == "engine"] == [0, 1, 2]
            assert {s["state"] for s in stages} == {"ready"}
            unwell = [n for h in running.values() for n in h.processes if h.health(n)]
            assert unwell == []
            assert running["front"].stop("gateway-1") == 0
        finally:
            for host in running.values():
                host.kill()


def _three(network: Hosts, host: str, folder: Path) -> Compose:
    text = "\n".join(line.removeprefix("#") for line in EXAMPLE.splitlines() if "=" in line)
    wanted = ("FRONT", "GPU_A", "GPU_B", "PIPEINFER_STAGES")
    ours = {"FRONT": "front", "GPU_A": "gpu-a", "GPU_B": "gpu-b"}
    lines = []
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name in wanted:
            lines.append(f"{name}={network.addresses[ours[name]] if name in ours else value}")
    lines[-1] += (
        " scheduler-2=tcp://${GPU_B}:7050,host=gpu-b engine-2-0=tcp://${GPU_B}:7060,host=gpu-b"
    )
    found = variables("\n".join(lines))
    return Compose(
        {
            **found,
            "COMPOSE_FILE": f"{FILE}:{GPU}:{HOSTS}",
            "THIS_HOST": host,
            "CURVE_KEY_FILE": str(folder / f"{curve.DEFAULT_KEY}.key"),
        }
    )
