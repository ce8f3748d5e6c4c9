"""docs/migrating.md says of each flag, field, endpoint and metric of others what is true here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeinfer import other_names
from pipeinfer import settings as config
from pipeinfer.gateway.foreign_fields import HARMLESS, REFUSED
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.openapi import ENDPOINTS
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
PATHS = {one.path for one in ENDPOINTS}
UNDERSTOOD = ("alias", "the same", "both work")  # so begins what is said of such a flag
OURS = {other_names.flag(name) for name in config.Settings.__struct_fields__}
KNOWN = OURS | {other_names.flag(name) for name in (*other_names.ALIASES, *other_names.constants())}


def rows(heading: str) -> list[list[str]]:
    """Cells of all tables of a section, without heads."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.M)
    found = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in found if "---" not in row and "here" not in row]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("server", ["vLLM", "SGLang"])
def test_a_flag_of_another_server_is_here_what_its_row_says(server):
    found = rows(f"Flags of {server}")
    assert len(found) > 50
    for theirs, ours, said in found:
        understood = said.startswith(UNDERSTOOD)
        assert understood <= (ours not in ("none", "always")), theirs
        if ours not in ("none", "always", "`MODEL`"):
            assert named(ours) and set(named(ours)) <= OURS, theirs
        for flag in named(theirs):
            assert (flag in KNOWN) == understood, flag
            if not understood:
                with pytest.raises(SystemExit, match="2"):
                    config.parse_flags([flag])


def test_no_flag_stands_twice_on_a_list():
    for server in ("vLLM", "SGLang"):
        flags = [flag for theirs, *_ in rows(f"Flags of {server}") for flag in named(theirs)]
        assert len(set(flags)) == len(flags)


def test_a_field_of_a_request_is_here_what_its_row_says():
    found = rows("Requests")
    assert len(found) > 15
    for fields, here, said in found:
        where = {"the same": FIELDS, "new": FIELDS, "refused": set(REFUSED), "ignored": HARMLESS}
        assert set(named(fields)) <= where[here], fields
        if here == "refused":
            assert not set(named(fields)) & FIELDS
            assert set(re.findall(r"`([a-z_]+)`", said)) <= FIELDS


def test_an_endpoint_is_here_what_its_row_says():
    found = rows("Endpoints")
    assert len(found) > 15
    for theirs, here, _ in found:
        paths = set(named(theirs))
        if here in ("the same", "501"):
            assert paths <= PATHS
        else:
            assert not paths & PATHS
            assert here == "none" or set(named(here)) <= PATHS


def test_metrics_in_place_of_others_exist():
    exposed = Metrics(Health([])).exposition("")[0].decode()
    real = set(re.findall(r"^# TYPE (\w+)", exposed, re.M))
    found = rows("Metrics")
    assert len(found) > 10
    ours = [name for *_, here in found for name in named(here) if name.startswith("pipeinfer_")]
    assert len(ours) >= 10 and set(ours) <= real
