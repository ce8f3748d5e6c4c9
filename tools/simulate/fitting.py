"""Fits step times, their scatter and the delays between stages to recordings of a real run.

Reads traces of `--record DIR` through pipeinfer.replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np

from pipeinfer.messages import Result, Submit, Text, Work
from pipeinfer.replay.traces import CannotReplay, LoadedTrace, TraceEntry, load
from pipeinfer.settings import ConfigurationError
from pipeinfer.step_cost import StepCost
from pipeinfer.wire import unpack
from simulate.cluster import Deployment
from simulate.noise import Noise, Scatter
from simulate.step_model import StepModel, attended
from simulate.workloads import Arrival


@dataclass(frozen=True)
class MeasuredStep:
    """The arguments of StepModel.seconds, and the seconds from the end of the step before, or from
    its own launch if that was later, to its end."""

    decodes: int
    contexts: int
    tokens: int
    pairs: int
    seconds: float


def recordings(folder: Path) -> list[LoadedTrace]:
    """All traces in `folder`. ConfigurationError if there is none of an engine."""
    try:
        found = [load(path) for path in sorted(folder.glob("*.pitrace"))]
    except CannotReplay as error:
        raise ConfigurationError(str(error)) from None
    if not any(one.identity.name == "engine" for one in found):
        raise ConfigurationError(f"{folder} holds no recording of an engine")
    return found


def leads(recording: LoadedTrace) -> bool:
    """Whether it is of the rank of an engine that reports to the scheduler."""
    return recording.identity.name == "engine" and recording.identity.rank == 0


def steps(recording: LoadedTrace) -> Iterator[MeasuredStep]:
    """The steps of an engine, in order."""
    begun: dict[tuple[int, int], float] = {}
    taken: dict[tuple[int, int], float] = {}
    before = 0.0
    for entry in recording.entries:
        message = entry.message
        if entry.kind == "StepNote":
            begun[message.epoch, message.number] = entry.time
        elif entry.kind == "StepDone":
            launched = begun.pop((message.epoch, message.number), entry.time)
            taken[message.epoch, message.number] = entry.time - max(before, launched)
            before = entry.time
        elif isinstance(message, Result):
            seconds = taken.pop((message.epoch, message.number), 0.0)
            if seconds > 0:
                yield _step(message, seconds)


def steps_since(found: Sequence[LoadedTrace], begin: float) -> int:
    """Steps of all engines whose results came after `begin`, those without a row left out."""
    return sum(
        bool(unpack(entry.message.counts).any())
        for recording in found
        if leads(recording)
        for entry in recording.entries
        if isinstance(entry.message, Result) and entry.time > begin
    )


def _step(result: Result, seconds: float) -> MeasuredStep:
    starts, counts = unpack(result.starts), unpack(result.counts)
    one, more = counts == 1, counts > 1
    pairs = attended(starts[more].tolist(), counts[more].tolist())
    contexts = int(starts[one].sum()) + int(one.sum())
    return MeasuredStep(int(one.sum()), contexts, int(counts[more].sum()), pairs, seconds)


def entries(found: Sequence[LoadedTrace], name: str) -> Iterator[TraceEntry]:
    """What all stages called `name` took and gave."""
    for recording in found:
        if recording.identity.name == name:
            yield from recording.entries


@dataclass
class Stream:
    """A request: when the gateway sent it on, when pieces of its text came, how many tokens."""

    sent: float
    prompt: np.ndarray | None = None
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0


def streams(found: Sequence[LoadedTrace], skip: int) -> list[Stream]:
    """Requests that got tokens, in the order in which they came, without the first `skip`."""
    known: dict[str, Stream] = {}
    for entry in entries(found, "gateway"):
        message = entry.message
        if isinstance(message, Submit) and entry.direction == "out":
            known.setdefault(message.request_id, Stream(entry.time))
        elif isinstance(message, Text) and entry.direction == "in":
            for row in message.rows:
                stream = known.get(row.request_id)
                if stream is not None and row.ids:
                    stream.pieces.append(entry.time)
                    stream.tokens += len(row.ids) // 4
    for entry in entries(found, "scheduler"):
        if isinstance(entry.message, Work) and entry.message.request_id in known:
            known[entry.message.request_id].prompt = unpack(entry.message.prompt_ids)
    ordered = sorted(known.values(), key=lambda stream: stream.sent)[skip:]
    kept = [stream for stream in ordered if stream.tokens and stream.prompt is not None]
    if not kept:
        raise ConfigurationError("the recording holds no request that got a token")
    return kept


def arrivals(kept: Sequence[Stream]) -> list[Arrival]:
    """The same requests, the first of them at 0 seconds; each wants as many tokens as it got."""
    found: list[Arrival] = []
    for number, stream in enumerate(kept):
        assert stream.prompt is not None
        found.append(Arrival(number, stream.sent - kept[0].sent, stream.prompt, stream.tokens))
    return found


def deployment(found: Sequence[LoadedTrace]) -> tuple[Deployment, int, str]:
    """(each group, how many groups, routing policy), as the headers of the recordings say."""
    scheduler = next((one for one in found if one.identity.name == "scheduler"), None)
    engine = next((one for one in found if leads(one)), None)
    if scheduler is None or engine is None:
        raise ConfigurationError("there is no recording of a scheduler, or none of an engine")
    settings, facts = scheduler.header.settings, engine.header.facts
    group = Deployment(
        kv_pages=facts["pages"] - 1,  # without the dummy
        page_size=facts["page_size"],
        max_model_len=facts["max_model_len"],
        max_running=min(settings["max_running"], facts["max_slots"]),
        max_step_tokens=settings["max_step_tokens"] or facts["step_tokens"],
        mixed_step_tokens=settings["mixed_step_tokens"],
        itl_target=settings.get("itl_target", 0.0),
        ttft_target=settings.get("ttft_target", 0.0),
        policy=settings["policy"],
        overlap_depth=settings["overlap_depth"],
        cache=settings["cache"],
        step_cost=msgspec.convert(facts["step_cost"], StepCost | None),
    )
    return group, settings["dp"], settings["routing"]


DECODE_FROM = (0, 16, 64, 128)  # rows from which each further row may cost more
PREFILL_FROM = (0, 128, 512)
TOLERANCE = 1e-12
ROUNDS = 10  # of weighting: far more than it takes


def fit(steps: Sequence[MeasuredStep]) -> StepModel:
    """The model that is closest to `steps` in the square, each weighted by one over its seconds.

    So short steps count as well as long ones, and yet the sum over all steps comes out right:
    iteratively reweighted least squares with a variance that grows with the mean (Wedderburn,
    Quasi-likelihood functions, Biometrika 1974), without negative coefficients.
    """
    table = np.array([(s.decodes, s.contexts, s.tokens, s.pairs) for s in steps], float)
    seconds = np.array([s.seconds for s in steps])
    decodes, contexts, tokens, pairs = table.T
    columns = [np.ones(len(steps)), (tokens > 0).astype(float), contexts, pairs]
    columns += [np.maximum(decodes - start, 0.0) for start in DECODE_FROM]
    columns += [np.maximum(tokens - start, 0.0) for start in PREFILL_FROM]
    found = _weighted(np.stack(columns, axis=1), seconds).tolist()
    many = 4 + len(DECODE_FROM)
    model = StepModel(
        fixed=found[0],
        mixed=found[1],
        context=found[2],
        pair=found[3],
        decode=_pieces(DECODE_FROM, found[4:many]),
        prefill=_pieces(PREFILL_FROM, found[many:]),
    )
    return model


def _weighted(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    said = np.full(len(seconds), seconds.mean())
    found = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        root = 1.0 / np.sqrt(np.maximum(said, seconds.mean() * 1e-3))
        found = nonnegative(matrix * root[:, None], seconds * root)
        said = matrix @ found
    return found


def predicted(model: StepModel, steps: Sequence[MeasuredStep]) -> np.ndarray:
    """Seconds of each step by the model, without noise, float64 [n]."""
    return np.array([model.seconds(s.decodes, s.contexts, s.tokens, s.pairs) for s in steps])


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |matrix x - target|; Lawson and Hanson, Solving Least Squares Problems
    (1974), algorithm NNLS. `matrix` [n, k], `target` [n]; columns are scaled to be alike."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    count = a.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        slope = a.T @ (target - a @ x)
        slope[free] = -np.inf
        if slope.max() <= TOLERANCE:
            break
        free[int(slope.argmax())] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            negative = free & (wanted <= 0)
            if not negative.any():
                x = wanted
                break
            step = (x[negative] / (x[negative] - wanted[negative])).min()
            x += step * (wanted - x)
            free &= x > TOLERANCE
            x[~free] = 0.0
    return x / scale


def _pieces(starts: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((start, rate) for start, rate in zip(starts, rates, strict=True) if rate > 0)


SIZES = 4  # classes of steps by their modelled seconds, as many steps in each
FEWEST = 100  # steps in a class
LEAST = 30  # steps with prompts, or without: fewer scatter as all steps do
QUANTILES = 100  # of the factors of a class
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # steps between those that are compared
LASTING = tuple(2.0 ** (power / 2) for power in range(15))  # steps, 1 to 128


def noise(
    seconds: Sequence[np.ndarray], said: Sequence[np.ndarray], mixed: Sequence[np.ndarray]
) -> Noise:
    """Of engines whose steps took `seconds` float64 [n], by a model take `said` float64 [n] and had
    prompt tokens where `mixed` bool [n], an array of each for each engine, in the steps' order."""
    took, model, prompts = (np.concatenate(one) for one in (seconds, said, mixed))
    scores = np.empty(len(took))
    kinds: list[tuple[Scatter, ...]] = []
    for kind in (~prompts, prompts):
        chosen = kind if kind.sum() >= LEAST else np.ones(len(took), bool)
        scatter, found = _scatter(took[chosen], model[chosen])
        scores[chosen] = found
        kinds.append(scatter)
    ends = np.cumsum([len(one) for one in seconds])[:-1]
    persistent, lasting = _persistence(np.split(scores, ends))
    return Noise(scatter=kinds[0], mixed=kinds[1], persistent=persistent, lasting=lasting)


def _scatter(took: np.ndarray, model: np.ndarray) -> tuple[tuple[Scatter, ...], np.ndarray]:
    """The classes of such steps, and each step's place in its own, as a normal variable."""
    sizes = max(1, min(SIZES, len(took) // FEWEST))
    above = np.unique(np.quantile(model, np.arange(sizes) / sizes))
    above[0] = 0.0
    of = np.searchsorted(above, model, side="right") - 1
    scatter: list[Scatter] = []
    scores = np.empty(len(took))
    for size, least in enumerate(above.tolist()):
        scatter.append(Scatter(least, _factors(took[of == size], model[of == size])))
        scores[of == size] = _scores((took / model)[of == size])
    return tuple(scatter), scores


def _factors(took: np.ndarray, said: np.ndarray) -> tuple[float, ...]:
    """Quantiles of took over said whose mean keeps the sum over all steps."""
    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    factors = np.quantile(took / said, middles)
    factors *= took.sum() / said.sum() / factors.mean()
    return tuple(factors.round(4).tolist())


def _scores(ratios: np.ndarray) -> np.ndarray:
    """The places of `ratios` among each other as those of a standard normal variable."""
    normal = NormalDist()
    places = np.empty(len(ratios))
    places[np.argsort(ratios, kind="stable")] = (np.arange(len(ratios)) + 0.5) / len(ratios)
    return np.array([normal.inv_cdf(place) for place in places])


def _persistence(engines: Sequence[np.ndarray]) -> tuple[float, float]:
    """(share, steps) for which share * exp(-lag / steps) is closest to the autocorrelation."""
    lags = [lag for lag in LAGS if sum(len(one) > lag for one in engines)]
    found = np.array([_correlation(engines, lag) for lag in lags])
    best = (np.inf, 0.0, 1.0)
    for lasting in LASTING:
        fading = np.exp(-np.array(lags) / lasting)
        share = float(np.clip(found @ fading / (fading @ fading), 0.0, 1.0))
        error = float(np.square(found - share * fading).sum())
        best = min(best, (error, share, lasting))
    return round(best[1], 4), round(best[2], 2)


def _correlation(engines: Sequence[np.ndarray], lag: int) -> float:
    """Mean product of scores that are `lag` steps apart, in the same engine."""
    products = [one[lag:] * one[:-lag] for one in engines if len(one) > lag]
    return float(np.concatenate(products).mean())
