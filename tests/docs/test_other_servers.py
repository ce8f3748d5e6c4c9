"""other_servers.py says of each flag, path and metric of others what is true here."""

from __future__ import annotations

import argparse
import re

import pytest

from docs import other_servers as pages
from pipeinfer import other_names
from pipeinfer import settings as config
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.openapi import ENDPOINTS
from pipeinfer.other_servers import FLAGS, Flag

PATHS = {one.path for one in ENDPOINTS}
OURS = {other_names.flag(name) for name in config.Settings.__struct_fields__}
ALIASES = {other_names.flag(name) for name in (*other_names.ALIASES, *other_names.constants())}


def flags_of(server: str) -> list[Flag]:
    return [flag for flags in FLAGS[server].values() for flag in flags]


@pytest.mark.parametrize("server", FLAGS)
def test_a_flag_of_another_server_is_here_what_is_said_of_it(server):
    found = flags_of(server)
    assert sum(len(flag.theirs) for flag in found) > 60
    for flag in found:
        assert set(flag.ours) <= OURS | {"MODEL"}, flag
        assert bool(flag.ours) == (flag.kind not in ("always", "none")), flag
        assert flag.said or flag.understood, flag
        for name in flag.theirs:
            known = {"same": OURS, "alias": ALIASES | {"--model"}}.get(flag.kind, set())
            assert (name in OURS | ALIASES) == flag.understood, name
            assert not flag.understood or name in known, name


@pytest.mark.parametrize("server", FLAGS)
def test_a_flag_that_is_refused_says_what_to_do_instead(server, capsys):
    parser = argparse.ArgumentParser(usage="", allow_abbrev=False)
    config.add_flags(parser)
    for flag in flags_of(server):
        for name in () if flag.understood else flag.theirs:
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


def test_no_flag_stands_twice_on_a_list():
    for server in FLAGS:
        names = [name for flag in flags_of(server) for name in flag.theirs]
        assert len(set(names)) == len(names)


def test_every_name_that_is_understood_is_said():
    said = {name for server in FLAGS for flag in flags_of(server) for name in flag.theirs}
    assert said >= ALIASES


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
