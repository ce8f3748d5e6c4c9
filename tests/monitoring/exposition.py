"""What /metrics says where a group has started: by the gateway's own code, without a server."""

from __future__ import annotations

from docs.http import statistics
from pipeinfer.gateway.health import ExpectedStage, Health
from pipeinfer.gateway.metrics import Metrics, VllmMetrics
from pipeinfer.messages import Heartbeat


def started(vllm: bool, accept: str = "") -> str:
    """All series, those by vLLM's names if `vllm`, for a scrape with this header `accept`."""
    health = Health([ExpectedStage(f"{name}-0", name) for name in ("scheduler", "engine")])
    for row in list(health.stages.values()):
        beat = Heartbeat(
            stage=row.stage,
            name=row.name,
            group=0,
            rank=0,
            index=0,
            pid=1,
            incarnation=1,
            state="ready",
            stats=dict.fromkeys(statistics()[row.name], 1.0),
        )
        health.on_heartbeat(beat, 0.0)
    metrics = Metrics(health, vllm=VllmMetrics(health, "model", 4096, True) if vllm else None)
    metrics.key_counters("anonymous")
    return metrics.exposition(accept)[0].decode()
