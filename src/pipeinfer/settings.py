"""Every setting of pipeinfer: one struct behind flags, environment variables and LLM(...) keywords.

Each field carries its help: its first line is the text of `--help`, all of it is in
docs/reference/settings.md. Precedence: flag, then environment (`--kv-pages` = PIPEINFER_KV_PAGES),
then the topology file's [settings] table, then the default. Knows no stage.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pipeinfer import other_servers
from pipeinfer.command_line import CommandLine, did_you_mean, no_number, none_of

PREFIX = "PIPEINFER_"
DEMO = "pipeinfer-demo"
# --policy: name -> "module:Class"
POLICIES = {
    "mixed": "pipeinfer.scheduler.policies:Mixed",
    "throughput": "pipeinfer.scheduler.policies:Throughput",
    "prefill-first": "pipeinfer.scheduler.policies:PrefillFirst",
    "decode-first": "pipeinfer.scheduler.policies:DecodeFirst",
}

MAX_COUNT = 2**31 - 1  # counts are int32 in messages and on devices
MAX_BYTES = 2**63 - 1
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
NonNegative = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
LargeNonNegative = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
# Stages of one kind, or ranks of a group: more than any deployment was tried with.
Stages = Annotated[int, Meta(ge=1, le=1024)]
# Tokens of one step, each of which takes kilobytes of buffers and activations.
StepTokens = Annotated[int, Meta(ge=0, le=2**20)]
# A loop cannot wait for an infinite time.
Timeout = Annotated[float, Meta(ge=0, le=86_400)]


class ConfigurationError(ValueError):
    """A wrong setting, topology or checkpoint; the text is for the user, the exit code is 2."""


def about(
    value: str,
    line: str,
    more: str = "",
    *,
    unset: str = "",
    group: str = "",
    several: bool = False,
) -> Meta:
    """The help of a setting, see SettingHelp. `group`: begins a group of settings."""
    text = f"{line}\n\n{more}" if more else line
    extra = {"value": value, "unset": unset, "group": group, "several": several}
    return Meta(description=text, extra=extra)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings with their defaults, in the order of the reference."""

    # fmt: off

    # Model
    model: Annotated[str, about("MODEL", "a folder, a GGUF file or a hub id",
        "A folder has config.json and safetensors files. A hub id is downloaded once. GGUF files "
        "have [a page of their own](gguf.md). Commands take the model without a flag, and also as "
        "`--model`.", unset="the demo model", group="model")] = ""
    task: Annotated[Literal["auto", "generate", "embed", "score"], about("",
        "what the model is for; auto: by the checkpoint",
        "With `embed` it makes [vectors of texts](embeddings.md) for `/v1/embeddings`, and "
        "generates no texts. With `score` it says how well texts fit to others, for `/score` "
        "and `/v1/rerank`: the model is asked, and its logits of yes and no are compared. `auto` "
        "embeds for a checkpoint that has a modules.json, as sentence-transformers writes it, or "
        "no head for logits.")] = "auto"
    served_model_name: Annotated[str, about("NAME", "the model's id in /v1/models; default: MODEL",
        "Answers name the model so. A request that names another model gets 404. A GGUF file is "
        "called by its name without the ending.", unset="what was given as MODEL")] = ""
    revision: Annotated[str, about("REV", "branch, tag or commit of a hub id",
        unset="the hub's default")] = ""
    chat_template: Annotated[str, about("FILE", "a Jinja template, in place of the checkpoint's",
        unset="the checkpoint's own")] = ""
    trust_request_chat_template: Annotated[bool, about("",
        "let chats bring a template of their own",
        "The field is `chat_template`, as in vLLM. The template runs in the sandbox of the model's "
        "own template, where nothing bounds its time: a template that never ends holds up all long "
        "prompts.", unset="such chats are refused")] = False
    control_tokens_in_messages: Annotated[bool, about("",
        "let messages spell control tokens, as vLLM does",
        "With it, a user's `<|im_end|>` ends the message. It holds for messages, tools and "
        "template arguments.", unset="control tokens in messages are text")] = False
    # gateway/tool_parsers/registry.py
    tool_parser: Annotated[str, about("NAME",
        "how calls of tools are read: a parser, none; auto: by template",
        "Parsers: `hermes`, `llama3_json`, `mistral`, `qwen3_coder`, `glm45`, `glm47`, "
        "`deepseek_v3`, `deepseek_v31`, `deepseek_v32`, `deepseek_v4`, `kimi_k2`, `seed_oss`, "
        "`minimax_m2`, `granite`, `hunyuan_a13b`, `phi4_mini_json`, `xlam`, `gigachat3`, "
        "`pythonic`, `lfm2`, `olmo3`, `openai`. `none` leaves calls in the text. [The API](api.md) "
        "says which form each reads.")] = "auto"
    grammar_backend: Annotated[Literal["llguidance", "none"], about("NAME",
        "what holds outputs to grammars, or none for nothing",
        "With `none`, requests that ask for a form are refused, and engines start a second or two "
        "sooner with large vocabularies.")] = "llguidance"
    grammar_cache_mib: Annotated[Positive, about("MIB",
        "memory for compiled grammars of each engine, in MiB",
        "An estimate. Where grammars in use take all of it, others are refused.")] = 512
    allow_additional_properties: Annotated[bool, about("",
        "objects may have properties that their schema does not name",
        "Of forms and of tools, where a schema says nothing of `additionalProperties`: JSON Schema "
        "allows any then, of which a model may invent more until `max_tokens`. So objects that "
        "name some properties are closed, unless this is given.",
        unset="objects have only those")] = False
    reasoning_parser: Annotated[str, about("NAME",
        "how reasoning is separated from the answer: a parser, none; auto: by template",
        "Parsers by vLLM's names, such as `qwen3`, `seed_oss` or `mistral`, which differ in tags "
        "alone, and `openai_gptoss`; see [the API](api.md). `none` leaves reasoning in the text. "
        "`auto` chooses by the chat template.")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about("",
        "auto: the checkpoint's; float32 on a CPU that lacks it",
        "What the model computes in. `auto` is what the checkpoint is stored in, and `bfloat16` "
        "for a GGUF file; on a CPU it is `float32` unless that is `bfloat16` and the CPU has "
        "instructions for it (AVX512-BF16 or AMX). `float32` on a CPU is for exactness.")] = "auto"
    load_format: Annotated[Literal["auto", "dummy"], about("",
        "dummy: random weights, no weight file is read",
        "The random numbers are drawn from `--seed`.")] = "auto"
    # checkpoint/quantization.py
    quantization: Annotated[Literal[
        "auto", "none", "fp8", "int8", "awq", "compressed-tensors", "gptq", "mxfp4"
    ], about("NAME", "auto: as stored; none: plain; fp8, int8: plain weights are rounded",
        "The [number format](number-formats.md) of the layers' matrices. `auto` takes them as the "
        "checkpoint has them. `none` makes them plain as they are loaded. `fp8` rounds plain ones "
        "to FP8, row by row, `int8` to whole numbers of eight bits, on CPUs that compute in "
        "bfloat16; there `auto` means so for a GGUF file whose matrices have eight bits or less, "
        "except that those of `Q4_0`, `Q4_1` and `Q4_K` stay in four. "
        "`awq`, `compressed-tensors`, `gptq` and `mxfp4` are like `auto`, and refuse a checkpoint "
        "that has another format.")] = "auto"
    model_impl: Annotated[Literal["auto", "pipeinfer", "transformers"], about("",
        "who builds the model; auto: pipeinfer if it has it, or transformers",
        "`pipeinfer` is this server's own implementation. `transformers` takes the model of that "
        "library, [with pipeinfer's attention](models-of-transformers.md).")] = "auto"
    max_model_len: Annotated[NonNegative, about("N",
        "tokens of prompt and output; default: what the checkpoint says",
        "It holds for each request. More than the checkpoint says is refused at the start.",
        unset="what the checkpoint says")] = 0

    # checkpoint/lora.py
    enable_lora: Annotated[bool, about("", "serve low-rank adapters (LoRA) beside the model",
        "[Adapters](lora.md) in PEFT's form. A request names one as its `model`.",
        unset="the model alone is served")] = False
    lora_modules: Annotated[str, about("NAME=PATH",
        "adapters by name, folders with PEFT's files; several with spaces between",
        "Needs `--enable-lora`. They are looked at when the server starts, and loaded when a "
        "request asks for one. A folder must be there for every engine and gateway.",
        unset="none", several=True)] = ""
    max_loras: Annotated[Annotated[int, Meta(ge=1, le=256)], about("N",
        "adapters that the device holds at a time",
        "Each takes memory for `--max-lora-rank`, of every layer. Where requests ask for more "
        "adapters at a time, some wait.")] = 8
    max_lora_rank: Annotated[Annotated[int, Meta(ge=1, le=512)], about("N",
        "the greatest rank of an adapter")] = 16

    # HTTP
    host: Annotated[str, about("HOST", "address to listen on",
        "`0.0.0.0` listens on all addresses.", group="HTTP")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], about("N",
        "port to listen on; 0 takes a free one",
        "The line `ready http://HOST:PORT` names the port that was taken.")] = 8000
    # gateway/stage.py
    public_address: Annotated[str, about("ADDRESS",
        "where users reach the server, if not where it listens",
        "Behind a published port or a proxy: HOST:PORT, a port of this host, or a whole URL. The "
        "line `ready` says it.", unset="where it listens")] = ""
    api_key: Annotated[str, about("KEY", "what clients must show under /v1",
        "Clients send `Authorization: Bearer KEY`. `/health` and `/metrics` need no key.",
        unset="no key is needed")] = ""
    api_key_file: Annotated[str, about("FILE",
        "a file with that key, or with named keys, read again on SIGHUP",
        unset="no key is needed")] = ""
    key_concurrent: Annotated[NonNegative, about("N",
        "requests of a key at a time; default: without limit",
        "Requests that run and requests that wait count, each choice of each prompt as one. What "
        "is beyond gets 429. This limit and the next two hold for each key that names none of its "
        "own. Without keys they hold for all clients together.",
        unset="without limit")] = 0
    key_requests_per_minute: Annotated[NonNegative, about("N",
        "requests of a key a minute; default: without limit", unset="without limit")] = 0
    key_tokens_per_minute: Annotated[NonNegative, about("N",
        "tokens of a key a minute; default: without limit",
        "Tokens of prompts and of outputs count.", unset="without limit")] = 0
    tls_cert: Annotated[str, about("FILE", "serve https with this certificate chain (PEM)",
        "The server then speaks TLS 1.2 or later and nothing else. Needs `--tls-key`. Both files "
        "are read again on SIGHUP, for new connections.", unset="plain http")] = ""
    tls_key: Annotated[str, about("FILE", "the private key of --tls-cert (PEM)",
        "The key has no password.", unset="plain http")] = ""
    allowed_origins: Annotated[str, about("ORIGINS",
        "web pages that may ask (CORS), with commas between, or *",
        "For example `https://chat.example.org,http://localhost:3000`. Without keys requests of "
        "other pages are refused with 403. With keys the key protects: other pages may send one, "
        "but cannot read the answer.", unset="no page of another origin may ask")] = ""
    allowed_hosts: Annotated[str, about("NAMES",
        "names with a dot by which clients may call the server, with commas between, or *",
        "For example `gateway.example.org`. IP addresses, `localhost` and names without a dot pass "
        "anyway. Other names get 403, so that no web page reads answers by giving its own name the "
        "server's address. `/health`, `/ping`, `/metrics` and `/version` answer by any name. Where "
        "the setting is given, it holds with keys, too.",
        unset="any name where keys are set; else none but the name in --host")] = ""
    no_page: Annotated[bool, about("",
        "serve neither the web page at / nor what it watches stages by",
        "Its paths are 404 then.", unset="the [web page](page.md) is served")] = False
    max_queue: Annotated[Positive, about("N", "requests that may wait; one more gets 429",
        "Requests without output count, each prompt and choice as one.")] = 10_000
    max_queue_tokens: Annotated[NonNegative, about("N",
        "prompt tokens that may wait; more get 429; 0: without limit",
        "It bounds the memory of what waits: about 4 bytes a token, and three times that in the "
        "gateway. A request that alone has more is taken when nothing else waits.")] = 10_000_000
    max_body_mib: Annotated[Positive, about("N", "MiB of a request's body; a larger one gets 413",
    )] = 32
    max_prompts: Annotated[Positive, about("N", "prompts of a request; more get 400",
        "Each prompt counts as often as it has choices. The limit in effect is also at most "
        "`--max-queue`.")] = 1024
    reattach: Annotated[Annotated[float, Meta(ge=0, le=3600)], about("SECONDS",
        "seconds for which a stream waits for its client to come back; 0: it ends with it",
        "Such streams have event ids, and go on at `GET /v1/streams/{id}`. What the client has not "
        "had is kept meanwhile, also if the gateway dies. The header `x-pipeinfer-reattach` asks "
        "for it in one request, `x-pipeinfer-detached` for more.",
        unset="`0`")] = 0.0
    store: Annotated[str, about("PATH",
        "file for responses with `store`; default: none are stored",
        "An SQLite file, made if it is missing. A response is stored for 30 days, so that "
        "`previous_response_id` works, also after a restart.", unset="none")] = ""
    kept_mib: Annotated[Positive, about("N", "MiB of all answers that are kept for clients",
        "The oldest that ended go first.")] = 256
    key_kept_mib: Annotated[Positive, about("N", "MiB of the kept answers of a key",
        "Without keys it holds for all clients together.")] = 64
    request_timeout: Annotated[Annotated[float, Meta(ge=0, le=86400)], about("SECONDS",
        "seconds of requests that name no timeout; 0: none",
        "At most a day. It does not hold for `LLM`.")] = 3600.0
    drain_timeout: Annotated[Timeout, about("SECONDS",
        "seconds that running requests have after SIGTERM or Ctrl-C",
        "Then they are cut off.")] = 30.0

    # Scheduling
    policy: Annotated[str, about("NAME",
        "mixed, throughput, prefill-first, decode-first, or module:Class",
        "How prompts and decodes share a step: `mixed`, `throughput`, `prefill-first`, "
        "`decode-first`, or [a class of your own](architecture.md). `LLM` takes `throughput`, "
        "unless it is given a target.", group="scheduling")] = "mixed"
    max_running: Annotated[Positive, about("N", "requests that run at a time",
        "The number of slots. The limit in effect is also at most `--max-step-tokens`. On a GPU, "
        "raise `--cuda-graph-max-batch` with it.")] = 256
    max_step_tokens: Annotated[StepTokens, about("N",
        "tokens of a step; default: 2,048 on a CPU, 8,192 on a GPU",
        unset="2,048 on a CPU, 8,192 on a GPU")] = 0
    mixed_step_tokens: Annotated[StepTokens, about("N",
        "tokens of a step in which requests decode; default: measured on a GPU",
        "A fixed budget, in place of the targets, for policies that limit prompts beside decodes "
        "(`mixed`, `throughput`). A quarter of it is always left for prompts.",
        unset="by the two targets; on a CPU a sixteenth of `--max-step-tokens`, at least 128")] = 0
    itl_target: Annotated[Annotated[float, Meta(ge=0, le=60)], about("SECONDS",
        "longest step beside running streams while prompts wait; 0: any")] = 0.025
    ttft_target: Annotated[Annotated[float, Meta(ge=0, le=3600)], about("SECONDS",
        "seconds that a prompt should wait at most, by longer steps; 0: any",
        "The more prompts wait, the longer steps get, up to [`--itl-target`](#itl-target). With 0, "
        "steps beside streams stay short, however many prompts wait.")] = 0.5
    overlap_depth: Annotated[Annotated[int, Meta(ge=1, le=2)], about("N", "steps in flight, 1 or 2",
        "1 waits for each step's tokens before the next step is planned.")] = 2
    speculate: Annotated[str, about("NAME",
        "guess tokens ahead and verify them together: ngram, a small model, or none",
        "[Speculative decoding](speculative-decoding.md): the tokens stay the same. `ngram` "
        "guesses what followed a request's last tokens where they stood before, which pays for "
        "texts that repeat themselves or their prompt. Any other name is that of a small model "
        "with the same vocabulary, as for `--model`, which guesses whatever the text is, and whose "
        "keys and values take their part of each page. Not with the attention backend "
        "`flashinfer`.",
    )] = "none"
    num_speculative_tokens: Annotated[Annotated[int, Meta(ge=1, le=16)], about("N",
        "tokens that are guessed ahead for a request in one step",
        "With `--speculate`.")] = 4
    speculative_max_requests: Annotated[Positive, about("N",
        "requests that decode at a time up to which tokens are guessed ahead",
        "With `--speculate`. Where more requests decode, a step's time grows with its tokens.",
    )] = 8
    synthetic_acceptance_rate: Annotated[Annotated[float, Meta(ge=-1, le=1)], about("RATE",
        "for benchmarks: accept draft tokens at random, at this rate; -1: by what is sampled",
        "With `--speculate`. Every request drafts, and the texts are worth nothing: it shows what "
        "drafts cost and save on a machine at a rate of acceptance.")] = -1.0
    watchdog: Annotated[Annotated[float, Meta(gt=0, le=86_400)], about("SECONDS",
        "seconds without a result after which an engine counts as hung",
        "Its process is killed and started again. Seconds in which the scheduler itself was "
        "stopped do not count.")] = 120.0
    host_loss: Annotated[Annotated[float, Meta(ge=1, le=3600)], about("SECONDS",
        "seconds of silence after which a group's requests go on at another group",
        "What no other group can take, and what needs a lost tokenizer or detokenizer, fails after "
        "ten times as long. After twenty times as long what is kept for a lost stage is dropped.",
    )] = 20.0
    seed: Annotated[LargeNonNegative, about("N", "start of the seeds of requests that bring none",
        "Random weights of `--load-format dummy` are drawn from it as well.",
        unset="`0`")] = 0

    # Memory
    cache: Annotated[Literal["radix", "naive"], about("NAME",
        "prefix cache: radix, or naive for none", group="memory")] = "radix"
    page_size: Annotated[Annotated[int, Meta(ge=0, le=65_536)], about("N",
        "tokens of a page; default: what the attention backend prefers",
        unset="16 of the backend `torch`, 64 of the others")] = 0
    kv_pages: Annotated[NonNegative, about("N",
        "pages for keys and values; default: from free memory",
        unset="from free memory")] = 0
    kv_cache_dtype: Annotated[Literal["auto", "bfloat16", "fp8", "fp8_e4m3"], about("",
        "dtype of keys and values in pages; auto: the model's; fp8 is fp8_e4m3",
        "`fp8_e4m3` has 8 bits: twice as many tokens of a model in 16 bits fit, at the price of "
        "precision: [many answers become others](number-formats.md#keys-and-values). Scales are "
        "the checkpoint's `k_scale` and `v_scale`, else 1. Keys are shifted and turned before they "
        "are rounded, which makes loading longer. On a GPU it needs compute capability 8.9, or "
        "`--attention torch`. `fa3` and `hybrid` take it for bfloat16 and heads of 64 and 128. "
        "`bfloat16` is for a model that computes in it.")] = "auto"
    memory_fraction: Annotated[Annotated[float, Meta(gt=0, le=1)], about("SHARE",
        "share of the free memory that pages may take",
        "On a CPU at most 4 GiB. Never more than `--max-running` requests of full length need. "
        "`--kv-pages` goes before it.")] = 0.9

    # Devices
    device: Annotated[Literal["auto", "cpu", "cuda"], about("", "auto: a GPU if there is one",
        "Else `auto` is the CPU.", group="devices")] = "auto"
    threads: Annotated[Annotated[int, Meta(ge=0, le=1024)], about("N",
        "torch's threads in an engine; default: what torch chooses",
        unset="what torch chooses")] = 0
    attention: Annotated[Literal["auto", "torch", "flashinfer", "fa3", "hybrid"], about("NAME",
        "torch, flashinfer, fa3, hybrid; auto: the fastest here",
        "`auto` is `hybrid` on Hopper, with heads of 256 `flashinfer`; `flashinfer` on other GPUs; "
        "else `torch`. Models with soft caps get `torch`, and off Hopper models with attention "
        "sinks (gpt-oss), too.")] = "auto"
    moe_backend: Annotated[Literal["auto", "triton", "torch", "flashinfer"], about("NAME",
        "what computes mixtures of experts: torch, triton, flashinfer; auto: the fastest here",
        "`auto` is `triton` on a GPU. `torch` is its grouped products, `flashinfer` its fused "
        "CUTLASS kernels, which are compiled for long where they are used first, and timed at "
        "each start; both are for plain weights in bfloat16. On a CPU each expert computes by "
        "itself, which is `torch` there.")] = "auto"
    tp: Annotated[Stages, about("N", "engines that share the model, each with a GPU of its own",
        "Tensor parallelism: the engines compute each step together. The number must divide the "
        "model's heads.")] = 1
    dp: Annotated[Stages, about("N", "groups of --tp engines, each with the whole model",
        "Data parallelism: each group has a scheduler of its own, all behind the same gateways."
        )] = 1
    gateways: Annotated[Stages, about("N", "gateways, which share the port",
        "One process serves HTTP for some ten thousand tokens a second; more share its work. "
        "Any of them answers for the whole server. See [several fronts](topology.md#several-"
        "fronts).")] = 1
    tokenizers: Annotated[Stages, about("N", "tokenizers; prompts that begin alike have the same",
        "A request's tokenizer is chosen by the first bytes of its prompt, so that each sees all "
        "prompts that share a beginning.")] = 1
    detokenizers: Annotated[Stages, about("N", "detokenizers, each with its part of the requests",
        )] = 1
    routing: Annotated[Literal["prefix", "least-loaded", "round-robin"], about("",
        "how a request finds its group",
        "`prefix` looks for the group that has the beginning of the prompt in its cache. With one "
        "group all are the same.")] = "prefix"
    all_reduce: Annotated[Literal["auto", "nccl"], about("",
        "how GPUs add up; auto: own kernels where they are faster than NCCL",
        "The kernels read the other GPUs' memory, for messages of up to 16 MiB, among 2, 4 or 8 "
        "ranks, if the GPUs can do that and sums prove right at the start. They add the residual "
        "and norm as well, and take 64 MiB of each GPU's memory. `nccl` takes NCCL alone. No "
        "effect on a CPU.")] = "auto"
    enable_expert_parallel: Annotated[bool, about("",
        "each rank of --tp has some experts whole, not a part of all",
        "For experts too small to be cut, or of a size that does not divide by the ranks. The load "
        "is even only if the routing is. Refused for a checkpoint with fewer experts than ranks, "
        "or with none.", unset="each rank has a part of every expert")] = False
    cuda_graph_max_batch: Annotated[NonNegative, about("N",
        "largest decode step that is a CUDA graph; 0: none",
        "With the backend `hybrid`, steps with prompts are graphs, too. No effect on a CPU.")] = 256
    no_keep_memory: Annotated[bool, about("",
        "let pages of keys and values, and weights, end with their engine",
        "Without this flag they outlive an engine that is killed or swapped: its successor "
        "computes again what the last steps computed, and nothing else. Weights that are "
        "dequantized as they are loaded, on a GPU, and those of models that transformers builds "
        "are read anew. Prompts stay in memory as long as the server runs either way.",
        unset="pages and weights outlive their engine")] = False
    keep_memory_on_stop: Annotated[bool, about("",
        "let them outlive the server too, for the next one at the same --port",
        "[The next server](operations.md#restart-a-server-and-keep-its-memory) with the same "
        "`--host`, `--port` and `--topology` finds pages and weights, if the model and what "
        "decides on its numbers are the same. Prompts and the memory stay as long, however the "
        "server ends.", unset="they end with the server")] = False
    # The kernel waits for at most 2**31 ms.
    kept_memory_timeout: Annotated[Annotated[int, Meta(ge=0, le=604_800)], about("SECONDS",
        "how long they wait for the next server",
        "With `--keep-memory-on-stop`.")] = 600
    standby: Annotated[bool, about("",
        "a second process of each engine, ready to go on where one ends",
        "It has the weights, waits in silence, and goes on with the pages of an engine that is "
        "killed or swapped, without a start. Then the next one is started. It shares the weights "
        "that [outlive an engine](architecture.md#pages-that-outlive-their-engine); others it "
        "loads itself, on a GPU when it is promoted. The pool leaves as much memory free as the "
        "engine takes without pages and shared weights. Of engines that a "
        "supervisor starts; with several ranks if all are on its host. "
        "Of containers, one that finds all engines running is a standby.",
        unset="an engine that ends is started anew")] = False
    exact: Annotated[bool, about("",
        "tokens depend on the request alone, bit by bit, not on what else is computed",
        "[Exact mode](exact.md): on a GPU with kernels of its own, for Hopper, in bfloat16 or "
        "float16, and unquantized weights; on a CPU in float32. Where something cannot keep it, "
        "the start is refused.",
        unset="speed comes first: near ties may fall otherwise")] = False
    no_cuda_graph: Annotated[bool, about("", "launch every step kernel by kernel",
        "No effect on a CPU.", unset="CUDA graphs are used")] = False
    all_graphs_first: Annotated[bool, about("",
        "capture all CUDA graphs before the server is ready",
        "Afterwards means while there is no step, one at a time. Until a graph is there, its steps "
        "take a larger one, of up to one and a half times as many rows. For measurements, and "
        "where load begins at once and does not pause. Always so with `--tp`, and for `LLM` unless "
        "it is given as `False`.", unset="most are captured afterwards")] = False
    compile: Annotated[bool, about("", "torch.compile for what no kernel fuses",
        "These are norms with their additions and SwiGLU, on a CPU and in float32 on a GPU. "
        "Loading takes half a minute longer the first time, and needs a C++ compiler on a CPU. It "
        "can be slower: measure with `python tools/bench offline --compile` first.",
        unset="nothing is compiled")] = False

    # Running
    topology: Annotated[str, about("FILE",
        "where the stages listen; default: one made for this host",
        "The [topology](topology.md) file.", unset="one made for this host",
        group="running")] = ""
    in_process: Annotated[bool, about("", "all stages in this process, for debuggers",
        "Nothing is started again then.", unset="a process each")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("",
        "how much is logged, to stderr")] = "info"
    log_format: Annotated[Literal["text", "json"], about("",
        "json: one object a line, and a line for each request",
        "[Telemetry](telemetry.md) says what stands in them.")] = "text"
    otlp_endpoint: Annotated[str, about("URL",
        "send a trace of each request there, by OTLP over HTTP",
        "The URL of an OpenTelemetry collector. Every stage sends a span for each request. Needs "
        "`pip install 'pipeinfer[otel]'`.", unset="no traces")] = ""
    vllm_metrics: Annotated[bool, about("", "metrics also by vLLM's names",
        "For dashboards, autoscalers and the endpoint picker of the gateway API's inference "
        "extension, which know those names. [The reference](reference/metrics.md) lists them; "
        "`/metrics` has them beside those of pipeinfer.",
        unset="only those of pipeinfer")] = False
    # runtime/entry.py
    stay_awake: Annotated[Literal["auto", "always", "never"], about("",
        "auto: beside GPUs, where there are cores to spare for it",
        "Whether stages other than engines sleep between messages that come within 5 ms of one "
        "another. A process that sleeps answers a tenth of a millisecond late, at times a whole "
        "millisecond. Staying awake takes a core each for scheduler, detokenizer and gateway while "
        "requests run. `auto` stays awake beside GPUs, if there are three cores for each process "
        "of the host within the control group's quota. Name `--device cuda` in a container that "
        "sees no GPU. With `always`, the loops of `LLM` and `AsyncLLM` stay awake as well.",
    )] = "auto"
    record: Annotated[str, about("DIR", "record what every stage takes and gives",
        "[Recordings](recording.md) begin at each stage's start.",
        unset="nothing is recorded")] = ""
    record_max_bytes: Annotated[LargeNonNegative, about("N",
        "bytes of each recording; default: without limit",
        "Then it ends.", unset="without limit")] = 0
    flight_recorder_mib: Annotated[NonNegative, about("N",
        "memory for the last minute of each stage; 0: off",
        "A stage that dies of an exception writes it.")] = 32
    flight_dir: Annotated[str, about("DIR",
        "where the flight recorder writes when a stage dies of an exception",
        unset="`--record`, or a folder for state of the user")] = ""
    profile: Annotated[NonNegative, about("N", "steps of a torch profiler's trace; default: none",
        "The trace is JSON that Perfetto and Chrome open. It begins when an epoch has had 20 steps "
        "that decode, once in a process. The log names the file, `profile-engine-0-0-PID.json`. "
        "Steps are slower meanwhile.", unset="none")] = 0
    profile_dir: Annotated[str, about("DIR", "where the profiler's trace is written",
        "The folder is made if need be.")] = "."
    # fmt: on

    @property
    def draft_model(self) -> str:
        """The model that makes draft tokens, in the form of `--model`; "": there is none."""
        return "" if self.speculate in ("none", "ngram") else self.speculate

    @property
    def model_name(self) -> str:
        """The model's name in /v1/models: of a GGUF file, its name without folder and ending."""
        file = Path(self.model)
        of_file = file.stem if file.suffix.lower() == ".gguf" else self.model
        return self.served_model_name or of_file or DEMO


def build(values: Mapping[str, object]) -> Settings:
    """Makes Settings from loosely typed values (strings from flags or the environment are
    converted).

    Raises ConfigurationError, which names the setting.
    """
    known = set(Settings.__struct_fields__)
    for name in values:
        if name not in known:
            why = other_servers.refused().get(other_servers.flag(name))
            raise ConfigurationError(why or unknown(name))
    try:
        built = msgspec.convert(dict(values), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_named(str(error), values)) from None
    if built.policy not in POLICIES and ":" not in built.policy:
        raise ConfigurationError(f"--policy: {none_of(built.policy, POLICIES)}")
    return built


def unknown(name: str) -> str:
    """The error for a name that is no setting, with the setting that it resembles most."""
    names = [*Settings.__struct_fields__, *other_servers.ALIASES, *other_servers.SWITCHES]
    return f"unknown setting {name!r}{did_you_mean(name, names)}"


def _named(text: str, values: Mapping[str, object]) -> str:
    """Turns msgspec's "... - at `$.kv_pages`" into "--kv-pages: ..."; for a value that is no choice
    the text lists the choices, for a value that is no number it says just that."""
    text, found, field = text.partition(" - at `$.")
    if not found:
        return text
    name = field.rstrip("`")
    choices = settings_help()[name].choices
    kind = re.fullmatch(r"Expected `(int|float)(?: \| null)?`, got `\w+`", text)
    reason = none_of(values[name], choices) if choices else text
    reason = no_number(values[name], kind[1]) if kind else reason
    if bound := re.fullmatch(r"Expected `(?:int|float)(?: \| null)?` ([<>]=?) (\S+)", reason):
        words = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
        reason = f"must be {words[bound[1]]} {bound[2]}, not {values[name]}"
    return f"{other_servers.flag(name)}: {reason}"


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings named in `environ`, as text; empty values count as not given."""
    names = {PREFIX + field.upper(): field for field in Settings.__struct_fields__}
    return {names[key]: value for key, value in environ.items() if key in names and value != ""}


def to_environment(settings: Settings) -> dict[str, str]:
    """The environment variables that give a child process the same settings."""
    defaults = Settings()
    changed = {}
    for field in Settings.__struct_fields__:
        value = getattr(settings, field)
        if value != getattr(defaults, field):
            changed[PREFIX + field.upper()] = str(int(value) if isinstance(value, bool) else value)
    return changed


class SettingHelp(NamedTuple):
    """The help of a setting, for the command line and the reference.

    Attributes:
    - kind: str, int, float or bool
    - choices: all values, if they are few; else empty
    - value: placeholder of a flag's value in `--help`, empty for a bool or with choices
    - line: text of `--help`, one line
    - more: text of the reference beside `line`: Markdown, with links relative to docs/
    - unset: meaning of the default, if it is 0 or empty
    - group: title of its group
    - several: whether the flag takes several values, which become one text that shlex takes apart
    """

    kind: type
    choices: tuple[str, ...]
    value: str
    line: str
    more: str
    unset: str
    group: str
    several: bool


@cache
def settings_help() -> dict[str, SettingHelp]:
    """The help by setting, in the order of Settings."""
    found: dict[str, SettingHelp] = {}
    group = ""
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        kind, *_, meta = get_args(hint)
        line, _, more = meta.description.partition("\n\n")
        group = meta.extra["group"] or group
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        found[name] = SettingHelp(
            kind=str if choices else kind,
            choices=choices,
            value=meta.extra["value"],
            line=line,
            more=more,
            unset=meta.extra["unset"],
            group=group,
            several=meta.extra["several"],
        )
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting but `model`; flags that are not given stay out of the
    namespace."""
    defaults = Settings()
    for group, settings in groupby(settings_help().items(), lambda item: item[1].group):
        added = parser.add_argument_group(group)
        for name, setting in settings:
            if name == "model":
                continue
            flag, nothing = other_servers.flag(name), argparse.SUPPRESS
            if setting.kind is bool:
                added.add_argument(flag, action="store_true", default=nothing, help=setting.line)
                continue
            default = getattr(defaults, name)
            shown = f" (default: {default})" if default not in ("", 0) else ""
            metavar = "|".join(setting.choices) or setting.value
            text = setting.line + shown
            if setting.several:
                added.add_argument(
                    flag, metavar=metavar, nargs="+", action=_Words, default=nothing, help=text
                )
            else:
                added.add_argument(flag, metavar=metavar, default=nothing, help=text)
    _add_other_names(parser)


def _add_other_names(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of other servers, which no help shows; docs/reference/other-servers.md lists
    them."""
    nothing = argparse.SUPPRESS
    for name in other_servers.refused():
        # The value is optional: whether they take one does not matter.
        parser.add_argument(name, action=_Refused, nargs="?", dest=nothing, help=nothing)
    for name, setting in other_servers.ALIASES.items():
        if setting != "model":
            flag = other_servers.flag(name)
            parser.add_argument(flag, dest=setting, default=nothing, help=nothing)
    for name, (setting, value) in other_servers.constants().items():
        parser.add_argument(
            other_servers.flag(name), dest=setting, action="store_const", const=value,
            default=nothing, help=nothing,
        )  # fmt: skip


class _Words(argparse.Action):
    """An action that joins several values to one text, which shlex takes apart again."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, shlex.join(map(str, given)))


class _Refused(argparse.Action):
    """The action of a flag that only another server has: the error contains the advice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(other_servers.refused()[str(option_string)])


def parse_flags(arguments: Sequence[str]) -> dict[str, object]:
    """The settings given as flags, by name; argparse ends the process with code 2 for an unknown
    flag."""
    parser = CommandLine()
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def base_url(url: str) -> str:
    """The base URL of a server, without a trailing `/v1`; `http://` is added if there is no scheme.
    Raises ConfigurationError if `url` is not an HTTP URL.
    """
    plain = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    whole = plain if "://" in plain else f"http://{plain}"
    refusal = ConfigurationError(f"{url!r} is no URL of HTTP, such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(whole)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an unbalanced bracket, or a port that is not a number
        raise refusal from None
    if not right:
        raise refusal
    return whole


def without_password(url: str) -> str:
    """A copy of `url` without user and password, for messages that people pass on."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
