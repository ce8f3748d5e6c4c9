"""Encodes long prompts in processes of their own while the stage goes on.

Three lanes: whoever sends a book makes others wait who send books, not those who send a chapter.
In each one prompt at a time is encoded, and clients take turns. Knows no routing and no recording.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from pipeinfer import pipes
from pipeinfer.messages import Message, Submit
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.apart import EncoderSetup
from pipeinfer.tokenizer.errands import FindSubmit, WorkerPool
from pipeinfer.tokenizer.events import Encode, Encoded

log = logging.getLogger(__name__)

# Bytes up to which a prompt is in the first lane, and in the second: it takes 0.1 s there, and 1 s,
# and so long may the next one wait for it.
SHORT_QUEUE_BYTES, MEDIUM_QUEUE_BYTES = 256 * 1024, 2 * 1024 * 1024
MAX_PROCESSES_A_PROMPT = 2  # processes that may end over a prompt before it is refused


class ProcessEnded(RuntimeError):
    """The process that encodes ended, or could not be started."""


class EncoderProcess:
    """A worker, see errands.py: one process that encodes."""

    def __init__(self, setup: EncoderSetup) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """See Worker."""
        with suppress(OSError, ProcessEnded):  # the next prompt is told
            self._running()

    def work(self, submit: Submit) -> Encoded:
        """Its ids, or why it is refused."""
        try:
            return self._encoded(submit)
        except ProcessEnded as error:
            name, attempt = submit.request_id, submit.attempt
            message = f"the prompt could not be tokenized: the process that does it ended ({error})"
            return Encoded(name, attempt, b"", 500, message)

    def close(self) -> None:
        """Ends the process, also while it encodes."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """Waits for its end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _encoded(self, submit: Submit) -> Encoded:
        """Raises ProcessEnded when TRIES processes ended over it."""
        for number in range(MAX_PROCESSES_A_PROMPT):
            try:
                return self._ask(submit)
            except (OSError, ProcessEnded) as error:
                self.kill()
                if self._closed or number == MAX_PROCESSES_A_PROMPT - 1:
                    raise ProcessEnded(str(error)) from None
                log.warning("the process for long prompts ended (%s) and is started again", error)
        raise AssertionError("unreachable")

    def _ask(self, submit: Submit) -> Encoded:
        process = self._running()
        assert process.stdout is not None
        pipes.write(cast(BinaryIO, process.stdin), msgspec.msgpack.encode(submit))
        answer = pipes.read(process.stdout.fileno())
        if answer is None:
            raise ProcessEnded(f"it ended with code {process.wait()}")
        return msgspec.msgpack.decode(answer, type=Encoded)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise ProcessEnded("the stage stops")
        if self._process is None:
            # One text at a time has no use for threads.
            environment = {"TOKENIZERS_PARALLELISM": "false"}
            self._process = pipes.start("pipeinfer.tokenizer.apart", environment)
            if self._closed:  # meanwhile
                self._process.kill()
            pipes.write(cast(BinaryIO, self._process.stdin), self._setup)
        return self._process


class EncodingQueues:
    """The tokenizer's driver of long prompts. `find`: see Errands."""

    def __init__(self, folder: Path, settings: Settings, find_submit: FindSubmit) -> None:
        own = msgspec.structs.replace(settings, api_key="", api_key_file="")
        setup = EncoderSetup(str(folder), own)
        self._pools = tuple(
            WorkerPool(1, lambda: EncoderProcess(setup), find_submit) for _ in range(3)
        )

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start with the first prompt of their lane."""
        for lane in self._pools:
            lane.start(feed)

    def deliver(self, message: Encode) -> None:
        """Takes the core's local outputs."""
        weight = message.weight
        self._pools[(weight > SHORT_QUEUE_BYTES) + (weight > MEDIUM_QUEUE_BYTES)].submit(
            message, weight
        )

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        for lane in self._pools:
            await lane.stop()
