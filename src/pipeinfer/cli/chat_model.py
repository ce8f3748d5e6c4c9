"""Models that answer prompts and chats of `generate` and `chat`: the interface, the flags that say
which model is asked and how it samples, and the model that is loaded here.

    ChatModel      the interface; also served_model.py has one
    ModelFlags     what the flags say
    LocalModel     loaded for this command, by the offline classes
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pipeinfer import settings as config
from pipeinfer.command_line import CommandLine
from pipeinfer.other_servers import flag
from pipeinfer.params import InvalidParameter, RequestParams, normalized
from pipeinfer.settings import DEMO

# A text to be completed, or the messages of a chat, whose answer is next.
Question = str | Sequence[Mapping[str, str]]


@dataclass(slots=True)
class AnswerDelta:
    """New text of an answer, with its token ids if they are known.

    reasoning: whether the text is a thought of the model. finish_reason: of the last delta.
    """

    text: str
    token_ids: Sequence[int] = field(default_factory=list[int])
    reasoning: bool = False
    finish_reason: str | None = None


class RequestFailed(Exception):
    """A request was refused, or its answer broke off; the text says why."""


class ChatModel(Protocol):
    """A model that answers prompts and chats, on the loop of a thread of its own."""

    name: str

    async def start(self) -> None:
        """Returns when questions are answered. ConfigurationError or RequestFailed."""
        ...

    def startup_status(self) -> str:
        """The step for which start() waits, in words."""
        ...

    def answer(self, question: Question) -> AsyncGenerator[AnswerDelta, None]:
        """The answer as it comes; leaving the generator early aborts it. RequestFailed."""
        ...

    async def close(self) -> None:
        """Gives back all that start() took. May be called again."""
        ...


@dataclass(frozen=True)
class AnswerOptions:
    """How a command wants its answers.

    Attributes:
    - max_tokens: of each answer, if no flag says so
    - batch: whether only the time of all of them counts
    - token_ids: whether deltas need their token ids
    """

    max_tokens: int | None = None
    batch: bool = False
    token_ids: bool = False


# Settings that mean something to a server that runs already: its key, and of a request's noise.
# The rest of these are of the terminal.
SERVER_SETTINGS = ("model", "api_key", "seed", "log_level", "log_format")
LOCAL_ONLY = "a setting of a model that is loaded here"


@dataclass(frozen=True)
class ModelFlags:
    """The values of a command's flags. `settings`: for LLM(...). `sampling`: only what was
    given."""

    options: argparse.Namespace
    settings: dict[str, Any]
    sampling: dict[str, Any]

    @property
    def model(self) -> str:
        """MODEL, "" for any."""
        return str(self.settings.get("model", ""))

    @property
    def local_only_flags(self) -> list[str]:
        """Flags that were given and that only apply to a model which is loaded here."""
        return [flag(name) for name in self.settings if name not in SERVER_SETTINGS]

    def params(self, defaults: RequestParams, max_tokens: int | None) -> RequestParams:
        """`defaults` with what was given; without --max-tokens that is `max_tokens`."""
        chosen = {"max_tokens": max_tokens, **self.sampling}
        return normalized(msgspec.structs.replace(defaults, **chosen))


def chat_model_parser(
    command: str, usage: str, description: str, essential: Sequence[str]
) -> CommandLine:
    """A parser with the choice of a server, the sampling flags and all settings. `essential`: flags
    of the command that `--help` shows before others."""
    command_line = CommandLine(
        prog=f"pipeinfer {command}",
        usage=f"pipeinfer {command} {usage} [FLAG ...]",
        description=description,
        epilog="A server that runs on this host and serves MODEL (without MODEL, the only one that "
        "runs) is asked, unless flags of a model that is loaded here are given. How to sample is "
        "the model's generation_config.json's to say where no flag does.",
        essential=(*essential, "--max-tokens", "--temperature", "--top-p", "--stop", "--url",
                   "--local", "--api-key", "--device", "--max-model-len"),
    )  # fmt: skip
    where = command_line.add_argument_group("where the model runs").add_mutually_exclusive_group()
    where.add_argument("--url", metavar="URL", default="", help="a running server, to be asked")
    where.add_argument("--local", action="store_true", help="load the model here in any case")
    nothing = argparse.SUPPRESS
    sampling = command_line.add_argument_group("sampling")
    add = sampling.add_argument
    add("--max-tokens", type=int, metavar="N", default=nothing, help="of the answer, at most")
    add("--temperature", type=float, metavar="T", default=nothing, help="0 is greedy")
    add("--top-k", type=int, metavar="K", default=nothing, help="of the K likeliest tokens")
    add("--top-p", type=float, metavar="P", default=nothing, help="of the likeliest, up to P")
    help_text = "ends the answer; may be repeated"
    add("--stop", action="append", metavar="TEXT", default=nothing, help=help_text)
    help_text = "go on after the model's end"
    add("--ignore-eos", action="store_true", default=nothing, help=help_text)
    config.add_flags(command_line)
    return command_line


def add_model_flag(command_line: CommandLine) -> None:
    """MODEL by a flag, as other servers take it."""
    also = ("--model", "--model-path")
    command_line.add_argument(
        *also, dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def read_flags(command_line: CommandLine, options: argparse.Namespace) -> ModelFlags:
    """Ends the process with code 2 for flags that cannot be."""
    given = vars(options)
    settings = {k: v for k, v in given.items() if k in config.Settings.__struct_fields__}
    environment = config.from_environment(os.environ)
    if "model" in environment:
        settings.setdefault("model", environment["model"])
    sampling = {k: v for k, v in given.items() if k in RequestParams.__struct_fields__}
    sampling.pop("seed", None)  # the setting of that name: it seeds all requests
    try:
        normalized(RequestParams(**sampling))
    except InvalidParameter as error:
        command_line.error(str(error))
    found = ModelFlags(options, settings, sampling)
    if options.url and found.local_only_flags:
        command_line.error(f"{found.local_only_flags[0]} is {LOCAL_ONLY}, and --url asks a server")
    if "log_level" not in environment:
        settings.setdefault("log_level", "warning")  # a terminal is for the answers
    return found


class LocalModel:
    """`name`: as it was given."""

    def __init__(self, flags: ModelFlags, answer_options: AnswerOptions) -> None:
        from pipeinfer.llm import AsyncLLM  # seconds, which a served model does not take
        from pipeinfer.offline.llm import batch_defaults

        self.name = flags.model or DEMO
        self._flags = flags
        self._max_tokens = answer_options.max_tokens
        settings = dict(flags.settings)
        model = str(settings.pop("model", ""))
        task = settings.get("task", "auto")
        if task not in ("auto", "generate"):
            raise config.ConfigurationError(f"--task {task}: this command generates texts")
        settings["task"] = "generate"
        self._llm = AsyncLLM(
            model, **(batch_defaults(settings) if answer_options.batch else settings)
        )
        self._params = RequestParams()

    async def start(self) -> None:
        from pipeinfer.llm import PipelineStopped

        try:
            await self._llm.start()
        except PipelineStopped as error:
            raise RequestFailed(str(error)) from None
        defaults = self._llm.get_default_sampling_params().plain()
        self._params = self._flags.params(defaults, self._max_tokens)

    def startup_status(self) -> str:
        return self._llm.waits_for()

    async def answer(self, question: Question) -> AsyncGenerator[AnswerDelta, None]:
        from pipeinfer.llm import PipelineStopped, RequestError

        try:
            if isinstance(question, str):
                deltas = self._llm.generate(question, self._params)
            else:
                deltas = self._llm.chat([dict(message) for message in question], self._params)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield AnswerDelta(delta.text, delta.token_ids, False, delta.finish_reason)
                    if delta.error:
                        raise RequestFailed(delta.error)
        except (PipelineStopped, RequestError) as error:
            raise RequestFailed(str(error)) from None

    async def close(self) -> None:
        await self._llm.close()
