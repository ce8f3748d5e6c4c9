"""What is said of flags, paths and metrics of other servers is true here."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeinfer import other_servers
from pipeinfer import settings as config
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.openapi import ENDPOINTS
from pipeinfer.other_servers import REFUSED, RefusedFlag

PATHS = {one.path for one in ENDPOINTS}
OURS = {other_servers.flag(name) for name in config.Settings.__struct_fields__}
KNOWN = (*other_servers.ALIASES, *other_servers.constants())
ALIASES = {other_servers.flag(name) for name in KNOWN}
SERVERS = ["vLLM", "SGLang"]
PAGE = (Path(__file__).parents[2] / "docs/reference/other-servers.md").read_text()


class Row(NamedTuple):
    """A row of a table of the page. kind: only of flags."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    kind: str
    said: str


def rows(title: str) -> list[Row]:
    """Of the table below the heading `title`."""
    section = PAGE.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    found = []
    for line in lines:
        theirs, ours, *kind, said = line.removeprefix("| ").removesuffix(" |").split(" | ")
        names = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in (theirs, ours))
        found.append(Row(*names, "".join(kind), said))
    return found


def understood(server: str) -> list[Row]:
    return [
        row
        for topic in REFUSED
        for row in rows(f"{server}: {topic}")
        if row.kind in ("same", "alias")
    ]


def refused(server: str) -> dict[str, RefusedFlag]:
    flags = [flag for of_topic in REFUSED.values() for flag in of_topic]
    return {name: flag for flag in flags for name in flag.names[server]}


@pytest.mark.parametrize("server", SERVERS)
def test_a_flag_of_another_server_is_here_what_is_said_of_it(server):
    for row in understood(server):
        assert (row.kind == "same") == (row.theirs == row.ours), row
        assert set(row.ours) <= OURS | {"MODEL"}, row
        known = OURS if row.theirs == row.ours else ALIASES | {"--model"}
        assert set(row.theirs) <= known, row
    for name, flag in refused(server).items():
        assert set(flag.ours) <= OURS, flag
        assert bool(flag.ours) == (flag.kind == "instead") and flag.advice, flag
        assert name not in OURS | ALIASES, name
    assert len(understood(server)) + len(refused(server)) > 60


@pytest.mark.parametrize("server", SERVERS)
def test_every_flag_that_is_refused_stands_on_the_page(server):
    """With the words of its error; a new one needs a row of its own."""
    for topic, flags in REFUSED.items():
        on_page = [row for row in rows(f"{server}: {topic}") if row.kind not in ("same", "alias")]
        assert on_page == [
            Row(flag.names[server], flag.ours, flag.kind, flag.advice)
            for flag in flags
            if flag.names[server]
        ]


@pytest.mark.parametrize("server", SERVERS)
def test_a_flag_that_is_refused_says_what_to_do_instead(server, capsys):
    parser = argparse.ArgumentParser(usage="", allow_abbrev=False)
    config.add_flags(parser)
    for name, flag in refused(server).items():
        for words in ([name], [name, "4"], [f"{name}=4"]):
            with pytest.raises(SystemExit, match="2"):
                parser.parse_args(words)
            said = capsys.readouterr().err
            assert f"error: {name} is a flag of" in said and server in said
            assert all(ours in said for ours in flag.ours)


def test_a_keyword_of_another_server_says_what_to_do_instead():
    with pytest.raises(config.ConfigurationError, match="--swap-space is a flag of vLLM, not"):
        config.build({"swap_space": 4})
    with pytest.raises(config.ConfigurationError, match="unknown setting 'swap_spice'"):
        config.build({"swap_spice": 4})


@pytest.mark.parametrize("server", SERVERS)
def test_no_flag_stands_twice_on_a_list(server):
    flags = [flag for of_topic in REFUSED.values() for flag in of_topic]
    names = [name for flag in flags for name in flag.names[server]]
    names += [name for row in understood(server) for name in row.theirs]
    assert len(set(names)) == len(names)


def test_every_name_that_is_understood_is_said():
    assert {
        name for server in SERVERS for row in understood(server) for name in row.theirs
    } >= ALIASES


def test_a_variable_of_another_server_has_its_counterpart():
    ours = {f"{config.PREFIX}{name.upper()}" for name in config.Settings.__struct_fields__}
    for row in rows("Environment variables"):
        assert set(row.ours) <= ours and not set(row.theirs) & ours, row
        assert row.ours or row.said, row


def test_an_endpoint_is_here_what_is_said_of_it():
    table = rows("Endpoints")
    assert len(table) > 15
    for row in table:
        assert set(row.ours) <= PATHS, row
        assert row.theirs == row.ours or not set(row.theirs) & PATHS, row
        assert row.ours or row.said, row


def test_metrics_in_place_of_others_exist():
    exposed = Metrics(Health([])).exposition("")[0].decode()
    real = set(re.findall(r"^# TYPE (\w+)", exposed, re.M))
    ours = [name for row in rows("Metrics") for name in row.ours]
    assert len(ours) >= 10 and set(ours) <= real
    for row in rows("Metrics"):
        assert all(name.startswith(("vllm:", "sglang:")) for name in row.theirs), row
