"""The command line: each command is a module with `add_arguments` and `run`.

The result of `run` has "broken", the promises that did not hold; the exit code is 1 if there are
any. What its parser does not know is taken as a setting of the server, so `--dp 2` works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import report
from pipeinfer import settings as config
from pipeinfer.settings import ConfigurationError

SCHEMA = "pipeinfer-soak/1"
COMMANDS = {
    "run": "starts a server, asks it for much, and looks for what grows, stays or is miscounted",
    "plot": "draws the samples of a run",
    "clients": "what `run` runs beside itself: clients that send their share of the requests",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a promise was broken, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python tools/soak",
        description="A long mixed load. Unknown flags of `run` are settings of `pipeinfer serve`.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(f"soak.{name}").add_arguments(command)
        if name == "run":
            command.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(words)
    module = importlib.import_module(f"soak.{options.command}")
    try:
        metrics = module.run(options, config.parse_flags(rest))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.command != "run":
        return 0
    print(json.dumps(metrics))
    if options.json is not None:
        report.write(options.json, words, metrics, "tools/soak", SCHEMA)
    for broken in metrics["broken"]:
        print(f"broken: {broken}", file=sys.stderr)
    return 1 if metrics["broken"] else 0
