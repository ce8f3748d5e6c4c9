"""`pipeinfer generate`, and `pipeinfer chat` on a terminal: what is on stdout, exit codes, history,
commands, Ctrl-C and Ctrl-D.
"""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from found_servers import found_server, temporary
from terminal import CTRL_C, CTRL_D, Terminal

from pipeinfer.cli.main import main
from servers import environment

QUICK = ("--threads", "1", "--kv-pages", "256")
COUNT, COUNTED = "Count from 3 to 9.", "3 4 5 6 7 8 9\n"


def words(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipeinfer", *arguments]


def test_completions_are_lines_on_stdout_and_stderr_is_silent() -> None:
    done = subprocess.run(
        words("generate", *QUICK, "--chat", "pipeinfer-demo", COUNT, "-"),
        input="Count from 1 to 4.\n\n",
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert (done.stdout, done.stderr, done.returncode) == (COUNTED + "1 2 3 4\n", "", 0)


def test_json_has_an_object_per_prompt_and_settings_keep_a_server_out_that_runs(capsys) -> None:
    asked = ("--in-process", "--json", "--max-tokens", "4", "--stop", "zz", "pipeinfer-demo")
    with temporary() as folder, found_server(folder, "one", "http://x:1", "pipeinfer-demo"):
        assert main(["generate", *QUICK, *asked, "a", "b"]) == 0
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], second["prompt"], err) == ("a", "b", "")
    assert len(first["token_ids"]) == 4
    assert first["finish_reason"] == "length"


def test_streamed_text_is_the_same_text_and_a_refusal_ends_with_1(capsys) -> None:
    asked = ("--in-process", "--stream", "--chat", "--model", "pipeinfer-demo")
    assert main(["generate", *QUICK, *asked, COUNT, "x" * 3000]) == 1
    out, err = capsys.readouterr()
    assert out == COUNTED
    assert err.startswith("error: This model's maximum context length is 2048 tokens")


def test_without_standard_input_a_prompt_is_answered() -> None:
    command = words("generate", *QUICK, "--in-process", "--chat")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command, COUNT],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert (done.stdout, done.stderr, done.returncode) == (COUNTED, "", 0)


@pytest.mark.parametrize(
    ("command", "errors"),
    [
        (("generate", "-"), "strict"),
        (("chat", "m", "--url", "http://127.0.0.1:1"), "surrogateescape"),
    ],
)
def test_input_that_is_no_text_is_said_in_one_line(command: tuple[str, ...], errors: str) -> None:
    done = subprocess.run(
        words(*command),
        input=b"a\n\xff\n",
        capture_output=True,
        timeout=300,
        env=environment() | {"PYTHONIOENCODING": f"utf-8:{errors}"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: line 2 of standard input is not UTF-8 (invalid start")
    assert done.stderr.count(b"\n") == 1


def test_a_prompt_that_no_text_can_be_is_refused_in_one_line() -> None:
    command = [*words("generate", *QUICK, "--in-process"), b"\xff"]
    done = subprocess.run(command, capture_output=True, timeout=300, env=environment())
    assert done.returncode == 2
    assert done.stderr == b"error: prompt 1 of the command line is not UTF-8\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "PROMPT"),
        (("--model", "~nobody-is-called-so/model", "a"), "there is no such folder or file"),
        (("--temperature", "-1", "a"), "temperature must be from 0 to 100"),
        (("--kv-pages", "many", "a"), "--kv-pages"),
        (("--model", "/no/such/folder", "a"), "/no/such/folder"),
        (("--json", "--stream", "a"), "not allowed with"),
        (("count", "from", "3"), "if it begins a prompt of several words, that needs quotes"),
        (("Count from 3 to 9.", "a"), "'Count from 3 to 9.' is no model: of several words the"),
        (("--url", "http://127.0.0.1:1", "--kv-pages", "9", "a"), "--kv-pages is a setting of a"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    arguments: tuple[str, ...], said: str, capsys
) -> None:
    try:
        code = main(["generate", *arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (out, code) == ("", 2) and said in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "is_told"), [((), True), (("--max-tokens", "128"), False), (("--json",), False)]
)
def test_a_terminal_is_told_that_the_default_limit_cut_an_answer(
    more: tuple[str, ...], is_told: bool, monkeypatch
) -> None:
    keys, screen = pty.openpty()  # its buffer holds all that is shown
    with os.fdopen(screen, "w") as shown, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", shown)
        patch.setattr(sys, "stderr", shown)
        assert main(["generate", *QUICK, "--in-process", "--ignore-eos", "a", *more]) == 0
    said = b""
    with suppress(OSError):  # the other side is closed
        while True:
            said += os.read(keys, 1 << 16)
    os.close(keys)
    told = b"(cut at 128 tokens, the default; --max-tokens N allows more)"
    assert (told in said) == is_told


def test_a_chat_on_a_terminal_from_its_start_to_the_end_of_its_stages() -> None:
    """Ctrl-C stops the answer, and only the answer."""
    command = words("chat", "--local", *QUICK, "--ignore-eos")
    with Terminal(command, environment()) as chat:
        first = chat.wait_for("pipeinfer-demo")
        assert "starting (0 s): " in first
        chat.wait_for(": starting")  # stages
        assert chat.wait_for("pipeinfer-demo: /reset").endswith("\x1b[Kpipeinfer-demo: /reset")
        chat.wait_for("> ")
        chat.type("Hello\n")
        chat.wait_for("Hello\r\n")
        chat.wait_for_more()
        chat.type(CTRL_C)
        chat.wait_for("[stopped]")
        chat.wait_for("> ")
        stages = psutil.Process(chat.process.pid).children()
        assert len(stages) == 5  # four stages, and the engine's memory holder
        chat.press(CTRL_C, until="> ")  # at the prompt: a new line
        chat.type(CTRL_D)
        assert chat.process.wait(60) == 0
        assert not any(stage.is_running() for stage in stages)


def test_piped_lines_are_questions_without_prompts(monkeypatch, capsys) -> None:
    lines = "Remember: kiv=4821, dol=1390.\nWhat is dol?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", *QUICK, "--in-process"]) == 0
    assert capsys.readouterr() == ("OK.\ndol=1390\n", "")
