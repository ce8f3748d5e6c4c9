"""The page of the statistics in heartbeats: from statistics_help.py.

The phases of a step, after which many are called, stand behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from docs.markdown import bullets, sentence
from docs.markdown import page as page_of
from pipeinfer.statistics_help import PHASES, STATISTICS

BUCKET = "_le_"  # before the upper end of a histogram's bucket
INTRODUCTION = """Every stage says these numbers in its heartbeats. `LLM.stats()` returns the \
latest of each stage, and [metrics](metrics.md) are made of some. Names that end in `_total` only \
grow, until the process ends. [Telemetry](../telemetry.md) says what heartbeats are."""
PHASES_SAID = """The engine times its host by phase of a step. The phases are ranges on the \
timeline of nsys (NVTX), and in the trace that `--profile` writes."""


def page() -> str:
    """docs/reference/statistics.md."""
    return page_of(
        "Statistics",
        INTRODUCTION,
        *_stages(),
        "## Phases of a step",
        PHASES_SAID,
        bullets(f"`{name}`: {sentence(said)}" for name, said in PHASES.items()),
    )


def _stages() -> Iterator[str]:
    for stage, statistics in STATISTICS.items():
        yield f"## {stage[0].upper()}{stage[1:]}"
        yield bullets(_lines(statistics))


def _lines(statistics: Mapping[str, str]) -> Iterator[str]:
    """The buckets of a histogram stand in one line."""
    for _, named in groupby(statistics, lambda name: name.partition(BUCKET)[0]):
        names = list(named)
        first, last = names[0], names[-1]
        if first != last:
            buckets = f"`{first}` to `{last}`, {len(names)} in all"
            yield f"{buckets}: how many of those took at most so many seconds."
        else:
            yield f"`{first}`: {sentence(statistics[first])}"
