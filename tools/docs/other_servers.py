"""The page of what vLLM and SGLang have, and what there is here.

Tables, because readers look a name up. Flags that are refused are those of
pipeinfer/other_servers.py; what differs in those that are understood stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from docs.markdown import codes, table
from docs.markdown import page as page_of
from pipeinfer.other_servers import BACKENDS, NO_ADAPTERS, REFUSED, TEXTS_ONLY

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


def _same(names: str, said: str = "") -> Row:
    return _row(names, names, said)


# {server: {topic: flags with the same meaning here}}; under another name where `ours` differ.
# fmt: off
UNDERSTOOD: dict[str, dict[str, tuple[Row, ...]]] = {
    "vLLM": {
        "model": (
            _row("--model", "MODEL", "`pipeinfer serve` takes it with and without the flag."),
            _same("--served-model-name", "One name, not several."),
            _same("--revision"),
            _same("--dtype", "By the full names: `float16`, not `half`."),
            _same("--seed"),
            _same("--max-model-len",
                "As a number, not `32k`. Beyond what the checkpoint says is refused."),
            _same("--load-format",
                "For `auto` and `dummy`. GGUF files are recognised by their name. No other "
                "format is read."),
            _same("--model-impl",
                "For `auto` and `transformers`. vLLM's `vllm` is called `pipeinfer`."),
            _same("--quantization",
                "For `fp8`, `awq`, `gptq`, `compressed-tensors` and `mxfp4`. Others are "
                "refused. GGUF files are decoded as they are loaded."),
        ),
        "memory": (
            _row("--gpu-memory-utilization", "--memory-fraction",
                "A share of the memory that is free, not of all."),
            _row("--block-size", "--page-size"),
            _row("--num-gpu-blocks-override", "--kv-pages"),
            _row("--enable-prefix-caching", "--cache", "`radix`, which is the default."),
            _row("--no-enable-prefix-caching", "--cache", "`naive`."),
            _same("--kv-cache-dtype",
                "For `auto`, `bfloat16`, `fp8` and `fp8_e4m3`. Scales are the checkpoint's, "
                "else 1."),
        ),
        "scheduling": (
            _row("--max-num-seqs", "--max-running"),
            _row("--max-num-batched-tokens", "--max-step-tokens"),
        ),
        "devices": (
            _row("--tensor-parallel-size", "--tp", "vLLM's short `-tp` is not understood."),
            _row("--data-parallel-size", "--dp", "vLLM's short `-dp` is not understood."),
            _same("--enable-expert-parallel"),
            _row("--enforce-eager", "--no-cuda-graph"),
        ),
        "chats": (
            _same("--chat-template", "A file."),
            _same("--trust-request-chat-template"),
            _row("--tool-call-parser", "--tool-parser",
                "`auto` by default, which chooses by the template. Parsers have vLLM's names: "
                "[which](../api.md#tools)."),
            _same("--reasoning-parser",
                "For `qwen3`, `deepseek_r1` and `openai_gptoss`. `auto` by default."),
        ),
        "HTTP and logs": (
            _same("--host", "127.0.0.1 by default. Say `--host 0.0.0.0` for all addresses."),
            _same("--port", "8000 by default, as there."),
            _same("--api-key", "One key. Several stand in `--api-key-file`, with limits of each."),
            _row("--ssl-certfile", "--tls-cert"),
            _row("--ssl-keyfile", "--tls-key"),
            _same("--allowed-origins",
                "With commas between, no JSON. None by default, where vLLM has all."),
        ),
    },
    "SGLang": {
        "model": (
            _row("--model-path", "MODEL",
                "`pipeinfer serve` takes it with and without the flag."),
            _same("--served-model-name"),
            _same("--revision"),
            _same("--dtype"),
            _row("--context-length", "--max-model-len"),
            _row("--random-seed", "--seed"),
            _same("--load-format", "For `auto` and `dummy`."),
            _same("--model-impl",
                "For `auto` and `transformers`. SGLang's `sglang` is called `pipeinfer`."),
            _same("--quantization",
                "For `fp8`, `awq`, `gptq`, `compressed-tensors` and `mxfp4`. Others are refused."),
        ),
        "memory": (
            _same("--kv-cache-dtype", "For `auto`, `bfloat16` and `fp8_e4m3`."),
            _row("--mem-fraction-static", "--memory-fraction", "Weights do not count here."),
            _same("--page-size", "By default what the attention backend prefers, not 1."),
            _row("--disable-radix-cache", "--cache", "`naive`."),
        ),
        "scheduling": (
            _row("--max-running-requests", "--max-running"),
        ),
        "devices": (
            _row("--tp-size", "--tp"),
            _row("--dp-size", "--dp"),
            _same("--tp --dp"),
            _same("--device", "For `cuda` and `cpu`."),
            _same("--grammar-backend", "For `llguidance` and `none`."),
            _row("--disable-cuda-graph", "--no-cuda-graph"),
            _row("--cuda-graph-max-bs", "--cuda-graph-max-batch"),
        ),
        "chats": (
            _same("--chat-template", "A file. There are no built-in names."),
            _row("--tool-call-parser", "--tool-parser",
                "SGLang's `qwen25` is `hermes`, its `llama3` is `llama3_json`, its `deepseekv3` "
                "and `deepseekv31` have a `_` before the `v`, its `deepseekv32` is "
                "`deepseek_v32`, its `gpt-oss` is `openai`. vLLM's `llama4_pythonic` is "
                "`pythonic`."),
            _same("--reasoning-parser",
                "For `qwen3`. SGLang's `deepseek-r1` is `deepseek_r1`, its `gpt-oss` "
                "`openai_gptoss`."),
        ),
        "HTTP and logs": (
            _same("--host", "127.0.0.1 by default."),
            _same("--port", "8000 by default, not 30000."),
            _same("--api-key", "One key. Several stand in `--api-key-file`, with limits of each."),
            _same("--log-level", "For `debug`, `info`, `warning`, `error`."),
        ),
    },
}
# fmt: on

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
    for server, understood in UNDERSTOOD.items():
        yield f"## Flags of {server}"
        for topic, refused in REFUSED.items():
            yield f"### {server}: {topic}"
            rows = [
                _flag(row.theirs, row.ours, "same" if row.theirs == row.ours else "alias", row.said)
                for row in understood.get(topic, ())
            ]
            rows += [
                _flag(flag.names[server], flag.ours, flag.kind, flag.said)
                for flag in refused
                if flag.names[server]
            ]
            yield table((server, "here", "kind", "notes"), rows)


def _flag(
    theirs: tuple[str, ...], ours: tuple[str, ...], kind: str, said: str
) -> tuple[str, str, str, str]:
    return codes(theirs), "`MODEL`" if ours == ("MODEL",) else codes(ours), kind, said


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
