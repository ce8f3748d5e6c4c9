"""`pipeinfer replay`: each of its commands is a module with `add_arguments` and `run`.

Knows no trace. What the parser of `replay run` does not know is taken as a setting of pipeinfer
that wins over the recorded one, so that `--device cpu` or `--overlap-depth 1` work there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence

from pipeinfer import settings as config
from pipeinfer.command_line import CommandLine
from pipeinfer.replay.codes import CannotReplay

COMMANDS = {
    "run": "a fresh stage gets the recorded inputs, and must give the recorded outputs",
    "serve": "plays a recorded stage on the bus of a running pipeline",
    "show": "the messages of a trace as a table",
    "stats": "counts, bytes and latencies of traces",
    "diff": "where two traces of the same stage first differ",
    "timeline": "traces as a timeline: a page for the browser, or a file for Perfetto",
    "session": "records a session of mixed requests, to have something to replay",
}
TAKES_SETTINGS = ("run", "session")


def parser(known: Collection[str] = tuple(COMMANDS)) -> CommandLine:
    """The words of the command line, with the flags of the `known` commands."""
    command_line = CommandLine(
        prog="pipeinfer replay",
        description="Replays what stages recorded: one stage alone, every message in its place.",
    )
    commands = command_line.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, help=text, description=description)
        if name in known:
            importlib.import_module(f"pipeinfer.replay.{name}").add_arguments(command)
    return command_line


def run(arguments: Sequence[str]) -> int:
    """The exit code: see replay/codes.py. ConfigurationError for a setting that cannot be."""
    command_line = parser(arguments[:1])
    options, rest = command_line.parse_known_args(arguments)
    module = importlib.import_module(f"pipeinfer.replay.{options.command}")
    try:
        if options.command in TAKES_SETTINGS:
            return module.run(options, config.parse_flags(rest))
        if rest:
            command_line.error(f"unknown flag or argument {rest[0]}")
        return module.run(options)
    except CannotReplay as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
