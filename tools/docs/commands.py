"""The page of all commands: from the parsers of `pipeinfer` and of the tools of a checkout.

Of each it says what `--help` says beside the settings, which have a page of their own.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from docs.markdown import bullets, prose
from docs.markdown import page as page_of
from pipeinfer.cli.main import COMMANDS, command_parser
from pipeinfer.runtime import entry
from pipeinfer.settings import settings_help

INTRODUCTION = """`pipeinfer COMMAND --help` says the same. Exit codes: 0 where a command ended in \
order, 2 for wrong usage or configuration, 1 for everything else. `python -m pipeinfer` is the \
same as `pipeinfer`."""
TOOLS_SAID = """These run from a checkout: `python tools/NAME COMMAND`. What stands here is what \
each knows beside `--help`."""
TAKES_SETTINGS = "All [settings](settings.md) are flags, too."
SETTING_GROUPS = {setting.group for setting in settings_help().values()}
TOOLS = ("bench", "simulate", "chaos", "soak", "fuzz", "same_tokens", "docs")


def page() -> str:
    """docs/reference/commands.md."""
    return page_of(
        "Commands", INTRODUCTION, *_commands(), "## Tools of a checkout", TOOLS_SAID, *_tools()
    )


def _commands() -> Iterator[str]:
    for name in COMMANDS:
        yield f"## pipeinfer {name}"
        yield from _parser(command_parser(name))
    yield "## A stage alone"
    yield "`python stages/STAGE.py`, or `python -m pipeinfer.runtime STAGE`."
    yield from _parser(entry.parser("STAGE"))


def _tools() -> Iterator[str]:
    for name in TOOLS:
        yield f"### tools/{name}"
        yield from _parser(_tool_parser(name), "####")


def _tool_parser(name: str) -> argparse.ArgumentParser:
    tool = importlib.import_module(name)
    return (
        tool.TOOL.parser()
        if hasattr(tool, "TOOL")
        else importlib.import_module(f"{name}.cli").parser()
    )


def _parser(parser: argparse.ArgumentParser, head: str = "###") -> Iterator[str]:
    """What a parser says; each command of its own below a heading that begins with `head`."""
    yield prose(parser.description or "")
    groups = parser._action_groups
    yield bullets(
        line
        for group in groups
        if group.title not in SETTING_GROUPS
        for action in group._group_actions
        for line in _action(action, parser)
    )
    if any(group.title in SETTING_GROUPS for group in groups):
        yield TAKES_SETTINGS
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{head} {parser.prog.removeprefix('python ')} {name}"
                yield from _parser(command)


def _action(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    hidden = argparse.SUPPRESS in (action.help, action.dest)
    if hidden or isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return
    value = action.metavar or ("|".join(map(str, action.choices or ())) or action.dest.upper())
    name = action.option_strings[0] if action.option_strings else str(value)
    if action.option_strings and action.nargs != 0:
        name += f" {value}"
    said = (action.help or "") % {**vars(action), "prog": parser.prog}
    yield f"`{name}`: {said}" if said else f"`{name}`"
