"""Tries grammars in processes of their own while the stage goes on.

How long a grammar takes nobody can tell from its text, and a client without a key can look like a
new one at any time. So each has a slice of time at first, which nearly all need a small part of.
What is not done then begins again in a class of its own, where it takes no time from the others.
Knows no routing, no prompt and no recording.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from pipeinfer.grammars.trial import SECONDS, Setup, TooSlow, Trial
from pipeinfer.messages import Message, Submit
from pipeinfer.tokenizer.errands import FindSubmit, WorkerPool
from pipeinfer.tokenizer.events import Tried, Try
from pipeinfer.tokenizer.verdicts import grammar_digest

# Processes for first trials; the second starts when the first is busy.
FAST_PROCESSES = 2
# Seconds of processor time of a first trial, ten times what most grammars take. While eight
# connections send what takes longer, a ninth waits for four of these at most.
FAST_SECONDS = 0.1
SLOW_PROCESSES = 1  # processes for what takes longer
SLOW_NICENESS = 10  # of these: streams and first trials come first


class ValidationWorker:
    """A worker, see errands.py. `process`: the one that it asks. `slow`: it tries what was too
    slow for others, and nobody else does so after it."""

    def __init__(self, process: Trial, is_slow: bool) -> None:
        self.process = process
        self.close = process.close
        self.kill = process.kill
        self._is_slow = is_slow

    def start(self) -> None:
        """See Worker."""
        with suppress(RuntimeError, OSError):  # the next trial says it to the client
            self.process.start()

    def work(self, submit: Submit) -> Tried | Try:
        """The verdict, or why there is none; a Try if the slice is over."""
        name, attempt = submit.request_id, submit.attempt
        spec = submit.params.structured_outputs
        assert spec is not None
        try:
            message = self.process.verdict(spec)
        except TooSlow as error:
            if not self._is_slow:
                return Try(name, attempt, submit.client)
            message = str(error)
        except (RuntimeError, OSError) as error:
            return Tried(name, attempt, 500, f"the grammar was not tried: {error}")
        return Tried(
            name, attempt, 400 if message else 0, message, grammar_digest(spec), self._is_slow
        )


class GrammarValidation:
    """A part of the tokenizer's driver. `find`: see Errands. `setup`: the model's vocabulary; None
    if it has none for grammars, because of `none`. `seconds`: that a grammar may take at most."""

    def __init__(
        self,
        setup: Setup | None,
        find_submit: FindSubmit,
        no_grammars_because: str = "",
        seconds: float = SECONDS,
    ) -> None:
        self._no_grammars_because = no_grammars_because
        self._workers: list[ValidationWorker] = []
        self._setup = setup
        self._fast_pool = WorkerPool(
            FAST_PROCESSES, lambda: self._make_worker(FAST_SECONDS, 0, False), find_submit
        )
        self._slow_pool = WorkerPool(
            SLOW_PROCESSES, lambda: self._make_worker(seconds, SLOW_NICENESS, True), find_submit
        )
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start with the first grammar."""
        self._feed = feed
        self._fast_pool.start(self._on_verdict)
        self._slow_pool.start(self._on_verdict)

    def deliver(self, message: Try) -> None:
        """One more."""
        if self._no_grammars_because:
            said = Tried(message.request_id, message.attempt, 400, self._no_grammars_because)
            asyncio.get_running_loop().call_soon(self._on_verdict, said)
            return
        self._fast_pool.submit(message, 1)

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        await self._fast_pool.stop()
        await self._slow_pool.stop()

    def stats(self) -> dict[str, float]:
        """Trials that were ended before there was a verdict."""
        return {"trials_ended_total": sum(trier.process.ended for trier in self._workers)}

    def _make_worker(self, seconds: float, niceness: int, slow: bool) -> ValidationWorker:
        assert self._setup is not None
        self._workers.append(ValidationWorker(Trial(self._setup, seconds, niceness), slow))
        return self._workers[-1]

    def _on_verdict(self, verdict: Message) -> None:
        match verdict:
            case Try():
                self._slow_pool.submit(verdict, 1)
            case _ if self._feed is not None:
                self._feed(verdict)
            case _:
                return
