"""How a new process learns from its neighbours what the one before it knew.

Both sides of the question are here: a roll call of the peers that have to answer, and the brackets
around an answer. Knows no stage and nothing of what is bracket between the brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeinfer.core import Send
from pipeinfer.messages import Recover, Recovered

DIGITS = re.compile("[0-9]{1,9}")
ASK_AGAIN = 1.0  # seconds after which a peer that has not answered is asked again


class RollCall:
    """Asks every one of `peers` until it bracket `stage`, a process with `incarnation`, all it
    knows.

    What was queued for a process that died may be lost, but never something after what arrived: an
    answer whose opening came is whole, one without is asked for again.
    """

    def __init__(self, stage: str, incarnation: int, peers: Iterable[str]) -> None:
        self._question = Recover(stage, incarnation)
        self._missing = dict.fromkeys(peers, False)  # True: its answer has begun
        self._ask_at = float("-inf")

    def ask(self, now: float) -> list[Send]:
        """The questions that are due at `now` (seconds); the first time, one to each peer."""
        if not self._missing or now < self._ask_at:
            return []
        self._ask_at = now + ASK_AGAIN
        return [Send("recovery", peer, self._question) for peer in self._missing]

    def on_recovered(self, bracket: Recovered) -> bool:
        """Takes a bracket of an answer; True if nobody is missing any more because of it."""
        if bracket.stage not in self._missing or bracket.incarnation != self._question.incarnation:
            return False
        if bracket.opening:
            self._missing[bracket.stage] = True
            return False
        if not self._missing[bracket.stage]:
            return False
        del self._missing[bracket.stage]
        return not self._missing

    def has_begun(self, peer: str) -> bool:
        """Whether the answer of `peer` has come, or begun to; also true of who is not asked.

        What it says before may be the rest of what the process before this one was bracket, or come
        from a process that is dead. What of it still holds is in the answer.
        """
        return self._missing.get(peer, True)

    @property
    def stage(self) -> str:
        """Who asks."""
        return self._question.stage

    @property
    def missing(self) -> list[str]:
        """Who has not bracket everything yet."""
        return list(self._missing)

    @property
    def complete(self) -> bool:
        """True when everybody has."""
        return not self._missing


def bracketed_answer(stage: str, asked: Recover, known: Iterable[Send]) -> list[Send]:
    """What `stage` sends to the asker: all that is `known`, between two brackets."""
    opening = Recovered(stage, asked.incarnation, opening=True)
    end = Recovered(stage, asked.incarnation)
    return [
        Send("recovery", asked.stage, opening),
        *known,
        Send("recovery", asked.stage, end),
    ]


def stage_number(stage: str, name: str) -> int | None:
    """The group or index in the id of a stage called `name`: 2 of "scheduler-2".

    None for what is no such id: a peer may say anything.
    """
    kind, _, digits = stage.partition("-")
    return int(digits) if kind == name and DIGITS.fullmatch(digits) else None
