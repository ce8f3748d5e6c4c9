"""`pipeinfer chat`: a conversation on the terminal, with history.

Knows the offline classes only. Lines are read on the main thread, which Ctrl-C interrupts; the
model answers on another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import aclosing, suppress

from pipeinfer.cli import flags
from pipeinfer.cli.generate import show
from pipeinfer.llm import AsyncLLM, PipelineStopped, RequestError
from pipeinfer.offline.loop_thread import LoopThread
from pipeinfer.params import SamplingParams
from pipeinfer.settings import DEMO

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    return flags.parser("chat", f"Talks to a model: {HELP}.")


def run(arguments: Sequence[str]) -> int:
    """Talks until /exit or the end of the input; returns the exit code."""
    asked = flags.parse(parser(), arguments)
    llm, thread = AsyncLLM(**asked.settings), LoopThread()
    try:
        thread.run(llm.start())
        conversation = Conversation(
            llm, thread, asked.params(llm.get_default_sampling_params().plain(), None)
        )
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (imported for what it does to input())
            print(f"{asked.settings.get('model') or DEMO}: {HELP}.")
        talk(conversation)
        return 0
    except PipelineStopped as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        thread.run(llm.close())
        thread.close()


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: AsyncLLM, thread: LoopThread, params: SamplingParams) -> None:
        self._llm = llm
        self._thread = thread
        self._params = params
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forgets everything."""
        self._messages.clear()

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. One that is stopped counts as far as it got; a question
        that is refused is forgotten."""
        self._messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            error = self._thread.run(self._answer(said))
        except KeyboardInterrupt:
            error = ""
            print(" [stopped]")
        except RequestError as refusal:
            error = str(refusal)
        if error:
            self._messages.pop()
            print(f"error: {error}", file=sys.stderr)
            return
        self._messages.append({"role": "assistant", "content": "".join(said)})

    async def _answer(self, said: list[str]) -> str:
        async with aclosing(self._llm.chat(self._messages, self._params)) as deltas:
            return await show(deltas, said)


def talk(conversation: Conversation) -> None:
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
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            print("(forgotten)")
        elif line.startswith("/"):
            print(f"unknown command {line}: {HELP}")
        elif line:
            conversation.ask(line)
