"""`pipeinfer chat` on a terminal: history, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from terminal import CTRL_C, CTRL_D, Terminal

from servers import environment

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
    assert len(stages) == 4
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
