"""compose.yaml as Docker Compose would read it: variables, profiles, what a container would get.

Knows the file's format, runs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def interpolated(tree: Any, variables: dict[str, str]) -> Any:
    """`${NAME}` and `${NAME:-default}` in all strings; nothing else is used in the file."""
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
    """The file with `variables` filled in."""

    variables: dict[str, str]

    def __post_init__(self) -> None:
        text = (ROOT / "compose.yaml").read_text()
        self.tree = interpolated(yaml.safe_load(text), self.variables)
        self.services: dict[str, dict[str, Any]] = self.tree["services"]

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
