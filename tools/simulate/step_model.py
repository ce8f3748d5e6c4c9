"""How long a step takes, fitted to recordings, and how steps scatter around that; what a simulated
engine says of its steps.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from math import erf, exp, sqrt
from pathlib import Path

import msgspec

from pipeinfer.settings import ConfigurationError
from pipeinfer.step_cost import PER_SECOND, StepCost, measured_sizes


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


ROWS = 1, 8, 16, 32, 64, 96, 128, 192, 256  # of decodes alone
BESIDE = 64  # decodes without context in a step with a prompt, at most half of its tokens
DEPTH = 2048  # tokens of the prompt before those whose price is measured


def step_cost(model: StepModel, most: int) -> StepCost:
    """Of steps of up to `most` tokens, without scatter."""

    def amid(tokens: int, before: int) -> int:
        decodes = min(BESIDE, tokens // 2)
        prompt = tokens - decodes
        pairs = prompt * before + prompt * (prompt + 1) // 2
        return round(model.seconds(decodes, decodes, prompt, pairs) * PER_SECOND)

    mixed = tuple(
        (tokens, amid(tokens, 0), (amid(tokens, DEPTH) - amid(tokens, 0)) // DEPTH)
        for tokens in measured_sizes(most)
    )
    decodes = tuple((rows, round(model.seconds(rows, rows) * PER_SECOND)) for rows in ROWS)
    return StepCost(decodes, mixed, round(model.context * PER_SECOND))


SCHEMA = "pipeinfer-step-model/2"
SHIPPED = Path(__file__).parent / "models"


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients, in seconds.

    fixed: of every step. mixed: on top in a step with prompt tokens. decode: (from, per row) pairs,
    each adds `per row` for every decode row beyond `from`. prefill: the same over prompt tokens.
    context: per token that decode rows attend to. pair: per (query, key) pair of prompt rows.
    noise: how steps scatter around the rest. turnaround: from the end of a step to the start of one
    that was planned only then. bubble: from the end of a step to the start of the next, which was
    planned while it ran; 0 where the device found it in time. inbound: from a client to the
    scheduler. outbound: from the end of a step to the client, if nothing before it is still under
    way, but for outbound_row, which each decode of the step takes. Equally likely seconds of each,
    () for none.
    """

    fixed: float
    mixed: float = 0.0
    decode: tuple[tuple[int, float], ...] = ()
    prefill: tuple[tuple[int, float], ...] = ()
    context: float = 0.0
    pair: float = 0.0
    noise: Noise = Noise()
    turnaround: tuple[float, ...] = ()
    bubble: tuple[float, ...] = ()
    inbound: tuple[float, ...] = ()
    outbound: tuple[float, ...] = ()
    outbound_row: float = 0.0
    schema: str = SCHEMA
    source: str = ""

    def seconds(self, decodes: int, contexts: int, tokens: int = 0, pairs: int = 0) -> float:
        """Of one step: `decodes` rows of one token that attend to `contexts` tokens in all, and
        `tokens` prompt tokens in longer rows that attend in `pairs` pairs."""
        total = self.fixed + self.context * contexts
        for start, rate in self.decode:
            if decodes <= start:
                break
            total += rate * (decodes - start)
        if tokens:
            total += self.mixed + self.pair * pairs
            for start, rate in self.prefill:
                if tokens <= start:
                    break
                total += rate * (tokens - start)
        return total


def attended(starts: Sequence[int], counts: Sequence[int]) -> int:
    """(query, key) pairs of rows that compute counts[r] tokens from position starts[r] on."""
    return sum(
        count * start + count * (count + 1) // 2
        for start, count in zip(starts, counts, strict=True)
    )


def load(name: str) -> StepModel:
    """The model in the file `name`, or a shipped one of that name. Raises ConfigurationError."""
    path = Path(name)
    if not path.exists() and (SHIPPED / f"{name}.json").exists():
        path = SHIPPED / f"{name}.json"
    try:
        model = msgspec.json.decode(path.read_bytes(), type=StepModel)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path} is no step model: {error}") from None
    if model.schema != SCHEMA:
        raise ConfigurationError(f"{path} has schema {model.schema!r}, not {SCHEMA!r}")
    return model


def save(path: Path, model: StepModel) -> None:
    """As JSON that people can read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
