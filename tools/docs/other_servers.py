"""The page of what vLLM and SGLang have, and what there is here.

Tables, because readers look a name up. The flags are those of pipeinfer/other_servers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from docs.markdown import codes, table
from docs.markdown import page as page_of
from pipeinfer.other_servers import BACKENDS, FLAGS, NO_ADAPTERS, TEXTS_ONLY, Flag

INTRODUCTION = """What a command line, a client and a dashboard of vLLM 0.26 and SGLang 0.5 find \
here. [From vLLM](../start/from-vllm.md) and [from SGLang](../start/from-sglang.md) say how to \
begin. [Requests](requests.md) lists fields of requests by the server that has them.

- *Same*: the flag has this name and this meaning here.
- *Alias*: the flag is understood, and sets what the second column says.
- *Instead*: the flag is an error, which says to use the second column.
- *Always*: the flag is an error, because things are so without it.
- *None*: the flag is an error, because nothing here is like it."""


class Row(NamedTuple):
    """theirs: names of others. ours: in their place, empty for none. said: what else is to say."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    said: str = ""


def _row(theirs: str, ours: str, said: str = "") -> Row:
    return Row(tuple(theirs.split()), tuple(ours.split()), said)


VARIABLES = (
    _row("VLLM_API_KEY", "PIPEINFER_API_KEY", "`PIPEINFER_API_KEY_FILE` keeps it out of the "
         "environment."),
    _row("VLLM_LOGGING_LEVEL", "PIPEINFER_LOG_LEVEL", "In small letters."),
    _row("VLLM_ATTENTION_BACKEND", "PIPEINFER_ATTENTION", BACKENDS),
    _row(
        "VLLM_TORCH_PROFILER_DIR SGLANG_TORCH_PROFILER_DIR",
        "PIPEINFER_PROFILE_DIR",
        "With `PIPEINFER_PROFILE` steps.",
    ),
    _row("VLLM_PORT VLLM_HOST_IP", "", "Addresses between processes are a topology's."),
    _row(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "", "A context longer than the checkpoint's is refused."
    ),
    _row("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "", "A connection without a request ends after 620 s."),
    _row(
        "VLLM_USE_MODELSCOPE SGLANG_USE_MODELSCOPE",
        "",
        "Models come from a folder or from the Hugging Face hub.",
    ),
    _row(
        "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH",
        "PIPEINFER_LOG_FORMAT",
        "Logs go to stderr, a line each, as text or JSON.",
    ),
)  # fmt: skip

# Where `theirs` and `ours` are equal, the path is the same.
ENDPOINTS = (
    _row("/v1/chat/completions", "/v1/chat/completions"),
    _row("/v1/completions", "/v1/completions"),
    _row("/v1/models", "/v1/models"),
    _row("/v1/responses", "/v1/responses", "Nothing is remembered: no `GET`, no cancelling."),
    _row("/v1/messages", "/v1/messages"),
    _row("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
    _row("/tokenize", "/tokenize", "Needs the API key."),
    _row("/detokenize", "/detokenize", "Needs the API key."),
    _row("/version", "/version"),
    _row("/ping", "/ping"),
    _row("/metrics", "/metrics"),
    _row("/openapi.json", "/openapi.json"),
    _row("/docs", "/docs"),
    _row(
        "/reset_prefix_cache",
        "/reset_prefix_cache",
        "Succeeds while requests run; what they use stays cached.",
    ),
    _row(
        "/health",
        "/health",
        "With a JSON body of all stages. 503 unless the status is `ready` or `degraded`.",
    ),
    _row("/v1/embeddings", "/v1/embeddings", "Always 501."),
    _row("/flush_cache", "/reset_prefix_cache", "SGLang's."),
    _row("/health_generate", "/health/ready", "SGLang's. Heartbeats of all stages say the same."),
    _row("/get_model_info /model_info", "/v1/models", "SGLang's."),
    _row("/load /server_info /get_load", "/health /metrics"),
    _row(
        "/generate /abort_request",
        "/v1/completions",
        "SGLang's. A request ends when its connection does.",
    ),
    _row("/score /rerank /classify /pooling /encode", "", "Models generate."),
    _row("/v1/audio/transcriptions /v1/realtime", "", TEXTS_ONLY),
    _row("/v1/load_lora_adapter /load_lora_adapter", "", NO_ADAPTERS),
    _row(
        "/sleep /wake_up /pause /update_weights_from_disk /release_memory_occupation",
        "",
        "`pipeinfer swap` exchanges a running stage.",
    ),
    _row("/start_profile", "", "`--profile` traces steps."),
    _row("/invocations", "", "Ask the endpoint itself."),
)

# `theirs`: first vLLM's metrics, then SGLang's.
METRICS = (
    _row("vllm:num_requests_running sglang:num_running_reqs", "pipeinfer_requests_running"),
    _row("vllm:num_requests_waiting sglang:num_queue_reqs", "pipeinfer_requests_waiting"),
    _row("vllm:prompt_tokens_total sglang:prompt_tokens_total", "pipeinfer_prompt_tokens_total"),
    _row(
        "vllm:generation_tokens_total sglang:generation_tokens_total",
        "pipeinfer_generated_tokens_total",
    ),
    _row("sglang:gen_throughput", "pipeinfer_generated_tokens_total", "Its rate."),
    _row(
        "vllm:request_success_total sglang:num_requests_total",
        "pipeinfer_requests_total",
        "By `outcome`.",
    ),
    _row(
        "vllm:time_to_first_token_seconds sglang:time_to_first_token_seconds",
        "pipeinfer_time_to_first_token_seconds",
    ),
    _row(
        "vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds "
        "sglang:inter_token_latency_seconds sglang:time_per_output_token_seconds",
        "pipeinfer_inter_token_seconds",
    ),
    _row(
        "vllm:kv_cache_usage_perc sglang:token_usage",
        "pipeinfer_kv_usage_ratio",
        "By `group`. Cached pages do not count as used.",
    ),
    _row(
        "vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total sglang:cache_hit_rate",
        "pipeinfer_prefix_cache_hit_ratio",
    ),
    _row("vllm:num_preemptions_total", "pipeinfer_preemptions_total"),
    _row(
        "vllm:e2e_request_latency_seconds sglang:e2e_request_latency_seconds",
        "pipeinfer_request_seconds",
    ),
    _row("vllm:request_queue_time_seconds", "pipeinfer_queue_seconds"),
    _row("vllm:request_prefill_time_seconds", "pipeinfer_prefill_seconds"),
    _row(
        "vllm:request_time_per_output_token_seconds",
        "pipeinfer_time_per_output_token_seconds",
    ),
    _row(
        "vllm:spec_decode_num_accepted_tokens_total vllm:lora_requests_info "
        "sglang:spec_accept_length",
        "",
    ),
)


def page() -> str:
    """docs/reference/other-servers.md."""
    return page_of("Other servers", INTRODUCTION, *_flags(), *_rest())


def _flags() -> Iterator[str]:
    for server, sections in FLAGS.items():
        yield f"## Flags of {server}"
        for section, flags in sections.items():
            yield f"### {server}: {section}"
            yield table((server, "here", "kind", "notes"), map(_flag, flags))


def _flag(flag: Flag) -> tuple[str, str, str, str]:
    ours = "`MODEL`" if flag.ours == ("MODEL",) else codes(flag.ours)
    return codes(flag.theirs), ours, flag.kind, flag.said


def _rest() -> Iterator[str]:
    yield "## Environment variables"
    yield "Each setting is a variable: `--kv-pages` is `PIPEINFER_KV_PAGES`."
    yield _table(VARIABLES)
    yield "## Endpoints"
    yield _table(ENDPOINTS)
    yield "## Metrics"
    yield "Metrics have no label of the model here, because there is one model."
    yield _table(METRICS)


def _table(rows: Iterable[Row]) -> str:
    shown = ((codes(row.theirs), codes(row.ours) or "none", row.said) for row in rows)
    return table(("there", "here", "notes"), shown)
