"""How often stages say that they are there.

All stages' heartbeats reach every gateway, and what schedulers say of their groups every tokenizer:
these must not spend their time on it. Knows numbers only.
"""

from __future__ import annotations

HEARTBEAT_SECONDS = 0.5  # seconds
# Times --host-loss: so long a lost host may come back to what nobody else can go on with. It may
# have to boot, and to load a model.
GIVE_UP_FACTOR = 10
# The same after which what is kept for it is dropped: nobody waits for its answer any more.
FORGET_FACTOR = 2 * GIVE_UP_FACTOR
MAX_HEARTBEAT_RATE = (
    100  # a second, of all stages together: each takes 0.2 ms where nothing else is to be done
)


def heartbeat_period(stages: int) -> float:
    """Seconds between what a stage says, where so many stages say it; HEARTBEAT up to 50 of
    them."""
    return max(HEARTBEAT_SECONDS, stages / MAX_HEARTBEAT_RATE)


def silence_limit(stages: int, least: float = 5.0) -> float:
    """Seconds after which a stage that is not heard counts as lost."""
    return max(least, 3 * heartbeat_period(stages))
