"""The page of all metrics: as a gateway exposes them.

Labels are found in samples, so the gateway that is asked has a group that has started and a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import Metric

from docs.markdown import bullets
from docs.markdown import page as page_of
from pipeinfer.gateway.health import ExpectedStage, Health
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.vllm_metrics import VllmMetrics
from pipeinfer.histogram import names_of
from pipeinfer.messages import Heartbeat

INTRODUCTION = """`GET /metrics` of the gateway shows these in Prometheus' text format, or as \
OpenMetrics to who accepts that. What is said of stages, groups, pages and queues comes from the \
latest heartbeats, and is up to half a second old. [Telemetry](../telemetry.md) says how to use \
them."""
VLLM = """With [`--vllm-metrics`](settings.md#vllm-metrics) `/metrics` has these, too. `engine` is \
the number of a group. What pipeinfer does not have, such as adapters, has no metric here."""
STAGES = ("engine", "scheduler")
STATISTICS = Path(__file__).resolve().parents[2] / "docs/reference/statistics.md"


def page() -> str:
    """docs/reference/metrics.md."""
    return page_of(
        "Metrics",
        INTRODUCTION,
        bullets(_lines(exposed())),
        "## Names of vLLM",
        VLLM,
        bullets(_lines(of_vllm())),
    )


def exposed() -> Iterator[tuple[str, Metric]]:
    """All metrics by the name that dashboards use, sorted."""
    metrics = Metrics(_health())
    metrics.key_counters("a key")
    yield from _named(metrics.registry.collect())


def of_vllm() -> Iterator[tuple[str, Metric]]:
    """Those of --vllm-metrics."""
    yield from _named(VllmMetrics(_health(), "model", 1, True).collect())


def statistics() -> dict[str, list[str]]:
    """Names of the statistics in heartbeats, by the headings of docs/reference/statistics.md."""
    found: dict[str, list[str]] = {}
    for section in STATISTICS.read_text().split("\n## ")[1:]:
        title, _, listed = section.partition("\n")
        names = found.setdefault(title.lower(), [])
        for first, last in re.findall(r"^- `([\w.]+)`(?: to `([\w.]+)`)?", listed, re.MULTILINE):
            if last:  # all buckets of a histogram stand in one line
                names += [one for one in names_of(first.partition("_seconds")[0]) if "_le_" in one]
            else:
                names.append(first)
    return found


def _named(metrics: Iterable[Metric]) -> list[tuple[str, Metric]]:
    found = {f"{one.name}_total" if one.type == "counter" else one.name: one for one in metrics}
    return sorted(found.items())


def _health() -> Health:
    health = Health([ExpectedStage(f"{name}-0", name) for name in STAGES])
    for name in STAGES:
        told = Heartbeat(
            stage=f"{name}-0",
            name=name,
            group=0,
            rank=0,
            index=0,
            pid=1,
            incarnation=1,
            state="ready",
            stats=dict.fromkeys(statistics()[name], 1.0),
        )
        health.on_heartbeat(told, 0.0)
    return health


def _lines(metrics: Iterable[tuple[str, Metric]]) -> Iterator[str]:
    for name, metric in metrics:
        labels = dict.fromkeys(
            label for sample in metric.samples for label in sample.labels if label != "le"
        )
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        yield f"`{shown}` ({metric.type}): {metric.documentation}"
