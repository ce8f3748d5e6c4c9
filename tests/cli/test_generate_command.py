"""`pipeinfer generate` as a process, and `pipeinfer chat` on a terminal: what is on stdout, exit
codes, history, commands, Ctrl-C and Ctrl-D.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from terminal import CTRL_C, CTRL_D, Terminal

from servers import environment

QUICK = ("--threads", "1", "--kv-pages", "256")


def generate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeinfer", "generate", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )


def test_completions_are_lines_on_stdout_and_stderr_is_silent() -> None:
    done = generate(
        *QUICK,
        "--chat",
        "pipeinfer-demo",
        "Count from 3 to 9.",
        "-",
        stdin="Count from 1 to 4.\n\n",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("3 4 5 6 7 8 9\n1 2 3 4\n", "", 0)


def test_json_has_an_object_per_prompt() -> None:
    done = generate(
        *QUICK,
        "--in-process",
        "--json",
        "--max-tokens",
        "4",
        "--stop",
        "zz",
        "pipeinfer-demo",
        "a",
        "b",
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("a", "b")
    assert len(first["token_ids"]) == 4
    assert first["finish_reason"] == "length"
    assert done.returncode == 0


def test_streamed_text_is_the_same_text_and_a_refusal_ends_with_1() -> None:
    done = generate(
        *QUICK, "--stream", "--chat", "--model", "pipeinfer-demo", "Count from 3 to 9.", "x" * 3000
    )
    assert done.stdout == "3 4 5 6 7 8 9\n"
    assert done.stderr.startswith("error: This model's maximum context length is 2048 tokens")
    assert done.returncode == 1


def test_without_standard_input_a_prompt_is_answered() -> None:
    words = [sys.executable, "-m", "pipeinfer", "generate", *QUICK, "--in-process", "--chat"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *words, "Count from 3 to 9."],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert (done.stdout, done.stderr, done.returncode) == ("3 4 5 6 7 8 9\n", "", 0)


@pytest.mark.parametrize(
    "command", [("generate", "-"), ("chat", "m", "--url", "http://127.0.0.1:1")]
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_text_is_said_in_one_line(command: tuple[str, ...], errors: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", *command],
        input=b"a\n\xff\n",
        capture_output=True,
        timeout=120,
        env=environment() | {"PYTHONIOENCODING": f"utf-8:{errors}"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: line 2 of standard input is not UTF-8 (invalid start")
    assert done.stderr.count(b"\n") == 1


def test_a_prompt_that_no_text_can_be_is_refused_in_one_line() -> None:
    words = [sys.executable, "-m", "pipeinfer", "generate", *QUICK, "--in-process", b"\xff"]
    done = subprocess.run(words, capture_output=True, timeout=120, env=environment())
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
    arguments: tuple[str, ...], said: str
) -> None:
    done = generate(*arguments)
    assert said in done.stderr
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_terminal_is_told_that_the_default_limit_cut_an_answer() -> None:
    words = [sys.executable, "-m", "pipeinfer", "generate", *QUICK, "--local", "--ignore-eos", "a"]
    told = "(cut at 128 tokens, the default; --max-tokens N allows more)"
    for more, is_told in (((), True), (("--max-tokens", "128"), False), (("--json",), False)):
        with Terminal([*words, *more], environment()) as shown:
            assert (told in shown.rest()) == is_told
            assert shown.process.wait(60) == 0


CHAT = [sys.executable, "-m", "pipeinfer", "chat", "--threads", "1", "--kv-pages", "256"]
REMEMBER = "Remember: kiv=4821, dol=1390."


@pytest.fixture
def chat() -> Iterator[Terminal]:
    with Terminal(CHAT, environment()) as terminal:
        yield terminal


def test_a_conversation_on_a_terminal(chat: Terminal) -> None:
    assert "/reset" in chat.wait_for("> ")

    chat.type(REMEMBER + "\n")
    chat.wait_for("OK.")
    chat.wait_for("> ")
    chat.type("What is kiv?\n")
    chat.wait_for("kiv=4821")  # it has the history
    chat.wait_for("> ")

    chat.type("/reset\n")
    chat.wait_for("forgotten")
    chat.wait_for("> ")
    chat.type("What is kiv?\n")
    assert "4821" not in chat.wait_for("> ").removeprefix("What is kiv?")

    chat.type("/help\n")
    chat.wait_for("unknown command /help")
    chat.wait_for("> ")

    stages = psutil.Process(chat.process.pid).children()
    assert len(stages) == 5  # four stages, and the engine's memory holder
    chat.press(CTRL_C, until="> ")  # at the prompt: a new line
    chat.type(CTRL_D)
    assert chat.process.wait(30) == 0
    assert not any(stage.is_running() for stage in stages)


def test_ctrl_c_stops_the_answer_and_only_the_answer() -> None:
    with Terminal([*CHAT, "--ignore-eos"], environment()) as chat:
        chat.wait_for("> ")
        chat.type("Hello\n")
        chat.wait_for("Hello\r\n")
        chat.wait_for_more()
        chat.type(CTRL_C)
        chat.wait_for("[stopped]")
        chat.wait_for("> ")
        chat.type("/exit\n")
        assert chat.process.wait(30) == 0


def test_piped_lines_are_questions_without_prompts() -> None:
    done = subprocess.run(
        [*CHAT, "--in-process"],
        input=f"{REMEMBER}\nWhat is dol?\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert (done.stdout, done.stderr, done.returncode) == ("OK.\ndol=1390\n", "", 0)
