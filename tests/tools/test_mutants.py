"""A mutant that the tests notice is killed, one that they do not survives, and nothing is left."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest

from mutants import exclusions
from mutants.areas import AREAS, LEFT_OUT, ROOT
from mutants.running import Workplace

FILTER = next(path for path in AREAS["recovery"].files() if path.name == "stage.py")
TEXT = (ROOT / FILTER).read_text()
TESTS = ("tests/runtime/test_incarnations.py",)


@pytest.fixture(scope="module")
def workplace():
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:
        yield Workplace(Path(folder))


def test_each_module_is_in_one_area_and_each_test_is_there():
    files = [path for area in AREAS.values() for path in area.files()]
    assert len(files) == len(set(files)) and all(area.files() for area in AREAS.values())
    ordered = [area.in_order() for area in AREAS.values()]
    assert all(len(tests) == len(set(tests)) for tests in ordered)
    tests = {test for tests in ordered for test in tests} | set(LEFT_OUT)
    for test in tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert name.split("[")[0] in ((ROOT / path).read_text() if name else "")


def test_what_is_not_noticed_survives(workplace):
    outcome = workplace.test(FILTER, TEXT, TESTS, math.inf)
    assert outcome.ended == "survived", outcome.said
    assert (ROOT / FILTER).read_text() == TEXT


def test_what_is_noticed_is_killed_by_a_test_that_is_named(workplace):
    """Also if the text is as long as the one before: no bytecode may be left of it."""
    changed = TEXT.replace("incarnation < newest", "incarnation > newest")
    assert len(changed) == len(TEXT) and changed != TEXT
    outcome = workplace.test(FILTER, changed, TESTS, math.inf)
    assert outcome.ended == "killed"
    assert outcome.by.startswith(TESTS[0])
    assert workplace.test(FILTER, TEXT, TESTS, math.inf).ended == "survived"


def test_what_never_ends_is_ended(workplace):
    outcome = workplace.test(FILTER, f"{TEXT}\nwhile True:\n    pass\n", TESTS, 1.5)
    assert outcome.ended == "timeout"
    assert outcome.seconds < 30.0


def test_without_a_test_there_is_no_outcome(workplace):
    with pytest.raises(RuntimeError, match="no test was run"):
        workplace.test(FILTER, TEXT, ("-k=nothing_is_called_so", *TESTS), math.inf)


@pytest.mark.parametrize(
    "text", ["def f(x: int | None): ...", "x: int | None = y", "LIMIT = 10", "log.info(1 + 1)",
             "raise Error(1 + 1)", "zip(a, b, strict=True)"],
)  # fmt: skip
def test_places_where_nothing_can_be_noticed(text):
    assert exclusions.ranges(text)


@pytest.mark.parametrize(
    "text", ["LIMIT = 9", "limits = [10]", "def f(x=10): ...", "a.info(1 + 1)"]
)
def test_places_where_something_can(text):
    assert exclusions.ranges(text) == []
