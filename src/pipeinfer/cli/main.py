"""The command `pipeinfer`: finds the subcommand and turns its errors into exit codes.

Knows the names of the subcommands; each is imported only when it is called.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.settings import ConfigurationError
from pipeinfer.version import __version__

COMMANDS = {
    "serve": ("pipeinfer.cli.serve", "serve a model over HTTP"),
    "generate": ("pipeinfer.cli.generate", "complete prompts on the terminal"),
    "record": ("pipeinfer.cli.record", "record what stages of a running server take and give"),
    "replay": ("pipeinfer.cli.replay", "play again what stages recorded"),
    "chat": ("pipeinfer.cli.chat", "talk to a model on the terminal"),
    "keys": ("pipeinfer.cli.keys", "make keys for stages on several hosts"),
    "api-key": ("pipeinfer.cli.api_key", "make an API key for a client"),
    "topology": ("pipeinfer.cli.topology", "check and draw which stage runs where"),
    "doctor": ("pipeinfer.cli.doctor", "say whether a model could be served on this host"),
    "bench": ("pipeinfer.cli.bench", "measure a server's latency and throughput over HTTP"),
    "top": ("pipeinfer.cli.top", "show what the stages of a running server do"),
    "swap": ("pipeinfer.cli.swap", "put another process in the place of a running stage"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 ended in order, 2 wrong usage or configuration, 1 everything else."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="pipeinfer", description="An inference server as a pipeline of processes."
    )
    parser.add_argument("--version", action="version", version=f"pipeinfer {__version__}")
    listing = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"commands:\n{listing}\n\n`pipeinfer COMMAND --help` says more."
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    options = parser.parse_args(arguments[:1])
    module, _ = COMMANDS[options.command]
    try:
        _check_here()
        return importlib.import_module(module).run(arguments[1:])
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1


def _check_here() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        message = "the working directory does not exist any more: change to one that does"
        raise ConfigurationError(message) from None
