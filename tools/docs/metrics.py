"""The page of all metrics: as a gateway exposes them.

Labels are found in samples, so the gateway that is asked has a stage and a key.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric

from docs.markdown import bullets
from docs.markdown import page as page_of
from pipeinfer.gateway.health import Expected, Health
from pipeinfer.gateway.metrics import Metrics

INTRODUCTION = """`GET /metrics` of the gateway shows these in Prometheus' text format, or as \
OpenMetrics to who accepts that. What is said of stages, pages and queues comes from the latest \
heartbeats, and is up to half a second old. [Telemetry](../telemetry.md) says how to use them."""


def page() -> str:
    """docs/reference/metrics.md."""
    return page_of("Metrics", INTRODUCTION, bullets(_lines()))


def exposed() -> Iterator[tuple[str, Metric]]:
    """All metrics by the name that dashboards use, sorted."""
    metrics = Metrics(Health([Expected("engine-0-0", "engine")]))
    metrics.key_counters("a key")
    found = {
        f"{one.name}_total" if one.type == "counter" else one.name: one
        for one in metrics.registry.collect()
    }
    yield from sorted(found.items())


def _lines() -> Iterator[str]:
    for name, metric in exposed():
        labels = dict.fromkeys(
            label for sample in metric.samples for label in sample.labels if label != "le"
        )
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        yield f"`{shown}` ({metric.type}): {metric.documentation}"
