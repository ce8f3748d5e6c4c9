"""The gateway's Prometheus metrics: own counters and histograms, and statistics of all stages.

Owns its registry. Knows no HTTP and no contents of requests.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pipeinfer.core import REQUEST_SECONDS, read_histogram
from pipeinfer.gateway.counters import CounterFamily, MetricCounter, SecondsHistogram, add_histogram
from pipeinfer.gateway.health import Health, kv_usage
from pipeinfer.gateway.vllm_metrics import VllmMetrics
from pipeinfer.step_cost import NO_TARGETS, Targets

log = logging.getLogger(__name__)

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
MAX_NAME_LETTERS, MAX_LOGGED_NAMES = (
    64,
    100,
)  # letters of a field that nobody knows; how many are logged
KEY_OUTCOMES = ("ok", "limited", "refused", "error", "abort")


class Metrics:
    """All metrics of one gateway.

    Requests are counted by outcome: a finish reason ("abort" if the client left or its time was
    up), or "refused" if the request never ran.

    ready(): whether a request sent now would be served. targets: the latency targets that are set.
    vllm: the same under vLLM's names, None unless wanted.
    """

    def __init__(
        self,
        health: Health,
        ready: Callable[[], bool] = lambda: False,
        targets: Targets = NO_TARGETS,
        vllm: VllmMetrics | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.vllm = vllm
        family = self._counter_family
        self._requests = family(
            "requests",
            "Ended requests. Outcomes: stop, length, abort (its client left, or its time was up), "
            "error, refused (it never ran).",
            "outcome",
        )
        self.prompt_tokens = family("prompt_tokens", "Tokens of accepted prompts.").labels()
        self.generated_tokens = family(
            "generated_tokens", "Output tokens delivered; a stop token is not."
        ).labels()
        self.bad_requests = family(
            "bad_requests", "Requests that could not be read as HTTP."
        ).labels()
        self.refused_connections = family(
            "refused_connections",
            "Connections beyond the bound: the new one, or an idle one, was closed.",
        ).labels()
        self._unknown_fields = family(
            "unknown_fields",
            "Fields of bodies that were ignored because nobody knows them. The log names each "
            "once.",
        ).labels()
        self._seen_fields: set[str] = set()
        self._key_requests = family(
            "key_requests",
            "HTTP requests by the name of their API key, anonymous where none is needed; one of "
            "several prompts is one. Outcomes: ok, limited (429 for the key's limits), refused "
            "(other errors of the client, 503), error, abort (its client left).",
            "key",
            "outcome",
        )
        self._key_tokens = family(
            "key_tokens",
            "Tokens by the name of their API key. Kinds: prompt, output.",
            "key",
            "kind",
        )
        self.time_to_first_token = SecondsHistogram(
            "pipeinfer_time_to_first_token_seconds",
            "From a request's arrival to its first output.",
            TTFT_BUCKETS,
        )
        self.inter_token = SecondsHistogram(
            "pipeinfer_inter_token_seconds", "Between two outputs of a request.", ITL_BUCKETS
        )
        self.time_per_output_token = SecondsHistogram(
            "pipeinfer_time_per_output_token_seconds",
            "From a request's first output to its last, by the tokens after the first; of requests "
            "that ended by stop or length.",
            ITL_BUCKETS,
        )
        self.request_seconds = SecondsHistogram(
            "pipeinfer_request_seconds",
            "From a request's arrival to its end, of those that ended by stop or length.",
            REQUEST_SECONDS,
        )
        for times in (
            self.time_to_first_token,
            self.inter_token,
            self.time_per_output_token,
            self.request_seconds,
        ):
            self.registry.register(times)
        if vllm is not None:
            self.registry.register(vllm)
        self.registry.register(_StageCollector(health))
        self.registry.register(_GatewayCollector(ready, targets))
        for outcome in ("stop", "length", "abort", "error", "refused"):
            self._requests.labels(outcome)  # so that rates have a zero to start from

    def _counter_family(self, name: str, text: str, *labels: str) -> CounterFamily:
        family = CounterFamily(f"pipeinfer_{name}", text, labels)
        self.registry.register(family)
        return family

    def count_ended(self, outcome: str) -> None:
        """Counts one request that is over."""
        self._requests.labels(outcome).inc()

    def count_unknown_fields(self, names: Sequence[str]) -> None:
        """Counts fields that were ignored; logs the first of each name."""
        self._unknown_fields.inc(len(names))
        for name in islice(names, MAX_LOGGED_NAMES):
            name = name[:MAX_NAME_LETTERS]
            if name not in self._seen_fields and len(self._seen_fields) < MAX_LOGGED_NAMES:
                self._seen_fields.add(name)
                log.warning("requests have a field %r, which nobody knows; it is ignored", name)

    def key_counters(self, key: str) -> tuple[MetricCounter, MetricCounter]:
        """Counters of prompt tokens and of output tokens of the key called `key`."""
        for outcome in KEY_OUTCOMES:
            self._key_requests.labels(key, outcome)
        return self._key_tokens.labels(key, "prompt"), self._key_tokens.labels(key, "output")

    def count_key_request(self, key: str, outcome: str) -> None:
        """Counts one HTTP request of a key that is over."""
        self._key_requests.labels(key, outcome).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text for a scrape and its content type: OpenMetrics if the header `accept` asks for
        it."""
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind


class _GatewayCollector(Collector):
    """Gauges of the gateway itself."""

    def __init__(self, ready: Callable[[], bool], targets: Targets) -> None:
        self._ready = ready
        self._targets = targets
        self._started = time.time()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pipeinfer_ready",
            "1 if a request would be answered, as /health/ready says, else 0.",
            float(self._ready()),
        )
        yield GaugeMetricFamily(
            "pipeinfer_gateway_start_time_seconds",
            "Unix time when the gateway's process began. Counters begin anew with it.",
            self._started,
        )
        target = GaugeMetricFamily(
            "pipeinfer_target_seconds",
            "The settings --ttft-target (ttft) and --itl-target (itl), in seconds; 0: none.",
            labels=["of"],
        )
        target.add_metric(["ttft"], self._targets.ttft)
        target.add_metric(["itl"], self._targets.itl)
        yield target


class _StageCollector(Collector):
    """Statistics of the latest heartbeats, read at scrape time."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        yield from self._each_stage()
        yield from self._each_group()
        total = self._health.total
        yield CounterMetricFamily(
            "pipeinfer_preemptions",
            "Requests that were taken back because memory ran short. They run again later.",
            total("scheduler", "preemptions_total"),
        )
        computed = total("engine", "prompt_tokens_total")
        hit = total("engine", "cached_tokens_total") / computed if computed else 0.0
        for name, help_text, value in (
            ("requests_running", "Requests in slots.", total("scheduler", "running")),
            (
                "requests_waiting",
                "Requests that the scheduler has and that are in no slot.",
                total("scheduler", "waiting"),
            ),
            (
                "pages_free",
                "Free KV pages. Cached pages that could be evicted are not counted.",
                total("engine", "pages_free"),
            ),
            (
                "pages_evictable",
                "KV pages that are cached and not in use: given up when others need them.",
                total("engine", "pages_evictable"),
            ),
            ("pages", "All KV pages.", total("engine", "pages_total")),
            (
                "target_step_tokens",
                "Tokens of the longest step beside 64 streams within --itl-target, of all groups; "
                "0 where step times are not known.",
                total("scheduler", "target_step_tokens"),
            ),
            (
                "target_prompt_tokens_per_second",
                "Prompt tokens a second by steps of pipeinfer_target_step_tokens.",
                total("scheduler", "target_prompt_rate"),
            ),
            (
                "prefix_cache_hit_ratio",
                "Share of prompt tokens found in the prefix cache, since the engine started.",
                hit,
            ),
        ):
            yield GaugeMetricFamily(f"pipeinfer_{name}", help_text, value)

    def _each_group(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily(
            "pipeinfer_kv_usage_ratio",
            "Share of a group's KV pages that requests use, from 0 to 1. Cached pages that could "
            "be evicted are not used.",
            labels=["group"],
        )
        for row in self._health.one_per_group("engine"):
            usage.add_metric([str(row.group)], kv_usage(row))
        yield usage
        for name, text in (
            ("queue", "From a request's arrival at its group's scheduler to its first slot."),
            ("prefill", "From a request's first slot to its first output."),
        ):
            family = HistogramMetricFamily(f"pipeinfer_{name}_seconds", text, labels=["group"])
            for row in self._health.one_per_group("scheduler"):
                histogram = read_histogram(row.stats, name)
                if histogram is not None:
                    add_histogram(family, [str(row.group)], *histogram)
            yield family

    def _each_stage(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "pipeinfer_stage_up",
            "1 if the stage is ready, else 0. engine-0-1 is group 0, rank 1.",
            labels=["stage"],
        )
        restarts = CounterMetricFamily(
            "pipeinfer_stage_restarts",
            "Processes of the stage that this gateway heard after the first: restarts and swaps. "
            "A process that dies before it speaks is not counted, nor are a gateway's own.",
            labels=["stage"],
        )
        for row in self._health.stages.values():
            up.add_metric([row.stage], float(row.state == "ready"))
            restarts.add_metric([row.stage], row.restarts)
        yield up
        yield restarts


QUANTILES = (50, 90, 99)  # in percent: those that are shown
WINDOW = 60.0  # seconds
SNAPSHOT_INTERVAL = 1.0  # seconds between two snapshots that are kept


class RollingHistogram:
    """The share of a growing histogram that fell into the last WINDOW seconds.

    bounds: upper ends of the buckets, in seconds.
    _snapshots: (seconds, cumulative counts), the oldest at least WINDOW old if there is one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (0.0, *bounds)
        self._snapshots: deque[tuple[float, list[float]]] = deque()
        self._latest: list[float] = []

    def update(self, totals: Sequence[float], now: float) -> None:
        """Takes cumulative counts since the start: at most each bound, and all."""
        if not self._snapshots or now - self._snapshots[-1][0] >= SNAPSHOT_INTERVAL:
            self._snapshots.append((now, list(totals)))
        while len(self._snapshots) > 1 and now - self._snapshots[1][0] >= WINDOW:
            self._snapshots.popleft()
        self._latest = list(totals)

    @property
    def count(self) -> int:
        """How many values fell into the window."""
        return int(self._latest[-1] - self._snapshots[0][1][-1])

    def quantile(self, q: float) -> float | None:
        """Seconds, interpolated within a bucket; None without values."""
        grown = [now - then for now, then in zip(self._latest, self._snapshots[0][1], strict=True)]
        if grown[-1] <= 0:
            return None
        target = q * grown[-1]
        below = 0.0
        for number, upto in enumerate(grown[:-1]):
            if upto >= target and upto > below:
                low, high = self._bounds[number], self._bounds[number + 1]
                return low + (high - low) * (target - below) / (upto - below)
            below = upto
        return self._bounds[-1]


class RollingLatencies:
    """Latencies of the last minute of one gateway, for its heartbeats."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.generated_tokens
        self._kinds = (
            ("ttft", metrics.time_to_first_token, RollingHistogram(TTFT_BUCKETS)),
            ("itl", metrics.inter_token, RollingHistogram(ITL_BUCKETS)),
        )

    def stats(self, now: float) -> dict[str, float]:
        """Counts of first outputs (ttft) and later ones (itl), and their quantiles in milliseconds.

        now: monotonic seconds.
        """
        stats = {"output_tokens_total": float(self._tokens.count)}
        for name, histogram, rolling in self._kinds:
            rolling.update(_cumulative_counts(histogram), now)
            stats[f"{name}_count"] = float(rolling.count)
            for q in QUANTILES:
                stats[f"{name}_ms_p{q}"] = (rolling.quantile(q / 100) or 0.0) * 1e3
        return stats


def _cumulative_counts(times: SecondsHistogram) -> list[float]:
    """Values at most each bound, and all of them."""
    (family,) = times.collect()
    return [one.value for one in family.samples if one.name.endswith("_bucket")]
