"""Settings of vLLM 0.26 and SGLang 0.5: names that are understood here, and flags that are refused
with advice.

For command lines and for keywords of LLM(...). A name is understood only if it means the same.
docs/reference/other-servers.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

ALIASES = {
    # vLLM
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
    "gpu_memory_utilization": "memory_fraction",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_step_tokens",
    "block_size": "page_size",
    "num_gpu_blocks_override": "kv_pages",
    "tool_call_parser": "tool_parser",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "api_server_count": "gateways",
    # SGLang
    "model_path": "model",
    "tp_size": "tp",
    "dp_size": "dp",
    "mem_fraction_static": "memory_fraction",
    "max_running_requests": "max_running",
    "context_length": "max_model_len",
    "random_seed": "seed",
    "cuda_graph_max_bs": "cuda_graph_max_batch",
    "max_loras_per_batch": "max_loras",
    "tokenizer_worker_num": "tokenizers",
}

# Switches: the setting, and its values for on and for off.
SWITCHES: dict[str, tuple[str, object, object]] = {
    "enforce_eager": ("no_cuda_graph", True, False),
    "enable_prefix_caching": ("cache", "radix", "naive"),
    "disable_radix_cache": ("cache", "naive", "radix"),
    "disable_cuda_graph": ("no_cuda_graph", True, False),
}
# Flags that turn a switch of SWITCHES off.
TURNED_OFF = {"no_enable_prefix_caching": "enable_prefix_caching"}


class RefusedFlag(NamedTuple):
    """Flags that only other servers have, and the text of the error about them.

    Attributes:
    - kind: "instead": `ours` are to be used; "always": it is so without a flag; "none": nothing
      here is like it
    - names: by server
    - ours: flags in their place
    - advice: a sentence for the user
    """

    kind: Literal["instead", "always", "none"]
    names: dict[str, tuple[str, ...]]
    ours: tuple[str, ...]
    advice: str


def _names(vllm: str, sglang: str) -> dict[str, tuple[str, ...]]:
    return {"vLLM": tuple(vllm.split()), "SGLang": tuple(sglang.split())}


def _instead(vllm: str, sglang: str, ours: str, advice: str) -> RefusedFlag:
    return RefusedFlag("instead", _names(vllm, sglang), tuple(ours.split()), advice)


def _always(vllm: str, sglang: str, advice: str) -> RefusedFlag:
    return RefusedFlag("always", _names(vllm, sglang), (), advice)


def _none(vllm: str, sglang: str, advice: str) -> RefusedFlag:
    return RefusedFlag("none", _names(vllm, sglang), (), advice)


DRAFTS = "`ngram` guesses tokens from the request itself; any other name is that of a draft model."
BACKENDS = "Backends: flashinfer, fa3, hybrid, torch."
TEXTS_ONLY = "Models take and give texts only."

# {topic: flags}, first those of vLLM, then those of SGLang.
# fmt: off
REFUSED: dict[str, tuple[RefusedFlag, ...]] = {
    "model": (
        _none("--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init",
            "--tokenizer-mode --skip-tokenizer-init",
            "The tokenizer is the checkpoint's. Prompts may be token ids."),
        _none("--trust-remote-code --code-revision", "--trust-remote-code",
            "No Python of a checkpoint runs."),
        _none("--hf-config-path --hf-overrides --config-format", "--json-model-override-args",
            "config.json is taken as it is."),
        _none("--generation-config --override-generation-config", "",
            "The checkpoint's generation_config.json always holds. Requests say what they want "
            "otherwise."),
        _instead("--runner --convert", "", "--task",
            "With `embed` the model makes vectors of texts."),
        _none("--download-dir", "", "The hub's own cache is used."),
        _none("--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path", "",
            TEXTS_ONLY),
        _instead("", "--lora-paths", "--lora-modules",
            "Adapters are NAME=PATH, with spaces between."),
        _none("--max-cpu-loras --lora-dtype --fully-sharded-loras",
            "--lora-target-modules --lora-backend",
            "Adapters are read when they are needed, in the model's dtype; all linear layers may "
            "have them."),
        _instead("--speculative-config",
            "--speculative-algorithm --speculative-num-steps --speculative-draft-model-path",
            "--speculate", DRAFTS),
        _none("--max-logprobs", "", "The bound is 20."),
        _none("--logprobs-mode", "",
            "Log-probs are always the model's own, vLLM's `raw_logprobs`."),
        _none("--logits-processors", "", "No code of others runs in a step."),
        _none("", "--tokenizer-path",
            "The tokenizer is the checkpoint's, in a stage of its own."),
        _instead("", "--is-embedding", "--task", "With `embed` the model makes vectors of texts."),
        _none("", "--enable-multimodal", TEXTS_ONLY),
        _none("", "--sampling-defaults",
            "Always `model`: the checkpoint's generation_config.json."),
    ),
    "memory": (
        _instead("--kv-cache-memory-bytes", "", "--kv-pages", "It counts pages, not bytes."),
        _none("--prefix-caching-hash-algo", "", "Prefixes are compared, not hashed."),
        _none("--calculate-kv-scales", "", "No scales are measured."),
        _none("--swap-space --cpu-offload-gb --kv-offloading-size", "--enable-hierarchical-cache",
            "Keys and values stay in the device's memory. A request that gives way is computed "
            "again."),
        _none("--kv-transfer-config --kv-events-config", "--disaggregation-mode",
            "An engine computes prompts and outputs."),
        _always("--enable-sleep-mode", "", "/sleep is always there. Leave the flag out."),
        _none("", "--quantization-param-path", "Scales are tensors of the checkpoint, or 1."),
        _instead("", "--max-total-tokens", "--kv-pages",
            "It counts pages, of --page-size tokens each."),
    ),
    "scheduling": (
        _instead("--max-num-partial-prefills --long-prefill-token-threshold", "",
            "--itl-target --ttft-target", "These are times."),
        _always("--enable-chunked-prefill", "", "Prompts are always cut. Leave the flag out."),
        _always("--scheduling-policy", "", "Priorities always count. Leave the flag out."),
        _none("--no-enable-chunked-prefill", "",
            "Without cuts a step beside streams would have no bound."),
        _instead("--scheduler-cls", "", "--policy", "A policy of this server, module:Class."),
        _always("--async-scheduling", "",
            "Two steps are in flight by default. Leave the flag out."),
        _instead("--no-async-scheduling", "--disable-overlap-schedule", "--overlap-depth",
            "Say --overlap-depth 1."),
        _none("--stream-interval", "--stream-interval", "Output is sent as it comes."),
        _instead("", "--max-queued-requests", "--max-queue",
            "It counts requests without output, 10,000 by default."),
        _instead("", "--chunked-prefill-size --max-prefill-tokens", "--max-step-tokens",
            "It bounds a whole step, prompts and decodes."),
        _instead("", "--schedule-policy", "--policy",
            "It is mixed, throughput, prefill-first, decode-first, or a class of your own."),
        _always("", "--enable-priority-scheduling --schedule-low-priority-values-first",
            "Lower values are always served earlier, as in vLLM; SGLang's default is the other "
            "way round. Leave the flag out."),
        _none("", "--schedule-conservativeness", "Requests give way when pages run out."),
        _always("", "--enable-mixed-chunk", "That is the policy mixed, the default."),
        _instead("", "--watchdog-timeout", "--watchdog",
            "It counts seconds, after which that engine alone starts again."),
    ),
    "devices": (
        _none("--pipeline-parallel-size --decode-context-parallel-size", "",
            "A group is as large as --tp."),
        _instead(
            "--nnodes --node-rank --master-addr --headless --distributed-executor-backend "
            "--data-parallel-address --data-parallel-size-local",
            "--nnodes --node-rank --dist-init-addr", "--topology",
            "A topology file says which stage runs where."),
        _instead("--disable-custom-all-reduce", "--disable-custom-all-reduce", "--all-reduce",
            "Say --all-reduce nccl."),
        _none("--enable-eplb --enable-dbo", "", "That is not built."),
        _instead("--max-cudagraph-capture-size", "", "--cuda-graph-max-batch",
            "It counts the requests of the largest decode step that is a graph."),
        _instead("--compilation-config", "--enable-torch-compile", "--compile",
            "--compile is for norms and activations alone, and off by default."),
        _instead("--attention-backend", "--attention-backend", "--attention", BACKENDS),
        _instead("", "--load-balance-method", "--routing",
            "It is prefix, least-loaded or round-robin."),
        _none("", "--pp-size --ep-size --enable-dp-attention",
            "A group is as large as --tp, and --enable-expert-parallel lets it share out experts."),
        _instead("", "--base-gpu-id --gpu-id-step", "--topology",
            "The file has a `device` of each stage."),
        _none("", "--sampling-backend",
            "There is one way to sample, whose noise follows from the seed."),
        _instead("", "--enable-deterministic-inference", "--exact",
            "It is refused where something cannot keep it."),
    ),
    "chats": (
        _always("--enable-auto-tool-choice --exclude-tools-when-tool-choice-none", "",
            "It is always so. Leave the flag out."),
        _none("--tool-parser-plugin --tool-server", "", "That is not built."),
        _instead("--structured-outputs-config --guided-decoding-backend", "", "--grammar-backend",
            "It is llguidance or none."),
        _none("--default-chat-template-kwargs", "", "A request says chat_template_kwargs."),
        _none("--chat-template-content-format", "",
            "It follows from the template whether parts reach it as a list or as one text."),
        _none("--response-role", "", "The role is assistant."),
    ),
    "HTTP and logs": (
        _none("--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers", "",
            "Clients show keys, not certificates."),
        _none("--enable-ssl-refresh", "", "SIGHUP reads certificates and keys again."),
        _none("--allowed-methods --allowed-headers --allow-credentials", "",
            "What the API needs is allowed, never cookies."),
        _always("--enable-request-id-headers --enable-prompt-tokens-details", "",
            "Answers always have x-request-id and prompt_tokens_details. Leave the flag out."),
        _none("--enable-force-include-usage", "", "A request asks by stream_options."),
        _instead("--uvicorn-log-level", "", "--log-level", "It holds for all stages."),
        _instead(
            "--enable-log-requests --disable-log-requests --disable-log-stats "
            "--disable-uvicorn-access-log --max-log-len --log-config-file",
            "--log-requests --log-level-http --decode-log-interval", "--log-format",
            "--log-format json has a line for each request, without its texts. Statistics are "
            "metrics."),
        _instead("--otlp-traces-endpoint --collect-detailed-traces",
            "--otlp-traces-endpoint --enable-trace", "--otlp-endpoint",
            "OTLP goes over HTTP, where the default of others is gRPC. Every stage has a span."),
        _instead("--profiler-config", "", "--profile --profile-dir",
            "It traces so many steps, once."),
        _none("--h11-max-incomplete-event-size --h11-max-header-count", "",
            "The bounds are fixed."),
        _none("--uds --root-path --middleware --disable-fastapi-docs", "--fastapi-root-path",
            "A proxy in front of the server does that."),
        _instead("--disable-frontend-multiprocessing", "", "--in-process",
            "All stages run in one process then, for debuggers."),
        _instead("--config", "--config", "--topology",
            "Settings stand in the table [settings] of a topology file."),
        _none("", "--admin-api-key",
            "/reset_prefix_cache needs the API key. `admin` in `--api-key-file` marks a key "
            "that sees what others ask."),
        _always("", "--enable-metrics --enable-cache-report",
            "/metrics and cached_tokens in usage are always there. Leave the flag out."),
        _instead("", "--crash-dump-folder", "--flight-dir",
            "There each stage's last minute is written when it dies, and can be replayed."),
        _none("", "--skip-server-warmup", "The server is ready when the engine has warmed up."),
        _none("", "--grpc-mode", "The server speaks HTTP alone."),
    ),
}
# fmt: on


class NamedTwice(ValueError):
    """A setting was given under two names; the text has both."""


def translated(given: Mapping[str, object]) -> dict[str, object]:
    """A copy of `given`, keywords by name, with the names of Settings. Raises NamedTwice."""
    found: dict[str, object] = {}
    given_as: dict[str, str] = {}
    for name, value in given.items():
        setting, worth = ALIASES.get(name, name), value
        if name in SWITCHES:
            setting, on, off = SWITCHES[name]
            worth = on if value else off
        if setting in found:
            raise NamedTwice(f"{given_as[setting]} and {name} are the same setting")
        found[setting], given_as[setting] = worth, name
    return found


def constants() -> dict[str, tuple[str, object]]:
    """Flags without a value: the setting and its value."""
    found = {name: (setting, on) for name, (setting, on, _) in SWITCHES.items()}
    for name, switch in TURNED_OFF.items():
        setting, _, off = SWITCHES[switch]
        found[name] = setting, off
    return found


def flag(name: str) -> str:
    """The flag of the setting `name`: --kv-pages of kv_pages."""
    return "--" + name.replace("_", "-")


def refused() -> Mapping[str, str]:
    """By flag that only other servers have: why it is refused, a sentence for its user."""
    messages: dict[str, str] = {}
    for name, flag in refused_flags().items():
        servers = [server for server, names in flag.names.items() if name in names]
        use = f"Use {' and '.join(flag.ours)}. " if flag.ours else ""
        text = flag.advice.replace("`", "")
        messages[name] = (
            f"{name} is a flag of {' and '.join(servers)}, not of pipeinfer. {use}{text}"
        )
    return messages


def refused_flags() -> Mapping[str, RefusedFlag]:
    """The RefusedFlag by name of a flag that only other servers have."""
    return {
        name: flag
        for flags in REFUSED.values()
        for flag in flags
        for names in flag.names.values()
        for name in names
    }
