"""Flags of vLLM 0.26 and SGLang 0.5, and what there is here in their place.

For the error that a command line gets for a flag that only they know, and for the reference.
Names that are understood stand in other_names.py as well; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

Kind = Literal["same", "alias", "instead", "always", "none"]


class Flag(NamedTuple):
    """Flags of another server, and what is said of them.

    kind: "same" name and meaning here; "alias": understood, and means what `ours` does; "instead":
    refused, `ours` are to be used; "always": refused, as it is always so; "none": refused.
    """

    kind: Kind
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    said: str

    @property
    def understood(self) -> bool:
        """Whether a command line may have it."""
        return self.kind in ("same", "alias")


def _same(names: str, said: str = "") -> Flag:
    return Flag("same", tuple(names.split()), tuple(names.split()), said)


def _alias(names: str, ours: str, said: str = "") -> Flag:
    return Flag("alias", tuple(names.split()), tuple(ours.split()), said)


def _instead(names: str, ours: str, said: str) -> Flag:
    return Flag("instead", tuple(names.split()), tuple(ours.split()), said)


def _always(names: str, said: str) -> Flag:
    return Flag("always", tuple(names.split()), (), said)


def _none(names: str, said: str) -> Flag:
    return Flag("none", tuple(names.split()), (), said)


NO_ADAPTERS = "No adapters are served. Merge them into the checkpoint."
NO_CODE = "No Python of a checkpoint runs."
OWN_TOKENIZER = "The tokenizer is the checkpoint's. Prompts may be token ids."
NOT_AHEAD = "No tokens are guessed ahead."
ONE_POOL = (
    "Keys and values stay in the device's memory. A request that gives way is computed again."
)
NOT_APART = "An engine computes prompts and outputs."
BY_FILE = "A topology file says which stage runs where."
BY_TABLE = "Settings stand in the table [settings] of a topology file."
AS_IT_COMES = "Output is sent as it comes."
LOG_LINES = (
    "--log-format json has a line for each request, without its texts. Statistics are metrics."
)
BACKENDS = "Backends: flashinfer, fa3, hybrid, torch."
NO_OTHER_FORMAT = "GGUF files are recognised by their name. No other format is read."
NORMS = "--compile is for norms and activations alone, and off by default."
PROXY = "A proxy in front of the server does that."
TEXTS_ONLY = "Models take and give texts only."

VLLM: dict[str, tuple[Flag, ...]] = {
    "model": (
        _alias("--model", "MODEL", "`pipeinfer serve` takes it with and without the flag."),
        _same("--served-model-name", "One name, not several."),
        _same("--revision"),
        _same("--dtype", "By the full names: `float16`, not `half`."),
        _same("--seed"),
        _same(
            "--max-model-len",
            "As a number, not `32k`. Beyond what the checkpoint says is refused.",
        ),
        _same("--load-format", f"For `auto` and `dummy`. {NO_OTHER_FORMAT}"),
        _none(
            "--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init",
            OWN_TOKENIZER,
        ),
        _none("--trust-remote-code --code-revision", NO_CODE),
        _none("--hf-config-path --hf-overrides --config-format", "config.json is taken as it is."),
        _none(
            "--generation-config --override-generation-config",
            "The checkpoint's generation_config.json always holds. Requests say what they want "
            "otherwise.",
        ),
        _same(
            "--model-impl", "For `auto` and `transformers`. vLLM's `vllm` is called `pipeinfer`."
        ),
        _none("--runner --convert --task", "Models generate."),
        _same(
            "--quantization",
            "For `fp8`, `awq`, `gptq`, `compressed-tensors` and `mxfp4`. Others are refused. GGUF "
            "files are decoded as they are loaded.",
        ),
        _none("--download-dir", "The hub's own cache is used."),
        _none("--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path", TEXTS_ONLY),
        _none("--enable-lora --lora-modules --max-loras --max-lora-rank", NO_ADAPTERS),
        _none("--speculative-config", NOT_AHEAD),
        _none("--max-logprobs", "The bound is 20."),
        _none("--logprobs-mode", "Log-probs are always the model's own, vLLM's `raw_logprobs`."),
        _none("--logits-processors", "No code of others runs in a step."),
    ),
    "memory": (
        _alias(
            "--gpu-memory-utilization",
            "--memory-fraction",
            "A share of the memory that is free, not of all.",
        ),
        _alias("--block-size", "--page-size"),
        _alias("--num-gpu-blocks-override", "--kv-pages"),
        _instead("--kv-cache-memory-bytes", "--kv-pages", "It counts pages, not bytes."),
        _alias("--enable-prefix-caching", "--cache", "`radix`, which is the default."),
        _alias("--no-enable-prefix-caching", "--cache", "`naive`."),
        _none("--prefix-caching-hash-algo", "Prefixes are compared, not hashed."),
        _same(
            "--kv-cache-dtype",
            "For `auto`, `bfloat16`, `fp8` and `fp8_e4m3`. Scales are the checkpoint's, else 1.",
        ),
        _none("--calculate-kv-scales", "No scales are measured."),
        _none("--swap-space --cpu-offload-gb --kv-offloading-size", ONE_POOL),
        _none("--kv-transfer-config --kv-events-config", NOT_APART),
        _none("--enable-sleep-mode", "Stop the server instead."),
    ),
    "scheduling": (
        _alias("--max-num-seqs", "--max-running"),
        _alias("--max-num-batched-tokens", "--max-step-tokens"),
        _instead(
            "--max-num-partial-prefills --long-prefill-token-threshold",
            "--itl-target --ttft-target",
            "These are times.",
        ),
        _always("--enable-chunked-prefill", "Prompts are always cut. Leave the flag out."),
        _always("--scheduling-policy", "Priorities always count. Leave the flag out."),
        _none(
            "--no-enable-chunked-prefill",
            "Without cuts a step beside streams would have no bound.",
        ),
        _instead("--scheduler-cls", "--policy", "A policy of this server, module:Class."),
        _always("--async-scheduling", "Two steps are in flight by default. Leave the flag out."),
        _instead("--no-async-scheduling", "--overlap-depth", "Say --overlap-depth 1."),
        _none("--stream-interval", AS_IT_COMES),
    ),
    "devices": (
        _alias("--tensor-parallel-size", "--tp", "vLLM's short `-tp` is not understood."),
        _alias("--data-parallel-size", "--dp", "vLLM's short `-dp` is not understood."),
        _same("--enable-expert-parallel"),
        _none(
            "--pipeline-parallel-size --decode-context-parallel-size",
            "A group is as large as --tp.",
        ),
        _instead(
            "--nnodes --node-rank --master-addr --headless --distributed-executor-backend "
            "--data-parallel-address --data-parallel-size-local",
            "--topology",
            BY_FILE,
        ),
        _instead("--disable-custom-all-reduce", "--all-reduce", "Say --all-reduce nccl."),
        _none("--enable-eplb --enable-dbo", "That is not built."),
        _alias("--enforce-eager", "--no-cuda-graph"),
        _instead(
            "--max-cudagraph-capture-size",
            "--cuda-graph-max-batch",
            "It counts the requests of the largest decode step that is a graph.",
        ),
        _instead("--compilation-config", "--compile", NORMS),
        _instead("--attention-backend", "--attention", BACKENDS),
    ),
    "chats": (
        _same("--chat-template", "A file."),
        _same("--trust-request-chat-template"),
        _alias(
            "--tool-call-parser",
            "--tool-parser",
            "`auto` by default, which chooses by the template. Parsers have vLLM's names: "
            "[which](../api.md#tools).",
        ),
        _same(
            "--reasoning-parser",
            "For `qwen3`, `deepseek_r1` and `openai_gptoss`. `auto` by default.",
        ),
        _always(
            "--enable-auto-tool-choice --exclude-tools-when-tool-choice-none",
            "It is always so. Leave the flag out.",
        ),
        _none("--tool-parser-plugin --tool-server", "That is not built."),
        _instead(
            "--structured-outputs-config --guided-decoding-backend",
            "--grammar-backend",
            "It is llguidance or none.",
        ),
        _none("--default-chat-template-kwargs", "A request says chat_template_kwargs."),
        _none(
            "--chat-template-content-format", "Parts of type text reach the template as one text."
        ),
        _none("--response-role", "The role is assistant."),
    ),
    "HTTP and logs": (
        _same("--host", "127.0.0.1 by default. Say `--host 0.0.0.0` for all addresses."),
        _same("--port", "8000 by default, as there."),
        _same("--api-key", "One key. Several stand in `--api-key-file`, with limits of each."),
        _alias("--ssl-certfile", "--tls-cert"),
        _alias("--ssl-keyfile", "--tls-key"),
        _none(
            "--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers", "Clients show keys, not certificates."
        ),
        _none("--enable-ssl-refresh", "SIGHUP reads certificates and keys again."),
        _same(
            "--allowed-origins",
            "With commas between, no JSON. None by default, where vLLM has all.",
        ),
        _none(
            "--allowed-methods --allowed-headers --allow-credentials",
            "What the API needs is allowed, never cookies.",
        ),
        _always(
            "--enable-request-id-headers --enable-prompt-tokens-details",
            "Answers always have x-request-id and prompt_tokens_details. Leave the flag out.",
        ),
        _none("--enable-force-include-usage", "A request asks by stream_options."),
        _instead("--uvicorn-log-level", "--log-level", "It holds for all stages."),
        _instead(
            "--enable-log-requests --disable-log-requests --disable-log-stats "
            "--disable-uvicorn-access-log --max-log-len --log-config-file",
            "--log-format",
            LOG_LINES,
        ),
        _instead(
            "--otlp-traces-endpoint --collect-detailed-traces",
            "--otlp-endpoint",
            "OTLP goes over HTTP, where vLLM's default is gRPC. Every stage has a span.",
        ),
        _instead("--profiler-config", "--profile --profile-dir", "It traces so many steps, once."),
        _none("--h11-max-incomplete-event-size --h11-max-header-count", "The bounds are fixed."),
        _none("--uds --root-path --middleware --disable-fastapi-docs", PROXY),
        _none("--api-server-count", "There is one gateway."),
        _instead(
            "--disable-frontend-multiprocessing",
            "--in-process",
            "All stages run in one process then, for debuggers.",
        ),
        _instead("--config", "--topology", BY_TABLE),
    ),
}

SGLANG: dict[str, tuple[Flag, ...]] = {
    "model": (
        _alias("--model-path", "MODEL", "`pipeinfer serve` takes it with and without the flag."),
        _same("--served-model-name"),
        _same("--revision"),
        _same("--dtype"),
        _alias("--context-length", "--max-model-len"),
        _alias("--random-seed", "--seed"),
        _same("--load-format", "For `auto` and `dummy`."),
        _none(
            "--tokenizer-path --tokenizer-mode --skip-tokenizer-init --tokenizer-worker-num",
            "The tokenizer is the checkpoint's, in a stage of its own.",
        ),
        _same(
            "--model-impl",
            "For `auto` and `transformers`. SGLang's `sglang` is called `pipeinfer`.",
        ),
        _none("--trust-remote-code", NO_CODE),
        _none("--json-model-override-args", "config.json is taken as it is."),
        _none("--is-embedding --enable-multimodal", "Models generate texts."),
        _same(
            "--quantization",
            "For `fp8`, `awq`, `gptq`, `compressed-tensors` and `mxfp4`. Others are refused.",
        ),
        _same("--kv-cache-dtype", "For `auto`, `bfloat16` and `fp8_e4m3`."),
        _none("--quantization-param-path", "Scales are tensors of the checkpoint, or 1."),
        _none("--lora-paths --enable-lora --max-loras-per-batch", NO_ADAPTERS),
        _none(
            "--speculative-algorithm --speculative-num-steps --speculative-draft-model-path",
            NOT_AHEAD,
        ),
        _none(
            "--sampling-defaults",
            "Always `model`: the checkpoint's generation_config.json.",
        ),
    ),
    "memory and scheduling": (
        _alias("--mem-fraction-static", "--memory-fraction", "Weights do not count here."),
        _alias("--max-running-requests", "--max-running"),
        _instead(
            "--max-queued-requests",
            "--max-queue",
            "It counts requests without output, 10,000 by default.",
        ),
        _instead(
            "--max-total-tokens", "--kv-pages", "It counts pages, of --page-size tokens each."
        ),
        _same("--page-size", "By default what the attention backend prefers, not 1."),
        _instead(
            "--chunked-prefill-size --max-prefill-tokens",
            "--max-step-tokens",
            "It bounds a whole step, prompts and decodes.",
        ),
        _instead(
            "--schedule-policy",
            "--policy",
            "It is mixed, throughput, prefill-first, decode-first, or a class of your own.",
        ),
        _always(
            "--enable-priority-scheduling --schedule-low-priority-values-first",
            "Lower values are always served earlier, as in vLLM; SGLang's default is the other way "
            "round. Leave the flag out.",
        ),
        _none("--schedule-conservativeness", "Requests give way when pages run out."),
        _alias("--disable-radix-cache", "--cache", "`naive`."),
        _none("--enable-hierarchical-cache", ONE_POOL),
        _instead("--disable-overlap-schedule", "--overlap-depth", "Say --overlap-depth 1."),
        _always("--enable-mixed-chunk", "That is the policy mixed, the default."),
        _none("--stream-interval", AS_IT_COMES),
        _instead(
            "--watchdog-timeout",
            "--watchdog",
            "It counts seconds, after which that engine alone starts again.",
        ),
        _none("--disaggregation-mode", NOT_APART),
    ),
    "devices": (
        _alias("--tp-size", "--tp"),
        _alias("--dp-size", "--dp"),
        _same("--tp --dp"),
        _instead(
            "--load-balance-method", "--routing", "It is prefix, least-loaded or round-robin."
        ),
        _none(
            "--pp-size --ep-size --enable-dp-attention",
            "A group is as large as --tp, and --enable-expert-parallel lets it share out experts.",
        ),
        _instead("--nnodes --node-rank --dist-init-addr", "--topology", BY_FILE),
        _instead(
            "--base-gpu-id --gpu-id-step", "--topology", "The file has a `device` of each stage."
        ),
        _same("--device", "For `cuda` and `cpu`."),
        _instead("--attention-backend", "--attention", BACKENDS),
        _none(
            "--sampling-backend",
            "There is one way to sample, whose noise follows from the seed.",
        ),
        _same("--grammar-backend", "For `llguidance` and `none`."),
        _alias("--disable-cuda-graph", "--no-cuda-graph"),
        _alias("--cuda-graph-max-bs", "--cuda-graph-max-batch"),
        _instead("--disable-custom-all-reduce", "--all-reduce", "Say --all-reduce nccl."),
        _instead("--enable-torch-compile", "--compile", NORMS),
        _none(
            "--enable-deterministic-inference",
            "Noise does not depend on the batch, but logits may.",
        ),
    ),
    "HTTP and logs": (
        _same("--host", "127.0.0.1 by default."),
        _same("--port", "8000 by default, not 30000."),
        _same("--api-key", "One key. Several stand in `--api-key-file`, with limits of each."),
        _none(
            "--admin-api-key",
            "/reset_prefix_cache needs the API key. `admin` in `--api-key-file` marks a key that "
            "sees what others ask.",
        ),
        _same("--chat-template", "A file. There are no built-in names."),
        _alias(
            "--tool-call-parser",
            "--tool-parser",
            "SGLang's `qwen25` is `hermes`, its `llama3` is `llama3_json`, its `deepseekv3` and "
            "`deepseekv31` have a `_` before the `v`, its `deepseekv32` is `deepseek_v32`, its "
            "`gpt-oss` is `openai`. vLLM's `llama4_pythonic` is `pythonic`.",
        ),
        _same(
            "--reasoning-parser",
            "For `qwen3`. SGLang's `deepseek-r1` is `deepseek_r1`, its `gpt-oss` `openai_gptoss`.",
        ),
        _always(
            "--enable-metrics --enable-cache-report",
            "/metrics and cached_tokens in usage are always there. Leave the flag out.",
        ),
        _same("--log-level", "For `debug`, `info`, `warning`, `error`."),
        _instead(
            "--log-requests --log-level-http --decode-log-interval", "--log-format", LOG_LINES
        ),
        _instead(
            "--crash-dump-folder",
            "--flight-dir",
            "There each stage's last minute is written when it dies, and can be replayed.",
        ),
        _instead(
            "--enable-trace --otlp-traces-endpoint",
            "--otlp-endpoint",
            "OTLP goes over HTTP, where SGLang speaks gRPC.",
        ),
        _none("--skip-server-warmup", "The server is ready when the engine has warmed up."),
        _none("--grpc-mode", "The server speaks HTTP alone."),
        _none("--fastapi-root-path", PROXY),
        _instead("--config", "--topology", BY_TABLE),
    ),
}
FLAGS: dict[str, dict[str, tuple[Flag, ...]]] = {"vLLM": VLLM, "SGLang": SGLANG}


def refused() -> Mapping[str, str]:
    """By flag, why each is refused that only others know: a sentence for its user."""
    servers: dict[str, list[str]] = {}
    for server, flag in _rows():
        for name in () if flag.understood else flag.theirs:
            servers.setdefault(name, []).append(server)
    first = refused_flags()
    return {name: _sentence(name, servers[name], flag) for name, flag in first.items()}


def refused_flags() -> Mapping[str, Flag]:
    """By name, the flags that only others know."""
    first: dict[str, Flag] = {}
    for _, flag in _rows():
        for name in () if flag.understood else flag.theirs:
            first.setdefault(name, flag)
    return first


def _sentence(name: str, servers: list[str], flag: Flag) -> str:
    use = f"Use {' and '.join(flag.ours)}. " if flag.ours else ""
    said = flag.said.replace("`", "")
    return f"{name} is a flag of {' and '.join(servers)}, not of pipeinfer. {use}{said}"


def _rows() -> Iterator[tuple[str, Flag]]:
    for server, sections in FLAGS.items():
        for flags in sections.values():
            for flag in flags:
                yield server, flag
