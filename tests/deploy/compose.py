"""compose.yaml and its siblings as Docker Compose would read them: variables, files that change one
another, profiles, what a container would get.

Knows the files' format, runs nothing; test_docker_compose.py holds it to the real tool.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
FILE, GPU, HOSTS = "compose.yaml", "compose.gpu.yaml", "compose.hosts.yaml"
# Sets of files, with profiles.
THREE = f"{FILE}:{GPU}:{HOSTS}"
RUNS = [
    (FILE, ()), (FILE, ("monitoring",)), (f"{FILE}:{GPU}", ()),
    (THREE, ("front",)), (THREE, ("gpu",)), (THREE, ("front", "gpu")),
    (f"{FILE}:{HOSTS}", ("front",)), (f"{FILE}:{HOSTS}", ("gpu",)),
]  # fmt: skip
REPLACED = ("command", "test")  # lists that a later file gives anew; others it adds to


class Reset:
    """`!reset`: what a later file takes away."""


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!reset", lambda _loader, _node: Reset())


def load(name: str) -> dict[str, Any]:
    return yaml.load((ROOT / name).read_text(), Loader)


def merged(tree: Any, change: Any, key: str = "") -> Any:
    """`tree` of earlier files, changed by a later one."""
    if isinstance(tree, dict) and isinstance(change, dict):
        both = {k: merged(tree[k], change[k], k) for k in tree.keys() & change.keys()}
        known = {**tree, **change, **both}
        return {k: value for k, value in known.items() if not isinstance(value, Reset)}
    if isinstance(tree, list) and isinstance(change, list) and key not in REPLACED:
        # A mount takes the place of an earlier one at the same path.
        name = (lambda one: one.split(":")[1]) if key == "volumes" else str
        return list({name(one): one for one in [*tree, *change]}.values())
    return change


def interpolated(tree: Any, variables: dict[str, str]) -> Any:
    """`${NAME}` and `${NAME:-default}` in all strings; nothing else is used in the files."""
    if isinstance(tree, dict):
        return {key: interpolated(value, variables) for key, value in tree.items()}
    if isinstance(tree, list):
        return [interpolated(value, variables) for value in tree]
    if isinstance(tree, str):
        return VARIABLE.sub(lambda m: variables.get(m[1]) or m[2] or "", tree)
    return tree


def variables(text: str) -> dict[str, str]:
    """The variables of a .env file; later ones may use earlier ones."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[name] = interpolated(value, found)
    return found


@dataclass
class Compose:
    """The files that COMPOSE_FILE names, or compose.yaml, with `variables` filled in."""

    variables: dict[str, str]

    def __post_init__(self) -> None:
        tree: dict[str, Any] = {}
        for name in self.variables.get("COMPOSE_FILE", FILE).split(":"):
            tree = merged(tree, load(name))
        self.tree = interpolated(tree, self.variables)
        self.services: dict[str, dict[str, Any]] = self.tree["services"]
        for service in self.services.values():
            environment = service.get("environment", {})
            passed_on = {k: self.variables.get(k) for k, v in environment.items() if v is None}
            found = {**environment, **passed_on}
            service["environment"] = {k: v for k, v in found.items() if v is not None}

    def active(self, *profiles: str) -> list[str]:
        """The services that `docker compose up` starts; without --profile those of .env."""
        wanted = profiles or self.variables.get("COMPOSE_PROFILES", "").split(",")
        return [
            name
            for name, service in self.services.items()
            if not service.get("profiles") or set(service["profiles"]) & set(wanted)
        ]

    def secret_file(self, source: str) -> str:
        return self.tree["secrets"][source]["file"]
