"""The page of all settings: from Settings and settings_help.py.

Each has a heading that other pages link: its flag without dashes in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docs.markdown import bullets, codes, sentence
from docs.markdown import page as page_of
from pipeinfer import other_names
from pipeinfer.settings import PREFIX, Settings, flag_types
from pipeinfer.settings_help import GROUPS, MODEL, SettingHelp

INTRODUCTION = """Each setting is

- a flag of `pipeinfer serve`, `generate`, `chat` and `doctor`, and of every stage: \
`--kv-pages 4000`;
- an environment variable: `PIPEINFER_KV_PAGES=4000`; an empty value counts as not given;
- a key of the table `[settings]` of a [topology file](../topology.md): `kv_pages = 4000`;
- a keyword of `LLM(...)` and `AsyncLLM(...)`: `kv_pages=4000`.

A flag goes before the environment, the environment before the topology file, the topology file \
before the default. A wrong value ends the process with code 2 and one line that names the flag."""


def page() -> str:
    """docs/reference/settings.md."""
    return page_of("Settings", INTRODUCTION, *_parts())


def _parts() -> Iterator[str]:
    yield "## Model"
    yield from _setting("model", MODEL)
    for group, settings in GROUPS.items():
        if group != "model":
            yield f"## {group[0].upper()}{group[1:]}"
        for name, told in settings.items():
            yield from _setting(name, told)


def _setting(name: str, told: SettingHelp) -> Iterator[str]:
    yield f"### {name.replace('_', '-')}"
    line = told.line.partition("; default: ")[0]
    yield sentence(re.sub(r"(^|; )(\w+)(?=: )", r"\1`\2`", line))
    yield _from_here(bullets(_facts(name, told)))
    yield _from_here(told.more)


def _from_here(text: str) -> str:
    """Links to other pages, which code has relative to docs/."""
    return re.sub(r"\]\((?!#)", "](../", text)


def _facts(name: str, told: SettingHelp) -> Iterator[str]:
    kind, choices = flag_types()[name]
    if name == "model":
        yield "Argument: `MODEL`"
    else:
        value = "" if kind is bool else f" {told.value or 'VALUE'}"
        yield f"Flag: `{other_names.flag(name)}{value}`"
    if choices:
        yield f"Values: {codes(choices)}"
    default = getattr(Settings(), name)
    shown = f"`{default}`" if default or not told.unset else told.unset
    off = "off: " if kind is bool else ""
    yield f"Default: {off}{shown}"
    yield f"Environment: `{PREFIX}{name.upper()}`"
    yield f"Topology file and Python: `{name}`"
