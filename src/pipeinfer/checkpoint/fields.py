"""Typed access to the fields of a checkpoint's JSON files, with errors that name file and field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pipeinfer.gguf.config import document
from pipeinfer.gguf.header import is_gguf
from pipeinfer.params import JsonObject
from pipeinfer.settings import ConfigurationError


@dataclass(frozen=True)
class Fields:
    """A JSON object of a file. All methods that read a field raise ConfigurationError for a wrong
    value.

    path: of the file, for errors.
    raw: the object.
    """

    path: Path
    raw: dict[str, Any]

    def error(self, message: str) -> ConfigurationError:
        """A ConfigurationError to be raised: `message` behind the file's path."""
        return ConfigurationError(f"{self.path}: {message}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`.

        default: stands for a missing field and for null; None: the field is required.
        """
        value = self.optional_integer(name, default, least)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        return value

    def optional_integer(self, name: str, missing: int | None = None, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None for null.

        missing: stands for a missing field, not for null.
        """
        if name not in self.raw:
            return missing
        value = self.raw[name]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{name} must be a whole number >= {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number.

        default: stands for a missing field and for null; None: the field is required.
        """
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
            raise self.error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; `default` stands for a missing field and for null."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, written as one number or as a list; none for null or a missing field."""
        value = self.raw.get(name)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        return tuple(listed)


def read_json(checkpoint: Path, name: str) -> Fields:
    """The object in file `name` of a checkpoint, as `read_object` finds it. Raises
    ConfigurationError also if there is no such file.
    """
    raw = read_object(checkpoint, name)
    if raw is None:
        raise ConfigurationError(f"{checkpoint} has no {name}")
    return Fields(checkpoint if is_gguf(checkpoint) else checkpoint / name, raw)


LFS_POINTER = "version https://git-lfs"  # the beginning of a Git LFS pointer


def pointer_error(path: Path) -> str:
    """The error message for `path`, a Git LFS pointer in place of the file."""
    return f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"


def read_object(checkpoint: Path, name: str) -> JsonObject | None:
    """The JSON object in file `name` of a checkpoint, or what stands for it in a GGUF file.

    checkpoint: a folder or a GGUF file.

    Returns None if the folder has no such file. Raises ConfigurationError for a file that is broken
    or has no object.
    """
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
