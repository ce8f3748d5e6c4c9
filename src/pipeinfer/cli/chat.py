"""`pipeinfer chat [MODEL]`: a conversation on the terminal, with history.

Knows questions and answers; asking.py knows who answers. Lines are read on the main thread, which
Ctrl-C interrupts; the model answers on another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeinfer.cli import questions
from pipeinfer.cli.generate import print_answer
from pipeinfer.cli.questions import AnswerOptions, RequestFailed
from pipeinfer.command_line import CommandLine
from pipeinfer.runtime.terminal import undecodable_input

if TYPE_CHECKING:
    from pipeinfer.cli.asking import ModelSession

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = questions.parser(
        "chat",
        "[MODEL]",
        f"Talks to MODEL (a folder, a GGUF file, a hub id, or what a running server calls it); "
        f"without it, to the demo. {HELP}.",
        (),
    )
    help_text = "default: of the only server that runs, or the demo"
    command_line.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help_text
    )
    questions.add_model_flag(command_line)
    return command_line


def run(arguments: Sequence[str]) -> int:
    """Talks until /exit or the end of the input; returns the exit code."""
    command_line = parser()
    asked = questions.read_flags(command_line, command_line.parse_args(arguments))

    from pipeinfer.cli.asking import model_session

    try:
        with model_session(asked, AnswerOptions()) as answering:
            if sys.stdin.isatty():
                with suppress(ImportError):
                    import readline  # noqa: F401  (imported for what it does to input())
                print(f"{answering.model.name}: {HELP}.")
            read_questions(Conversation(answering))
    except RequestFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, session: ModelSession) -> None:
        self._session = session
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forgets everything."""
        self._messages.clear()

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. One that is stopped counts as far as it got; a question
        that is refused is forgotten."""
        self._messages.append({"role": "user", "content": question})
        answer_texts: list[str] = []
        try:
            self._session.thread.run(
                print_answer(self._session.model, self._messages, answer_texts)
            )
        except KeyboardInterrupt:
            print(" [stopped]")
        except RequestFailed as error:
            self._messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        self._messages.append({"role": "assistant", "content": "".join(answer_texts)})


def read_questions(conversation: Conversation) -> None:
    """Reads lines and commands until /exit or the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        except UnicodeDecodeError as error:
            raise undecodable_input(error) from None
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            print("(forgotten)")
        elif line.startswith("/"):
            print(f"unknown command {line}: {HELP}")
        elif line:
            conversation.ask(line)
