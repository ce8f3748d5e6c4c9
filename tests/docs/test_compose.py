"""compose.yaml and the Dockerfile, run without containers: each service's command as a process.

A process gets the environment that compose would give it and nothing else; paths inside the image
stand for files of this checkout, and the port for a free one.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pipeinfer.settings import Settings, from_environment
from servers import STAGES, fetch

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "stages/Dockerfile").read_text()
SERVICES = COMPOSE["services"]
SOCKETS, TOPOLOGY = "/run/pipeinfer", "/etc/pipeinfer/pipeinfer.toml"


def interpolated(text: object) -> str:
    """`${NAME:-default}` with nothing set, as compose would do it."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))


def image_files() -> dict[str, str]:
    """{path in the image: path in the checkout} of single files that the Dockerfile copies."""
    copies = re.findall(r"^COPY (stages/\S+) (/\S+)$", DOCKERFILE, re.MULTILINE)
    return {target: source for source, target in copies}


@dataclass
class Host:
    """A folder in place of the image and its volumes."""

    folder: Path
    port: int

    def __post_init__(self) -> None:
        topology = (ROOT / image_files()[TOPOLOGY]).read_text()
        self._topology = self.folder / "pipeinfer.toml"
        self._topology.write_text(topology.replace(SOCKETS, f"{self.folder}/run"))

    def command(self, words: list[str]) -> list[str]:
        assert words[0] == "python"
        places = {t: str(ROOT / source) for t, source in image_files().items()}
        places[TOPOLOGY] = str(self._topology)
        words = [places.get(word, word.replace(":8000", f":{self.port}")) for word in words]
        return [sys.executable, *words[1:]]

    def environment(self, service: str) -> dict[str, str]:
        given = {k: interpolated(v) for k, v in SERVICES[service]["environment"].items()}
        if "PIPEINFER_PORT" in given:
            given["PIPEINFER_PORT"] = str(self.port)
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), **given}

    def start(self, service: str) -> subprocess.Popen:
        command = self.command(SERVICES[service]["command"])
        return subprocess.Popen(command, cwd=self.folder, env=self.environment(service))

    def health(self, service: str) -> int:
        test = SERVICES[service]["healthcheck"]["test"]
        assert test[0] == "CMD"
        return subprocess.run(
            self.command(test[1:]), cwd=self.folder, env=self.environment(service), timeout=60,
            check=False, capture_output=True,
        ).returncode  # fmt: skip


@pytest.fixture
def host():
    folder = Path(tempfile.mkdtemp(prefix="pi-compose-"))  # short, for the paths of sockets
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield Host(folder, port)
    shutil.rmtree(folder)


def wait_ready(port: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if fetch(f"http://127.0.0.1:{port}/health/ready")[0] == 200:
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.1)
    raise AssertionError("never ready")


def test_services_of_compose_form_a_pipeline_and_stop_in_order(host):
    processes = {}
    try:
        processes = {name: host.start(name) for name in SERVICES}
        wait_ready(host.port)
        body = json.dumps({"prompt": "count", "max_tokens": 3}).encode()
        assert fetch(f"http://127.0.0.1:{host.port}/v1/completions", body)[0] == 200
        assert {name: host.health(name) for name in SERVICES} == dict.fromkeys(SERVICES, 0)
        stop(processes, "gateway")
        assert host.health("gateway") != 0
        for name in SERVICES["gateway"]["depends_on"]:
            stop(processes, name)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def stop(processes: dict[str, subprocess.Popen], name: str) -> None:
    grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    processes[name].send_signal(signal.SIGTERM)
    assert processes[name].wait(grace) == 0


def test_health_check_of_a_stage_that_is_not_there_fails(host):
    assert host.health("engine") == 1


def test_one_service_runs_each_stage():
    assert {name: service["command"][3] for name, service in SERVICES.items()} == {
        name: name for name in STAGES
    }


def test_gateway_has_longer_to_stop_than_it_may_drain():
    grace = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings().drain_timeout + 5
    assert set(SERVICES["gateway"]["depends_on"]) == set(STAGES) - {"gateway"}


def test_compose_sets_settings_that_exist():
    for service in SERVICES.values():
        names = [k for k in service["environment"] if k.startswith("PIPEINFER_")]
        assert len(from_environment(dict.fromkeys(names, "1"))) == len(names)


def test_volumes_of_compose_are_declared_and_known_to_the_image():
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source, target, *_ = interpolated(volume).split(":")
            assert source in COMPOSE["volumes"]
            assert target in DOCKERFILE


def test_dockerfile_copies_what_exists_and_does_not_run_as_root():
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in (ROOT / "stages/Dockerfile.dockerignore").read_text().splitlines()
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users == ["pipeinfer"]
    assert image_files().keys() >= {TOPOLOGY, "/opt/pipeinfer/healthcheck.py"}
