"""What one API key may use: requests at a time, and requests and tokens a minute.

Sans-IO: the time is passed in. Knows no HTTP, no key's text and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE = 60.0  # seconds
ROUNDING = 1e-6  # what a sum of floats may lack of a whole request


@dataclass(frozen=True)
class Limits:
    """Bounds of one key; 0 is none. `requests` and `tokens` are a minute's."""

    concurrent: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Excess:
    """Why a request is not taken. `wait`: seconds until it would be; 0 where it never is, or
    where nobody knows, since it depends on other requests' ends."""

    reason: str
    wait: float = 0.0


class Bucket:
    """An allowance that refills evenly: `a_minute` of it each minute, at most a minute's worth.

    What is taken may be more than what is there; then the level is below zero until it has
    refilled.
    """

    def __init__(self, a_minute: int, now: float) -> None:
        self.a_minute = a_minute
        self._level = float(a_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is there at `now` (seconds); a clock that goes back adds nothing."""
        passed = now - self._at  # hot path: once for every token of a key with such a limit
        if passed <= 0:
            return self._level
        level = self._level + passed * self.a_minute / MINUTE
        return level if level < self.a_minute else float(self.a_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, also if it is not there; a negative one gives back."""
        level = self.level(now) - amount
        self._level = level if amount > 0 else min(float(self.a_minute), level)
        if now > self._at:
            self._at = now

    def wait(self, wanted: float, now: float) -> float:
        """Seconds until the level is `wanted`, 0 if it is; `wanted` is at most `a_minute`."""
        missing = wanted - self.level(now)
        return missing * MINUTE / self.a_minute if missing > ROUNDING else 0.0

    def resized(self, a_minute: int, now: float) -> Bucket:
        """Another size; what was used stays used."""
        bucket = Bucket(a_minute, now)
        bucket.take(self.a_minute - self.level(now), now)
        return bucket


class Account:
    """What one key uses. Every request that `enter` let in must `leave`, for all of its choices.

    Tokens are taken when they are known, so a request is let in while any are left, and those that
    run may take the level below zero; then later requests wait.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self._requests = Bucket(limits.requests, now) if limits.requests else None
        self._tokens = Bucket(limits.tokens, now) if limits.tokens else None

    def enter(self, now: float) -> Excess | None:
        """Lets one request in, or says why not; then nothing was taken."""
        if self._tokens is not None and self._tokens.level(now) <= 0:
            reason = f"the limit of {self.limits.tokens} tokens a minute is used up"
            return Excess(reason, self._tokens.wait(1.0, now))
        excess = self._room(0, 1) or self._fetch(0, 1, now)
        if excess is None:
            self.running += 1
        return excess

    def enter_more(self, prompts: int, choices: int, now: float) -> Excess | None:
        """Takes a request that was let in as one for `prompts` of them, which have `choices`
        in all, at least one each; or says why not.

        Then it has its request a minute back, so that `wait` is true for the whole of it.
        """
        excess = self._room(1, choices) or self._fetch(1, prompts, now)
        if excess is None:
            self.running += choices - 1
        elif self._requests is not None:
            self._requests.take(-1, now)
            if excess.wait and prompts <= self.limits.requests:
                wait = self._requests.wait(prompts, now)
                excess = Excess(excess.reason, max(excess.wait, wait))
        return excess

    def _room(self, inside: int, choices: int) -> Excess | None:
        """Why so many answers, of which some are inside already, cannot be made now."""
        most = self.limits.concurrent
        if most and choices > most:
            return Excess(f"{choices} choices in a request, where {most} may be made at a time")
        if most and self.running + choices - inside > most:
            return Excess(f"{self.running} answers are being made, {most} may at a time", 1.0)
        return None

    def _fetch(self, inside: int, prompts: int, now: float) -> Excess | None:
        """Takes what so many prompts cost of the minute's requests, or says why not."""
        a_minute = self.limits.requests
        if self._requests is None:
            return None
        if prompts > a_minute:
            return Excess(f"{prompts} prompts in a request, where {a_minute} a minute may come")
        wait = self._requests.wait(prompts - inside, now)
        if wait > 0:
            return Excess(f"the limit of {a_minute} requests a minute is used up", wait)
        self._requests.take(prompts - inside, now)
        return None

    def leave(self, count: int = 1) -> None:
        """`count` answers have ended."""
        self.running -= count

    def use(self, tokens: int, now: float) -> None:
        """Takes tokens of prompt or output."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def limit(self, limits: Limits, now: float) -> None:
        """Other limits from now on; what was used stays used."""
        if limits == self.limits:
            return
        self._requests = _resized(self._requests, limits.requests, now)
        self._tokens = _resized(self._tokens, limits.tokens, now)
        self.limits = limits

    def left(self, now: float) -> tuple[int | None, int | None]:
        """(requests, tokens) that are left of the minute's, whole ones; None without a limit."""
        return _whole(self._requests, now), _whole(self._tokens, now)


def _resized(bucket: Bucket | None, a_minute: int, now: float) -> Bucket | None:
    if not a_minute:
        return None
    return Bucket(a_minute, now) if bucket is None else bucket.resized(a_minute, now)


def _whole(bucket: Bucket | None, now: float) -> int | None:
    return None if bucket is None else max(0, int(bucket.level(now)))
