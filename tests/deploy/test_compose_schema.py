"""compose.yaml and its siblings, validated against the Compose specification's own schema.

The schema comes with check-jsonschema. As the file stands, and as each
set of files and profiles makes it with its variables filled in.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from compose import FILE, ROOT, RUNS, Compose, load

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


def resolved(files: str, profiles: tuple[str, ...]) -> dict[str, Any]:
    """What those profiles of those files run, anchors and merges written out."""
    compose = Compose({"COMPOSE_FILE": files})
    tree = {key: value for key, value in compose.tree.items() if not key.startswith("x-")}
    tree["services"] = {name: compose.services[name] for name in compose.active(*profiles)}
    assert tree["services"]
    return tree


def test_the_file_is_valid():
    assert check(ROOT / FILE) == (0, "ok -- validation done\n")


def test_what_each_set_of_files_and_profiles_runs_is_valid(tmp_path):
    files = []
    for number, (names, profiles) in enumerate(RUNS):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump(resolved(names, profiles)))
    assert check(*files) == (0, "ok -- validation done\n")


def test_a_planted_mistake_is_refused_by_its_name(tmp_path):
    files = {}
    for what, (key, value) in MISTAKES.items():
        tree = load(FILE)
        tree["services"]["gateway"][key] = value
        files[what] = tmp_path / f"{key}.yaml"
        files[what].write_text(yaml.safe_dump(tree))
    code, said = check(*files.values())
    assert code == 1
    for what, file in files.items():
        assert f"{file}::$.services.gateway" in said, f"{what}:\n{said}"
