"""Docker Compose itself, where it is installed, reads the files as the other tests here do.

`docker compose config` writes out what it would run. It needs no daemon.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compose import ROOT, RUNS, THREE, Compose, variables

DOCKER = shutil.which("docker") or ""
COMMAND = [DOCKER, "compose", "--project-directory", str(ROOT)]
UNITS = {"h": 3600, "m": 60, "s": 1}
EXAMPLE = re.sub(r"^#(?=\w+=)", "", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
# What a .env says beside COMPOSE_FILE.
NOTHING = ""
SAID = """
PIPEINFER_PUBLISH=0.0.0.0:8600
MODEL_FOLDER=./models/tiny
PIPEINFER_MODEL=/model
HF_ENDPOINT=http://hub.local
GPUS=2
API_KEY_FILE=./secrets/api_key
"""


def installed() -> bool:
    if not DOCKER:
        return False
    said = subprocess.run([*COMMAND, "version"], capture_output=True, timeout=60, check=False)
    return said.returncode == 0


pytestmark = pytest.mark.skipif(not installed(), reason="needs docker with its plugin compose")


def configured(env_file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--env-file", str(env_file), *arguments, "config", "--format", "json"]
    # Variables of whoever runs the tests would go before those of the file.
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "DOCKER_CONFIG") if key in os.environ}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False, env=kept
    )


def seconds(text: str) -> int:
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def absolute(path: str) -> str:
    return str((ROOT / path).resolve()) if path.startswith(".") else path


def port(text: str) -> tuple[str, str, int]:
    """(address, published port, port of the container)"""
    before, _, target = text.rpartition(":")
    address, _, published = before.rpartition(":")
    return address, published, int(target)


def mount(text: str) -> tuple[str, str, bool]:
    """(volume or absolute path, path in the container, whether it is read only)"""
    source, target, *options = text.split(":")
    return absolute(source), target, options == ["ro"]


def secret(said: str | dict[str, Any]) -> tuple[str, str]:
    """(source, file name in the container)"""
    if isinstance(said, str):
        return said, said
    return said["source"], said.get("target", said["source"]).rpartition("/")[2]


def ours(service: dict[str, Any]) -> dict[str, Any]:
    """A service of `Compose`, as `theirs` gives one."""
    form = {**service}
    form["ports"] = [port(one) for one in service.get("ports", [])]
    form["volumes"] = [mount(one) for one in service.get("volumes", [])]
    form["secrets"] = [secret(one) for one in service.get("secrets", [])]
    if "stop_grace_period" in form:
        form["stop_grace_period"] = seconds(form["stop_grace_period"])
    if "build" in form:
        form["build"] = {**form["build"], "context": str(ROOT)}
    if "healthcheck" in form:
        form["healthcheck"] = _in_seconds(form["healthcheck"])
    if "deploy" in form:
        [devices] = form["deploy"]["resources"]["reservations"]["devices"]
        count = -1 if devices["count"] == "all" else int(devices["count"])
        form["deploy"] = {**devices, "count": count}
    return form


def theirs(service: dict[str, Any]) -> dict[str, Any]:
    """A service that Docker Compose wrote, with what differs between its versions left out."""
    form = {key: value for key, value in service.items() if value is not None}
    environment = service.get("environment", {})
    form["environment"] = {key: value for key, value in environment.items() if value is not None}
    form["ports"] = [
        (one.get("host_ip", ""), one["published"], one["target"]) for one in form.get("ports", [])
    ]
    form["volumes"] = [
        (one["source"], one["target"], one.get("read_only", False)) for one in form["volumes"]
    ]
    for one in service["volumes"]:
        assert one["type"] == ("bind" if one["source"].startswith("/") else "volume")
    form["secrets"] = [secret(one) for one in form.get("secrets", [])]
    if "stop_grace_period" in form:
        form["stop_grace_period"] = seconds(form["stop_grace_period"])
    if "healthcheck" in form:
        form["healthcheck"] = _in_seconds(form["healthcheck"])
    if "deploy" in form:
        [form["deploy"]] = form["deploy"]["resources"]["reservations"]["devices"]
    form.pop("entrypoint", None)
    return form


def _in_seconds(check: dict[str, Any]) -> dict[str, Any]:
    times = ("interval", "timeout", "start_period")
    return {key: seconds(value) if key in times else value for key, value in check.items()}


@pytest.mark.parametrize(
    ("files", "profiles", "said"),
    [
        *((*run, NOTHING) for run in RUNS),
        *((*run, SAID) for run in RUNS),
        (THREE, ("front",), EXAMPLE),
        (THREE, ("gpu",), EXAMPLE),
    ],
)
def test_docker_compose_runs_what_these_tests_say_it_runs(files, profiles, said, tmp_path):
    env_file = tmp_path / "env"
    env_file.write_text(f"{said}\nCOMPOSE_FILE={files}\n")
    named = [word for profile in profiles for word in ("--profile", profile)]
    done = configured(env_file, *named)
    assert (done.returncode, done.stderr) == (0, "")
    tree = json.loads(done.stdout)
    compose = Compose(variables(env_file.read_text()))
    active = {name: ours(compose.services[name]) for name in compose.active(*profiles)}
    assert {name: theirs(one) for name, one in tree["services"].items()} == active
    assert {name: absolute(one["file"]) for name, one in tree.get("secrets", {}).items()} == {
        source: absolute(compose.secret_file(source))
        for source in {source for one in active.values() for source, _ in one["secrets"]}
    }
    used = {source for one in active.values() for source, *_ in one["volumes"]}
    assert set(tree["volumes"]) == {source for source in used if not source.startswith("/")}


def test_of_several_hosts_no_profile_runs_nothing(tmp_path):
    env_file = tmp_path / "env"
    env_file.write_text(f"COMPOSE_FILE={THREE}\n")
    assert json.loads(configured(env_file).stdout).get("services", {}) == {}
    env_file.write_text(f"COMPOSE_FILE={THREE}\nCOMPOSE_PROFILES=gpu\n")
    assert set(json.loads(configured(env_file).stdout)["services"]) == {
        "scheduler",
        "memory",
        "engine",
    }
    assert Compose(variables(env_file.read_text())).active() == ["scheduler", "memory", "engine"]


def test_a_folder_that_looks_like_a_volume_is_refused_by_its_name(tmp_path):
    env_file = tmp_path / "env"
    env_file.write_text("MODEL_FOLDER=models/tiny\n")
    done = configured(env_file)
    assert done.returncode != 0 and "models/tiny" in done.stderr
