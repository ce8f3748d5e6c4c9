"""Metrics under vLLM's names, for dashboards, scalers and routers made for them.

A name is here only if it counts the same thing. Names, labels and buckets are those of vLLM 0.33;
one of its `engine`s is one of our groups. Knows no HTTP and no contents of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pipeinfer.core import REQUEST_SECONDS, Histogram, read_histogram
from pipeinfer.gateway.counters import add_histogram
from pipeinfer.gateway.health import Health, StageStatus, kv_usage

VLLM_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
SHORTEST_REQUEST = 0.3  # of the buckets of whole requests, and of what they go through
REQUEST_BUCKETS = tuple(bound for bound in REQUEST_SECONDS if bound >= SHORTEST_REQUEST)
FINISH_REASONS = ("stop", "length", "abort", "error")
LABELS = ("model_name", "engine")


@dataclass
class GroupMetrics:
    """What one gateway measured of one group's requests.

    max_tokens: of a request; bounds of the histograms of tokens end there.
    prompt_tokens, output_tokens: totals. finished: requests by reason.
    Histograms of seconds: time_to_first_token, inter_token (between two outputs),
    time_per_output_token (after the first), request_seconds, decode_seconds (first output to last).
    Histograms of tokens: prompts, outputs.
    """

    max_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(FINISH_REASONS, 0))
    )
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(VLLM_TTFT_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(VLLM_ITL_BUCKETS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(VLLM_ITL_BUCKETS))
    request_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    decode_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))

    def __post_init__(self) -> None:
        self.prompts = Histogram(token_bounds(self.max_tokens))
        self.outputs = Histogram(token_bounds(self.max_tokens))

    def count_finished(
        self, total_seconds: float, decode_seconds: float, prompt: int, output: int
    ) -> None:
        """Counts a request that ended by stop or length. total_seconds, decode: seconds.

        prompt: tokens, 0 where another choice has counted them.
        """
        self.request_seconds.observe(total_seconds)
        if output:
            self.decode_seconds.observe(decode_seconds)
        if output > 1:
            self.time_per_output_token.observe(decode_seconds / (output - 1))
        if prompt:
            self.prompts.observe(prompt)
        self.outputs.observe(output)


def token_bounds(max_tokens: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `max_tokens` tokens."""
    steps = (
        mantissa * 10**power for power in range(len(str(max_tokens))) for mantissa in (1, 2, 5)
    )
    return [float(step) for step in steps if step <= max_tokens]


# Of groups: name, help, and where it is counted.
HISTOGRAMS: tuple[tuple[str, str, Callable[[GroupMetrics], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "From a request's arrival to its first output.",
        lambda group: group.time_to_first_token,
    ),
    (
        "inter_token_latency_seconds",
        "Between two outputs of a request.",
        lambda group: group.inter_token,
    ),
    (
        "request_time_per_output_token_seconds",
        "From the first output of a request to its last, by tokens after the first.",
        lambda group: group.time_per_output_token,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's arrival to its end, by stop or length.",
        lambda group: group.request_seconds,
    ),
    (
        "request_decode_time_seconds",
        "From the first output of a request to its last.",
        lambda group: group.decode_seconds,
    ),
    (
        "request_prompt_tokens",
        "Tokens of the prompts of requests that have ended by stop or length.",
        lambda group: group.prompts,
    ),
    (
        "request_generation_tokens",
        "Output tokens of requests that have ended by stop or length.",
        lambda group: group.outputs,
    ),
)


class VllmMetrics(Collector):
    """The metrics of one gateway.

    model: served name. max_tokens: of a request. caches: whether prefixes are cached.
    """

    def __init__(self, health: Health, model: str, max_tokens: int, caches: bool) -> None:
        self._health, self._model = health, model
        self._max_tokens, self._caches = max_tokens, caches
        self._groups: dict[int, GroupMetrics] = {}

    def group(self, group: int) -> GroupMetrics:
        """The metrics of group number `group`; made on first use."""
        if group not in self._groups:
            self._groups[group] = GroupMetrics(self._max_tokens)
        return self._groups[group]

    def collect(self) -> Iterator[Metric]:
        for row in self._groups_of("scheduler"):
            self.group(row.group)  # so that rates have a zero to start from
        yield from self._of_schedulers()
        yield from self._of_engines()
        yield from self._counted()
        yield from self._timed()

    def _groups_of(self, name: str) -> list[StageStatus]:
        return self._health.one_per_group(name)

    def _labels(self, group: int, *more: str) -> list[str]:
        return [self._model, str(group), *more]

    # --------------------------------------------------------------------- what heartbeats say

    def _gauge(
        self, name: str, text: str, stage: str, value: Callable[[StageStatus], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for row in self._groups_of(stage):
            family.add_metric(self._labels(row.group), value(row))
        return family

    def _counter(self, name: str, text: str, stage: str, statistic: str) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for row in self._groups_of(stage):
            family.add_metric(self._labels(row.group), row.stats.get(statistic, 0.0))
        return family

    def _of_schedulers(self) -> Iterator[Metric]:
        stage = "scheduler"
        yield self._gauge(
            "num_requests_running",
            "Requests in slots.",
            stage,
            lambda row: row.stats.get("running", 0.0),
        )
        yield self._gauge(
            "num_requests_waiting",
            "Requests that a scheduler has and that are in no slot.",
            stage,
            lambda row: row.stats.get("waiting", 0.0),
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests in no slot: for a slot and pages (capacity), or for a grammar or another's "
            "prompt (deferred).",
            labels=(*LABELS, "reason"),
        )
        for row in self._groups_of(stage):
            deferred = row.stats.get("held", 0.0) + row.stats.get("preparing", 0.0)
            capacity = max(row.stats.get("waiting", 0.0) - deferred, 0.0)
            waiting.add_metric(self._labels(row.group, "capacity"), capacity)
            waiting.add_metric(self._labels(row.group, "deferred"), deferred)
        yield waiting
        yield self._counter(
            "num_preemptions",
            "Requests that were taken back because memory ran short.",
            stage,
            "preemptions_total",
        )
        for name, statistic, text in (
            ("request_queue_time", "queue", "From a request's arrival at its scheduler to a slot."),
            ("request_prefill_time", "prefill", "From a request's slot to its first output."),
        ):
            family = HistogramMetricFamily(f"vllm:{name}_seconds", text, labels=LABELS)
            for row in self._groups_of(stage):
                histogram = read_histogram(row.stats, statistic)
                if histogram is not None:
                    longer = [
                        (bound, count) for bound, count in histogram[0] if bound >= SHORTEST_REQUEST
                    ]
                    add_histogram(family, self._labels(row.group), longer, histogram[1])
            yield family

    def _of_engines(self) -> Iterator[Metric]:
        stage = "engine"
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of KV pages that requests use, from 0 to 1.",
            stage,
            kv_usage,
        )
        yield self._counter(
            "prefix_cache_queries",
            "Tokens of admitted prompts, which were looked for in the prefix cache.",
            stage,
            "prompt_tokens_total",
        )
        yield self._counter(
            "prefix_cache_hits",
            "Tokens of those that the prefix cache had.",
            stage,
            "cached_tokens_total",
        )
        about = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine")
        info = GaugeMetricFamily("vllm:cache_config_info", "Always 1; labels say it.", labels=about)
        for row in self._groups_of(stage):
            sizes = [f"{row.stats.get(name, 0.0):.0f}" for name in ("page_tokens", "pages_total")]
            dtype = "fp8_e4m3" if row.stats.get("kv_fp8", 0.0) else "auto"
            info.add_metric([*sizes, dtype, str(self._caches), str(row.group)], 1.0)
        yield info

    # ------------------------------------------------------------- what this gateway has counted

    def _counted(self) -> Iterator[Metric]:
        prompts = CounterMetricFamily(
            "vllm:prompt_tokens", "Tokens of accepted prompts.", labels=LABELS
        )
        outputs = CounterMetricFamily(
            "vllm:generation_tokens", "Output tokens delivered.", labels=LABELS
        )
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Requests that a group had and that have ended, by reason.",
            labels=(*LABELS, "finished_reason"),
        )
        for number, group in sorted(self._groups.items()):
            prompts.add_metric(self._labels(number), group.prompt_tokens)
            outputs.add_metric(self._labels(number), group.output_tokens)
            for reason, count in group.finished.items():
                finished.add_metric(self._labels(number, reason), count)
        yield from (prompts, outputs, finished)

    def _timed(self) -> Iterator[Metric]:
        for name, text, histogram in HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for number, group in sorted(self._groups.items()):
                made = histogram(group)
                add_histogram(family, self._labels(number), made.at_most(), made.total)
            yield family
