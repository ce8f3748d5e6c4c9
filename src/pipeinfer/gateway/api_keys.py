"""API keys, and what each may use: requests at a time, and requests and tokens a minute.

Keys are named, hashed, read from a file, and compared in constant time. The text of a key is never
kept, only its SHA-256: keys of `pipeinfer api-key` are random and need neither salt nor stretching.
Sans-IO apart from reading the file: the time is passed in. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeinfer.settings import ConfigurationError

DEFAULT_NAME = "default"  # the name of a key that was given without one
KEY_PREFIX = "pik-"  # by which people and scanners for leaked secrets know a key of pipeinfer
KEY_BYTES = 32  # bytes of a fresh key
MAX_KEYS = 1_000  # each request is compared with all of them, and each is a label of the metrics
MAX_FILE_BYTES = 2**20  # of a file of keys
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LIMIT_VALUE = re.compile(r"[0-9]{1,12}")
LIMIT_NAMES = ("concurrent", "requests", "tokens")
ADMIN = "admin"  # marks the key of an operator, who may see requests of other clients


@dataclass(frozen=True)
class ApiKey:
    """An API key of a client or an operator.

    Attributes:
    - name: shown in logs and as a label of metrics
    - digest: SHA-256 of the key's text, 32 bytes; kept out of the repr
    - limits: what its clients may use
    - admin: whether it is an operator's, who may see other clients' requests
    """

    name: str
    digest: bytes = field(repr=False)
    limits: KeyLimits
    admin: bool = False


class ApiKeys:
    """All keys of a server. Without any key every client is let in."""

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
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigurationError(f"--api-key-file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"--api-key-file {path}: it is not UTF-8 text") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"--api-key-file {path}: it has more than {MAX_FILE_BYTES} bytes")
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
            if len(found) == MAX_KEYS:
                raise ConfigurationError(f"more than {MAX_KEYS} keys")
        except ConfigurationError as error:
            raise ConfigurationError(f"line {number}: {error}") from None
        found[key.name] = key
    if not found:
        raise ConfigurationError("there is no key in it, only comments")
    return ApiKeys(found.values())


def _parse_line(fields: list[str], limits: KeyLimits) -> ApiKey:
    """Parses one line into a key. An error does not quote the line: it may have a key's text in the
    wrong place."""
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


MINUTE = 60.0  # seconds
ROUNDING = 1e-6  # the most by which rounding makes a sum smaller than a whole request


@dataclass(frozen=True)
class KeyLimits:
    """Bounds of one key; 0: no bound.

    Attributes:
    - concurrent: answers that are made at a time
    - requests: prompts a minute
    - tokens: tokens of prompts and outputs a minute
    """

    concurrent: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class KeyLimitExceeded:
    """Why a request is not taken.

    Attributes:
    - reason: for the client
    - wait: seconds until the request would be taken; 0 if it never would be, or if that depends on
      when other requests end
    - lacking: of which limit the share is too small, and by how many units; other gateways may have
      some; "" where the whole limit is too small
    """

    reason: str
    wait: float = 0.0
    lacking: tuple[str, int] = ("", 0)


class TokenBucket:
    """An allowance that refills evenly, up to one minute's worth.

    More may be taken than there is: the level is then below zero until it has refilled.

    per_minute: how much is added in a minute, and the most there can be.
    """

    def __init__(self, a_minute: int, now: float) -> None:
        self.per_minute = a_minute
        self._level = float(a_minute)
        self._updated_at = now

    def level(self, now: float) -> float:
        """The bucket's level at `now` (seconds); a clock that goes back adds nothing."""
        passed = now - self._updated_at  # hot path: once for every token of a key with such a limit
        if passed <= 0:
            return self._level
        level = self._level + passed * self.per_minute / MINUTE
        return level if level < self.per_minute else float(self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, also if it is not there; a negative one gives back."""
        level = self.level(now) - amount
        self._level = level if amount > 0 else min(float(self.per_minute), level)
        if now > self._updated_at:
            self._updated_at = now

    def missing(self, amount: float, now: float) -> float:
        """The units by which the level is below `amount`; 0 if it is not below."""
        missing = amount - self.level(now)
        return missing if missing > ROUNDING else 0.0

    def resized(self, a_minute: int, now: float) -> TokenBucket:
        """Another size; what was used stays used."""
        bucket = TokenBucket(a_minute, now)
        bucket.take(self.per_minute - self.level(now), now)
        return bucket


class KeyUsage:
    """The use of one key at this moment. Each request that `start_request` let in must be released,
    with all its choices. Where several gateways share the key's limits, this is what one of them
    lets in: see SharedLimitHolder (gateway/peers.py).

    Tokens are taken when their number is known: a request is let in while any are left, and running
    requests may take the level below zero. Later requests wait then.

    Attributes:
    - limits: the key's
    - running: answers that are being made
    """

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self._concurrent = limits.concurrent  # the share; those of the others are in their buckets
        self._requests = TokenBucket(limits.requests, now) if limits.requests else None
        self._tokens = TokenBucket(limits.tokens, now) if limits.tokens else None

    def whole(self, kind: str) -> int:
        """See SharedLimitHolder; `kind` is one of LIMIT_NAMES."""
        limits = self.limits
        return {"concurrent": limits.concurrent, "requests": limits.requests}.get(
            kind, limits.tokens
        )

    def free(self, kind: str, now: float) -> int:
        """See SharedLimitHolder."""
        if kind == "concurrent":
            return self._concurrent - self.running
        bucket = self._requests if kind == "requests" else self._tokens
        return 0 if bucket is None else math.floor(bucket.level(now) + ROUNDING)

    def set_share(self, kind: str, size: int, now: float) -> None:
        """See SharedLimitHolder."""
        if kind == "concurrent":
            self._concurrent = size
        elif kind == "requests" and self._requests is not None:
            self._requests = self._requests.resized(size, now)
        elif kind == "tokens" and self._tokens is not None:
            self._tokens = self._tokens.resized(size, now)

    def start_request(self, now: float) -> KeyLimitExceeded | None:
        """Lets one request in, or says why not; then nothing was taken."""
        excess = self.excess(0, 1, 1, now)
        if excess is None:
            self._take_requests(1, now)
            self.running += 1
        return excess

    def admit_choices(self, prompts: int, choices: int, now: float) -> KeyLimitExceeded | None:
        """Takes a request that was let in as one for `prompts` of them, which have `choices`
        in all, at least one each; or says why not.

        Then it has its request a minute back, so that `wait` is true for the whole of it.
        """
        excess = self.excess(1, prompts, choices, now)
        if excess is None:
            self._take_requests(prompts - 1, now)
            self.running += choices - 1
        elif self._requests is not None:
            self._requests.take(-1, now)
            if excess.wait and prompts <= self.limits.requests:
                wait = self._requests.missing(prompts, now) * MINUTE / self.limits.requests
                excess = replace(excess, wait=max(excess.wait, wait))
        return excess

    def excess(
        self, inside: int, prompts: int, choices: int, now: float
    ) -> KeyLimitExceeded | None:
        """Why so many prompts with so many choices are not let in now; None if they are.

        inside: 1 for a request that was let in as one of one choice, else 0.
        """
        if not inside and self._tokens is not None and self._tokens.level(now) <= 0:
            reason = f"the limit of {self.limits.tokens} tokens a minute is used up"
            return _exceeded(reason, "tokens", self._tokens.missing(1.0, now), self.limits.tokens)
        return self._check_concurrency(inside, choices) or self._check_requests(
            inside, prompts, now
        )

    def _check_concurrency(self, inside: int, choices: int) -> KeyLimitExceeded | None:
        """Why so many answers, of which some are inside already, cannot be made now."""
        max_concurrent = self.limits.concurrent
        if max_concurrent and choices > max_concurrent:
            return KeyLimitExceeded(
                f"{choices} choices in a request, where {max_concurrent} may be made at a time"
            )
        beyond = self.running + choices - inside - self._concurrent
        if max_concurrent and beyond > 0:
            running = self.running + max_concurrent - self._concurrent
            return KeyLimitExceeded(
                f"{running} answers are being made, {max_concurrent} may at a time",
                1.0,
                ("concurrent", beyond),
            )
        return None

    def _check_requests(self, inside: int, prompts: int, now: float) -> KeyLimitExceeded | None:
        """Why the minute's requests do not suffice for so many prompts."""
        a_minute = self.limits.requests
        if self._requests is None:
            return None
        if prompts > a_minute:
            return KeyLimitExceeded(
                f"{prompts} prompts in a request, where {a_minute} a minute may come"
            )
        missing = self._requests.missing(prompts - inside, now)
        if missing:
            reason = f"the limit of {a_minute} requests a minute is used up"
            return _exceeded(reason, "requests", missing, a_minute)
        return None

    def _take_requests(self, prompts: int, now: float) -> None:
        if self._requests is not None:
            self._requests.take(prompts, now)

    def release(self, count: int = 1) -> None:
        """`count` answers have ended."""
        self.running -= count

    def use_tokens(self, tokens: int, now: float) -> None:
        """Takes tokens of prompt or output."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def set_limits(self, limits: KeyLimits, now: float) -> None:
        """Other limits from now on; what was used stays used."""
        if limits == self.limits:
            return
        self._concurrent = limits.concurrent
        self._requests = _resized(self._requests, limits.requests, now)
        self._tokens = _resized(self._tokens, limits.tokens, now)
        self.limits = limits


def _exceeded(reason: str, kind: str, missing: float, a_minute: int) -> KeyLimitExceeded:
    """A minute's limit of `a_minute` units is used up, by all gateways, if they have none left."""
    return KeyLimitExceeded(reason, missing * MINUTE / a_minute, (kind, math.ceil(missing)))


def _resized(bucket: TokenBucket | None, a_minute: int, now: float) -> TokenBucket | None:
    if not a_minute:
        return None
    return TokenBucket(a_minute, now) if bucket is None else bucket.resized(a_minute, now)
