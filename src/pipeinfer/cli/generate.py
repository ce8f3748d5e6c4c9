"""`pipeinfer generate [MODEL] PROMPT...`: completions of prompts on stdout; and `pipeinfer chat
[MODEL]`: a conversation on the terminal, with history.

Both ask a ChatModel (chat_model.py) and print what it answers. Lines of a
chat are read on the main thread, which Ctrl-C interrupts; the model answers on another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeinfer.cli.chat_model import (
    AnswerDelta,
    AnswerOptions,
    ChatModel,
    LocalModel,
    ModelFlags,
    Question,
    RequestFailed,
    add_model_flag,
    chat_model_parser,
    read_flags,
)
from pipeinfer.command_line import CommandLine, counted
from pipeinfer.runtime.logs import StatusLine, undecodable_input
from pipeinfer.settings import DEMO, ConfigurationError

if TYPE_CHECKING:
    from pipeinfer.offline.calls import LoopThread


MAX_TOKENS = 128


class JsonLine(msgspec.Struct):
    """The line that --json prints for a prompt."""

    prompt: str
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


def run_generate(arguments: Sequence[str]) -> int:
    """Prints the completions in the prompts' order; returns the exit code."""
    command_line = generate_parser()
    options = command_line.parse_args(arguments)
    first = _take_model(options)
    flags = read_flags(command_line, options)
    prompts = _prompts(options.words)

    live = sys.stdout.isatty() and len(prompts) == 1 and not options.json
    streams = options.stream or live
    answer_options = AnswerOptions(MAX_TOKENS, batch=not streams, token_ids=options.json)
    batch = [_question(prompt, options.chat) for prompt in prompts]
    try:
        with model_session(flags, answer_options) as session:
            if streams:
                reasons = [session.thread.run(print_answer(session.model, one)) for one in batch]
            else:
                lines = [JsonLine(prompt) for prompt in prompts]
                _answer_all(session, batch, lines)
                for line in lines:
                    print(msgspec.json.encode(line).decode() if options.json else line.text)
                reasons = [line.finish_reason for line in lines]
    except RequestFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ConfigurationError as error:
        if not first or not str(error).startswith(f"model {first!r}"):
            raise
        hint = "if it begins a prompt of several words, that needs quotes"
        raise ConfigurationError(f"{error}; {hint}") from None
    cut = "length" in reasons and "max_tokens" not in flags.sampling
    if cut and sys.stderr.isatty() and not options.json:
        notice = f"cut at {MAX_TOKENS} tokens, the default; --max-tokens N allows more"
        print(f"({notice})", file=sys.stderr)
    return 0


def generate_parser() -> CommandLine:
    """The words of the command line."""
    command_line = chat_model_parser(
        "generate",
        "[MODEL] PROMPT ...",
        f"Completes prompts; at most {MAX_TOKENS} tokens by default. Of several words the first is "
        "MODEL (a folder, a GGUF file, a hub id, or what a running server calls it), unless "
        "--model names it; without MODEL a single PROMPT is the demo's.",
        ("--chat", "--stream", "--json"),
    )
    add_model_flag(command_line)
    command_line.add_argument("words", nargs="+", metavar="PROMPT", help="a text; - reads lines")
    command_line.add_argument("--chat", action="store_true", help="use the chat template")
    how = command_line.add_mutually_exclusive_group()
    help_text = "print as it comes; on a terminal one prompt's completion is anyway"
    how.add_argument("--stream", action="store_true", help=help_text)
    how.add_argument("--json", action="store_true", help="one object per line")
    return command_line


def _take_model(options: argparse.Namespace) -> str:
    """Takes the first of several words as MODEL and returns it; "" if there is one word, or --model
    is given."""
    if "model" in options or len(options.words) == 1:
        return ""
    model, *options.words = options.words
    if len(model.split()) != 1 and not Path(model).exists():
        raise ConfigurationError(
            f"{model!r} is no model: of several words the first is MODEL, {DEMO} for the demo"
        )
    options.model = model
    return str(model)


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
    for number, prompt in enumerate(prompts, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes of an argument
            raise ConfigurationError(f"prompt {number} of the command line is not UTF-8")
    return prompts


def _question(prompt: str, chat: bool) -> Question:
    return [{"role": "user", "content": prompt}] if chat else prompt


def _answer_all(
    session: ModelSession, questions: Sequence[Question], lines: Sequence[JsonLine]
) -> None:
    """All at once, into `lines`; the first that is refused ends the others."""
    from pipeinfer.runtime.logs import StatusLine

    shown = StatusLine(doing="answering")

    def show_progress() -> None:
        ended = sum(line.finish_reason is not None for line in lines)
        tokens = sum(len(line.token_ids) for line in lines)
        so_far = f", {counted(tokens, 'token')}" if tokens else ""
        shown.show(f"{ended} of {counted(len(lines), 'prompt')}{so_far}")

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
) -> str | None:
    """Prints an answer as it comes, and a newline, also if it breaks off; returns why it ended.
    `answer_texts`: gets what is no thought. RequestFailed."""
    printed, reason = False, None
    async with aclosing(model.answer(question)) as pieces:
        try:
            async for text, ended in _separated(pieces, answer_texts):
                print(text, end="", flush=True)
                printed, reason = True, ended
        except RequestFailed:
            if printed:
                print(flush=True)
            raise
    print(flush=True)
    return reason


async def _separated(
    pieces: AsyncIterator[AnswerDelta], answer_texts: list[str] | None
) -> AsyncIterator[tuple[str, str | None]]:
    """The text of all, with the finish reason; between reasoning and what comes after it is an
    empty line."""
    thinks = False
    async for piece in pieces:
        between = "\n\n" if thinks and piece.text and not piece.reasoning else ""
        thinks = piece.reasoning or (thinks and not piece.text)
        yield between + piece.text, piece.finish_reason
        if answer_texts is not None and not piece.reasoning:
            answer_texts.append(piece.text)


HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def chat_parser() -> CommandLine:
    """The words of the command line."""
    command_line = chat_model_parser(
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
    add_model_flag(command_line)
    return command_line


def run_chat(arguments: Sequence[str]) -> int:
    """Talks until /exit or the end of the input; returns the exit code."""
    command_line = chat_parser()
    flags = read_flags(command_line, command_line.parse_args(arguments))

    try:
        with model_session(flags, AnswerOptions()) as session:
            if sys.stdin.isatty():
                with suppress(ImportError):
                    import readline  # noqa: F401  (imported for what it does to input())
                print(f"{session.model.name}: {HELP}.")
            read_questions(Conversation(session))
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
        """Forgets the conversation so far."""
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
    for lines in itertools.count():
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
            raise undecodable_input(error, lines) from None
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            print("(forgotten)")
        elif line.startswith("/"):
            print(f"unknown command {line}: {HELP}")
        elif line:
            conversation.ask(line)


@dataclass(frozen=True)
class ModelSession:
    """A model that answers, and the thread on whose loop it does."""

    model: ChatModel
    thread: LoopThread


@contextmanager
def model_session(flags: ModelFlags, answer_options: AnswerOptions) -> Iterator[ModelSession]:
    """The model that the flags mean, started. From the first moment on a terminal shows what the
    start waits for. Raises ConfigurationError or RequestFailed."""
    line = StatusLine()
    line.show(f"{flags.model or DEMO}")
    try:
        model = _model(flags, answer_options, line)

        from pipeinfer.offline.calls import LoopThread

        thread = LoopThread()
        try:
            thread.run(model.start(), lambda: line.show(f"{model.name}: {model.startup_status()}"))
            line.clear()
            yield ModelSession(model, thread)
        finally:
            line.clear()
            thread.run(model.close())
            thread.close()
    finally:
        line.clear()


def _model(flags: ModelFlags, answer_options: AnswerOptions, line: StatusLine) -> ChatModel:
    """Chooses the model. Prints which running server is asked, if it was found and not named."""
    if flags.options.url:
        from pipeinfer.cli.served_model import ServedModel

        return ServedModel(flags, answer_options, flags.options.url)
    if not flags.options.local and not flags.local_only_flags:
        from pipeinfer.cli.served_model import ServedModel, servers_of

        servers = servers_of(flags.model)
        if len(servers) == 1 or (servers and flags.model):
            server, served = servers[0]
            line.clear()
            notice = f"asking {served.model} of the server at {served.url} (process {server.pid})"
            print(f"{notice}; --local loads a model here", file=sys.stderr, flush=True)
            return ServedModel(flags, answer_options, served.url, served.model, server.pid)
        if servers:
            line.clear()
            notice = (
                f"{len(servers)} servers run here, and neither MODEL nor --url says which to ask"
            )
            print(f"{notice}: loading {DEMO}", file=sys.stderr, flush=True)

    return LocalModel(flags, answer_options)
