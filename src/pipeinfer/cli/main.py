"""The command `pipeinfer`: finds the subcommand and turns its errors into exit codes.

Knows the names of the subcommands; each is imported only when it is called. What a subcommand's
module imports is paid for by its `--help`, so that heavy modules are imported by its `run` alone.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeinfer.command_line import CommandLine, did_you_mean
from pipeinfer.runtime.logs import discard_unread, open_streams
from pipeinfer.settings import ConfigurationError
from pipeinfer.version import __version__

# Each subcommand's module, which has `run_COMMAND(arguments)` and `COMMAND_parser()`; and its help.
COMMANDS = {
    "serve": ("pipeinfer.cli.serve", "serve a model over HTTP"),
    "generate": ("pipeinfer.cli.generate", "complete prompts on the terminal"),
    "chat": ("pipeinfer.cli.generate", "talk to a model on the terminal"),
    "record": ("pipeinfer.cli.operate", "record what stages of a running server take and give"),
    "replay": ("pipeinfer.cli.operate", "play again what stages recorded"),
    "keys": ("pipeinfer.cli.operate", "make keys for stages on several hosts"),
    "api-key": ("pipeinfer.cli.operate", "make an API key for a client"),
    "topology": ("pipeinfer.cli.operate", "check and draw which stage runs where"),
    "doctor": ("pipeinfer.cli.serve", "say whether a model could be served on this host"),
    "bench": ("pipeinfer.cli.bench", "measure a server's latency and throughput over HTTP"),
    "top": ("pipeinfer.cli.top", "show what the stages of a running server do"),
    "swap": ("pipeinfer.cli.operate", "put another process in the place of a running stage"),
}
WRONG_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 ended in order, 2 wrong usage or configuration, 1 everything else; 141, as a
    shell reports SIGPIPE, if the reader of the output has gone."""
    open_streams()
    with _until_pipe_closed():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    command = parser().parse_args(arguments[:1]).command
    if command is None:
        print(parser().format_help(), end="", file=sys.stderr)
        return WRONG_USAGE
    if command not in COMMANDS:
        print(f"error: unknown command {command!r}{_suggestion(command)}", file=sys.stderr)
        return WRONG_USAGE
    try:
        _check_working_directory()
        return _function(command, "run_{}")(arguments[1:])
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt:
        return 1


def parser() -> CommandLine:
    """The words of the command line, up to the subcommand."""
    command_line = _Pipeinfer(
        prog="pipeinfer",
        description="An inference server as a pipeline of processes.",
        usage="pipeinfer COMMAND [FLAG ...]",
    )
    command_line.add_argument("--version", action="version", version=f"pipeinfer {__version__}")
    command_line.formatter_class = argparse.RawDescriptionHelpFormatter
    listing = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    command_line.epilog = f"commands:\n{listing}\n\n`pipeinfer COMMAND --help` says more."
    command_line.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return command_line


class _Pipeinfer(CommandLine):
    """`--help-all` shows the flags of all subcommands."""

    def format_help_all(self) -> str:
        parsers = [command_parser(command) for command in COMMANDS]
        texts = [self.format_help(), *(one.format_help_all() for one in parsers)]
        return f"\n{'-' * 80}\n\n".join(texts)


def command_parser(command: str) -> CommandLine:
    """The parser of a subcommand."""
    return _function(command, "{}_parser")()


def _function(command: str, name: str) -> Callable[..., Any]:
    """`run_record` or `record_parser` of the module that has the subcommand."""
    module = importlib.import_module(COMMANDS[command][0])
    return getattr(module, name.format(command.replace("-", "_")))


def _suggestion(command: str) -> str:
    """The end of the error about an unknown subcommand: what is close to it, or all there are."""
    known = [*COMMANDS, "--help", "--version"]
    return did_you_mean(command, known) or f": there are {', '.join(COMMANDS)}"


@contextmanager
def _until_pipe_closed() -> Iterator[None]:
    """Ends the process quietly once the reader of its output has gone: `pipeinfer doctor | head`.
    What a command has opened is closed before."""
    try:
        try:
            yield
        finally:
            for output in (sys.stdout, sys.stderr):
                output.flush()  # here, and not when it is too late to say how this ended
    except BrokenPipeError:
        if not discard_unread():
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None


def _check_working_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        message = "the working directory does not exist any more: change to one that does"
        raise ConfigurationError(message) from None
