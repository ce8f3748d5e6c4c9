"""How often stages say that they are there.

What others decide by (channel `group`) they say every HEARTBEAT. Heartbeats are for people, every
stage's reach every gateway, and a gateway must not spend its time on them. Knows numbers only.
"""

from __future__ import annotations

HEARTBEAT = 0.5  # seconds
MOST = 500  # heartbeats a second, of all stages together: 3 % of a gateway's core


def period(stages: int) -> float:
    """Seconds between the heartbeats of a stage where there are so many; it is HEARTBEAT up to 250
    of them."""
    return max(HEARTBEAT, stages / MOST)


def silence(stages: int) -> float:
    """Seconds after which a stage that is not heard counts as lost."""
    return max(5.0, 3 * period(stages))
