"""What a run says in the end: throughput, latencies, hits and balance, as numbers and as text.

Knows a tally; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simulate.tally import Tally

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def of(tally: Tally, wall: float) -> dict[str, Any]:
    """The metrics of a run that took `wall` seconds of this machine's processor.

    Names as in tools/bench; imbalance is the largest group's share of computed tokens over the
    mean, busy_share the mean share of time in which devices computed.
    """
    groups = tally.groups
    prompt, output = sum(g.prompt for g in groups), sum(g.output for g in groups)
    computed = [g.prefill + g.decode for g in groups]
    seconds = tally.last
    gaps = [1e3 * gap for gap in tally.gap_percentiles(*SHARES.values())]
    return {
        "requests": sum(g.finished for g in groups),
        "refused": sum(g.refused for g in groups),
        "seconds": seconds,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "tokens_per_s": output / seconds if seconds else 0.0,
        "ttft_ms": percentiles(tally.first),
        "itl_ms": {**dict(zip(SHARES, gaps, strict=False)), "mean": 1e3 * tally.mean_gap()},
        "e2e_ms": percentiles(tally.whole),
        "hit_rate": sum(g.cached for g in groups) / prompt if prompt else 0.0,
        "imbalance": max(computed) * len(groups) / sum(computed) if sum(computed) else 1.0,
        "preemptions": sum(g.preemptions for g in groups),
        "steps": sum(g.steps for g in groups),
        "busy_share": sum(g.busy for g in groups) / len(groups) / seconds if seconds else 0.0,
        "computed_per_group": computed,
        "simulated_in_s": wall,
    }


def show(name: str, metrics: Mapping[str, Any]) -> None:
    """Prints a run in a few lines."""
    print(
        f"{name}: {metrics['requests']:,} requests in {metrics['seconds']:,.2f} s, "
        f"{metrics['tokens_per_s']:,.1f} tokens/s, {metrics['steps']:,} steps"
    )
    print(
        f"  hit rate {metrics['hit_rate']:.1%}, imbalance {metrics['imbalance']:.3f}, "
        f"busy {metrics['busy_share']:.1%}, preemptions {metrics['preemptions']:,}, "
        f"refused {metrics['refused']:,}"
    )
    for key in ("ttft_ms", "itl_ms", "e2e_ms"):
        shown = "  ".join(f"{which} {value:9.2f}" for which, value in metrics[key].items())
        print(f"  {key.removesuffix('_ms'):<5}{shown}  ms")
    print(f"  simulated in {metrics['simulated_in_s']:.1f} s of processor time")


def percentiles(seconds: Any) -> dict[str, float]:
    """p50, p90, p99 and mean of `seconds`, in milliseconds; {} without any."""
    if not len(seconds):
        return {}
    values = 1e3 * np.asarray(seconds)
    found = np.percentile(values, [100 * share for share in SHARES.values()])
    return {**dict(zip(SHARES, found.tolist(), strict=True)), "mean": float(values.mean())}
