"""Streams that are closed when a process begins, and terminals that can write lines over."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from pipeinfer.runtime.logs import can_rewrite

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
