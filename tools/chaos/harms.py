"""What a storm does to a server, drawn from a seed: a list of harms, as many of each kind.

Knows stages by name and the kinds of harm; not how any of them is done.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.serving import Stage

KINDS = {
    "kill": "kill -9 of a stage",
    "two": "two stages killed at once",
    "stop": "SIGSTOP of a stage, and SIGCONT after some seconds",
    "hold": "nothing passes on a stage's links for some seconds, as with a pulled cable",
    "cut": "who hears a stage is cut off: dropped, and refused for some seconds",
    "sever": "who tells a stage is cut off: dropped, with what was on its way, and refused",
    "slow": "bytes for a stage come late, and few a second",
    "full": "the disk is full while stages record",
}
LINKS = ("hold", "cut", "sever", "slow")  # kinds that need a network between stages
SPARED = ("kill", "two")  # kinds that the gateway is spared: its connections would be gone
WAIT = 1.0  # seconds at most before a harm


@dataclass(frozen=True)
class Harm:
    """`stages`: the stages that suffer, none if all do. sockets: whose links, of those that have
    any. wait: seconds before it."""

    kind: str
    stages: tuple[Stage, ...]
    sockets: tuple[str, ...]
    wait: float

    def __str__(self) -> str:
        names = "+".join(f"{name}-{group}-{rank}" for name, group, rank in self.stages)
        return f"{names} {' '.join(self.sockets)}".strip()


def drawn(kinds: Sequence[str], stages: Sequence[Stage], count: int, seed: int) -> list[Harm]:
    """`count` harms; each round has one of each kind, in a drawn order.

    The first harms are the same for every count, so a long storm can be told in pieces.
    """
    source = random.Random(seed)
    harms: list[Harm] = []
    while len(harms) < count:
        harms += [_harm(kind, sorted(stages), source) for kind in source.sample(kinds, len(kinds))]
    return harms[:count]


def _harm(kind: str, stages: Sequence[Stage], source: random.Random) -> Harm:
    wait = source.uniform(0.0, WAIT)
    if kind == "full":
        return Harm(kind, (), (), wait)
    names = sorted({name for name, _, _ in stages} - ({"gateway"} if kind in SPARED else set()))
    chosen = source.sample(names, 2 if kind == "two" else 1)
    victims = tuple(source.choice([p for p in stages if p[0] == name]) for name in chosen)
    if kind not in LINKS:
        return Harm(kind, victims, (), wait)
    heard = ("plan", "telemetry") if chosen == ["scheduler"] else ("telemetry",)
    there = {"cut": heard, "sever": ("inbox",)}.get(kind, ("inbox", *heard))
    few = tuple(sorted(source.sample(there, source.randint(1, len(there)))))
    return Harm(kind, victims, few, wait)
