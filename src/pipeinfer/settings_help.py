"""What `--help` says of each setting, in groups: one line each; docs/settings.md says the rest.

Knows the settings by name alone; what they are and their defaults is settings.py's business.
"""

from __future__ import annotations

# {group: {setting: (placeholder of its value, what it does)}}, in the order of docs/settings.md.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "model": {
        "served_model_name": ("NAME", "the model's id in /v1/models; default: MODEL"),
        "revision": ("REV", "branch, tag or commit of a hub id"),
        "chat_template": ("FILE", "a Jinja template, in place of the checkpoint's"),
        "trust_request_chat_template": ("", "let chats bring a template of their own"),
        "control_tokens_in_messages": ("", "let messages spell control tokens, as vLLM does"),
        "tool_parser": ("NAME", "how calls of tools are read: a parser, none; auto: by template"),
        "grammar_backend": ("NAME", "what holds outputs to grammars, or none for nothing"),
        "reasoning_parser": ("NAME", "how thoughts are told apart: the same"),
        "dtype": ("", "auto: float32 on a CPU, else the checkpoint's"),
        "load_format": ("", "dummy: random weights, no weight file is read"),
        "quantization": ("NAME", "auto: as stored; none: plain; fp8: plain weights are rounded"),
        "model_impl": ("", "who builds the model; auto: pipeinfer if it has it, or transformers"),
        "max_model_len": ("N", "tokens of prompt and output; default: what the checkpoint says"),
    },
    "HTTP": {
        "host": ("HOST", "address to listen on"),
        "port": ("N", "port to listen on; 0 takes a free one"),
        "api_key": ("KEY", "what clients must show under /v1"),
        "api_key_file": ("FILE", "a file with that key, or with named keys, read again on SIGHUP"),
        "key_concurrent": ("N", "requests of a key at a time; default: without limit"),
        "key_requests_per_minute": ("N", "requests of a key a minute; default: without limit"),
        "key_tokens_per_minute": ("N", "of prompt and output, of a key; default: without limit"),
        "tls_cert": ("FILE", "serve https with this certificate chain (PEM)"),
        "tls_key": ("FILE", "and this private key (PEM)"),
        "allowed_origins": ("ORIGINS", "web pages that may ask (CORS), with commas between, or *"),
        "max_queue": ("N", "requests that may wait; one more gets 429"),
        "max_queue_tokens": ("N", "prompt tokens that may wait; more get 429; 0: without limit"),
        "max_body_mib": ("N", "a larger body gets 413"),
        "max_prompts": ("N", "prompts of a request; more get 400"),
        "request_timeout": ("SECONDS", "of requests that name no timeout; 0: none"),
        "drain_timeout": ("SECONDS", "that running requests have after SIGTERM or Ctrl-C"),
    },
    "scheduling": {
        "policy": ("NAME", "mixed, prefill-first, decode-first, or module:Class"),
        "max_running": ("N", "requests that run at a time"),
        "max_step_tokens": ("N", "tokens of a step; default: 2,048 on a CPU, 8,192 on a GPU"),
        "mixed_step_tokens": (
            "N",
            "tokens of a step in which requests decode; default: measured on a GPU",
        ),
        "itl_target": ("SECONDS", "longest step beside running streams while prompts wait; 0: any"),
        "ttft_target": ("SECONDS", "that a prompt should wait at most, by longer steps; 0: any"),
        "overlap_depth": ("N", "steps in flight, 1 or 2"),
        "watchdog": ("SECONDS", "without a result after which an engine counts as hung"),
        "seed": ("N", "start of the seeds of requests that bring none"),
    },
    "memory": {
        "cache": ("NAME", "prefix cache: radix, or naive for none"),
        "page_size": ("N", "tokens of a page; default: what the attention backend prefers"),
        "kv_pages": ("N", "pages for keys and values; default: from free memory"),
        "kv_cache_dtype": ("", "of keys and values in pages; auto: the model's; fp8 is fp8_e4m3"),
        "memory_fraction": ("SHARE", "of the free memory that these pages may take"),
    },
    "devices": {
        "device": ("", "auto: a GPU if there is one"),
        "threads": ("N", "torch's threads in an engine; default: what torch chooses"),
        "attention": ("NAME", "torch, flashinfer, fa3, hybrid; auto: the fastest here"),
        "tp": ("N", "engines that share the model, each with a GPU of its own"),
        "dp": ("N", "groups of --tp engines, each with the whole model"),
        "routing": ("", "how a request finds its group"),
        "all_reduce": ("", "how GPUs add up; auto: own kernels where they are faster than NCCL"),
        "enable_expert_parallel": (
            "",
            "each rank of --tp has some experts whole, not a part of all",
        ),
        "cuda_graph_max_batch": ("N", "largest decode step that is a CUDA graph; 0: none"),
        "no_cuda_graph": ("", "launch every step kernel by kernel"),
        "compile": ("", "torch.compile for what no kernel fuses"),
    },
    "running": {
        "topology": ("FILE", "where the stages listen; default: one made for this host"),
        "in_process": ("", "all stages in this process, for debuggers"),
        "log_level": ("", "how much is logged, to stderr"),
        "log_format": ("", "json: one object a line, and a line for each request"),
        "otlp_endpoint": ("URL", "send a trace of each request there, by OTLP over HTTP"),
        "stay_awake": ("", "auto: beside GPUs, where there are cores to spare for it"),
        "record": ("DIR", "record what every stage takes and gives"),
        "record_max_bytes": ("N", "of each recording; default: without limit"),
        "flight_recorder_mib": ("N", "memory for the last minute of each stage; 0: off"),
        "flight_dir": ("DIR", "where that is written when a stage dies of an exception"),
        "profile": ("N", "steps of a torch profiler's trace; default: none"),
        "profile_dir": ("DIR", "where that is written"),
    },
}
