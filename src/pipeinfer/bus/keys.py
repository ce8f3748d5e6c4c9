"""CURVE key pairs as files: NAME.key holds the secret (mode 0600), NAME.pub the public key.

Both are one line of Z85 text. Knows no sockets and no stage; see docs/topology.md for who needs
which file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import zmq

from pipeinfer.settings import ConfigurationError

DEFAULT = "pipeinfer"  # the pair of a stage whose topology names no other
LENGTH = 40  # characters of a key
# Mounted into one container alone, with whatever mode the orchestrator gives it.
SECRETS = Path("/run/secrets")


@dataclass(frozen=True)
class Pair:
    """A key pair of this process. It is never shown: `repr` names it and no more."""

    name: str
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Pair({self.name!r})"


def create(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a pair, (secret file, public file). ConfigurationError if there is one already."""
    check_name(name)
    public, secret = zmq.curve_keypair()
    files = folder / f"{name}.key", folder / f"{name}.pub"
    for file in files:
        if file.exists():
            raise ConfigurationError(f"{file} exists; a key is never overwritten")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, key, mode in zip(files, (secret, public), (0o600, 0o644), strict=True):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(key + b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write keys to {folder}: {error.strerror}") from None
    return files


def check_name(name: str) -> None:
    """ConfigurationError for a name that is no plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigurationError(f"key {name!r}: a name has letters, digits, '.', '-' and '_'")


def load_pair(folder: Path, name: str) -> Pair:
    """The pair of NAME.key. ConfigurationError if it cannot, or must not, be used."""
    file = folder / f"{name}.key"
    secret = _line(file)
    if not file.is_relative_to(SECRETS) and file.stat().st_mode & 0o077:
        raise ConfigurationError(f"{file}: others may read this secret key; chmod 600 it")
    return pair(name, secret, str(file))


def pair(name: str, secret: bytes, source: str) -> Pair:
    """The pair of a secret key in Z85; `source`: where it comes from, for errors."""
    if len(secret) != LENGTH:
        raise ConfigurationError(f"{source}: a key has {LENGTH} characters, not {len(secret)}")
    try:
        return Pair(name, zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigurationError(f"{source}: this is no CURVE key") from None


def load_public(folder: Path, name: str) -> bytes:
    """The public key of NAME.pub, or of NAME.key where only that is there."""
    file = folder / f"{name}.pub"
    if not file.exists() and (folder / f"{name}.key").exists():
        return load_pair(folder, name).public
    key = _line(file)
    if len(key) != LENGTH:
        raise ConfigurationError(f"{file}: a key has {LENGTH} characters, not {len(key)}")
    return key


def _line(file: Path) -> bytes:
    try:
        return file.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read key {file}: {error.strerror}") from None
