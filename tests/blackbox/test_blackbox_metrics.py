"""What /metrics says of requests is what was served, by our names and by vLLM's, which routers,
autoscalers and dashboards read.
"""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servers import Server

LABELS = {"model_name": "pipeinfer-demo", "engine": "0"}
ONE, MANY = 3, 9  # tokens of outputs
# What reads vLLM's names, where that is written, and the (name, type) that it reads.
READ_BY = {
    # kubernetes-sigs/gateway-api-inference-extension:
    # pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go; of adapters, it asks for
    # vllm:lora_requests_info, too, which may be missing
    "endpoint picker": {
        "num_requests_waiting": "gauge",
        "num_requests_running": "gauge",
        "kv_cache_usage_perc": "gauge",
        "cache_config_info": "gauge",
    },
    # docs.vllm.ai/projects/production-stack: use_cases/autoscaling-keda; kserve/website:
    # docs/model-serving/generative-inference/autoscaling; docs.aws.amazon.com/eks:
    # ml-inference-autoscaling-hpa-keda
    "KEDA": {
        "num_requests_waiting": "gauge",
        "num_requests_running": "gauge",
        "e2e_request_latency_seconds": "histogram",
    },
    # vllm 0.33: examples/observability/prometheus_grafana/grafana.json
    "dashboard of the server": {
        "kv_cache_usage_perc": "gauge",
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "prompt_tokens": "counter",
        "generation_tokens": "counter",
        "request_success": "counter",
        "e2e_request_latency_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "time_to_first_token_seconds": "histogram",
        "request_time_per_output_token_seconds": "histogram",
        "request_queue_time_seconds": "histogram",
        "request_prefill_time_seconds": "histogram",
        "request_decode_time_seconds": "histogram",
        "request_prompt_tokens": "histogram",
        "request_generation_tokens": "histogram",
        "iteration_tokens_total": "histogram",
        "request_max_num_generation_tokens": "histogram",
    },
    # vllm 0.33: examples/observability/dashboards/grafana/performance_statistics.json and
    # query_statistics.json
    "dashboards of performance and of queries": {
        "prompt_tokens": "counter",
        "generation_tokens": "counter",
        "request_success": "counter",
        "e2e_request_latency_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "time_to_first_token_seconds": "histogram",
        "request_prompt_tokens": "histogram",
        "iteration_tokens_total": "histogram",
    },
}
ENDS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
# Labels beside LABELS, and what has others.
MORE_LABELS = {"_bucket": {"le"}, "request_success": {"finished_reason"}}
INFO_LABELS = {"block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine"}


class Scrape:
    """One look at /metrics."""

    def __init__(self, server) -> None:
        text = server.get("/metrics")[1]
        self.families = {one.name: one for one in text_string_to_metric_families(text)}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def of(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def vllm(self, name: str, **labels: str) -> float:
        return self.of(f"vllm:{name}", **LABELS, **labels)


@pytest.fixture(scope="module")
def server():
    """One that nobody asked anything before: heartbeats tell of requests only some time later."""
    with Server("--vllm-metrics") as running:
        yield running


@pytest.fixture(scope="module")
def looks(server):
    """Before and after two requests, of which the server has heard all; and their usage."""
    before = Scrape(server)
    asked = {"prompt": "count from 1 to 90", "temperature": 0, "ignore_eos": True}
    usages = [
        _asked(server, "/v1/completions", {**asked, "max_tokens": most})["usage"]
        for most in (ONE, MANY)
    ]
    _asked(server, "/tokenize", {"prompt": "not a request of any group"})

    def all_heard() -> Scrape | None:
        """What scheduler and engine tell by heartbeats is there."""
        now = Scrape(server)
        looked_up = now.vllm("prefix_cache_queries_total")
        queued = now.of("pipeinfer_queue_seconds_count", group="0")
        grown = queued - before.of("pipeinfer_queue_seconds_count", group="0")
        busy = now.of("pipeinfer_requests_running") + now.vllm("kv_cache_usage_perc")
        whole = grown == 2 and looked_up == sum(one["prompt_tokens"] for one in usages)
        return now if whole and not busy else None

    return before, server.wait(all_heard, "heartbeats tell of both requests"), usages


def _asked(server, path: str, body: dict) -> dict:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120).raise_for_status().json()


def grown(looks, name: str, **labels: str) -> float:
    before, after, _ = looks
    return after.of(name, **labels) - before.of(name, **labels)


@pytest.mark.parametrize(
    ("ours", "labels", "theirs", "count"),
    [
        ("time_to_first_token_seconds", {}, "time_to_first_token_seconds", 2),
        ("inter_token_seconds", {}, "inter_token_latency_seconds", ONE + MANY - 2),
        ("time_per_output_token_seconds", {}, "request_time_per_output_token_seconds", 2),
        ("request_seconds", {}, "e2e_request_latency_seconds", 2),
        ("queue_seconds", {"group": "0"}, "request_queue_time_seconds", 2),
        ("prefill_seconds", {"group": "0"}, "request_prefill_time_seconds", 2),
    ],
)
def test_histograms_have_what_was_served_by_both_names(looks, ours, labels, theirs, count):
    for end in ("_count", "_sum"):
        mine = grown(looks, f"pipeinfer_{ours}{end}", **labels)
        assert grown(looks, f"vllm:{theirs}{end}", **LABELS) == pytest.approx(mine)
    assert grown(looks, f"pipeinfer_{ours}_count", **labels) == count
    assert 0 <= grown(looks, f"pipeinfer_{ours}_sum", **labels) < 60
    _, after, _ = looks
    assert after.vllm(f"{theirs}_bucket", le="+Inf") == after.vllm(f"{theirs}_count")


def test_a_request_takes_as_long_as_its_parts(looks):
    whole = grown(looks, "vllm:e2e_request_latency_seconds_sum", **LABELS)
    parts = [
        grown(looks, f"vllm:{name}_seconds_sum", **LABELS)
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time")
    ]
    assert 0 < sum(parts) <= whole


def test_tokens_and_ends_are_those_that_clients_were_told(looks):
    _, _, usages = looks
    prompts = sum(one["prompt_tokens"] for one in usages)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    assert [one["completion_tokens"] for one in usages] == [ONE, MANY]
    for name, value in (
        ("prompt_tokens_total", prompts),
        ("prefix_cache_queries_total", prompts),
        ("prefix_cache_hits_total", cached),
        ("generation_tokens_total", ONE + MANY),
        ("request_prompt_tokens_sum", prompts),
        ("request_generation_tokens_sum", ONE + MANY),
        ("request_max_num_generation_tokens_sum", ONE + MANY),
        ("iteration_tokens_total_sum", prompts - cached + ONE + MANY - 2),
        ("num_preemptions_total", 0),
    ):
        assert grown(looks, f"vllm:{name}", **LABELS) == value, name
    reasons = {
        reason: grown(looks, "vllm:request_success_total", **LABELS, finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 0, "length": 2, "abort": 0, "error": 0}


def test_a_stream_that_runs_is_seen_in_slots_and_pages(server):
    body = {"prompt": "count", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200

        def seen() -> Scrape | None:
            now = Scrape(server)
            return (
                now
                if now.vllm("num_requests_running")
                and now.of("pipeinfer_kv_usage_ratio", group="0")
                else None
            )

        now = server.wait(seen, "the stream in a heartbeat")
    assert now.vllm("num_requests_running") == 1 and now.vllm("num_requests_waiting") == 0
    free, evictable, pages = (
        now.of(f"pipeinfer_pages{end}") for end in ("_free", "_evictable", "")
    )
    assert 0 < now.vllm("kv_cache_usage_perc") < 1
    assert now.vllm("kv_cache_usage_perc") == pytest.approx(1 - (free + evictable) / pages)


@pytest.mark.parametrize("reader", READ_BY)
def test_what_reads_names_of_vllm_finds_them_with_their_types_and_labels(looks, reader):
    _, after, _ = looks
    for name, kind in READ_BY[reader].items():
        family = after.families[f"vllm:{name}"]
        assert family.type == kind, name
        for end in ENDS[kind]:
            found = [one.labels for one in family.samples if one.name == f"vllm:{name}{end}"]
            wanted = {*LABELS} | MORE_LABELS.get(end, set()) | MORE_LABELS.get(name, set())
            assert found, name + end
            for labels in found:
                assert set(labels) == (INFO_LABELS if name == "cache_config_info" else wanted)
                assert all(labels[key] == LABELS[key] for key in labels.keys() & LABELS.keys())


def test_the_picker_learns_how_large_the_cache_is(looks):
    _, after, _ = looks
    (info,) = after.families["vllm:cache_config_info"].samples
    assert info.labels["num_gpu_blocks"] == f"{after.of('pipeinfer_pages'):.0f}"
    assert int(info.labels["block_size"]) > 0 and info.labels["enable_prefix_caching"] == "True"
    by_reason = [
        after.vllm("num_requests_waiting_by_reason", reason=reason)
        for reason in ("capacity", "deferred")
    ]
    assert sum(by_reason) == after.vllm("num_requests_waiting")
