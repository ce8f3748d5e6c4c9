"""What a process prints: log lines as JSON, streams that are closed when it begins, terminals whose
lines can be rewritten, and the line that says what a start waits for.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core import SendFailed
from pipeinfer.messages import OpenStream
from pipeinfer.params import RequestParams
from pipeinfer.runtime.logs import (
    JsonLines,
    StatusLine,
    can_rewrite,
    request_fields,
    waiting_summary,
)

TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


def line(message: str, *arguments: object, **changed: object) -> dict:
    made = {"name": "pipeinfer.x", "levelno": logging.WARNING, "levelname": "WARNING",
            "msg": message, "args": arguments, **changed}  # fmt: skip
    text = JsonLines("engine-0-0").format(logging.makeLogRecord(made))
    assert "\n" not in text
    return json.loads(text)


def test_a_line_says_when_who_and_what():
    at = datetime(2026, 11, 25, 9, 8, 7, 123_456, UTC)
    said = line("%d of %s", 3, "x", created=at.timestamp(), process=17, request_id="r")
    assert said == {
        "time": "2026-11-25T09:08:07.123Z",
        "level": "warning",
        "stage": "engine-0-0",
        "pid": 17,
        "logger": "pipeinfer.x",
        "message": "3 of x",
        "request_id": "r",
    }


@given(st.text(), st.dictionaries(st.text(st.characters(codec="ascii", categories=["Ll"]),
       min_size=12), st.one_of(st.text(), st.floats(allow_nan=False), st.booleans())))  # fmt: skip
def test_any_text_is_one_line(message, fields):
    said = line("%s", message, **fields)
    assert said["message"] == message
    assert {name: said[name] for name in fields} == fields


def test_an_exception_is_text_and_what_json_has_not_as_well():
    try:
        raise KeyError("two\nlines")
    except KeyError:
        said = line("no", exc_info=sys.exc_info(), subject={1}, pid="hidden")
    assert said["exception"].startswith("Traceback") and "KeyError" in said["exception"]
    assert said["subject"] == "{1}" and said["pid"] != "hidden"


def test_a_line_about_a_message_names_its_request_and_its_trace():
    opened = OpenStream(
        request_id="r", attempt=1, gateway=0, params=RequestParams(), context_ids=b"", trace=TRACE
    )
    assert request_fields(opened) == {"request_id": "r", "trace_id": "1" * 32}
    assert request_fields(SendFailed("r", 1, "x")) == {"request_id": "r"}
    assert request_fields(object()) == {}


PROGRAM = """
import logging, sys, warnings
from pipeinfer.runtime.logs import ACCESS, report_error, set_up_logging
from pipeinfer.settings import Settings
settings = Settings(log_format=sys.argv[1], log_level=sys.argv[2])
set_up_logging(settings, "gateway-0")
warnings.warn("careful")
logging.getLogger(ACCESS).info("a request")
logging.getLogger("pipeinfer").info("a line")
report_error(settings, "no such thing")
"""


def printed(form: str, level: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, form, level], capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stderr.splitlines()


def test_all_that_a_process_says_is_json_and_requests_are_among_it():
    said = [json.loads(text) for text in printed("json", "info")]
    assert [one["level"] for one in said] == ["warning", "info", "info", "error"]
    assert "careful" in said[0]["message"] and said[3]["message"] == "no such thing"
    assert [one["message"] for one in said[1:3]] == ["a request", "a line"]
    assert [json.loads(text)["level"] for text in printed("json", "error")] == ["error"]


def test_lines_for_people_have_requests_only_where_details_are_wanted():
    text = "\n".join(printed("text", "info"))
    assert "I gateway-0 a line\n" in text and "a request" not in text
    assert text.endswith("error: no such thing")
    assert "I gateway-0 a request" in "\n".join(printed("text", "debug"))


OPENS = "from pipeinfer.runtime.logs import open_streams; open_streams(); "


def after_opening(code: str, redirected: str = "", **environment: str) -> str:
    """What a process says on stdout that begins with streams `redirected` as a shell does it."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, OPENS + code]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode()


def test_a_closed_stream_is_there_and_no_socket_has_its_number():
    code = "import socket, sys; print(socket.socket().fileno() > 2, repr(sys.stdin.read()))"
    assert after_opening(code, "<&-") == "True ''\n"
    code = "import sys; print('lost'); sys.stdin.read(); sys.stderr.write(''); print('lost')"
    assert after_opening(code, "<&- >&- 2>&-") == ""


def test_children_have_what_was_opened():
    code = "import subprocess; subprocess.run(['sh', '-c', 'cat <&0 && echo read'], check=True)"
    assert after_opening(code, "<&-") == "read\n"


def test_what_the_output_has_no_letter_for_is_a_question_mark():
    said = after_opening("print('\\u4f60 ok')", PYTHONIOENCODING="ascii")
    assert said == "? ok\n"


@pytest.mark.parametrize(("term", "can"), [("xterm-256color", True), ("dumb", False)])
def test_a_dumb_terminal_writes_no_line_over(monkeypatch, term, can):
    monkeypatch.setenv("TERM", term)
    output = io.StringIO()
    assert not can_rewrite(output)
    monkeypatch.setattr(output, "isatty", lambda: True)
    assert can_rewrite(output) is can


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
