"""The table of which GPU runs what is what the code says, and stands so in the docs."""

from __future__ import annotations

from pathlib import Path

from pipeinfer.attention.registry import PACKAGES
from pipeinfer.engine.gpu_kinds import ALL_PACKAGES, KINDS, PLAIN, doctor_line, table

PAGE = Path(__file__).parents[2] / "docs/gpus.md"


def test_the_page_has_the_table_that_the_code_makes():
    assert table() in PAGE.read_text()


def test_kinds_differ_in_what_they_run():
    ampere, ada, hopper, blackwell = KINDS
    assert "hybrid" in hopper.backends and "hybrid" not in blackwell.backends
    assert "flashinfer" not in ampere.fp8_kv and "flashinfer" in ada.fp8_kv
    assert ampere.fp8_weights == ada.fp8_weights == PLAIN != hopper.fp8_weights


def test_what_never_ran_is_said():
    assert "not yet: " in doctor_line((9, 0)) and "what was run: nothing" in doctor_line((8, 0))
    assert "never run on this kind" in doctor_line((12, 0))


def test_all_packages_of_backends_are_counted_as_there():
    assert {*ALL_PACKAGES} == {name for names in PACKAGES.values() for name in names}
