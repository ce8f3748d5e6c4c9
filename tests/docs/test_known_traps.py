"""The tests that the documentation names as guards of known traps exist under these names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_known_trap_is_held_by_tests_that_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## Known traps")[1].split("\n## ")[0]
    traps = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    assert len(traps) == 17
    for trap in traps:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", trap)
        assert named, trap
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
