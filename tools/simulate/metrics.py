"""Counts of a running simulation, and the metrics that are made of them.

Gaps between tokens are kept as a histogram, so that millions of requests fit.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, floor, log
from typing import Any

from pipeinfer.bench import client
from simulate.workloads import Arrival

RESOLUTION = 2000  # bins for each factor of e: a percentile is right within 0.03 %
GOLDEN = (5**0.5 - 1) / 2
NO_TIME = -(10**9)  # the bin of gaps of no length


@dataclass
class GroupTally:
    """Of one group. prompt, cached: tokens of prompts that got a first token, and how many of them
    came from the prefix cache. prefill, decode: tokens computed. refused: requests that never fit.
    """

    prompt: int = 0
    cached: int = 0
    prefill: int = 0
    decode: int = 0
    output: int = 0
    steps: int = 0
    finished: int = 0
    refused: int = 0
    preemptions: int = 0
    evicted: int = 0  # pages of the prefix cache
    busy: float = 0.0  # seconds that the device computed


@dataclass
class Tally:
    """Of a whole run. first, whole: seconds to the first and to the last token of each request, in
    the order in which they came. last: when the last token came. inbound: equally likely seconds
    from clients to schedulers, which are part of both."""

    groups: list[GroupTally]
    inbound: tuple[float, ...] = ()
    first: array[float] = field(default_factory=lambda: array("d"))
    whole: array[float] = field(default_factory=lambda: array("d"))
    last: float = 0.0
    _gaps: Counter[int] = field(default_factory=Counter)

    def started(self, group: int, arrival: Arrival, now: float, cached: int) -> None:
        """The first token of `arrival` came; `cached` tokens of its prompt were."""
        self.first.append(now - arrival.at + self._delay(arrival))
        tally = self.groups[group]
        tally.prompt += len(arrival.prompt)
        tally.cached += cached

    def gap(self, seconds: float) -> None:
        """A request got a token, `seconds` after the one before."""
        self._gaps[floor(log(seconds) * RESOLUTION) if seconds > 0 else NO_TIME] += 1

    def ended(self, group: int, arrival: Arrival, output: int, now: float) -> None:
        """The last token of `arrival` came, its `output`th."""
        self.whole.append(now - arrival.at + self._delay(arrival))
        self.groups[group].finished += 1
        self.groups[group].output += output
        self.last = max(self.last, now)

    def _delay(self, arrival: Arrival) -> float:
        """The same for both ends of a request, and spread evenly over any run of requests."""
        if not self.inbound:
            return 0.0
        return self.inbound[int(arrival.number * GOLDEN % 1.0 * len(self.inbound))]

    def gap_percentiles(self, *shares: float) -> list[float]:
        """Seconds between tokens that so large shares of all gaps do not exceed; [] without any."""
        bins = sorted(self._gaps.items())
        total = sum(self._gaps.values())
        found: list[float] = []
        for share in shares if total else ():
            left = share * total
            for place, count in bins:
                left -= count
                if left <= 0:
                    found.append(exp((place + 0.5) / RESOLUTION) if place > NO_TIME else 0.0)
                    break
        return found

    def mean_gap(self) -> float:
        """Mean seconds between tokens; 0 without any."""
        total = sum(self._gaps.values())
        weighted = sum(
            exp((place + 0.5) / RESOLUTION) * count
            for place, count in self._gaps.items()
            if place > NO_TIME
        )
        return weighted / total if total else 0.0


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
    found = client.distribution(seconds)
    found.pop("max", None)
    return found
