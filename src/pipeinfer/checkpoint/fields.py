"""Typed access to the fields of a checkpoint's JSON files, with errors that name file and field.

Knows no architecture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pipeinfer.gguf.config import document
from pipeinfer.gguf.header import is_gguf
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError


@dataclass(frozen=True)
class Fields:
    """A JSON object from `path`; every reader raises ConfigurationError for a wrong value."""

    path: Path
    raw: dict[str, Any]

    def error(self, message: str) -> ConfigurationError:
        """To be raised: `message`, with the file in front."""
        return ConfigurationError(f"{self.path}: {message}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; required if there is no default."""
        value = self.optional_integer(name, default, least)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        return value

    def optional_integer(self, name: str, missing: int | None = None, least: int = 1) -> int | None:
        """As `integer`, but null stays None; `missing` stands for a field that is not there."""
        if name not in self.raw:
            return missing
        value = self.raw[name]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{name} must be a whole number >= {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; required if there is no default."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
            raise self.error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; null counts as missing."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids written as one number, as a list or as null."""
        value = self.raw.get(name)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        return tuple(listed)


def read_json(checkpoint: Path, name: str) -> Fields:
    """As `read_object`, as Fields; raises ConfigurationError if there is no such file, too."""
    raw = read_object(checkpoint, name)
    if raw is None:
        raise ConfigurationError(f"{checkpoint} has no {name}")
    return Fields(checkpoint if is_gguf(checkpoint) else checkpoint / name, raw)


LFS_POINTER = "version https://git-lfs"  # what stands in place of a file that Git LFS keeps


def pointer_error(path: Path) -> str:
    """What is wrong with a checkout without the files of Git LFS."""
    return f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"


def read_object(checkpoint: Path, name: str) -> JsonObject | None:
    """The JSON object in file `name` of a folder, or what a GGUF file says in its place; None if
    there is no such file. Raises ConfigurationError if it is broken, or not an object."""
    if is_gguf(checkpoint):
        return document(checkpoint, name) or {}
    path = checkpoint / name
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(LFS_POINTER):
            raise ConfigurationError(pointer_error(path))
        raw = json.loads(text)
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return raw
