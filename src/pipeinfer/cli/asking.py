"""Whom `generate` and `chat` ask: a model that is loaded here, or a server that runs.

Knows when to take which, and nothing of how they answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeinfer.cli.questions import AnswerOptions, ChatModel, ModelFlags
from pipeinfer.runtime.terminal import StatusLine
from pipeinfer.settings import DEMO

if TYPE_CHECKING:
    from pipeinfer.offline.llm import LoopThread


@dataclass(frozen=True)
class ModelSession:
    """A model that answers, and the thread on whose loop it does."""

    model: ChatModel
    thread: LoopThread


@contextmanager
def model_session(asked: ModelFlags, wanted: AnswerOptions) -> Iterator[ModelSession]:
    """The model that the flags mean, started; a terminal is told from the first moment on what is
    waited for. Raises ConfigurationError or RequestFailed."""
    line = StatusLine()
    line.show(f"{asked.model or DEMO}")
    try:
        model = _model(asked, wanted, line)

        from pipeinfer.offline.llm import LoopThread

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


def _model(asked: ModelFlags, wanted: AnswerOptions, line: StatusLine) -> ChatModel:
    """Says in a line which running server is asked, if it was found and not named."""
    if asked.options.url:
        from pipeinfer.cli.served_model import ServedModel

        return ServedModel(asked, wanted, asked.options.url)
    if not asked.options.local and not asked.local_only_flags:
        from pipeinfer.cli.running import servers_of

        servers = servers_of(asked.model)
        if len(servers) == 1 or (servers and asked.model):
            from pipeinfer.cli.served_model import ServedModel

            server, served = servers[0]
            line.clear()
            notice = f"asking {served.model} of the server at {served.url} (process {server.pid})"
            print(f"{notice}; --local loads a model here", file=sys.stderr, flush=True)
            return ServedModel(asked, wanted, served.url, served.model, server.pid)
        if servers:
            line.clear()
            notice = (
                f"{len(servers)} servers run here, and neither MODEL nor --url says which to ask"
            )
            print(f"{notice}: loading {DEMO}", file=sys.stderr, flush=True)

    from pipeinfer.cli.local_model import LocalModel

    return LocalModel(asked, wanted)
