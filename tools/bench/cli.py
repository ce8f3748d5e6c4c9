"""The benchmarks, by name. What a command measures stands in its module; how the command line
is read, and what is written, in bench/commands.py.
"""

from __future__ import annotations

from bench.commands import Tool

COMMANDS = {
    "offline": "throughput of a batch of requests through the offline class",
    "formats": "number formats side by side, as a batch and as one stream",
    "llama": "a GGUF file on a CPU, beside llama.cpp, in turns",
    "online": "latency over HTTP under Poisson arrivals or a recorded trace",
    "pipeline": "CPU time per streamed token and stage, with an engine that answers at once",
    "storm": "time between tokens of running streams while long prompts arrive",
    "startup": "from process start to ready and to the first token",
    "compare": "two result files side by side",
}

TOOL = Tool(
    name="bench",
    description="Benchmarks of pipeinfer.",
    commands=COMMANDS,
    schema="pipeinfer-bench/1",
    silent=("compare",),
)
main, parser = TOOL.main, TOOL.parser
