"""compose.yaml and its siblings, their variables and the Dockerfile: valid, and consistent."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import product
from typing import Any

import pytest
from compose import FILE, GPU, HOSTS, ROOT, VARIABLE, Compose, load, variables
from containers import DOCKERFILE, HEAVY, MEMORY, SECRETS, TOPOLOGY, image_files, stage_of

from pipeinfer.runtime.memory_holder import HOLDER_VARIABLE
from pipeinfer.settings import Settings, from_environment
from pipeinfer.topology import (
    BIND_VARIABLE,
    KEYS_VARIABLE,
    SECRET_VARIABLE,
    STAGES_VARIABLE,
    parse_stages,
)
from servers import STAGES as NAMES

EXAMPLE = (ROOT / ".env.example").read_text()
# The deployments: as it is checked out, with GPUs, and on several hosts.
FILES = {
    "cpu": (), "gpu": (FILE, GPU), "hosts": (FILE, GPU, HOSTS), "cpu hosts": (FILE, HOSTS),
}  # fmt: skip
DEPLOYMENTS = {
    name: Compose({"COMPOSE_FILE": ":".join(files)} if files else {})
    for name, files in FILES.items()
}
COMPOSE = DEPLOYMENTS["cpu"]
# Those of this project; the others are other people's.
SERVICES = {
    (where, name): one
    for where, compose in DEPLOYMENTS.items()
    for name, one in compose.services.items()
    if one["image"].startswith("pipeinfer")
}
services = pytest.mark.parametrize(("where", "name"), SERVICES)

HUB = {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET"}
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
    "pull_policy": r"always|never|missing|build",
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
    "stop_signal": r"SIG[A-Z0-9]+",
    "read_only": bool,
    "tmpfs": [r"/[^:]+(:[\w=,]+)?"],
    "cap_drop": [TEXT],
    "security_opt": [TEXT],
}  # fmt: skip
SPECIFICATION: Rule = {
    "services": {"*": SERVICE},
    "volumes": {"*": (type(None), {"external": bool, "name": TEXT})},
    "secrets": {"*": {"file": TEXT, "environment": TEXT, "external": bool}},
}


def test_the_file_holds_to_the_compose_specification():
    for compose in DEPLOYMENTS.values():
        tree = {key: value for key, value in compose.tree.items() if not key.startswith("x-")}
        assert wrong(tree, SPECIFICATION) == []


def test_what_breaks_the_specification_would_be_found():
    broken = load(FILE)["services"]["gateway"]
    for key, value in (
        ("stop_grace_period", 45), ("ports", ["8000:"]), ("privileged_", True),
        ("depends_on", {"tokenizer": {"condition": "service_up"}}), ("restart", True),
    ):  # fmt: skip
        assert len(wrong({**broken, key: value}, SERVICE)) >= 1, key


@services
def test_a_service_is_whole(where, name):
    service, tree = SERVICES[where, name], DEPLOYMENTS[where].tree
    assert bool(service.get("profiles")) == ("hosts" in where), "all, where one host is all"
    assert not (service.get("ports") and service["network_mode"] == "host")
    assert set(service.get("depends_on", {})) <= {*NAMES, MEMORY}
    for volume in service["volumes"]:
        source, target, *_ = volume.split(":")
        assert source in tree["volumes"]
        assert target in DOCKERFILE
    for secret in service["secrets"]:
        assert (secret if isinstance(secret, str) else secret["source"]) in tree["secrets"]
    assert service["read_only"] and service["tmpfs"] == ["/tmp"]
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > Settings().drain_timeout + 5


@services
def test_a_service_sets_variables_that_exist(where, name):
    given = set(SERVICES[where, name]["environment"])
    known = {k for k in given if from_environment({k: "1"})}
    others = {STAGES_VARIABLE, KEYS_VARIABLE, SECRET_VARIABLE, BIND_VARIABLE, HOLDER_VARIABLE}
    assert given - known <= others
    assert "PIPEINFER_ALLOWED_HOSTS" in given or name != "gateway"
    assert SERVICES[where, name]["environment"][KEYS_VARIABLE] == SECRETS


def test_variables_of_the_hub_reach_every_stage_where_they_are_set():
    """And only there: an empty HF_ENDPOINT would be no hub."""
    documented = (ROOT / "docs/deployment.md").read_text()
    assert set(re.findall(r"^\| `(HF_\w+)` \|", documented, re.MULTILINE)) == {*HUB, "HF_HUB_CACHE"}
    for name in NAMES:
        assert not HUB & set(COMPOSE.services[name]["environment"])
        given = Compose(dict.fromkeys(HUB, "1")).services[name]["environment"]
        assert {key: given[key] for key in HUB} == dict.fromkeys(HUB, "1")


@services
def test_an_image_is_a_target_of_the_dockerfile_with_a_user_of_its_own(where, name):
    image = SERVICES[where, name]["image"]
    target = image.partition(":")[2] or "cpu"
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    bodies = {part.split("\n")[0].split()[-1]: part for part in parts}
    bases = {part.split("\n")[0].split()[-1]: part.split()[0] for part in parts}
    text = bodies[target] + bodies.get(bases[target], "")
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["pipeinfer"]
    assert name != "engine" or target != "slim"


@pytest.mark.parametrize(
    ("where", "profiles"),
    [("cpu", ()), ("gpu", ()), *product(("hosts", "cpu hosts"), (("front",), ("gpu",)))],
)
def test_every_image_that_runs_is_built_once_by_one_service_and_pulled_by_none(where, profiles):
    compose = DEPLOYMENTS[where]
    running = [compose.services[name] for name in compose.active(*profiles)]
    builders = [one["image"] for one in running if "build" in one]
    assert sorted(builders) == sorted({one["image"] for one in running})
    for one in running:
        assert one["pull_policy"] == "never", "of those who build, too: they would pull first"
        if "build" in one:
            target = one["build"]["target"]
            assert one["image"] == ("pipeinfer" if target == "cpu" else f"pipeinfer:{target}")


def test_every_deployment_runs_each_stage_once():
    """The first without a .env, and without a profile."""
    for where, compose in DEPLOYMENTS.items():
        active = compose.active(*(("front", "gpu") if "hosts" in where else ()))
        assert sorted(stage_of(compose.services[name]) for name in active) == sorted(
            [*NAMES, MEMORY]
        ), where
    hosts = DEPLOYMENTS["hosts"]
    assert hosts.active() == []
    assert hosts.active("gpu") == ["scheduler", "memory", "engine"]


def test_the_gateway_prints_the_address_that_is_published():
    for given, said in (({}, "127.0.0.1:8000"), ({"PIPEINFER_PUBLISH": "8600"}, "8600")):
        gateway = Compose(given).services["gateway"]
        assert gateway["ports"] == [f"{said}:8000"]
        assert gateway["environment"]["PIPEINFER_PUBLIC_ADDRESS"] == said
    hosts = DEPLOYMENTS["hosts"].services["gateway"]
    assert "ports" not in hosts and not hosts["environment"]["PIPEINFER_PUBLIC_ADDRESS"]


def test_what_must_stop_later_is_depended_on():
    """A gateway before all others, a scheduler before its engine, that before its memory's holder;
    missing ones are not missed."""
    for (where, name), service in SERVICES.items():
        after = {
            "gateway": set(NAMES) - {"gateway"}, "scheduler": {"engine"}, "engine": {MEMORY},
        }  # fmt: skip
        depends = service.get("depends_on", {})
        assert set(depends) == after.get(name, set()), (where, name)
        for how in depends.values():
            assert how == {"condition": "service_started", "required": False}


def test_those_who_watch_run_beside_the_stages_and_read_files_that_are_there():
    active = set(COMPOSE.active("monitoring")) - {*NAMES, MEMORY}
    assert active == {"prometheus", "grafana"}
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
    engine = SERVICES["gpu", "engine"]
    [devices] = engine["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    caches = re.findall(r"(\w+)=/var/cache/pipeinfer", DOCKERFILE)
    assert {"FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"} <= set(caches)
    assert "kernels:/var/cache/pipeinfer" in engine["volumes"]


def test_the_example_names_every_variable_and_no_other():
    files = "".join((ROOT / name).read_text() for name in (FILE, GPU, HOSTS))
    used = {m[1] for m in VARIABLE.finditer(files)} | HUB
    named = variables(re.sub(r"^#(?=\w+=)", "", EXAMPLE, flags=re.MULTILINE))
    assert set(named) == used | {"COMPOSE_FILE", "FRONT", "GPU_A", "GPU_B"}
    assert named["COMPOSE_FILE"] == f"{FILE}:{GPU}:{HOSTS}"
    assert variables(EXAMPLE) == {}, "copied as it is, nothing changes"
    assert {e.host for e in parse_stages(named[STAGES_VARIABLE])} == {"front", "gpu-a", "gpu-b"}
    assert named["THIS_HOST"] == "front"


def test_dockerfile_copies_what_exists():
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in (ROOT / "stages/Dockerfile.dockerignore").read_text().splitlines()
    assert image_files().keys() >= {TOPOLOGY, "/usr/local/share/pipeinfer/healthcheck.py"}


def test_the_lists_of_packages_are_the_dependencies_and_the_slim_image_needs_no_torch(tmp_path):
    script = ROOT / "stages/requirements.py"
    command = [sys.executable, "-S", script, ROOT / "pyproject.toml", tmp_path]
    subprocess.run(command, check=True, timeout=60)
    lists = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lists["cpu.txt"] == project["dependencies"]
    assert lists["cuda.txt"] == [*lists["cpu.txt"], *project["optional-dependencies"]["cuda"]]
    left_out = set(lists["cpu.txt"]) - set(lists["slim.txt"])
    assert {re.split(r"[<>=]", line)[0] for line in left_out} == set(HEAVY)
    assert [re.split(r"[<>=]", line)[0] for line in lists["torch.txt"]] == ["torch"]


def test_a_change_of_the_code_installs_no_package_again():
    """A stage that installs lists of packages has got no sources, nor comes of one that has."""
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    bodies = {part.split("\n")[0].split()[-1]: part for part in parts}
    installing = [name for name, body in bodies.items() if "install -r" in body]
    assert len(installing) == 3
    for name in installing:
        while name in bodies:
            assert "COPY src" not in bodies[name] and "--from=wheel" not in bodies[name]
            assert "COPY pyproject.toml" not in bodies[name], "its other lines change, too"
            name = bodies[name].split()[0]
    assert DOCKERFILE.count("hatchling build") == 1


@pytest.mark.parametrize("image", ["slim", "cpu", "cuda"])
def test_the_code_is_a_layer_of_its_own_after_that_of_the_packages(image):
    """So that a change of the code makes, pushes and pulls that layer, and not all packages."""
    parts = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    [body] = [part for part in parts if part.split("\n")[0].split()[-1] == image]
    packages, code = re.findall(r"^COPY --from=(\S+) \S+ /opt/pipeinfer$", body, re.MULTILINE)
    assert packages == f"packages-{image}"
    assert code == ("code-cuda" if image == "cuda" else "code")
