"""What one API key may use: requests at a time, and requests and tokens a minute.

Sans-IO: the time is passed in. Knows no HTTP, no key's text and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE = 60.0  # seconds
ROUNDING = 1e-6  # what a sum of floats may lack of a whole request


@dataclass(frozen=True)
class KeyLimits:
    """Bounds of one key; 0 is none. `requests` and `tokens` are a minute's."""

    concurrent: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class LimitExceeded:
    """Why a request is not taken. `wait`: seconds until it would be; 0 where it never is, or
    where nobody knows, since it depends on other requests' ends."""

    reason: str
    wait: float = 0.0


class TokenBucket:
    """An allowance that refills evenly: `a_minute` of it each minute, at most a minute's worth.

    What is taken may be more than what is there; then the level is below zero until it has
    refilled.
    """

    def __init__(self, a_minute: int, now: float) -> None:
        self.per_minute = a_minute
        self._level = float(a_minute)
        self._updated_at = now

    def level(self, now: float) -> float:
        """What is there at `now` (seconds); a clock that goes back adds nothing."""
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

    def seconds_until(self, wanted: float, now: float) -> float:
        """Seconds until the level is `wanted`, 0 if it is; `wanted` is at most `a_minute`."""
        missing = wanted - self.level(now)
        return missing * MINUTE / self.per_minute if missing > ROUNDING else 0.0

    def resized(self, a_minute: int, now: float) -> TokenBucket:
        """Another size; what was used stays used."""
        bucket = TokenBucket(a_minute, now)
        bucket.take(self.per_minute - self.level(now), now)
        return bucket


class KeyUsage:
    """What one key uses. Every request that `enter` let in must `leave`, for all of its choices.

    Tokens are taken when they are known, so a request is let in while any are left, and those that
    run may take the level below zero; then later requests wait.
    """

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self._requests = TokenBucket(limits.requests, now) if limits.requests else None
        self._tokens = TokenBucket(limits.tokens, now) if limits.tokens else None

    def admit(self, now: float) -> LimitExceeded | None:
        """Lets one request in, or says why not; then nothing was taken."""
        if self._tokens is not None and self._tokens.level(now) <= 0:
            reason = f"the limit of {self.limits.tokens} tokens a minute is used up"
            return LimitExceeded(reason, self._tokens.seconds_until(1.0, now))
        excess = self._check_concurrency(0, 1) or self._take_requests(0, 1, now)
        if excess is None:
            self.running += 1
        return excess

    def admit_choices(self, prompts: int, choices: int, now: float) -> LimitExceeded | None:
        """Takes a request that was let in as one for `prompts` of them, which have `choices`
        in all, at least one each; or says why not.

        Then it has its request a minute back, so that `wait` is true for the whole of it.
        """
        excess = self._check_concurrency(1, choices) or self._take_requests(1, prompts, now)
        if excess is None:
            self.running += choices - 1
        elif self._requests is not None:
            self._requests.take(-1, now)
            if excess.wait and prompts <= self.limits.requests:
                wait = self._requests.seconds_until(prompts, now)
                excess = LimitExceeded(excess.reason, max(excess.wait, wait))
        return excess

    def _check_concurrency(self, inside: int, choices: int) -> LimitExceeded | None:
        """Why so many answers, of which some are inside already, cannot be made now."""
        most = self.limits.concurrent
        if most and choices > most:
            return LimitExceeded(
                f"{choices} choices in a request, where {most} may be made at a time"
            )
        if most and self.running + choices - inside > most:
            return LimitExceeded(
                f"{self.running} answers are being made, {most} may at a time", 1.0
            )
        return None

    def _take_requests(self, inside: int, prompts: int, now: float) -> LimitExceeded | None:
        """Takes what so many prompts cost of the minute's requests, or says why not."""
        a_minute = self.limits.requests
        if self._requests is None:
            return None
        if prompts > a_minute:
            return LimitExceeded(
                f"{prompts} prompts in a request, where {a_minute} a minute may come"
            )
        wait = self._requests.seconds_until(prompts - inside, now)
        if wait > 0:
            return LimitExceeded(f"the limit of {a_minute} requests a minute is used up", wait)
        self._requests.take(prompts - inside, now)
        return None

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
        self._requests = _resized(self._requests, limits.requests, now)
        self._tokens = _resized(self._tokens, limits.tokens, now)
        self.limits = limits

    def remaining(self, now: float) -> tuple[int | None, int | None]:
        """(requests, tokens) that are left of the minute's, whole ones; None without a limit."""
        return _whole(self._requests, now), _whole(self._tokens, now)


def _resized(bucket: TokenBucket | None, a_minute: int, now: float) -> TokenBucket | None:
    if not a_minute:
        return None
    return TokenBucket(a_minute, now) if bucket is None else bucket.resized(a_minute, now)


def _whole(bucket: TokenBucket | None, now: float) -> int | None:
    return None if bucket is None else max(0, int(bucket.level(now)))
