"""The command line: draws mutants, runs them in several processes, and lists who survived.

First each area's tests run without a change, as many at a time as later: they must pass, and their
time says how long a mutant may take. The exit code is 1 if fewer than --least percent were killed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from bench import report
from mutants import mutations
from mutants.areas import AREAS, ROOT
from mutants.mutations import Mutant
from mutants.running import Outcome, Workplace

SCHEMA = "pipeinfer-mutants/1"
PATIENCE, SPARE = 3.0, 30.0  # a mutant may take so many times what its area takes; seconds more

T, R = TypeVar("T"), TypeVar("R")


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = argparse.ArgumentParser(prog="python tools/mutants", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="draw mutants and run the tests on each")
    listed = commands.add_parser("list", help="draw mutants and show them")
    for command in (run, listed):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--count", type=int, default=300, help="in all areas together")
        command.add_argument("--areas", nargs="+", choices=list(AREAS), default=list(AREAS))
    run.add_argument("--workers", type=int, default=2, help="mutants at a time")
    said = "the code is 1 if fewer were killed, in percent"
    run.add_argument("--least", type=float, default=90.0, help=said)
    said = "only those that survived in this result, by what they change"
    run.add_argument("--again", type=Path, metavar="RESULT", help=said)
    run.add_argument("--json", type=Path, metavar="OUT", help="write the result there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if too many survived, 2 if tests fail without any change."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    shares = mutations.shares(options.count, options.areas)
    drawn = [m for area, share in shares.items() for m in mutations.draw(options.seed, area, share)]
    if options.command == "list":
        for mutant in drawn:
            print(f"{mutant.path}:{mutant.change.line} {mutant.change.operator}\n{mutant.diff}\n")
        return 0
    if options.again is not None:
        survivors = json.loads(options.again.read_text())["metrics"]["survivors"]
        diffs = {(one["module"], one["change"]) for one in survivors}
        drawn = [m for m in drawn if (str(m.path), changed_lines(m.diff)) in diffs]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            limits, outcomes = _run(drawn, options.workers, Path(folder))
        except TestsFail as error:
            print(error, file=sys.stderr)
            return 2
    metrics = result(drawn, outcomes)
    metrics |= {"limits": limits, "seconds": round(time.monotonic() - begun, 1)}
    print(json.dumps({k: v for k, v in metrics.items() if k not in ("mutants", "survivors")}))
    if options.json is not None:
        report.write(options.json, words, metrics, "tools/mutants", SCHEMA)
    return 1 if metrics["percent"] < options.least else 0


class TestsFail(Exception):
    """They do without any change; the text is what they say."""


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
            raise TestsFail(f"the tests of {area} fail without any change:\n{outcome.said}")
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
