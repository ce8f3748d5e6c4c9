"""The command line of a tool, and its result file.

Each command is a module with `add_arguments` and `run`. A result that has "broken", the promises
that did not hold, is printed, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer import settings as config
from pipeinfer.bench.report import command_output, write_result
from pipeinfer.settings import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tool:
    """A package in tools/.

    Attributes:
    - name: of the package
    - description: what `--help` says first
    - commands: what each does, by the name of its module
    - schema: of its result files
    - silent: commands without a result
    - settings: whether flags that a command does not know are settings of pipeinfer, as in `--dp 2`
    - long: keys, at any depth, of what is written to a result file and not printed
    """

    name: str
    description: str
    commands: Mapping[str, str]
    schema: str
    silent: tuple[str, ...] = ()
    settings: bool = True
    long: tuple[str, ...] = ()

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
        """All commands and their flags."""
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
            write_report(out, self.name, words, metrics, self.schema)
        if "broken" not in metrics:
            return 0
        print(json.dumps(self._short(metrics)))
        for broken in metrics["broken"]:
            print(f"broken: {broken}", file=sys.stderr)
        return 1 if metrics["broken"] else 0

    def _short(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: self._short(one) for name, one in value.items() if name not in self.long}


def write_report(
    path: Path, tool: str, words: Sequence[str], metrics: dict[str, Any], schema: str
) -> None:
    """Writes the result of `python tools/TOOL WORDS` as JSON."""
    command = shlex.join(["python", f"tools/{tool}", *words])
    write_result(path, command, metrics, commit(), schema)


def read_report(path: Path, schema: str) -> dict[str, Any]:
    """A result file. Raises ConfigurationError if it is none of this schema."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(str(error)) from None
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise ConfigurationError(f"{path} is no result of schema {schema}")
    return found


def commit() -> str:
    """The checkout's commit, with "+changes" if files differ from it; "" outside a checkout."""
    name = command_output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changes = command_output("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    return name + ("+changes" if name and changes else "")
