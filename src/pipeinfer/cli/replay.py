"""`pipeinfer replay`: each of its commands is a module with `add_arguments` and `run`.

Knows no trace. What the parser of `replay run` does not know is taken as a setting of pipeinfer
that wins over the recorded one, so that `--device cpu` or `--overlap-depth 1` work there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pipeinfer import settings as config
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


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = argparse.ArgumentParser(
        prog="pipeinfer replay",
        description="Replays what stages recorded: one stage alone, every message in its place.",
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        said = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, help=text, description=said, allow_abbrev=False)
        importlib.import_module(f"pipeinfer.replay.{name}").add_arguments(command)
    return made


def run(arguments: Sequence[str]) -> int:
    """The exit code: see replay/codes.py. ConfigurationError for a setting that cannot be."""
    made = parser()
    options, rest = made.parse_known_args(arguments)
    module = importlib.import_module(f"pipeinfer.replay.{options.command}")
    try:
        if options.command in TAKES_SETTINGS:
            return module.run(options, config.parse_flags(rest))
        if rest:
            made.error(f"unrecognized arguments: {' '.join(rest)}")
        return module.run(options)
    except CannotReplay as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # a pager that was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
