"""What is said of flags, paths and metrics of other servers is true here."""

from __future__ import annotations

import argparse
import re

import pytest

from docs import other_servers as pages
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
SERVERS = list(pages.UNDERSTOOD)


def understood(server: str) -> list[pages.Row]:
    return [row for rows in pages.UNDERSTOOD[server].values() for row in rows]


def refused(server: str) -> dict[str, RefusedFlag]:
    flags = [flag for of_topic in REFUSED.values() for flag in of_topic]
    return {name: flag for flag in flags for name in flag.names[server]}


@pytest.mark.parametrize("server", SERVERS)
def test_a_flag_of_another_server_is_here_what_is_said_of_it(server):
    for row in understood(server):
        assert set(row.ours) <= OURS | {"MODEL"}, row
        known = OURS if row.theirs == row.ours else ALIASES | {"--model"}
        assert set(row.theirs) <= known, row
    for name, flag in refused(server).items():
        assert set(flag.ours) <= OURS, flag
        assert bool(flag.ours) == (flag.kind == "instead") and flag.said, flag
        assert name not in OURS | ALIASES, name
    assert len(understood(server)) + len(refused(server)) > 60


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
    for row in pages.VARIABLES:
        assert set(row.ours) <= ours and not set(row.theirs) & ours, row
        assert row.ours or row.said, row


def test_an_endpoint_is_here_what_is_said_of_it():
    assert len(pages.ENDPOINTS) > 15
    for row in pages.ENDPOINTS:
        assert set(row.ours) <= PATHS, row
        assert row.theirs == row.ours or not set(row.theirs) & PATHS, row
        assert row.ours or row.said, row


def test_metrics_in_place_of_others_exist():
    exposed = Metrics(Health([])).exposition("")[0].decode()
    real = set(re.findall(r"^# TYPE (\w+)", exposed, re.M))
    ours = [name for row in pages.METRICS for name in row.ours]
    assert len(ours) >= 10 and set(ours) <= real
    for row in pages.METRICS:
        assert all(name.startswith(("vllm:", "sglang:")) for name in row.theirs), row
