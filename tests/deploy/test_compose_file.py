"""compose.yaml, its variables and the Dockerfile: valid by the specification, and consistent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from compose import ROOT, VARIABLE, Compose, variables
from containers import DOCKERFILE, HEAVY, SECRETS, TOPOLOGY, image_files, stage_of

from pipeinfer.runtime.deployment import BIND, KEYS, SECRET, STAGES, stages
from pipeinfer.settings import Settings, from_environment
from servers import STAGES as NAMES

DEFAULTS = variables((ROOT / ".env").read_text())
EXAMPLE = (ROOT / ".env.example").read_text()
COMPOSE = Compose(DEFAULTS)
# What is built here; the others are other people's.
SERVICES = {name: one for name, one in COMPOSE.services.items() if "build" in one}
services = pytest.mark.parametrize("name", SERVICES)

TEXT, WORD = r".*", r"[a-zA-Z0-9][a-zA-Z0-9_.-]*"
DURATION = r"(\d+(us|ms|s|m|h))+"
PORT = r"((\d+\.){3}\d+:)?(\d+:)?\d+(/(tcp|udp))?"
VOLUME = r"[^:]+:/[^:]+(:(ro|rw|z|Z))*"

Rule = Any  # a pattern, a list of one rule, a dictionary of rules, a type, or a tuple of rules


def wrong(value: object, rule: Rule, path: str = "") -> list[str]:
    """Where `value` breaks `rule`."""
    if isinstance(rule, tuple):
        found = [wrong(value, one, path) for one in rule]
        return [] if [] in found else found[0]
    if isinstance(rule, str):
        holds = isinstance(value, str) and re.fullmatch(rule, value)
        return [] if holds else [f"{path}: {value!r}"]
    if isinstance(rule, type):
        return [] if isinstance(value, rule) else [f"{path}: {value!r} is no {rule.__name__}"]
    if isinstance(rule, list):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [w for n, one in enumerate(value) for w in wrong(one, rule[0], f"{path}[{n}]")]
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no mapping"]
    found = []
    for key, one in value.items():
        known = rule.get(key, rule.get("*"))
        found += wrong(one, known, f"{path}.{key}") if known else [f"{path}.{key} is unknown"]
    return found


# The attributes of the Compose specification that a service here may have, with their forms.
SERVICE: Rule = {
    "image": r"[a-z0-9/._-]+(:[\w.-]+)?",
    "build": {"context": TEXT, "dockerfile": TEXT, "target": WORD, "args": {"*": (TEXT, int)}},
    "profiles": [r"[a-zA-Z0-9][a-zA-Z0-9_.-]+"],
    "network_mode": r"none|host|bridge|(service|container):.+",
    "ipc": r"host|private|shareable|none|(service|container):.+",
    "command": (TEXT, [TEXT]),
    "environment": {"*": (TEXT, int, bool)},
    "volumes": [VOLUME],
    "ports": [(PORT, int)],
    "secrets": [(WORD, {"source": WORD, "target": TEXT, "uid": TEXT, "gid": TEXT, "mode": int})],
    "depends_on": (
        [WORD],
        {"*": {
            "condition": "service_(started|healthy|completed_successfully)",
            "required": bool, "restart": bool,
        }},
    ),
    "healthcheck": {
        "test": (TEXT, [TEXT]), "interval": DURATION, "timeout": DURATION, "retries": int,
        "start_period": DURATION, "start_interval": DURATION, "disable": bool,
    },
    "deploy": {"resources": {"reservations": {"devices": [
        {"driver": TEXT, "count": (r"\d+|all", int), "capabilities": [TEXT], "device_ids": [TEXT]}
    ]}}},
    "restart": r"no|always|on-failure(:\d+)?|unless-stopped",
    "stop_grace_period": DURATION,
    "cap_drop": [TEXT],
    "security_opt": [TEXT],
}  # fmt: skip
FILE: Rule = {
    "services": {"*": SERVICE},
    "volumes": {"*": (type(None), {"external": bool, "name": TEXT})},
    "secrets": {"*": {"file": TEXT, "environment": TEXT, "external": bool}},
}


def test_the_file_holds_to_the_compose_specification():
    tree = {key: value for key, value in COMPOSE.tree.items() if not key.startswith("x-")}
    assert wrong(tree, FILE) == []


def test_what_breaks_the_specification_would_be_found():
    broken = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["gateway-local"]
    for key, value in (
        ("stop_grace_period", 45), ("ports", ["8000:"]), ("privileged_", True),
        ("depends_on", {"tokenizer": {"condition": "service_up"}}), ("restart", True),
    ):  # fmt: skip
        assert len(wrong({**broken, key: value}, SERVICE)) >= 1, key


@services
def test_a_service_is_whole(name):
    service = SERVICES[name]
    assert service["profiles"], "without a profile it would run with every one"
    assert not (service.get("ports") and service["network_mode"] == "host")
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    for volume in service["volumes"]:
        source, target, *_ = volume.split(":")
        assert source in COMPOSE.tree["volumes"]
        assert target in DOCKERFILE
    for secret in service["secrets"]:
        assert (secret if isinstance(secret, str) else secret["source"]) in COMPOSE.tree["secrets"]
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > Settings().drain_timeout + 5


@services
def test_a_service_sets_variables_that_exist(name):
    given = set(SERVICES[name]["environment"])
    known = {k for k in given if from_environment({k: "1"})}
    assert given - known <= {STAGES, KEYS, SECRET, BIND}
    assert SERVICES[name]["environment"][KEYS] == SECRETS


@services
def test_an_image_is_a_target_of_the_dockerfile_with_a_user_of_its_own(name):
    service = SERVICES[name]
    target = service["build"]["target"]
    assert service["image"] == ("pipeinfer" if target == "cpu" else f"pipeinfer:{target}")
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    bodies = {part.split("\n")[0].split()[-1]: part for part in parts}
    bases = {part.split("\n")[0].split()[-1]: part.split()[0] for part in parts}
    text = bodies[target] + bodies.get(bases[target], "")
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["pipeinfer"]
    assert (stage_of(service) == "engine") == (target != "slim")


def test_every_profile_set_runs_each_stage_once():
    assert DEFAULTS["COMPOSE_PROFILES"] == "local"
    for profiles in ((), ("local",), ("front", "gpu")):
        active = COMPOSE.active(*profiles)
        assert sorted(stage_of(SERVICES[name]) for name in active) == sorted(NAMES), profiles
    assert {stage_of(SERVICES[n]) for n in COMPOSE.active("gpu")} == {"scheduler", "engine"}


def test_what_must_stop_later_is_depended_on():
    """A gateway before all others, a scheduler before its engine; missing ones are not missed."""
    for name, service in SERVICES.items():
        after = {"gateway": set(NAMES) - {"gateway"}, "scheduler": {"engine"}}
        depends = service.get("depends_on", {})
        assert {stage_of(SERVICES[n]) for n in depends} == after.get(stage_of(service), set()), name
        assert all(how["required"] is False for how in depends.values())


def test_those_who_watch_run_beside_every_profile_and_read_files_that_are_there():
    active = COMPOSE.active("monitoring")
    assert active == ["prometheus", "grafana"]
    for name in active:
        service = COMPOSE.services[name]
        assert service["network_mode"] == "host", "the gateway's port is there"
        assert re.fullmatch(r".+:v?\d+\.\d+\.\d+", service["image"]), "a version, not the newest"
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        files = [ROOT / source for source in sources if source.startswith("./")]
        assert files and all(file.exists() for file in files)
        assert set(sources) - set(COMPOSE.tree["volumes"]) == {s for s in sources if s[0] == "."}
    listens = "--web.listen-address=127.0.0.1:9090"
    assert listens in COMPOSE.services["prometheus"]["command"], "it has no password"
    assert COMPOSE.services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_engines_reserve_gpus_and_keep_their_kernels():
    engine = SERVICES["engine"]
    [devices] = engine["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    caches = re.findall(r"(\w+)=/var/cache/pipeinfer", DOCKERFILE)
    assert {"FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"} <= set(caches)
    assert "kernels:/var/cache/pipeinfer" in engine["volumes"]


def test_the_example_names_every_variable_and_no_other():
    used = {m[1] for m in VARIABLE.finditer((ROOT / "compose.yaml").read_text())}
    uncommented = re.sub(r"^#(?=\w+=)", "", EXAMPLE, flags=re.MULTILINE)
    named = variables(uncommented)
    helpers = {"COMPOSE_PROFILES", "FRONT", "GPU_A", "GPU_B"}
    assert set(named) == used | helpers
    assert variables(EXAMPLE) == DEFAULTS, "uncommented is what holds anyway"
    assert {e.host for e in stages(named[STAGES])} == {"front", "gpu-a", "gpu-b"}
    assert named["THIS_HOST"] == "front"


def test_dockerfile_copies_what_exists():
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in (ROOT / "stages/Dockerfile.dockerignore").read_text().splitlines()
    assert image_files().keys() >= {TOPOLOGY, "/usr/local/share/pipeinfer/healthcheck.py"}


def test_the_slim_image_leaves_out_what_only_the_engine_needs():
    """The Dockerfile's own filter, on the dependencies as they are."""
    [program] = re.findall(r'^RUN python -c "(.+)" > light\.txt', DOCKERFILE, re.MULTILINE)
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kept = {re.split(r"[<>=]", line)[0] for line in done.stdout.split()}
    assert not kept & set(HEAVY)
    assert {"pyzmq", "aiohttp", "tokenizers", "msgspec", "uvloop", "zstandard"} <= kept
