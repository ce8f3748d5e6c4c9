"""`pipeinfer generate [MODEL] PROMPT...`: completions of prompts on stdout, and the end.

Knows questions and answers; asking.py knows who answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeinfer.cli import questions
from pipeinfer.cli.questions import AnswerDelta, AnswerOptions, ChatModel, Question, RequestFailed
from pipeinfer.command_line import CommandLine
from pipeinfer.runtime.terminal import undecodable_input
from pipeinfer.settings import DEMO, ConfigurationError

if TYPE_CHECKING:
    from pipeinfer.cli.asking import ModelSession

MAX_TOKENS = 128


class JsonLine(msgspec.Struct):
    """What --json prints of a prompt."""

    prompt: str
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


def run(arguments: Sequence[str]) -> int:
    """Prints the completions in the prompts' order; returns the exit code."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    _take_model(options)
    asked = questions.read_flags(command_line, options)
    prompts = _prompts(options.words)

    from pipeinfer.cli.asking import model_session

    live = sys.stdout.isatty() and len(prompts) == 1 and not options.json
    streams = options.stream or live
    wanted = AnswerOptions(MAX_TOKENS, batch=not streams, token_ids=options.json)
    batch = [_question(prompt, options.chat) for prompt in prompts]
    try:
        with model_session(asked, wanted) as answering:
            if streams:
                for question in batch:
                    answering.thread.run(print_answer(answering.model, question))
                return 0
            lines = [JsonLine(prompt) for prompt in prompts]
            _answer_all(answering, batch, lines)
    except RequestFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(msgspec.json.encode(line).decode() if options.json else line.text)
    return 0


def parser() -> CommandLine:
    """The words of the command line."""
    command_line = questions.parser(
        "generate",
        "[MODEL] PROMPT ...",
        f"Completes prompts; at most {MAX_TOKENS} tokens by default. Of several words the first is "
        "MODEL (a folder, a GGUF file, a hub id, or what a running server calls it), unless "
        "--model names it; without MODEL a single PROMPT is the demo's.",
        ("--chat", "--stream", "--json"),
    )
    questions.add_model_flag(command_line)
    command_line.add_argument("words", nargs="+", metavar="PROMPT", help="a text; - reads lines")
    command_line.add_argument("--chat", action="store_true", help="use the chat template")
    how = command_line.add_mutually_exclusive_group()
    help_text = "print as it comes; on a terminal one prompt's completion is anyway"
    how.add_argument("--stream", action="store_true", help=help_text)
    how.add_argument("--json", action="store_true", help="one object per line")
    return command_line


def _take_model(options: argparse.Namespace) -> None:
    """Of several words the first is MODEL."""
    if "model" in options or len(options.words) == 1:
        return
    model, *options.words = options.words
    if len(model.split()) != 1 and not Path(model).exists():
        raise ConfigurationError(
            f"{model!r} is no model: of several words the first is MODEL, {DEMO} for the demo"
        )
    options.model = model


def _prompts(given: Sequence[str]) -> list[str]:
    prompts = []
    for prompt in given:
        if prompt == "-":
            try:
                lines = sys.stdin.read().split("\n")
            except UnicodeDecodeError as error:
                raise undecodable_input(error) from None
            prompts += filter(None, lines)
        else:
            prompts.append(prompt)
    return prompts


def _question(prompt: str, chat: bool) -> Question:
    return [{"role": "user", "content": prompt}] if chat else prompt


def _answer_all(
    session: ModelSession, questions: Sequence[Question], lines: Sequence[JsonLine]
) -> None:
    """All at once, into `lines`; the first that is refused ends the others."""
    from pipeinfer.runtime.terminal import StatusLine

    shown = StatusLine(doing="answering")

    def show_progress() -> None:
        ended = sum(line.finish_reason is not None for line in lines)
        tokens = sum(len(line.token_ids) for line in lines)
        so_far = f", {tokens:,} tokens" if tokens else ""
        shown.show(f"{ended} of {len(lines)} prompts{so_far}")

    try:
        session.thread.run(_together(session.model, questions, lines), show_progress)
    finally:
        shown.clear()


async def _together(
    model: ChatModel, questions: Sequence[Question], lines: Sequence[JsonLine]
) -> None:
    tasks = [
        asyncio.create_task(_collect(model, question, line))
        for question, line in zip(questions, lines, strict=True)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(model: ChatModel, question: Question, line: JsonLine) -> None:
    async with aclosing(model.answer(question)) as pieces:
        async for piece in pieces:
            line.text += piece.text
            line.token_ids += piece.token_ids
            line.finish_reason = piece.finish_reason or line.finish_reason


async def print_answer(
    model: ChatModel, question: Question, answer_texts: list[str] | None = None
) -> None:
    """Prints an answer as it comes, and a newline, also if it breaks off. `answer_texts`: gets what
    is no thought. RequestFailed."""
    printed = False
    async with aclosing(model.answer(question)) as pieces:
        try:
            async for text in _separated(pieces, answer_texts):
                print(text, end="", flush=True)
                printed = True
        except RequestFailed:
            if printed:
                print(flush=True)
            raise
    print(flush=True)


async def _separated(
    pieces: AsyncIterator[AnswerDelta], answer_texts: list[str] | None
) -> AsyncIterator[str]:
    """The text of all; between thoughts and what comes after them is an empty line."""
    thinks = False
    async for piece in pieces:
        if thinks and piece.text and not piece.reasoning:
            yield "\n\n"
        thinks = piece.reasoning or (thinks and not piece.text)
        yield piece.text
        if answer_texts is not None and not piece.reasoning:
            answer_texts.append(piece.text)
