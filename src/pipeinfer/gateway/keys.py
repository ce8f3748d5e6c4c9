"""API keys: named, hashed, read from a file, and compared in constant time.

Knows no HTTP. A key's text is never kept; what is left of it is its SHA-256, which needs neither
salt nor stretching where keys are random, as those of `pipeinfer api-key` are.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeinfer.gateway.limits import KeyLimits
from pipeinfer.settings import ConfigurationError

DEFAULT_NAME = "default"  # the name of a key that was given without one
KEY_PREFIX = "pik-"  # by which people and scanners for leaked secrets know a key of pipeinfer
KEY_BYTES = 32  # bytes of a fresh key
MOST_KEYS = 1_000  # each request is compared with all of them, and each is a label of the metrics
MOST_FILE_BYTES = 2**20  # of a file of keys
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LIMIT_VALUE = re.compile(r"[0-9]{1,12}")
LIMIT_NAMES = ("concurrent", "requests", "tokens")
ADMIN = "admin"  # marks the key of somebody who may see what others ask


@dataclass(frozen=True)
class ApiKey:
    """One key. `digest`: SHA-256 of its text, 32 bytes; kept out of its repr. `admin`: whether it
    is an operator's."""

    name: str
    digest: bytes = field(repr=False)
    limits: KeyLimits
    admin: bool = False


class ApiKeys:
    """The keys that let somebody in; with none, everybody is."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        """The key whose text is `given`. The time that it takes does not depend on `given`
        beyond its length, nor on which key it is."""
        digest = hashlib.sha256(given).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def single_key(text: str, limits: KeyLimits) -> ApiKeys:
    """The one key whose text is `text`."""
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    return ApiKeys([ApiKey(DEFAULT_NAME, digest, limits)])


def read_key_file(path: str, limits: KeyLimits) -> ApiKeys:
    """The keys of a file; an empty one has none. `limits`: of keys that name none themselves.

    Raises ConfigurationError, which names file and line and quotes nothing of it.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigurationError(f"--api-key-file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"--api-key-file {path}: it is not UTF-8 text") from None
    if len(content) > MOST_FILE_BYTES:
        raise ConfigurationError(f"--api-key-file {path}: it has more than {MOST_FILE_BYTES} bytes")
    try:
        return parse_keys(text, limits)
    except ConfigurationError as error:
        raise ConfigurationError(f"--api-key-file {path}: {error}") from None


def parse_keys(text: str, limits: KeyLimits) -> ApiKeys:
    """Keys from lines `NAME sha256:HEX [admin] [concurrent=N] [requests=N] [tokens=N]`, `#` begins
    a comment; or from one bare word, which is a key's text. ConfigurationError with the line."""
    if not text.strip():
        return ApiKeys()
    words = text.split()
    if len(words) == 1 and not words[0].startswith("#"):
        return single_key(words[0], limits)
    found: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            key = _parse_line(fields, limits)
            if key.name in found:
                raise ConfigurationError(f"the name {key.name} stands above already")
            if any(hmac.compare_digest(key.digest, other.digest) for other in found.values()):
                raise ConfigurationError(f"{key.name} has the key of a line above")
            if len(found) == MOST_KEYS:
                raise ConfigurationError(f"more than {MOST_KEYS} keys")
        except ConfigurationError as error:
            raise ConfigurationError(f"line {number}: {error}") from None
        found[key.name] = key
    if not found:
        raise ConfigurationError("there is no key in it, only comments")
    return ApiKeys(found.values())


def _parse_line(fields: list[str], limits: KeyLimits) -> ApiKey:
    """A line's key. What is wrong is not quoted: it may be a key's text in the wrong place."""
    name, *rest = fields
    if KEY_NAME.fullmatch(name) is None or (not rest):
        raise ConfigurationError("it must be NAME sha256:HEX, see `pipeinfer api-key`")
    if DIGEST.fullmatch(rest[0]) is None:
        raise ConfigurationError(
            "after the name must come sha256: and 64 hexadecimal digits in lower case"
        )
    digest = bytes.fromhex(rest[0].removeprefix("sha256:"))
    given = _parse_limits(rest[1:])
    admin = given.pop(ADMIN, 0) > 0
    return ApiKey(name, digest, replace(limits, **given), admin)


def _parse_limits(fields: list[str]) -> dict[str, int]:
    """{limit: number}, and 1 for ADMIN."""
    given: dict[str, int] = {}
    for number, word in enumerate(fields, 3):
        what, _, count = (word if word != ADMIN else f"{ADMIN}=1").partition("=")
        if (what not in LIMIT_NAMES and word != ADMIN) or LIMIT_VALUE.fullmatch(count) is None:
            allowed = ", ".join(f"{name}=N" for name in LIMIT_NAMES)
            raise ConfigurationError(f"word {number} is none of {allowed}, {ADMIN}")
        if what in given:
            raise ConfigurationError(f"{what} stands there twice")
        given[what] = int(count)
    return given


def new_key(name: str) -> tuple[str, str]:
    """(the text of a fresh key, the line for a file of keys). ConfigurationError for the name."""
    if KEY_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} is no name for a key: at most 64 letters, digits and . _ -"
        )
    text = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return text, f"{name} sha256:{hashlib.sha256(text.encode()).hexdigest()}"
