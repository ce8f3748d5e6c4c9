"""The command line: each command is a module with `add_arguments` and `run`.

A result has "broken", the promises that did not hold; the exit code is 1 if there are any. What a
command's parser does not know is taken as a setting of the server, so `--tp 2` works everywhere.
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

SCHEMA = "pipeinfer-chaos/1"
COMMANDS = {
    "kills": "stages are killed one after another under streams; no text may change",
    "storm": "harms of many kinds, drawn from a seed, under streams; no text may change",
    "hostile": "one client sends the worst it may, again and again; eight streams must go on",
    "overload": "many more requests a second than can be served; the rest is refused at once",
    "watch": "what `hostile` runs beside itself: eight clients that say when their pieces come",
    "attack": "what `hostile` runs beside itself: one client that sends one case again and again",
    "offer": "what `overload` runs beside itself: sends requests at their time, whatever happens",
    "links": "what `storm` runs beside itself: a proxy between stages, which is cut and slowed",
    "pester": "what `storm` runs beside itself: a few hostile requests a second",
}
PARTS = (
    "watch",
    "attack",
    "offer",
    "links",
    "pester",
)  # of other commands; they print lines for them


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a promise was broken, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python tools/chaos",
        description="Treats a server badly. Unknown flags are settings of `pipeinfer serve`.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(f"chaos.{name}").add_arguments(command)
        command.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(words)
    module = importlib.import_module(f"chaos.{options.command}")
    try:
        metrics = module.run(options, config.parse_flags(rest))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.command in PARTS:
        return 0
    print(json.dumps(metrics))
    if options.json is not None:
        report.write(options.json, words, metrics, "tools/chaos", SCHEMA)
    for broken in metrics["broken"]:
        print(f"broken: {broken}", file=sys.stderr)
    return 1 if metrics["broken"] else 0
