"""The command line of the benchmarks: each command is a module with `add_arguments` and `run`.

Knows no measurement. What a command's parser does not know is taken as a setting of pipeinfer, so
`--threads 2` or `--overlap-depth 1` work everywhere.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import report
from pipeinfer import settings as config
from pipeinfer.settings import ConfigurationError

COMMANDS = {
    "offline": "throughput of a batch of requests through the offline class",
    "llama": "a GGUF file on a CPU, beside llama.cpp, in turns",
    "online": "latency over HTTP under Poisson arrivals or a recorded trace",
    "pipeline": "CPU time per streamed token and stage, with an engine that answers at once",
    "storm": "time between tokens of running streams while long prompts arrive",
    "record": "what recordings and the flight recorder cost",
    "snapshot": "how long a stage's loop stops when its state is taken",
    "startup": "from process start to ready and to the first token",
    "heartbeats": "what many stages cost those who hear them all",
    "compare": "two result files side by side",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for wrong usage, or what the command returns."""
    parser = argparse.ArgumentParser(
        prog="python tools/bench",
        description="Benchmarks of pipeinfer. Unknown flags are settings of `pipeinfer serve`.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(f"bench.{name}").add_arguments(command)
        if name != "compare":
            command.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(words)
    module = importlib.import_module(f"bench.{options.command}")
    try:
        settings = config.parse_flags(rest)
        metrics = module.run(options, settings)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if getattr(options, "json", None) is not None:
        report.write(options.json, words, metrics)
    return 0
