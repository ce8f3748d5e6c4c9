"""Says at most once a minute what was refused, however often it is tried.

Knows neither keys nor sockets: reasons are text.
"""

from __future__ import annotations

import logging

PERIOD = 60.0  # seconds between two lines
REASONS = 8  # that a line names; the others are counted only


class Refusals:
    """Counts refusals by reason. `total`: since the start."""

    def __init__(self, log: logging.Logger) -> None:
        self.total = 0
        self._log = log
        self._counts: dict[str, int] = {}
        self._others = 0
        self._next = 0.0

    def note(self, reason: str) -> None:
        """One more; memory stays bounded, whatever the reasons say."""
        self.total += 1
        if reason in self._counts or len(self._counts) < REASONS:
            self._counts[reason] = self._counts.get(reason, 0) + 1
        else:
            self._others += 1

    def report(self, now: float) -> None:
        """Logs what was noted since the last line, if that is a minute ago. `now`: seconds."""
        if not self._counts or now < self._next:
            return
        named = [f"{reason} ({count} times)" for reason, count in self._counts.items()]
        if self._others:
            named.append(f"others ({self._others} times)")
        self._log.warning("handshakes refused: %s", "; ".join(named))
        self._counts.clear()
        self._others = 0
        self._next = now + PERIOD
