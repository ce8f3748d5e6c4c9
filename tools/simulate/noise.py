"""How steps scatter around what a model says: by their size, and partly for many steps in a row.

Knows seconds and a source of chance; no step and no plan. fitting.py finds the numbers.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from math import erf, exp, sqrt

import msgspec


class Scatter(msgspec.Struct, frozen=True):
    """Of steps that take more than `above` seconds by the model, up to the next one's: equally
    likely `factors` between what they take and what the model says, in ascending order."""

    above: float
    factors: tuple[float, ...]


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """scatter: by size, the first from 0 seconds on; () for none. mixed: the same of steps with
    prompt tokens. A step's place among its factors
    is that of a normal variable: a sum of one that fades, by a factor of e in `lasting` steps, and
    has the share `persistent` of the variance, and of one that is new with each step.
    """

    scatter: tuple[Scatter, ...] = ()
    mixed: tuple[Scatter, ...] = ()
    persistent: float = 0.0
    lasting: float = 1.0


class Draws:
    """The factors of the steps of one device, in order, drawn from `source`."""

    def __init__(self, noise: Noise, source: random.Random) -> None:
        self._kinds = [
            ([one.above for one in kind[1:]], [one.factors for one in kind])
            for kind in (noise.scatter, noise.mixed)
        ]
        self._gauss = source.gauss
        self._old, self._new = sqrt(noise.persistent), sqrt(1.0 - noise.persistent)
        self._keep = exp(-1.0 / noise.lasting)
        self._fresh = sqrt(1.0 - self._keep**2)
        self._state = self._gauss(0.0, 1.0)

    def factor(self, seconds: float, mixed: bool) -> float:
        """Of the next step, which takes `seconds` by the model; `mixed`: it has prompt tokens."""
        above, kinds = self._kinds[mixed]
        if not kinds:
            return 1.0
        gauss = self._gauss
        value = self._new * gauss(0.0, 1.0)
        if self._old:
            self._state = self._keep * self._state + self._fresh * gauss(0.0, 1.0)
            value += self._old * self._state
        factors = kinds[bisect_right(above, seconds)]
        # The chance of less than `value` is 1 only by rounding, far out.
        place = int(0.5 * (1.0 + erf(value / SQRT2)) * len(factors))
        return factors[min(place, len(factors) - 1)]


SQRT2 = sqrt(2.0)
