"""The command line: each command is a module with `add_arguments` and `run`.

Knows no simulation; writes what a command returns as JSON where that is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import report
from pipeinfer.settings import ConfigurationError

SCHEMA = "pipeinfer-simulation/1"
COMMANDS = {
    "run": "throughput, latency, hits and balance of a cluster for each routing policy",
    "against": "a recorded run beside the same requests simulated",
    "targets": "how long steps beside streams may take, the more prompts wait",
    "fit": "a step-time model from recordings of a real engine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python tools/simulate",
        description="Clusters in virtual time: the real router and scheduler, modelled engines.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(f"simulate.{name}").add_arguments(command)
        command.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    try:
        metrics = importlib.import_module(f"simulate.{options.command}").run(options)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        report.write(options.json, words, metrics, "tools/simulate", SCHEMA)
    return 0
