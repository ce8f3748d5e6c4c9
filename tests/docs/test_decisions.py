"""docs/decisions.md: dated entries, newest first, a paragraph each, and no measurements."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/decisions.md").read_text()
ENTRIES = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
UNITS = "ns|us|µs|ms|s|%|KB|MB|GB|TB|tokens/s|times"


def test_entries_are_dated_and_stand_newest_first():
    dates = [re.match(r"(\d{4}-\d\d-\d\d): \S", entry) for entry in ENTRIES]
    assert all(dates)
    found = [date[1] for date in dates if date is not None]
    assert len(found) > 50
    assert found == sorted(found, reverse=True)


def test_an_entry_is_one_paragraph():
    for entry in ENTRIES:
        heading, _, body = entry.partition("\n\n")
        assert body.strip()
        assert "\n" not in body.strip(), heading


def test_numbers_are_left_to_the_benchmarks():
    assert re.findall(rf"\b\d[\d.,]* (?:{UNITS})(?![\w/])", PAGE) == []
