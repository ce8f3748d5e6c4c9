"""Jobs that worker processes do while the stage goes on: long prompts and grammar validation.

- WorkerPool: jobs wait for a worker, and clients take turns (FairQueue).
- EncodingQueues: long prompts, in three queues by size, each with one EncoderProcess. A prompt of
  megabytes delays prompts of its size only.
- GrammarValidation: every grammar compiles in a process that may die of it. A first attempt has
  little time, which is enough for nearly all grammars. A grammar that needs more begins again in a
  pool of its own: its text does not show how long a grammar takes, and clients without a key
  cannot be distinguished from new ones.
- TokenizerDriver: the stage's I/O beside the bus.
- main: the process of an EncoderProcess, `python -m pipeinfer.tokenizer.workers`. It is a process
  because templates and the tokenizers library hold the interpreter for seconds. Its frames are
  MessagePack. It ends with its stage, also in the middle of a text.

Knows no routing and no recording.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import msgspec

from pipeinfer.core import FairQueue
from pipeinfer.grammars.bounds import VocabularySetup
from pipeinfer.grammars.validation import MAX_SECONDS, TooSlow, ValidationProcess
from pipeinfer.messages import Message, Submit
from pipeinfer.processes import incoming_frames, read_frame, start_child, write_frame
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.core import Encode, Encoded, EncodeNext, GrammarVerdict, ValidateGrammar
from pipeinfer.tokenizer.prompts import PromptEncoder, Rejected, load_encoder
from pipeinfer.tokenizer.routing import grammar_digest

log = logging.getLogger(__name__)

# Bytes of a prompt in the first queue at most: encoding takes 0.1 s, for which the next may wait.
SHORT_QUEUE_BYTES = 256 * 1024
# Bytes of a prompt in the second queue at most: encoding takes 1 s.
MEDIUM_QUEUE_BYTES = 2 * 1024 * 1024
MAX_PROCESSES_A_PROMPT = 2  # processes that may end during a prompt before it is refused
# Processes for first attempts; the second starts when the first is busy.
FAST_PROCESSES = 2
# Seconds of processor time of a first attempt, ten times what most grammars take. While eight
# connections send grammars that take longer, a ninth waits for four of these at most.
FAST_SECONDS = 0.1
SLOW_PROCESSES = 1  # for grammars that need more than FAST_SECONDS
SLOW_NICENESS = 10  # of these processes: streams and first attempts come first

FindSubmit = Callable[[str, int], Submit | None]
FeedCore = Callable[[Message], None]


class Worker(Protocol):
    """A worker process. All methods but `close` are called from one thread."""

    def start(self) -> None:
        """Starts the process before there is a job; blocks. An error shows in `work`."""
        ...

    def work(self, submit: Submit) -> Message:
        """Does one job and returns the event for the core; blocks."""
        ...

    def close(self) -> None:
        """From any thread: ends the process, also during a job. No other one is started."""
        ...

    def kill(self) -> None:
        """Waits for the end of the process, after `close` and with no job running."""
        ...


class _WorkerSlot:
    """A worker, and the thread that talks to it.

    Attributes:
    - worker: the process
    - pool: its one thread
    - busy: whether a call runs on the thread
    - starting: whether that call is the first one, `Worker.start`
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pool = ThreadPoolExecutor(1, "tokenizer-job")
        self.busy = False
        self.starting = True


class WorkerPool:
    """Jobs of up to `max_workers` workers. A worker is added when all others are busy, one at a
    time.

    Arguments:
    - max_workers: processes at most
    - make_worker: makes the next worker
    - find_submit: (request_id, attempt) -> the request, None if it has ended. Called when the job's
      turn comes.
    """

    def __init__(
        self, max_workers: int, make_worker: Callable[[], Worker], find_submit: FindSubmit
    ) -> None:
        self._max_workers = max_workers
        self._make_worker = make_worker
        self._find_submit = find_submit
        self._slots: list[_WorkerSlot] = []
        self._waiting: FairQueue[Encode | ValidateGrammar] = FairQueue()
        self._feed: FeedCore | None = None

    @property
    def workers(self) -> list[Worker]:
        """The workers that have been added so far."""
        return [slot.worker for slot in self._slots]

    def start(self, feed: FeedCore) -> None:
        """Within the loop of the stage; `feed` gets the events. Workers start with the jobs."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def submit(self, job: Encode | ValidateGrammar, weight: int) -> None:
        """Adds a job; `weight` as in FairQueue."""
        self._waiting.put(job.client, weight, job)
        self._start_waiting()

    async def stop(self) -> None:
        """Ends the processes; running jobs are dropped."""
        self._feed = None
        for slot in self._slots:
            slot.worker.close()
        for slot in self._slots:
            await self._loop.run_in_executor(None, slot.pool.shutdown)
            slot.worker.kill()

    def _start_waiting(self) -> None:
        while len(self._waiting) and self._feed is not None:
            slot = next((slot for slot in self._slots if not slot.busy), None)
            if slot is None:
                self._add_worker()
                return
            job = self._waiting.take()
            submit = self._find_submit(job.request_id, job.attempt)
            if submit is not None:
                self._run(slot, partial(slot.worker.work, submit))

    def _add_worker(self) -> None:
        """Adds a worker, unless there are `max_workers` or one is still starting."""
        if len(self._slots) < self._max_workers and not any(slot.starting for slot in self._slots):
            slot = _WorkerSlot(self._make_worker())
            self._slots.append(slot)
            self._run(slot, slot.worker.start)

    def _run(self, slot: _WorkerSlot, call: Callable[[], Message | None]) -> None:
        slot.busy = True
        done = self._loop.run_in_executor(slot.pool, call)
        done.add_done_callback(partial(self._on_done, slot))

    def _on_done(self, slot: _WorkerSlot, future: asyncio.Future[Message | None]) -> None:
        slot.busy = slot.starting = False
        if self._feed is not None and not future.cancelled():
            event = future.result()
            if event is not None:
                self._feed(event)
            self._start_waiting()


class ProcessEnded(RuntimeError):
    """The process that encodes ended, or could not be started."""


class EncoderProcess:
    """A Worker that encodes prompts in a process, whose code is `main`."""

    def __init__(self, setup: EncoderSetup) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """See Worker."""
        with suppress(OSError, ProcessEnded):  # the next prompt gets the error
            self._running()

    def work(self, submit: Submit) -> Encoded:
        """The prompt's ids, or why the prompt is refused."""
        try:
            return self._encoded(submit)
        except ProcessEnded as error:
            name, attempt = submit.request_id, submit.attempt
            message = f"the prompt could not be tokenized: the process that does it ended ({error})"
            return Encoded(name, attempt, b"", 500, message)

    def close(self) -> None:
        """See Worker, here and below."""
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
        """Raises ProcessEnded when MAX_PROCESSES_A_PROMPT processes ended during this prompt."""
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
        write_frame(cast(BinaryIO, process.stdin), msgspec.msgpack.encode(submit))
        answer = read_frame(process.stdout.fileno())
        if answer is None:
            raise ProcessEnded(f"it ended with code {process.wait()}")
        return msgspec.msgpack.decode(answer, type=Encoded)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise ProcessEnded("the stage stops")
        if self._process is None:
            # Threads are of no use for one text at a time.
            environment = {"TOKENIZERS_PARALLELISM": "false"}
            self._process = start_child("pipeinfer.tokenizer.workers", environment)
            if self._closed:  # meanwhile
                self._process.kill()
            write_frame(cast(BinaryIO, self._process.stdin), self._setup)
        return self._process


class EncodingQueues:
    """Encodes long prompts. `find_submit`: see WorkerPool."""

    def __init__(self, folder: Path, settings: Settings, find_submit: FindSubmit) -> None:
        worker_settings = msgspec.structs.replace(settings, api_key="", api_key_file="")
        setup = EncoderSetup(str(folder), worker_settings)
        self._pools = tuple(
            WorkerPool(1, lambda: EncoderProcess(setup), find_submit) for _ in range(3)
        )

    async def start(self, feed: Callable[[Message], None]) -> None:
        """A process starts with the first prompt of its queue."""
        for pool in self._pools:
            pool.start(feed)

    def deliver(self, message: Encode) -> None:
        """Adds the prompt to the queue of its size."""
        weight = message.weight
        self._pools[(weight > SHORT_QUEUE_BYTES) + (weight > MEDIUM_QUEUE_BYTES)].submit(
            message, weight
        )

    async def stop(self) -> None:
        """Ends the processes; running jobs are dropped."""
        for pool in self._pools:
            await pool.stop()


class ValidationWorker:
    """A Worker that validates grammars.

    process: compiles them.
    is_slow: it has grammars that were too slow for a first attempt; its verdict is the last word.
    """

    def __init__(self, process: ValidationProcess, is_slow: bool) -> None:
        self.process = process
        self.close = process.close
        self.kill = process.kill
        self._is_slow = is_slow

    def start(self) -> None:
        """See Worker."""
        with suppress(RuntimeError, OSError):  # the next job gets the error
            self.process.start()

    def work(self, submit: Submit) -> GrammarVerdict | ValidateGrammar:
        """The verdict, or why there is none. ValidateGrammar: a first attempt needs more time."""
        name, attempt = submit.request_id, submit.attempt
        spec = submit.params.structured_outputs
        assert spec is not None
        try:
            message = self.process.verdict(spec)
        except TooSlow as error:
            if not self._is_slow:
                return ValidateGrammar(name, attempt, submit.client)
            message = str(error)
        except (RuntimeError, OSError) as error:
            return GrammarVerdict(
                name, attempt, 500, f"the grammar could not be validated: {error}"
            )
        return GrammarVerdict(
            name, attempt, 400 if message else 0, message, grammar_digest(spec), self._is_slow
        )


class GrammarValidation:
    """Validates grammars, quick ones and slow ones in pools of their own.

    Arguments:
    - setup: the model's vocabulary; None where no grammars are served
    - find_submit: see WorkerPool
    - no_grammars_because: the refusal of requests with grammars then
    - seconds: of processor time that a grammar may take at most
    """

    def __init__(
        self,
        setup: VocabularySetup | None,
        find_submit: FindSubmit,
        no_grammars_because: str = "",
        seconds: float = MAX_SECONDS,
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

    def deliver(self, message: ValidateGrammar) -> None:
        """Adds a grammar to be validated."""
        if self._no_grammars_because:
            event = GrammarVerdict(
                message.request_id, message.attempt, 400, self._no_grammars_because
            )
            asyncio.get_running_loop().call_soon(self._on_verdict, event)
            return
        self._fast_pool.submit(message, 1)

    async def stop(self) -> None:
        """Ends the processes; running jobs are dropped."""
        self._feed = None
        await self._fast_pool.stop()
        await self._slow_pool.stop()

    def stats(self) -> dict[str, float]:
        """trials_ended_total: attempts that ended without a verdict."""
        return {"trials_ended_total": sum(worker.process.ended_runs for worker in self._workers)}

    def _make_worker(self, seconds: float, niceness: int, slow: bool) -> ValidationWorker:
        assert self._setup is not None
        self._workers.append(
            ValidationWorker(ValidationProcess(self._setup, seconds, niceness), slow)
        )
        return self._workers[-1]

    def _on_verdict(self, verdict: Message) -> None:
        match verdict:
            case ValidateGrammar():
                self._slow_pool.submit(verdict, 1)
            case _ if self._feed is not None:
                self._feed(verdict)
            case _:
                return


class TokenizerDriver:
    """See Driver in runtime/stage.py. Gives the core's EncodeNext back, one in each turn of the
    loop, so that sockets are read in between."""

    def __init__(self, encoding: EncodingQueues, validation: GrammarValidation) -> None:
        self._encoding = encoding
        self._validation = validation
        self._feed: Callable[[Message], None] | None = None
        self._outstanding = 0  # EncodeNext that the core has not got back

    async def start(self, feed: Callable[[Message], None]) -> None:
        """See Driver, here and below."""
        self._feed = feed
        await self._encoding.start(feed)
        await self._validation.start(feed)

    def deliver(self, message: Message) -> None:
        match message:
            case Encode():
                self._encoding.deliver(message)
            case EncodeNext():
                self._outstanding += 1
                if self._outstanding == 1:
                    asyncio.get_running_loop().call_soon(self._encode_next)
            case ValidateGrammar():
                self._validation.deliver(message)
            case _:
                raise TypeError(f"a tokenizer's driver takes no {type(message).__name__}")

    def _encode_next(self) -> None:
        """Runs in a turn of the loop of its own."""
        if self._feed is None:
            return
        self._outstanding -= 1
        if self._outstanding:
            asyncio.get_running_loop().call_soon(self._encode_next)
        self._feed(EncodeNext())

    async def stop(self) -> None:
        self._feed = None
        await self._encoding.stop()
        await self._validation.stop()

    def stats(self) -> dict[str, float]:
        return self._validation.stats()


class EncoderSetup(msgspec.Struct, array_like=True):
    """The first frame: what to load the encoder from."""

    folder: str
    settings: Settings


def encode_submit(encoder: PromptEncoder, submit: Submit) -> Encoded:
    """The event for the core of the stage."""
    name, attempt = submit.request_id, submit.attempt
    try:
        prompt = encoder.prompt(submit)
        ids, state, reasoning = prompt.ids.tobytes(), prompt.reasoning_state, prompt.reasoning
        return Encoded(name, attempt, ids, reasoning_state=state, reasoning=reasoning)
    except Rejected as error:
        return Encoded(
            request_id=name,
            attempt=attempt,
            status=error.status,
            message=str(error),
            param=error.param,
            code=error.code,
        )


def main() -> None:
    """The process that encodes long prompts: serves until stdin ends."""
    frames, answers = incoming_frames()
    with contextlib.suppress(OSError):  # running out of memory here need not end the stage
        Path("/proc/self/oom_score_adj").write_text("1000")
    setup = msgspec.msgpack.decode(frames.get(), type=EncoderSetup)
    encoder = load_encoder(Path(setup.folder), setup.settings, multithreaded=True).encoder
    decoder = msgspec.msgpack.Decoder(Submit)
    while True:
        answer = encode_submit(encoder, decoder.decode(frames.get()))
        write_frame(answers, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
