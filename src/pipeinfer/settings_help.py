"""What is said of each setting, in groups: one line for `--help`, and more for the reference.

Knows the settings by name alone; what they are and their defaults is settings.py's business. Links
are relative to docs/.
"""

from __future__ import annotations

from typing import NamedTuple


class Told(NamedTuple):
    """value: the placeholder of a flag's value. line: what `--help` says. unset: what the default
    means where it is 0 or empty. more: what the reference says beside `line`, as Markdown."""

    value: str
    line: str
    unset: str = ""
    more: str = ""


MODEL = Told(
    "MODEL",
    "a folder, a GGUF file or a hub id",
    "the demo model",
    "A folder has config.json and safetensors files. A hub id is downloaded once. GGUF files have "
    "[a page of their own](gguf.md). Commands take the model without a flag, "
    "and also as `--model`.",
)

# Of the file of API keys, and of the two targets: too long for a sentence.
KEY_FILE = """The file holds the key, so that the key stands in no environment. Or the file holds \
named keys, each with limits of its own. `--api-key` goes before it. An empty file is no key. The \
file is read again on SIGHUP.

```sh
pipeinfer api-key alice --requests 60 >> keys.txt   # shows the key once, on stderr
kill -HUP PID                                       # of `pipeinfer serve`, or of the gateway
```

One key a line, `#` begins a comment:

```
alice sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b requests=60
bob   sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9 concurrent=4
```

- The name stands in metrics. It has at most 64 letters, digits and `._-`.
- After the name comes the SHA-256 of the key.
- `admin` marks an operator's key, which sees others' requests and the texts of cached prompts at \
`/monitor`.
- `concurrent`, `requests` and `tokens` are limits like the settings below. `requests` and \
`tokens` count a minute. 0 is no limit. A limit that is not given is the setting's.
- A file of one bare word is a key as it is, called `default`.
- A file has at most 1,000 keys and 1 MiB, because each request is compared with all keys.
- After SIGHUP a new key is let in. A key that is gone gets 401 from its next request on. \
Answers that have begun go on; a feed of `/monitor` ends. A name that stays keeps what it has used \
of its minute, also with another key.
- A file that is broken, missing or empty changes nothing and is one error in the log."""

TARGETS = """A step in which streams decode also computes a part of the prompts that wait. A \
longer step finishes prompts sooner, and lets every stream wait longer for its next token. Under \
the policy `mixed` the time of such a step is

```
T = max(T_spared, min(T_itl, T_ttft))
```

- `T_spared` is what streams hardly notice: up to half as long again as the decodes alone would \
take, or up to 512 tokens in all; at most 1,024 tokens. [Architecture](architecture.md) says how \
exactly.
- `T_ttft` is the shortest step with which every prompt that waits, in the order of the queue, \
would be computed within `--ttft-target` of its arrival.
- `T_itl` is `--itl-target`. A server full of long prompts makes steps of this length. So does a \
server on which a prompt is late already.

![Left: the time of a step beside 64 streams grows with its tokens, and reaches the target of 25 \
ms at about 7,500. Right: up to 50,000 prompt tokens that wait, steps take 4.5 ms; from there on \
they get longer, up to 21 ms for 190,000 and more.](images/step-targets.png)

Qwen3-0.6B on an H200 with 64 streams: on the left what a step takes, on the right the step that \
is chosen. `python tools/simulate targets --plot FILE` draws the same for other targets.

The engine measures at its start how long steps take, and logs what the target allows. \
`pipeinfer_target_step_tokens` and `pipeinfer_target_prompt_tokens_per_second` of `/metrics` and \
`pipeinfer doctor` say the same. On a CPU nothing is measured, and `--mixed-step-tokens` limits \
steps. `LLM` has no targets, because nobody waits for single tokens of a batch."""

# {group: {setting: what is said of it}}, in the order of the reference.
GROUPS: dict[str, dict[str, Told]] = {
    "model": {
        "served_model_name": Told(
            "NAME",
            "the model's id in /v1/models; default: MODEL",
            "what was given as MODEL",
            "Answers name the model so. A request that names another model gets 404.",
        ),
        "revision": Told("REV", "branch, tag or commit of a hub id", "the hub's default"),
        "chat_template": Told(
            "FILE", "a Jinja template, in place of the checkpoint's", "the checkpoint's own"
        ),
        "trust_request_chat_template": Told(
            "",
            "let chats bring a template of their own",
            "such chats are refused",
            "The field is `chat_template`, as in vLLM. The template runs in the sandbox of the "
            "model's own template, where nothing bounds its time: a template that never ends holds "
            "up all long prompts.",
        ),
        "control_tokens_in_messages": Told(
            "",
            "let messages spell control tokens, as vLLM does",
            "control tokens in messages are text",
            "With it, a user's `<|im_end|>` ends the message. It holds for messages, tools and "
            "template arguments.",
        ),
        "tool_parser": Told(
            "NAME",
            "how calls of tools are read: a parser, none; auto: by template",
            more="Parsers: `hermes`, `llama3_json`, `mistral`, `qwen3_coder`, `glm45`, `glm47`, "
            "`deepseek_v3`, `deepseek_v31`, `deepseek_v32`, `deepseek_v4`, `kimi_k2`, `seed_oss`, "
            "`minimax_m2`, `granite`, `hunyuan_a13b`, `phi4_mini_json`, `xlam`, `gigachat3`, "
            "`pythonic`, `lfm2`, `olmo3`, `openai`. `none` leaves calls in the text. "
            "[api.md](api.md) says which form each reads.",
        ),
        "grammar_backend": Told(
            "NAME",
            "what holds outputs to grammars, or none for nothing",
            more="With `none`, requests that ask for a form are refused, and engines start a "
            "second or two sooner with large vocabularies.",
        ),
        "grammar_cache_mib": Told(
            "MIB",
            "memory for compiled grammars of each engine, in MiB",
            more="An estimate. Where grammars in use take all of it, others are refused.",
        ),
        "allow_additional_properties": Told(
            "",
            "objects may have properties that their schema does not name",
            "objects have only those",
            "Of forms and of tools, where a schema says nothing of `additionalProperties`: "
            "JSON Schema allows any then, of which a model may invent more until `max_tokens`. So "
            "objects that name some properties are closed, unless this is given.",
        ),
        "reasoning_parser": Told(
            "NAME",
            "how thoughts are told apart: a parser, none; auto: by template",
            more="Parsers by vLLM's names, such as `qwen3`, `seed_oss` or `mistral`, which differ "
            "in tags alone, and `openai_gptoss`; see [api.md](api.md). `none` leaves thoughts in "
            "the text. `auto` chooses by the chat template.",
        ),
        "dtype": Told(
            "",
            "auto: the checkpoint's; float32 on a CPU that lacks it",
            more="What the model computes in. `auto` is what the checkpoint is stored in, and "
            "`bfloat16` for a GGUF file; on a CPU it is `float32` unless that is `bfloat16` and "
            "the CPU has instructions for it (AVX512-BF16 or AMX). `float32` on a CPU is for "
            "exactness.",
        ),
        "load_format": Told(
            "",
            "dummy: random weights, no weight file is read",
            more="The random numbers are drawn from `--seed`.",
        ),
        "quantization": Told(
            "NAME",
            "auto: as stored; none: plain; fp8, int8: plain weights are rounded",
            more="The [number format](number-formats.md) of the layers' matrices. `auto` takes "
            "them as the checkpoint has them. `none` makes them plain as they are loaded. `fp8` "
            "rounds plain ones to FP8, row by row, `int8` to whole numbers of eight bits, on CPUs "
            "that compute in bfloat16; there `auto` means so for a GGUF file whose matrices have "
            "eight bits or less. `awq`, `compressed-tensors`, `gptq` and `mxfp4` "
            "are like `auto`, and refuse a checkpoint that has another format.",
        ),
        "model_impl": Told(
            "",
            "who builds the model; auto: pipeinfer if it has it, or transformers",
            more="`pipeinfer` is this server's own implementation. `transformers` takes the model "
            "of that library, [with pipeinfer's attention](models-of-transformers.md).",
        ),
        "max_model_len": Told(
            "N",
            "tokens of prompt and output; default: what the checkpoint says",
            "what the checkpoint says",
            "It holds for each request. More than the checkpoint says is refused at the start.",
        ),
    },
    "HTTP": {
        "host": Told("HOST", "address to listen on", more="`0.0.0.0` listens on all addresses."),
        "port": Told(
            "N",
            "port to listen on; 0 takes a free one",
            more="The line `ready http://HOST:PORT` names the port that was taken.",
        ),
        "public_address": Told(
            "ADDRESS",
            "where users reach the server, if not where it listens",
            "where it listens",
            "Behind a published port or a proxy: HOST:PORT, a port of this host, or a whole URL. "
            "The line `ready` says it.",
        ),
        "api_key": Told(
            "KEY",
            "what clients must show under /v1",
            "no key is needed",
            "Clients send `Authorization: Bearer KEY`. `/health` and `/metrics` need no key.",
        ),
        "api_key_file": Told(
            "FILE",
            "a file with that key, or with named keys, read again on SIGHUP",
            "no key is needed",
            KEY_FILE,
        ),
        "key_concurrent": Told(
            "N",
            "requests of a key at a time; default: without limit",
            "without limit",
            "Requests that run and requests that wait count, each choice of each prompt as one. "
            "What is beyond gets 429. This limit and the next two hold for each key that names "
            "none of its own. Without keys they hold for all clients together.",
        ),
        "key_requests_per_minute": Told(
            "N", "requests of a key a minute; default: without limit", "without limit"
        ),
        "key_tokens_per_minute": Told(
            "N",
            "tokens of a key a minute; default: without limit",
            "without limit",
            "Tokens of prompts and of outputs count.",
        ),
        "tls_cert": Told(
            "FILE",
            "serve https with this certificate chain (PEM)",
            "plain http",
            "The server then speaks TLS 1.2 or later and nothing else. Needs `--tls-key`. Both "
            "files are read again on SIGHUP, for new connections.",
        ),
        "tls_key": Told(
            "FILE", "the private key of --tls-cert (PEM)", "plain http", "The key has no password."
        ),
        "allowed_origins": Told(
            "ORIGINS",
            "web pages that may ask (CORS), with commas between, or *",
            "no page of another origin may ask",
            "For example `https://chat.example.org,http://localhost:3000`. Without keys requests "
            "of other pages are refused with 403. With keys the key protects: other pages may send "
            "one, but cannot read the answer.",
        ),
        "allowed_hosts": Told(
            "NAMES",
            "names with a dot by which clients may call the server, with commas between, or *",
            "any name where keys are set; else none but the name in --host",
            "For example `gateway.example.org`. IP addresses, `localhost` and names without a dot "
            "pass anyway. Other names get 403, so that no web page reads answers by giving its own "
            "name the server's address. `/health`, `/ping`, `/metrics` and `/version` answer by "
            "any name. Where the setting is given, it holds with keys, too.",
        ),
        "no_page": Told(
            "",
            "serve neither the web page at / nor what it watches stages by",
            "the [web page](page.md) is served",
            "Its paths are 404 then.",
        ),
        "max_queue": Told(
            "N",
            "requests that may wait; one more gets 429",
            more="Requests without output count, each prompt and choice as one.",
        ),
        "max_queue_tokens": Told(
            "N",
            "prompt tokens that may wait; more get 429; 0: without limit",
            more="It bounds the memory of what waits: about 4 bytes a token, and three times that "
            "in the gateway. A request that alone has more is taken when nothing else waits.",
        ),
        "max_body_mib": Told("N", "MiB of a request's body; a larger one gets 413"),
        "max_prompts": Told(
            "N",
            "prompts of a request; more get 400",
            more="Each prompt counts as often as it has choices. The limit in effect is also at "
            "most `--max-queue`.",
        ),
        "request_timeout": Told(
            "SECONDS",
            "seconds of requests that name no timeout; 0: none",
            more="At most a day. It does not hold for `LLM`.",
        ),
        "drain_timeout": Told(
            "SECONDS",
            "seconds that running requests have after SIGTERM or Ctrl-C",
            more="Then they are cut off.",
        ),
    },
    "scheduling": {
        "policy": Told(
            "NAME",
            "mixed, throughput, prefill-first, decode-first, or module:Class",
            more="How prompts and decodes share a step: `mixed`, `throughput`, `prefill-first`, "
            "`decode-first`, or [a class of your own](architecture.md). `LLM` takes `throughput`, "
            "unless it is given a target.",
        ),
        "max_running": Told(
            "N",
            "requests that run at a time",
            more="The number of slots. The limit in effect is also at most `--max-step-tokens`. On "
            "a GPU, raise `--cuda-graph-max-batch` with it.",
        ),
        "max_step_tokens": Told(
            "N",
            "tokens of a step; default: 2,048 on a CPU, 8,192 on a GPU",
            "2,048 on a CPU, 8,192 on a GPU",
        ),
        "mixed_step_tokens": Told(
            "N",
            "tokens of a step in which requests decode; default: measured on a GPU",
            "by the two targets; on a CPU a sixteenth of `--max-step-tokens`, at least 128",
            "A fixed budget, in place of the targets, under the policy `mixed`. A quarter of it is "
            "always left for prompts.",
        ),
        "itl_target": Told(
            "SECONDS",
            "longest step beside running streams while prompts wait; 0: any",
            more=TARGETS,
        ),
        "ttft_target": Told(
            "SECONDS",
            "seconds that a prompt should wait at most, by longer steps; 0: any",
            more="The more prompts wait, the longer steps get, up to "
            "[`--itl-target`](#itl-target). With 0, steps beside streams stay short, however many "
            "prompts wait.",
        ),
        "overlap_depth": Told(
            "N",
            "steps in flight, 1 or 2",
            more="1 waits for each step's tokens before the next step is planned.",
        ),
        "watchdog": Told(
            "SECONDS",
            "seconds without a result after which an engine counts as hung",
            more="Its process is killed and started again. Seconds in which the scheduler itself "
            "was stopped do not count.",
        ),
        "host_loss": Told(
            "SECONDS",
            "seconds of silence after which a group's requests go on at another group",
            more="What no other group can take, and what needs a lost tokenizer or detokenizer, "
            "fails after ten times as long. After twenty times as long what is kept for a lost "
            "stage is dropped.",
        ),
        "seed": Told(
            "N",
            "start of the seeds of requests that bring none",
            "`0`",
            "Random weights of `--load-format dummy` are drawn from it as well.",
        ),
    },
    "memory": {
        "cache": Told("NAME", "prefix cache: radix, or naive for none"),
        "page_size": Told(
            "N",
            "tokens of a page; default: what the attention backend prefers",
            "16 of the backend `torch`, 64 of the others",
        ),
        "kv_pages": Told(
            "N", "pages for keys and values; default: from free memory", "from free memory"
        ),
        "kv_cache_dtype": Told(
            "",
            "dtype of keys and values in pages; auto: the model's; fp8 is fp8_e4m3",
            more="`fp8_e4m3` has 8 bits: twice as many tokens of a model in 16 bits fit, at the "
            "price of precision: [many answers become others](number-formats.md#keys-and-values). "
            "Scales are the checkpoint's `k_scale` and `v_scale`, else 1. "
            "Keys are shifted and turned before they are rounded, which makes loading longer. "
            "On a GPU it needs compute capability 8.9, or `--attention torch`. `fa3` and `hybrid` "
            "take it for bfloat16 and heads of 64 and 128. `bfloat16` is for a model that computes "
            "in it.",
        ),
        "memory_fraction": Told(
            "SHARE",
            "share of the free memory that pages may take",
            more="On a CPU at most 4 GiB. Never more than `--max-running` requests of full length "
            "need. `--kv-pages` goes before it.",
        ),
    },
    "devices": {
        "device": Told("", "auto: a GPU if there is one", more="Else `auto` is the CPU."),
        "threads": Told(
            "N", "torch's threads in an engine; default: what torch chooses", "what torch chooses"
        ),
        "attention": Told(
            "NAME",
            "torch, flashinfer, fa3, hybrid; auto: the fastest here",
            more="`auto` is `hybrid` on Hopper, with heads of 256 `flashinfer`; `flashinfer` on "
            "other GPUs; else `torch`. Models with soft caps get `torch`, and off Hopper models "
            "with attention sinks (gpt-oss), too.",
        ),
        "moe_backend": Told(
            "NAME",
            "what computes mixtures of experts: torch, triton; auto: the fastest here",
            more="`auto` is `triton` on a GPU. `torch` is its grouped products, for plain weights "
            "in bfloat16. On a CPU each expert computes by itself, which is `torch` there.",
        ),
        "tp": Told(
            "N",
            "engines that share the model, each with a GPU of its own",
            more="Tensor parallelism: the engines compute each step together. The number must "
            "divide the model's heads.",
        ),
        "dp": Told(
            "N",
            "groups of --tp engines, each with the whole model",
            more="Data parallelism: each group has a scheduler of its own, all behind one gateway.",
        ),
        "routing": Told(
            "",
            "how a request finds its group",
            more="`prefix` looks for the group that has the beginning of the prompt in its cache. "
            "With one group all are the same.",
        ),
        "all_reduce": Told(
            "",
            "how GPUs add up; auto: own kernels where they are faster than NCCL",
            more="The kernels read the other GPUs' memory, for messages of up to 16 MiB, among 2, "
            "4 or 8 ranks, if the GPUs can do that and sums prove right at the start. They add the "
            "residual and norm as well, and take 64 MiB of each GPU's memory. `nccl` takes NCCL "
            "alone. No effect on a CPU.",
        ),
        "enable_expert_parallel": Told(
            "",
            "each rank of --tp has some experts whole, not a part of all",
            "each rank has a part of every expert",
            "For experts too small to be cut, or of a size that does not divide by the ranks. The "
            "load is even only if the routing is. Refused for a checkpoint with fewer experts than "
            "ranks, or with none.",
        ),
        "cuda_graph_max_batch": Told(
            "N",
            "largest decode step that is a CUDA graph; 0: none",
            more="With the backend `hybrid`, steps with prompts are graphs, too. No effect on a "
            "CPU.",
        ),
        "no_cuda_graph": Told(
            "",
            "launch every step kernel by kernel",
            "CUDA graphs are used",
            "No effect on a CPU.",
        ),
        "all_graphs_first": Told(
            "",
            "capture all CUDA graphs before the server is ready",
            "most are captured afterwards",
            "Afterwards means while there is no step, one at a time. Until a graph is there, its "
            "steps take a larger one, of up to one and a half times as many rows. For "
            "measurements, and where load begins at once and does not pause. Always so with "
            "`--tp`, and for `LLM` unless it is given as `False`.",
        ),
        "compile": Told(
            "",
            "torch.compile for what no kernel fuses",
            "nothing is compiled",
            "These are norms with their additions and SwiGLU, on a CPU and in float32 on a GPU. "
            "Loading takes half a minute longer the first time, and needs a C++ compiler on a CPU. "
            "It can be slower: measure with `python tools/bench offline --compile` first.",
        ),
    },
    "running": {
        "topology": Told(
            "FILE",
            "where the stages listen; default: one made for this host",
            "one made for this host",
            "The [topology](topology.md) file.",
        ),
        "in_process": Told(
            "",
            "all stages in this process, for debuggers",
            "a process each",
            "Nothing is started again then.",
        ),
        "log_level": Told("", "how much is logged, to stderr"),
        "log_format": Told(
            "",
            "json: one object a line, and a line for each request",
            more="[Telemetry](telemetry.md) says what stands in them.",
        ),
        "otlp_endpoint": Told(
            "URL",
            "send a trace of each request there, by OTLP over HTTP",
            "no traces",
            "The URL of an OpenTelemetry collector. Every stage sends a span for each request. "
            "Needs `pip install 'pipeinfer[otel]'`.",
        ),
        "vllm_metrics": Told(
            "",
            "metrics also by vLLM's names",
            "only those of pipeinfer",
            "For dashboards, autoscalers and the endpoint picker of the gateway API's "
            "inference extension, which know those names. [The reference](reference/metrics.md) "
            "lists them; `/metrics` has them beside those of pipeinfer.",
        ),
        "stay_awake": Told(
            "",
            "auto: beside GPUs, where there are cores to spare for it",
            more="Whether stages other than engines sleep between messages that come within 5 ms "
            "of one another. A process that sleeps answers a tenth of a millisecond late, at times "
            "a whole millisecond. Staying awake takes a core each for scheduler, detokenizer and "
            "gateway while requests run. `auto` stays awake beside GPUs, if there are three cores "
            "for each process of the host within the control group's quota. Name `--device cuda` "
            "in a container that sees no GPU. With `always`, the loops of `LLM` and `AsyncLLM` "
            "stay awake as well.",
        ),
        "record": Told(
            "DIR",
            "record what every stage takes and gives",
            "nothing is recorded",
            "[Recordings](recording.md) begin at each stage's start.",
        ),
        "record_max_bytes": Told(
            "N", "bytes of each recording; default: without limit", "without limit", "Then it ends."
        ),
        "flight_recorder_mib": Told(
            "N",
            "memory for the last minute of each stage; 0: off",
            more="A stage that dies of an exception writes it.",
        ),
        "flight_dir": Told(
            "DIR",
            "where the flight recorder writes when a stage dies of an exception",
            "`--record`, or a folder for state of the user",
        ),
        "profile": Told(
            "N",
            "steps of a torch profiler's trace; default: none",
            "none",
            "The trace is JSON that Perfetto and Chrome open. It begins when an epoch has had 20 "
            "steps that decode, once in a process. The log names the file, "
            "`profile-engine-0-0-PID.json`. Steps are slower meanwhile.",
        ),
        "profile_dir": Told(
            "DIR", "where the profiler's trace is written", more="The folder is made if need be."
        ),
    },
}
