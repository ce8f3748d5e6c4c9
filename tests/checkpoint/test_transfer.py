"""How far a transfer is: one rewritten line on a terminal, lines where there is none."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest

from pipeinfer.checkpoint.transfer import ProgressLines, Transfer, duration, progress, size

MIB = 2**20


def test_a_line_comes_every_ten_seconds_or_five_percent_and_never_twice_a_second() -> None:
    lines = ProgressLines(began=100.0)
    assert lines.due(0, 1000 * MIB, 0, 100.2) == ""
    assert lines.due(60 * MIB, 1000 * MIB, 60 * MIB, 100.9) == ""  # enough, but too soon
    assert lines.due(60 * MIB, 1000 * MIB, 60 * MIB, 101.0) != ""
    assert lines.due(61 * MIB, 1000 * MIB, 61 * MIB, 108.0) == ""
    assert lines.due(110 * MIB, 1000 * MIB, 110 * MIB, 109.0) != ""  # five percent more
    assert lines.due(111 * MIB, 1000 * MIB, 111 * MIB, 119.0) != ""  # ten seconds later


def test_a_rate_is_of_what_came_lately_and_not_of_what_was_here_before() -> None:
    lines = ProgressLines(began=0.0)
    said = lines.due(500 * MIB, 1000 * MIB, 20 * MIB, 10.0)
    assert said == "500.0 MiB of 1000.0 MiB (50 %), 2.0 MiB/s, 4 min left"
    for second in range(11, 60):
        lines.due(500 * MIB, 1000 * MIB, 20 * MIB, float(second))
    assert lines.due(500 * MIB, 1000 * MIB, 20 * MIB, 60.0).endswith("nothing comes at the moment")


def test_sizes_and_times_are_in_units_that_a_person_reads() -> None:
    assert [size(n) for n in (512, 6 * MIB, 3 << 30)] == ["0.5 KiB", "6.0 MiB", "3.00 GiB"]
    assert [duration(s) for s in (4.4, 130, 7500)] == ["4 s", "2 min", "2 h 5 min"]
    assert progress(0, 0, 1.0) == "0.0 KiB of 0.0 KiB (100 %), 0.0 KiB/s, 0 s left"


def test_without_a_terminal_only_lines_are_said() -> None:
    stream, told = io.StringIO(), list[str]()
    with Transfer("a/model", {"one": 10, "two": 20}, told.append, stream) as transfer:
        transfer.set("one", 4)  # was here
        transfer.add("one", 6)
        transfer.expect("two", 30)
        transfer.add("two", 30)
        transfer.log("the connection broke")
        assert (transfer.total, transfer.done, transfer.received) == (40, 40, 36)
    assert stream.getvalue() == ""
    assert told[0] == "the connection broke"
    assert told[-1].startswith("a/model: 0.0 KiB came in ")


PROGRAM = """
import sys
from pipeinfer.checkpoint.transfer import Transfer
with Transfer("a/model", {"file": 64 << 20}, print) as transfer:
    transfer.add("file", 32 << 20)
    sys.stdin.readline()
    transfer.log("the connection broke")
    transfer.add("file", 32 << 20)
"""


def test_on_a_terminal_one_line_is_rewritten_and_removed_at_the_end() -> None:
    """Of a terminal that does not say how large it is."""
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        shown = ""
        while "50%" not in shown:
            shown += os.read(master, 4096).decode()
        assert "\n" not in shown
        os.write(master, b"\n")
        while "came in" not in shown:
            shown += os.read(master, 4096).decode()
        assert process.wait(60) == 0
    os.close(master)
    assert re.search(r"a/model:\s+50%.*32\.0M/64\.0M \[[^\]]*B/s\]", shown)
    assert "the connection broke\r\n" in shown
    *_, last = shown.strip().split("\r")
    assert last.startswith("a/model: 64.0 MiB came in ")


def test_a_transfer_that_fails_does_not_say_that_all_came() -> None:
    told = list[str]()
    with pytest.raises(KeyError), Transfer("a/model", {"file": 1}, told.append, io.StringIO()):
        raise KeyError
    assert told == []
