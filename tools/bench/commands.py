"""The command line of a tool: each command is a module with `add_arguments` and `run`.

A result that has "broken", the promises that did not hold, is printed, and the exit code is 1 if
there are any. What a command's parser does not know is a setting of pipeinfer: `--dp 2` works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from pipeinfer import settings as config
from pipeinfer.settings import ConfigurationError


@dataclass(frozen=True)
class Tool:
    """What is in tools/`name`. commands: by name, what they do. silent: those that have no result,
    such as parts of others. settings: whether unknown flags are some."""

    name: str
    description: str
    commands: Mapping[str, str]
    schema: str
    silent: tuple[str, ...] = ()
    settings: bool = True

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """The exit code: 0, 1 if a promise was broken, 2 for wrong usage."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        options, rest = self.parser().parse_known_args(words)
        if rest and not self.settings:
            self.parser().error(f"unrecognized arguments: {' '.join(rest)}")
        module = importlib.import_module(f"{self.name}.{options.command}")
        try:
            metrics = module.run(options, config.parse_flags(rest))
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0 if options.command in self.silent else self._show(words, options.json, metrics)

    def parser(self) -> argparse.ArgumentParser:
        """The words of the command line, of all commands."""
        unknown = " Unknown flags are settings of `pipeinfer serve`." if self.settings else ""
        parser = argparse.ArgumentParser(
            prog=f"python tools/{self.name}", description=self.description + unknown
        )
        commands = parser.add_subparsers(dest="command", required=True)
        for name, text in self.commands.items():
            command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
            importlib.import_module(f"{self.name}.{name}").add_arguments(command)
            if name not in self.silent:
                said = "write the result there"
                command.add_argument("--json", metavar="OUT", type=Path, help=said)
        return parser

    def _show(self, words: Sequence[str], out: Path | None, metrics: dict[str, Any]) -> int:
        if out is not None:
            report.write(out, words, metrics, f"tools/{self.name}", self.schema)
        if "broken" not in metrics:
            return 0
        print(json.dumps(metrics))
        for broken in metrics["broken"]:
            print(f"broken: {broken}", file=sys.stderr)
        return 1 if metrics["broken"] else 0
