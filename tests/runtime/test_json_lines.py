"""Log lines as JSON: one object each, whatever the message, with what it is about."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core import Unsent
from pipeinfer.messages import Open
from pipeinfer.params import SamplingParams
from pipeinfer.runtime.logs import JsonLines, request_fields

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
    opened = Open(
        request_id="r", attempt=1, gateway=0, params=SamplingParams(), context_ids=b"", trace=TRACE
    )
    assert request_fields(opened) == {"request_id": "r", "trace_id": "1" * 32}
    assert request_fields(Unsent("r", 1, "x")) == {"request_id": "r"}
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
