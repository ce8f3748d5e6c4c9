"""`run`: draws mutants, runs them in several processes, and lists who survived.

First each area's tests run without a change, as many at a time as later: they must pass, and their
time says how long a mutant may take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutants import mutations
from mutants.areas import AREAS, ROOT
from mutants.list import add_arguments as add_drawing
from mutants.list import drawn as draw
from mutants.mutations import Mutant
from mutants.running import Outcome, Workplace
from pipeinfer.settings import ConfigurationError

PATIENCE = 3.0  # a mutant may take so many times what its area takes
SPARE = 30.0  # seconds more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_drawing(parser)
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    said = "the exit code is 1 if fewer were killed, in percent"
    parser.add_argument("--least", type=float, default=90.0, help=said)
    said = "only those that survived in this result, by what they change"
    parser.add_argument("--again", type=Path, metavar="RESULT", help=said)


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics. Raises ConfigurationError if tests fail without any change."""
    drawn = draw(options)
    if options.again is not None:
        survivors = json.loads(options.again.read_text())["metrics"]["survivors"]
        diffs = {(one["module"], one["change"]) for one in survivors}
        drawn = [m for m in drawn if (str(m.path), changed_lines(m.diff)) in diffs]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        limits, outcomes = _run(drawn, options.workers, Path(folder))
    metrics = result(drawn, outcomes)
    metrics |= {"limits": limits, "seconds": round(time.monotonic() - begun, 1)}
    few = metrics["percent"] < options.least
    return metrics | {"broken": [f"only {metrics['percent']} % were killed"] if few else []}


def _run(
    drawn: Sequence[Mutant], workers: int, folder: Path
) -> tuple[dict[str, float], list[Outcome]]:
    """Seconds that a mutant of each area may take, and what became of each."""
    free: SimpleQueue[Workplace] = SimpleQueue()
    for number in range(workers):
        free.put(Workplace(folder / str(number)))

    def test(mutant: Mutant, limit: float) -> Outcome:
        place = free.get()
        try:
            return place.test(mutant.path, mutant.text, AREAS[mutant.area].in_order(), limit)
        finally:
            free.put(place)

    with ThreadPoolExecutor(workers) as pool:
        limits = _time_limits(sorted({m.area for m in drawn}), pool.map, test)
        outcomes = []
        for mutant, outcome in zip(
            drawn, pool.map(lambda m: test(m, limits[m.area]), drawn), strict=True
        ):
            outcomes.append(outcome)
            _tell(len(outcomes), len(drawn), mutant, outcome)
    return limits, outcomes


def _time_limits(
    areas: list[str],
    several: Callable[[Callable[[str], Outcome], Iterable[str]], Iterator[Outcome]],
    test: Callable[[Mutant, float], Outcome],
) -> dict[str, float]:
    """By area, from what its tests take without a change."""

    def unchanged(area: str) -> Outcome:
        path = next(AREAS[area].files())
        text = (ROOT / path).read_text(encoding="utf-8")
        change = mutations.Change("", 0, 0, 0)
        return test(Mutant(area, path, change, text, ""), float("inf"))

    found = {}
    for area, outcome in zip(areas, several(unchanged, areas), strict=True):
        if outcome.ended != "survived":
            raise ConfigurationError(
                f"the tests of {area} fail without any change:\n{outcome.said}"
            )
        found[area] = round(PATIENCE * outcome.seconds + SPARE, 1)
    print("limits in seconds:", found, file=sys.stderr, flush=True)
    return found


def _tell(number: int, count: int, mutant: Mutant, outcome: Outcome) -> None:
    where = f"{mutant.path}:{mutant.change.line} {mutant.change.operator}"
    line = f"{number}/{count} {outcome.ended} {outcome.seconds:.0f} s {where} {outcome.by}"
    more = f"\n{mutant.diff}" if outcome.ended == "survived" else ""
    print(line + more, file=sys.stderr, flush=True)


def changed_lines(diff: str) -> str:
    """Of a diff, without line numbers and without what surrounds them."""
    return "\n".join(line for line in diff.splitlines() if line[:1] in ("-", "+"))


def result(drawn: Sequence[Mutant], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of each area and of all, everybody's fate, and the survivors with their diffs."""
    everybody, survivors = [], []
    areas: dict[str, dict[str, int]] = {}
    for mutant, outcome in zip(drawn, outcomes, strict=True):
        counts = areas.setdefault(
            mutant.area, {"mutants": 0, "killed": 0, "timeout": 0, "survived": 0}
        )
        counts["mutants"] += 1
        counts[outcome.ended] += 1
        known = {
            "area": mutant.area,
            "module": str(mutant.path),
            "line": mutant.change.line,
            "operator": mutant.change.operator,
            "change": changed_lines(mutant.diff),
        }
        seconds = round(outcome.seconds, 1)
        everybody.append({**known, "ended": outcome.ended, "by": outcome.by, "seconds": seconds})
        if outcome.ended == "survived":
            survivors.append({**known, "diff": mutant.diff})
    noticed = len(drawn) - len(survivors)
    return {
        "mutants": everybody,
        "count": len(drawn),
        "killed": sum(counts["killed"] for counts in areas.values()),
        "timeout": sum(counts["timeout"] for counts in areas.values()),
        "survived": len(survivors),
        "percent": round(100 * noticed / len(drawn), 1) if drawn else 100.0,
        "areas": areas,
        "survivors": survivors,
    }
