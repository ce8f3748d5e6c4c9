"""What a start waits for is said: on a terminal in one line, in a log seldom, and by stage."""

from __future__ import annotations

import io
import logging

import pytest

from pipeinfer.runtime.logs import StatusLine, waiting_summary


class OnTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_has_one_line_that_is_rewritten_and_cleared(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    output, clock = OnTerminal(), Clock()
    line = StatusLine(output=output, clock=clock)
    line.show("engine: reading weights")
    line.show("engine: reading weights")
    clock.now += 1
    line.show("engine: reading weights")
    line.show("engine: reading weights, 1.25 of 15.00 GiB, and more")
    line.clear()
    assert output.getvalue().split("\r\x1b[K") == [
        "",
        "starting (0 s): engine: reading weights",
        "starting (1 s): engine: reading weights",
        "starting (1 s): engine: reading weights, 1.25 of ",
        "",
    ]


@pytest.mark.parametrize("output", [io.StringIO(), OnTerminal()], ids=["file", "JSON on terminal"])
def test_a_log_has_a_line_every_five_seconds_at_most(caplog, output):
    caplog.set_level(logging.INFO)
    clock = Clock()
    line = StatusLine(rewritten=not output.isatty(), output=output, clock=clock)
    for second in range(41):
        clock.now = 100.0 + second
        line.show("engine: loading libraries" if second < 7 else "engine: reading weights")
    line.clear()
    assert output.getvalue() == ""
    assert caplog.messages == [
        "starting, after 5 s: engine: loading libraries",
        "starting, after 10 s: engine: reading weights",
        "starting, after 20 s: engine: reading weights",
        "starting, after 30 s: engine: reading weights",
        "starting, after 40 s: engine: reading weights",
    ]


def test_stages_that_do_something_are_named_before_those_that_wait_or_say_nothing():
    states = {
        "gateway-0": ("starting", ""),
        "tokenizer-0": ("ready", ""),
        "scheduler-0": ("waiting", "no engine yet"),
        "engine-0-0": ("loading", "reading weights, 1.00 of 4.00 GiB"),
    }
    assert waiting_summary(states) == "engine: reading weights, 1.00 of 4.00 GiB"
    states["engine-0-0"] = ("ready", "")
    assert waiting_summary(states) == "gateway: starting"
    states["gateway-0"] = ("ready", "")
    assert waiting_summary(states) == "scheduler: waiting (no engine yet)"
    states["scheduler-0"] = ("ready", "")
    assert waiting_summary(states) == ""


def test_stages_of_one_kind_are_told_apart_and_many_are_counted():
    two = {f"engine-0-{rank}": ("loading", "reading weights") for rank in range(2)}
    assert waiting_summary(two) == "engine-0-0, engine-0-1: reading weights"
    many = {f"engine-0-{rank}": ("loading", "reading weights") for rank in range(8)}
    assert waiting_summary(many) == "8 stages: reading weights"
    apart = {f"engine-0-{rank}": ("loading", f"graph {rank}") for rank in range(8)}
    assert waiting_summary(apart) == (
        "engine-0-0: graph 0; engine-0-1: graph 1; engine-0-2: graph 2; and 5 more"
    )
