"""compose.yaml validated against the schema that the Compose specification publishes.

The schema comes with check-jsonschema. As the file stands, and as each set of profiles makes it
with its variables filled in.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose import ROOT, Compose, variables

FILE = ROOT / "compose.yaml"
PROFILES = [("local",), ("front",), ("gpu",), ("front", "gpu"), ("local", "monitoring")]
MISTAKES: dict[str, tuple[str, Any]] = {
    "an attribute that does not exist": ("privileged_", True),
    "a number where a duration belongs": ("stop_grace_period", 45),
    "an unknown condition": ("depends_on", {"tokenizer": {"condition": "service_up"}}),
    "a flag where a policy belongs": ("restart", True),
    "a health check with a misspelt key": ("healthcheck", {"tests": ["CMD", "true"]}),
}


def check(*files: Path) -> tuple[int, str]:
    """The validator's exit code (0: all are valid, 1: one is not) and what it says."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def resolved(profiles: tuple[str, ...], env: str) -> dict[str, Any]:
    """What those profiles run with these variables, anchors and merges written out."""
    compose = Compose(variables((ROOT / env).read_text()))
    tree = {key: value for key, value in compose.tree.items() if not key.startswith("x-")}
    tree["services"] = {name: compose.services[name] for name in compose.active(*profiles)}
    assert tree["services"]
    return tree


def test_the_file_is_valid():
    assert check(FILE) == (0, "ok -- validation done\n")


@pytest.mark.parametrize("env", [".env", ".env.example"])
def test_what_each_set_of_profiles_runs_is_valid(env, tmp_path):
    files = []
    for profiles in PROFILES:
        files.append(tmp_path / f"{'-'.join(profiles)}.yaml")
        files[-1].write_text(yaml.safe_dump(resolved(profiles, env)))
    assert check(*files) == (0, "ok -- validation done\n")


def test_a_planted_mistake_is_refused_by_its_name(tmp_path):
    files = {}
    for what, (key, value) in MISTAKES.items():
        tree = yaml.safe_load(FILE.read_text())
        tree["services"]["gateway"][key] = value
        files[what] = tmp_path / f"{key}.yaml"
        files[what].write_text(yaml.safe_dump(tree))
    code, said = check(*files.values())
    assert code == 1
    for what, file in files.items():
        assert f"{file}::$.services.gateway" in said, f"{what}:\n{said}"
