"""Measures pipeinfer: throughput, latency, start-up, and what each stage costs.

Run it as `python tools/bench COMMAND`; docs/benchmarks.md says what each number means.
"""

from harness.command_line import Tool
from pipeinfer.bench.report import SCHEMA

TOOL = Tool(
    name="bench",
    description="Benchmarks of pipeinfer.",
    commands={
        "offline": "throughput of a batch of requests through the offline class",
        "formats": "number formats side by side, as a batch and as one stream",
        "llama": "a GGUF file on a CPU, beside llama.cpp, in turns",
        "online": "latency over HTTP under Poisson arrivals or a recorded trace",
        "pipeline": "CPU time per streamed token and stage, with an engine that answers at once",
        "storm": "time between tokens of running streams while long prompts arrive",
        "startup": "from process start to ready and to the first token",
        "drafts": "one stream with speculative decoding and without, by kind of text",
        "vectors": "vectors of prompts beside one token of each, in turns",
        "sleep": "seconds to sleep and to wake up beside those of a start, and memory of the GPU",
        "takeover": "engines killed under streams: what is computed again, and how long it takes",
        "lora": "adapters loaded and unloaded under streams: what streams feel, and what stays",
        "compare": "two result files side by side",
    },
    schema=SCHEMA,
    silent=("compare",),
)
