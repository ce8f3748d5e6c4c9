"""Encodes long prompts in processes of their own while the stage goes on.

Two lanes: whoever sends a book makes others wait who send books, not those who send a chapter.
In each the lightest prompt goes first, one at a time. Knows no routing and no recording.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from pipeinfer.messages import Message, Submit
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.apart import Setup, read_frame, write_frame
from pipeinfer.tokenizer.events import Encode, Encoded

log = logging.getLogger(__name__)

# Bytes up to which a prompt is in the first lane: it takes 0.1 s there, and so long may the next
# one wait for it.
CHAPTER = 256 * 1024
TRIES = 2  # processes that may end over a prompt before it is refused

Find = Callable[[str, int], Submit | None]
Job = tuple[int, int, Encode]  # weight, number, what to encode


class ProcessEnded(RuntimeError):
    """The process that encodes ended, or could not be started."""


class Apart:
    """One process that encodes, started when it is first needed. All calls but `kill` block."""

    def __init__(self, setup: Setup) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def encode(self, submit: Submit) -> Encoded:
        """Raises ProcessEnded when TRIES processes ended over it."""
        for number in range(TRIES):
            try:
                return self._ask(submit)
            except (OSError, ProcessEnded) as error:
                self._end()
                if self._killed or number == TRIES - 1:
                    raise ProcessEnded(str(error)) from None
                log.warning("the process for long prompts ended (%s) and is started again", error)
        raise AssertionError("unreachable")

    def kill(self) -> None:
        """Ends it, also while it encodes."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Waits for its end, after `kill`."""
        self._end()

    def _ask(self, submit: Submit) -> Encoded:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        write_frame(process.stdin, msgspec.msgpack.encode(submit))  # type: ignore[arg-type]
        answer = read_frame(process.stdout)  # type: ignore[arg-type]
        if answer is None:
            raise ProcessEnded(f"it ended with code {process.wait()}")
        return msgspec.msgpack.decode(answer, type=Encoded)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._killed:
            raise ProcessEnded("the stage stops")
        if self._process is None:
            home = str(Path(__file__).parents[2])
            paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "TOKENIZERS_PARALLELISM": "false",  # one text at a time has no use for threads
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeinfer.tokenizer.apart"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            if self._killed:  # meanwhile
                self._process.kill()
            assert self._process.stdin is not None
            write_frame(self._process.stdin, self._setup)  # type: ignore[arg-type]
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except BrokenPipeError as error:  # of what it had not read
                        log.debug("closing the pipe: %s", error)


class Lane:
    """A process, a thread that talks to it, and the prompts that wait for them."""

    def __init__(self, setup: Setup) -> None:
        self.apart = Apart(setup)
        self.pool = ThreadPoolExecutor(1, "encode")
        self.waiting: list[Job] = []
        self.busy = False


class Lanes:
    """The tokenizer's driver. `find(request_id, attempt)`: the request, None if nobody wants it any
    more; asked when its turn comes."""

    def __init__(self, folder: Path, settings: Settings, find: Find) -> None:
        own = msgspec.structs.replace(settings, api_key="", api_key_file="")
        setup = Setup(str(folder), own)
        self._lanes = (Lane(setup), Lane(setup))
        self._find = find
        self._count = 0
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start with the first prompt of their lane."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs."""
        assert isinstance(message, Encode)
        lane = self._lanes[message.weight > CHAPTER]
        self._count += 1
        heapq.heappush(lane.waiting, (message.weight, self._count, message))
        self._next(lane)

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        for lane in self._lanes:
            lane.apart.kill()
        for lane in self._lanes:
            await asyncio.get_running_loop().run_in_executor(lane.pool, lane.apart.close)
            lane.pool.shutdown()

    def stats(self) -> dict[str, float]:
        """The core counts what is under way."""
        return {}

    def _next(self, lane: Lane) -> None:
        while lane.waiting and not lane.busy and self._feed is not None:
            _, _, asked = heapq.heappop(lane.waiting)
            submit = self._find(asked.request_id, asked.attempt)
            if submit is not None:
                lane.busy = True
                done = self._loop.run_in_executor(lane.pool, _encode, lane.apart, submit)
                done.add_done_callback(partial(self._done, lane))

    def _done(self, lane: Lane, future: asyncio.Future[Encoded]) -> None:
        lane.busy = False
        if self._feed is not None and not future.cancelled():
            self._feed(future.result())
            self._next(lane)


def _encode(apart: Apart, submit: Submit) -> Encoded:
    try:
        return apart.encode(submit)
    except ProcessEnded as error:
        name, attempt = submit.request_id, submit.attempt
        message = f"the prompt could not be tokenized: the process that does it ended ({error})"
        return Encoded(name, attempt, b"", 500, message)
