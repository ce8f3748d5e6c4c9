"""The parser of all command lines: errors are one line, and --help shows the flags that matter
most. Also the texts of errors for an unknown name or a text that is no number, and counts in words.

Knows no command, no setting and no names of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

WRONG_USAGE = 2  # exit code of a wrong command line
NO_NUMBER = re.compile(r"invalid (int|float) value: '(.*)'$", re.DOTALL)  # argparse's words


def counted(count: float, noun: str) -> str:
    """A whole number of things, with their noun: "1 stream", "1,024 streams"."""
    return f"{count:,.0f} {noun}" if round(count) == 1 else f"{count:,.0f} {noun}s"


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors end the process with code 2 and one line, which names the flag or the
    choice that was perhaps meant. Flags are not abbreviated.

    - essential: flags that `--help` shows, in this order; `--help-all` shows all. Without them both
      show all
    """

    def __init__(
        self,
        prog: str | None = None,
        description: str = "",
        epilog: str = "",
        usage: str | None = None,
        essential: Sequence[str] = (),
    ) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, usage=usage, allow_abbrev=False
        )
        self._essential = tuple(essential)
        help_text = "show all flags and exit"
        self.add_argument("--help-all", action=_HelpAll, text=self.format_help_all, help=help_text)

    def parse_args(  # type: ignore[override]  (the overloads of typeshed say the same)
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        # Before anything else: argparse would take the value of an unknown flag for another
        # argument.
        for flag in _flags(words):
            if flag not in self._option_string_actions:
                self.error(self._unknown(flag))
        options, left = self.parse_known_args(words, namespace or argparse.Namespace())
        # argparse gives a list argument only words that stand together.
        many = [one for one in self._get_positional_actions() if one.nargs in ("*", "+")]
        while many and left and not left[0].startswith("-"):
            getattr(options, many[0].dest).append(left.pop(0))
        if left:
            flag = f"-{left[0]}"
            meant = f"; did you mean {flag}?" if flag in self._option_string_actions else ""
            self.error(f"unexpected argument {left[0]!r}{meant}")
        return options

    def error(self, message: str) -> NoReturn:
        """Ends the process with `message` in one line; argparse's own messages are rephrased."""
        text = message.removeprefix("argument ").replace("allowed with argument ", "allowed with ")
        missing = "the following arguments are required: "
        if text.startswith(missing):
            text = self._missing(text.removeprefix(missing))
        text = NO_NUMBER.sub(lambda found: no_number(found[2], found[1]), text)
        more = "" if text.endswith(("?", ".")) else f" (`{self.prog} --help` says more)"
        self.exit(WRONG_USAGE, f"error: {' '.join(text.split())}{more}\n")

    def _missing(self, names: str) -> str:
        """The error for arguments that must be given, with the choices of a single one."""
        actions = self._get_positional_actions()
        choices = next((one.choices for one in actions if names in (one.dest, one.metavar)), None)
        return f"{names} is missing" + (f": {', '.join(map(str, choices))}" if choices else "")

    def format_help(self) -> str:
        """The text of `--help`."""
        if not self._essential:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self._short_usage(), [], [])
        formatter.add_text(self.description)
        formatter.start_section(None)
        formatter.add_arguments(self._get_positional_actions())
        formatter.end_section()
        formatter.start_section("flags that matter most")
        known = self._option_string_actions
        shown = [known[flag] for flag in self._essential]
        formatter.add_arguments([*shown, known["--help-all"]])
        formatter.end_section()
        formatter.add_text(self.epilog)
        flags = sum(
            bool(action.option_strings) and action.help != argparse.SUPPRESS
            for action in self._actions
        )
        formatter.add_text(f"`{self.prog} --help-all` shows all {flags} flags.")
        return formatter.format_help()

    def format_help_all(self) -> str:
        """The text of `--help-all`: every flag, in its group."""
        usage = self.usage
        try:
            self.usage = self._short_usage() if self._essential else usage
            return super().format_help()
        finally:
            self.usage = usage

    def _short_usage(self) -> str:
        """The usage line without the flags, which would fill a screen."""
        words = [
            "%(prog)s",
            *(_placeholder(one) for one in self._get_positional_actions()),
            "[FLAG ...]",
        ]
        return self.usage or " ".join(words)

    def _unknown(self, flag: str) -> str:
        known = [
            name
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and action.dest != argparse.SUPPRESS
        ]
        return f"unknown flag {flag}{did_you_mean(flag, known, quote='')}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, none_of(value, action.choices))


class _HelpAll(argparse._HelpAction):
    """Prints the text of `--help-all`, and ends the process."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, text: Callable[[], str], help: str
    ) -> None:
        super().__init__(option_strings, dest=dest, default=argparse.SUPPRESS, help=help)
        self._text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        sys.stdout.write(self._text())
        parser.exit()


def _flags(words: Sequence[str]) -> Iterator[str]:
    """Yields those of `words` that argparse takes for flags, without values."""
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if flag.startswith("--") and " " not in flag:
            yield flag


def _placeholder(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest.upper())
    forms = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}
    return forms.get(str(action.nargs), name)


def none_of(name: object, names: Iterable[object]) -> str:
    """The text of an error, "'mixd' is none of mixed, fcfs; did you mean 'mixed'?"."""
    known = [str(one) for one in names]
    return f"{name!r} is none of {', '.join(known)}{did_you_mean(str(name), known)}"


def no_number(text: object, kind: str) -> str:
    """The text of an error, "'many' is no whole number"; `kind`: int or float."""
    return f"{text!r:.60} is no {'whole number' if kind == 'int' else 'number'}"


def did_you_mean(name: str, names: Iterable[str], quote: str = "'") -> str:
    """The end of an error, "; did you mean 'mixed'?", or "" if no name is close. If `name` begins a
    single one of the names, that one is meant."""
    import difflib  # only here: the command line's start pays for every import

    by_lower = {known.lower(): known for known in names}
    begun = [known for known in by_lower if name and known.startswith(name.lower())]
    close = begun if len(begun) == 1 else difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {quote}{by_lower[close[0]]}{quote}?" if close else ""
