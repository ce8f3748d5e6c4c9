"""A short storm of `tools/chaos storm`: every kind of harm once, and all promises hold."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from chaos import storm
from chaos.harms import KINDS, Broken, SmallDisk


def asked(words: str) -> argparse.Namespace:
    """The options of a storm."""
    parser = argparse.ArgumentParser()
    storm.add_arguments(parser)
    return parser.parse_args(words.split())


def test_no_text_changes_in_a_storm_of_every_kind():
    """This seed waits little, and hurts every stage; engines are killed in other tests."""
    kinds = list(KINDS)
    words = f"--streams 3 --tokens 60 --storm-seed 1790 --seconds 0.3 --rate 2 --harms {len(kinds)}"
    found = storm.run(asked(words), {"log_level": "warning"})
    assert found["broken"] == []
    assert found["harms"] == dict.fromkeys(sorted(kinds), 1)
    assert found["answers"] >= 3
    assert sum(found["hostile"].values()) >= 3
    assert all(found["pauses"][kind]["max"] > 0 for kind in kinds)


def test_a_promise_that_does_not_hold_is_found():
    """Nobody records here, so nobody can say that the disk is full."""
    with SmallDisk() as disk, pytest.raises(Broken, match="full disk"):
        disk.record(str(Path(disk.folder, "none.toml")), 0.1, (), 0)
