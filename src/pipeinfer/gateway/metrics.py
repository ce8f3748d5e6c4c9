"""The metrics of a gateway: its own, those of the stages' heartbeats, and vLLM's names for them.

- MetricCounter, SecondsHistogram: counters and histograms of one event loop, cheap enough for every
  token. Prometheus' own take a lock and check their labels at every count.
- Metrics: counts of this gateway, and statistics of the stages, as Prometheus' text form.
- GatewayMetrics: the counts of all gateways, by stage.
- RollingLatencies: latencies of the last seconds, for the web page and for heartbeats.
- VllmMetrics: the same figures under vLLM's names, for dashboards made for vLLM.

Knows no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from pipeinfer.control import MetricSample, MetricSamples
from pipeinfer.core import (
    ACCEPTED_AT,
    REQUEST_SECONDS,
    STEP_TOKENS,
    Histogram,
    read_histogram,
    takeover_seconds,
)
from pipeinfer.gateway.health import Health, StageStatus, kv_usage
from pipeinfer.gateway.retention import ResumableStreams, RetentionBounds
from pipeinfer.step_cost import NO_TARGETS, Targets


class MetricCounter:
    """A count that only grows. created: Unix seconds."""

    __slots__ = ("count", "created")

    def __init__(self) -> None:
        self.count = 0
        self.created = time.time()

    def inc(self, amount: int = 1) -> None:
        """Adds to the count."""
        self.count += amount


class CounterFamily(Collector):
    """A metric of counters, one for each tuple of values of its `labels`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._about = name, text, tuple(labels)
        self._counters: dict[tuple[str, ...], MetricCounter] = {}

    def labels(self, *values: str) -> MetricCounter:
        """The counter with these values of its labels; made on first use."""
        counter = self._counters.get(values)
        if counter is None:
            counter = self._counters[values] = MetricCounter()
        return counter

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, counter in self._counters.items():
            family.add_metric(values, float(counter.count), counter.created)
        yield family


class SecondsHistogram(Collector):
    """A histogram of seconds. bounds: upper ends of all buckets but the last, infinite one."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._about = name, text
        self._histogram = Histogram(bounds)
        self._created = time.time()
        self.observe = self._histogram.observe

    def collect(self) -> Iterator[Metric]:
        name, text = self._about
        family = HistogramMetricFamily(name, text)
        add_histogram(family, (), self._histogram.at_most(), self._histogram.total)
        family.add_sample(f"{name}_created", {}, self._created)
        yield family


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    at_most: Iterable[tuple[float, float]],
    total: float,
) -> None:
    """Adds a histogram, as of Histogram.at_most, to a family, under these values of its labels."""
    buckets = [(_bound(bound), float(count)) for bound, count in at_most]
    family.add_metric(labels, buckets, total)


def _bound(bound: float) -> str:
    """The bound as Prometheus writes it."""
    return "+Inf" if bound == inf else str(float(bound))


log = logging.getLogger(__name__)

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
MAX_NAME_LETTERS = 64  # characters of an unknown field's name that are logged
MAX_LOGGED_NAMES = 100  # unknown fields that are logged
KEY_OUTCOMES = ("ok", "limited", "refused", "error", "abort")


class Metrics:
    """All metrics of one gateway.

    Requests are counted by outcome: a finish reason ("abort" if the client left or its time was
    up), or "refused" if the request never ran.

    Attributes:
    - ready(): whether a request sent now would be served
    - targets: the latency targets that are set
    - vllm: the same under vLLM's names, None unless wanted
    """

    def __init__(
        self,
        health: Health,
        ready: Callable[[], bool] = lambda: False,
        targets: Targets = NO_TARGETS,
        vllm: VllmMetrics | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.gateways = GatewayMetrics()
        self.registry.register(self.gateways)
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
            "Fields of bodies that were ignored because they are unknown. The log names each once.",
        ).labels()
        self.store_errors = family(
            "store_errors", "Responses that could not be written to the file of --store."
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
            self.gateways.own.append(times)
        if vllm is not None:
            self.gateways.own.append(vllm.counted)
            self.registry.register(vllm)
        self.registry.register(_StageCollector(health))
        self.registry.register(_GatewayCollector(ready, targets))
        self.gateways.own.append(_StartCollector())
        self._resumable = _ResumableCollector()
        self.gateways.own.append(self._resumable)
        for outcome in ("stop", "length", "abort", "error", "refused"):
            self._requests.labels(outcome)  # so that rates have a zero to start from

    def register_resumable_streams(self, streams: ResumableStreams) -> None:
        """Shows these streams from now on as those that outlive their connections."""
        self._resumable.streams = streams

    def _counter_family(self, name: str, text: str, *labels: str) -> CounterFamily:
        family = CounterFamily(f"pipeinfer_{name}", text, labels)
        self.gateways.own.append(family)
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
                log.warning("requests have an unknown field %r; it is ignored", name)

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
        it. Names stand as they are: all are legal without escapes, and the encoder of OpenMetrics
        would write vllm:NAME as vllm_NAME in samples."""
        encode, kind = choose_encoder(accept)
        exact = partial(encode, escaping=ALLOWUTF8)  # pyright: ignore[reportCallIssue]
        return exact(self.registry), kind


class GatewayMetrics(Collector):
    """The metrics that gateways count themselves: those of this gateway, and `others` of the other
    gateways.

    Attributes:
    - own: collectors of this gateway's
    - stage: its id, which is a label of all samples where there are several gateways; "": it is the
      only one
    - others: by stage id, for the next scrape
    """

    def __init__(self) -> None:
        self.own: list[Collector] = []
        self.stage = ""
        self.others: Mapping[str, tuple[MetricSamples, ...]] = {}

    def counted(self) -> tuple[MetricSamples, ...]:
        """The samples of this gateway."""
        return tuple(
            MetricSamples(
                name=family.name,
                help=family.documentation,
                kind=family.type,
                samples=tuple(
                    MetricSample(one.name, one.labels, one.value) for one in family.samples
                ),
            )
            for collector in self.own
            for family in collector.collect()
        )

    def collect(self) -> Iterator[Metric]:
        if not self.stage:
            for collector in self.own:
                yield from collector.collect()
            return
        families: dict[str, Metric] = {}
        of_each = {self.stage: self.counted(), **self.others}
        for stage, counted in sorted(of_each.items()):
            for one in counted:
                family = families.get(one.name)
                if family is None:
                    family = families[one.name] = Metric(one.name, one.help, one.kind)
                for sample in one.samples:
                    labels = {**sample.labels, "gateway": stage}
                    family.add_sample(sample.name, labels, sample.value)
        yield from families.values()


class _StartCollector(Collector):
    """When the gateway's process began."""

    def __init__(self) -> None:
        self._started = time.time()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pipeinfer_gateway_start_time_seconds",
            "Unix time when the gateway's process began. Counters begin anew with it.",
            self._started,
        )


class _GatewayCollector(Collector):
    """Gauges that are the same at each gateway."""

    def __init__(self, ready: Callable[[], bool], targets: Targets) -> None:
        self._ready = ready
        self._targets = targets

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pipeinfer_ready",
            "1 if a request would be answered, as /health/ready says, else 0.",
            float(self._ready()),
        )
        target = GaugeMetricFamily(
            "pipeinfer_target_seconds",
            "The settings --ttft-target (ttft) and --itl-target (itl), in seconds; 0: none.",
            labels=["of"],
        )
        target.add_metric(["ttft"], self._targets.ttft)
        target.add_metric(["itl"], self._targets.itl)
        yield target


class _ResumableCollector(Collector):
    """The streams that outlive their connections, read at scrape time. streams: none at first."""

    def __init__(self) -> None:
        self.streams = ResumableStreams(RetentionBounds(0, 0), lambda _: None)

    def collect(self) -> Iterator[Metric]:
        streams = self.streams
        for name, text, value in (
            ("kept_streams", "Answers that are kept for clients that come again.", len(streams)),
            ("kept_bytes", "Bytes that kept answers occupy.", streams.bytes),
            (
                "detached_requests",
                "Kept answers that are being computed while no connection reads them.",
                streams.num_detached,
            ),
        ):
            yield GaugeMetricFamily(f"pipeinfer_{name}", text, value)
        yield CounterMetricFamily(
            "pipeinfer_resumed_streams",
            "Connections that went on with a kept answer behind its first event.",
            streams.resumed,
        )
        yield CounterMetricFamily(
            "pipeinfer_dropped_streams",
            "Kept answers that were dropped, or lost their first events, because --kept-mib or "
            "--key-kept-mib was reached.",
            streams.dropped,
        )


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
                "standbys_ready",
                "Groups whose engines have standbys (--standby) that could go on at once.",
                self._health.standbys_ready,
            ),
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
            yield self._histogram(f"{name}_seconds", text, "scheduler", REQUEST_SECONDS)
        text = "Tokens that a step computed, of prompts and outputs together."
        yield self._histogram("step_tokens", text, "engine", STEP_TOKENS)
        level = GaugeMetricFamily(
            "pipeinfer_sleep_level",
            "The level at which a group sleeps; 0: it is awake.",
            labels=["group"],
        )
        for row in self._health.one_per_group("scheduler"):
            level.add_metric([str(row.group)], row.stats.get("sleep_level", 0.0))
        yield level
        yield from self._takeovers()
        yield from self._drafts()

    def _drafts(self) -> Iterator[Metric]:
        drafted = CounterMetricFamily(
            "pipeinfer_draft_tokens",
            "Tokens that were guessed ahead and verified; see --speculate.",
            labels=["group"],
        )
        accepted = CounterMetricFamily(
            "pipeinfer_accepted_draft_tokens",
            "Of those, the ones that were what was sampled; by position of the guess behind the "
            "last known token, from 0.",
            labels=["group", "position"],
        )
        for row in self._health.one_per_group("scheduler"):
            group, stats = str(row.group), row.stats
            drafted.add_metric([group], stats.get("draft_tokens_total", 0.0))
            for name, count in stats.items():
                if name.startswith(ACCEPTED_AT):
                    accepted.add_metric([group, name.removeprefix(ACCEPTED_AT)], count)
        yield from (drafted, accepted)

    def _histogram(
        self, name: str, text: str, stage: str, bounds: tuple[float, ...]
    ) -> HistogramMetricFamily:
        """A histogram of each group, from the statistics NAME_... of its stage."""
        family = HistogramMetricFamily(f"pipeinfer_{name}", text, labels=["group"])
        for row in self._health.one_per_group(stage):
            histogram = read_histogram(row.stats, name, bounds)
            if histogram is not None:
                add_histogram(family, [str(row.group)], *histogram)
        return family

    def _takeovers(self) -> Iterator[Metric]:
        recomputed = CounterMetricFamily(
            "pipeinfer_recomputed_tokens",
            "Tokens computed again because the engine that had computed them was lost, or slept: "
            "of each request that had gone on, those that the next engine did not find in kept "
            "pages.",
            labels=["group"],
        )
        takeovers = CounterMetricFamily(
            "pipeinfer_takeovers",
            "Engines that went on with the requests of a lost one, until each had a token.",
            labels=["group"],
        )
        seconds = GaugeMetricFamily(
            "pipeinfer_takeover_seconds",
            "The group's last takeover, phase after phase. restart: until the next engine spoke; "
            "begin: until it had its pages and took plans; first_token: until a request had a "
            "token; last_token: until all had one.",
            labels=["group", "phase"],
        )
        for row in self._health.one_per_group("scheduler"):
            group, stats = str(row.group), row.stats
            recomputed.add_metric([group], stats.get("recomputed_tokens_total", 0.0))
            takeovers.add_metric([group], stats.get("takeovers_total", 0.0))
            for phase, took in takeover_seconds(stats).items():
                seconds.add_metric([group, phase], took)
        yield from (recomputed, takeovers, seconds)

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


VLLM_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
SHORTEST_REQUEST = 0.3  # lowest bucket of whole requests and of their phases
REQUEST_BUCKETS = tuple(bound for bound in REQUEST_SECONDS if bound >= SHORTEST_REQUEST)
FINISH_REASONS = ("stop", "length", "abort", "error")
LABELS = ("model_name", "engine")


@dataclass
class GroupMetrics:
    """Counts and times of one group's requests, as one gateway measured them.

    Attributes:
    - max_tokens: of a request; bounds of the histograms of tokens end there
    - prompt_tokens, output_tokens: totals
    - finished: requests by reason
    - time_to_first_token, inter_token, time_per_output_token, request_seconds, decode_seconds:
      histograms of seconds; inter_token between two outputs, time_per_output_token after the first
      token, decode_seconds from the first output to the last
    - prompts, outputs, longest: histograms of tokens; outputs of each choice, longest of a prompt's
      choices
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
        self.longest = Histogram(token_bounds(self.max_tokens))

    def count_finished(
        self, total_seconds: float, decode_seconds: float, prompt: int, output: int
    ) -> None:
        """Counts a request that ended by stop or length.

        - total_seconds: from its arrival to its end
        - decode_seconds: from its first output to its last
        - prompt, output: tokens; prompt is 0 where another choice has counted the prompt
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


# Histograms of groups: name, help, and the histogram in GroupMetrics.
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
    (
        "request_max_num_generation_tokens",
        "Output tokens of the longest of a prompt's choices that have ended by stop or length.",
        lambda group: group.longest,
    ),
)


class VllmMetrics(Collector):
    """Metrics under vLLM's names: itself those of other stages' heartbeats.

    Attributes:
    - model: served name
    - max_tokens: of a request
    - caches: whether prefixes are cached
    - counted: those that this gateway counts itself
    """

    def __init__(self, health: Health, model: str, max_tokens: int, caches: bool) -> None:
        self._health, self._model = health, model
        self._max_tokens, self._caches = max_tokens, caches
        self._groups: dict[int, GroupMetrics] = {}
        self.counted = _VllmCounted(self)

    def group(self, group: int) -> GroupMetrics:
        """The metrics of group number `group`; made on first use."""
        if group not in self._groups:
            self._groups[group] = GroupMetrics(self._max_tokens)
        return self._groups[group]

    def collect(self) -> Iterator[Metric]:
        yield from self._of_schedulers()
        yield from self._of_engines()

    def counted_here(self) -> Iterator[Metric]:
        """The metrics that this gateway counts itself."""
        for row in self._groups_of("scheduler"):
            self.group(row.group)  # so that rates have a zero to start from
        yield from self._counted()
        yield from self._timed()

    def _groups_of(self, name: str) -> list[StageStatus]:
        return self._health.one_per_group(name)

    def _labels(self, group: int, *more: str) -> list[str]:
        return [self._model, str(group), *more]

    # ------------------------------------------------------------------- from stages' heartbeats

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
            "Requests in no slot: for a slot and pages (capacity), or for a grammar, an adapter or "
            "another's prompt (deferred).",
            labels=(*LABELS, "reason"),
        )
        for row in self._groups_of(stage):
            reasons = ("held", "preparing", "loading_adapter")
            deferred = sum(row.stats.get(reason, 0.0) for reason in reasons)
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
            ("queue", "queue_seconds", "From a request's arrival at its scheduler to a slot."),
            ("prefill", "prefill_seconds", "From a request's slot to its first output."),
        ):
            family = HistogramMetricFamily(f"vllm:request_{name}_time_seconds", text, labels=LABELS)
            yield self._histogram(family, stage, statistic, REQUEST_SECONDS, SHORTEST_REQUEST)

    def _histogram(
        self,
        family: HistogramMetricFamily,
        stage: str,
        statistic: str,
        bounds: tuple[float, ...],
        shortest: float = 0.0,
    ) -> HistogramMetricFamily:
        """The family with a histogram of each group; bounds below `shortest` are left out."""
        for row in self._groups_of(stage):
            histogram = read_histogram(row.stats, statistic, bounds)
            if histogram is not None:
                longer = [(bound, count) for bound, count in histogram[0] if bound >= shortest]
                add_histogram(family, self._labels(row.group), longer, histogram[1])
        return family

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
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens that a step computed, of prompts and outputs together.",
            labels=LABELS,
        )
        yield self._histogram(tokens, stage, "step_tokens", STEP_TOKENS)
        about = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine")
        info = GaugeMetricFamily("vllm:cache_config_info", "Always 1; labels say it.", labels=about)
        for row in self._groups_of(stage):
            sizes = [f"{row.stats.get(name, 0.0):.0f}" for name in ("page_tokens", "pages_total")]
            dtype = "fp8_e4m3" if row.stats.get("kv_fp8", 0.0) else "auto"
            info.add_metric([*sizes, dtype, str(self._caches), str(row.group)], 1.0)
        yield info

    # --------------------------------------------------------------- counted by this gateway itself

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


class _VllmCounted(Collector):
    """Collects what a gateway counts itself, under vLLM's names."""

    def __init__(self, metrics: VllmMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.counted_here()
