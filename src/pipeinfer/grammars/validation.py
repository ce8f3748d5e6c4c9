"""Validates clients' grammars in a process that may crash over them; `python -m` runs that process.

The compiler cannot be cancelled, and a small text can overflow its stack. So a grammar is compiled
here first, with less time, memory and stack than an engine has. The process holds the vocabulary
and forks for each grammar: a crash ends the fork alone, and the vocabulary is built once. The cost
of the grammar's masks is measured, too, by counts, so every run of a grammar has the same outcome.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, BinaryIO, NoReturn, cast

import msgspec
import numpy as np

from pipeinfer.grammars.bounds import GrammarError, VocabularySetup, check
from pipeinfer.params import StructuredOutputs
from pipeinfer.processes import incoming_frames, read_frame, start_child, write_frame

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from pipeinfer.grammars.compiling import Grammar

# The most seconds of processor time for a grammar; processor time, so that a busy machine refuses
# no more than an idle one. A choice of 10,000 texts takes 0.3 s, 5,000 optional keys take 4 s.
MAX_SECONDS = 5.0
# Seconds of waiting for a verdict, after which there is none. Long, because machines may be busy.
VERDICT_TIMEOUT_SECONDS = 300.0
# Seconds to import and to build the vocabulary, which takes 4 s for 262,000 tokens.
START_SECONDS = 60.0
# Bytes of address space. A vocabulary of 264 tokens and a chain of 5,900 rules take 320 MB.
MAX_ADDRESS_SPACE = 2 * 1024**3
WALK_TOKENS = 24  # tokens of `sample_walk`
# The most units (compiling.py) a token of the walk on average: 4 ms of each step with such a row.
# Honest grammars take up to 700, with a vocabulary of 262,000 tokens up to 2,200.
MAX_UNITS_A_TOKEN = 4_000
# The most fuel of the lexer a token of the walk on average, which lets the lexer grow by half a MB.
# Honest grammars take up to 7,000.
MAX_FUEL_A_TOKEN = 16_000
MAX_RUNS = 2  # tries of a grammar: the first fork may have been killed for another reason


class ValidationTask(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to be validated.

    Attributes:
    - spec: the grammar
    - seconds: the most processor time
    - niceness: to be added to the process's own
    """

    spec: StructuredOutputs
    seconds: float
    niceness: int


class ValidationOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one run. Without a verdict, either `slow` or `died` is true.

    Attributes:
    - refusal: why the grammar is not served; "": it is served
    - slow: the processor time was used up
    - died: the fork crashed
    """

    refusal: str = ""
    slow: bool = False
    died: bool = False


class TooSlow(Exception):
    """A grammar took longer than its time. The message is for the client."""


class ValidationProcess:
    """A process that validates grammars.

    Attributes:
    - seconds, niceness: as in ValidationTask
    - ended_runs: runs that gave no verdict

    `start` and `verdict` block, and are called from one thread. `kill` must not run at the same
    time as one of them; `close` may.
    """

    def __init__(
        self, setup: VocabularySetup, seconds: float = MAX_SECONDS, niceness: int = 0
    ) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._seconds = seconds
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.ended_runs = 0

    def start(self) -> None:
        """Starts the process ahead of the first `verdict`. Raises RuntimeError and OSError."""
        self._running()

    def verdict(self, spec: StructuredOutputs) -> str:
        """Why the grammar is not served, for the client; "": it is served.

        Raises TooSlow if the grammar takes too long, RuntimeError or OSError if no verdict can be
        had.
        """
        try:
            check(spec)
        except GrammarError as error:
            return str(error)
        task = msgspec.msgpack.encode(ValidationTask(spec, self._seconds, self._niceness))
        outcome = None
        for _ in range(MAX_RUNS):
            outcome = self._request(task)
            if outcome is None:
                continue
            if not outcome.died and not outcome.slow:
                return outcome.refusal
            self.ended_runs += 1
            if outcome.slow:
                raise TooSlow(f"it takes longer than {self._seconds:g} s to compile")
        if outcome is None:  # not the grammar's fault, which can only end a fork
            raise RuntimeError("the process that tries grammars ended")
        return "it is too complex to compile"

    def kill(self) -> None:
        """Ends the process, even while it compiles."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """Ends the process for good; a `verdict` that waits raises RuntimeError. May be called from
        any thread. `kill` must be called afterwards to release the resources of the process.
        """
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _request(self, task: bytes) -> ValidationOutcome | None:
        """The outcome of `task`; None if the process ended. Raises RuntimeError after
        VERDICT_TIMEOUT_SECONDS.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        write_frame(cast(BinaryIO, process.stdin), task)
        answer = read_frame(process.stdout.fileno(), VERDICT_TIMEOUT_SECONDS)
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=ValidationOutcome)
        ended = bool(select.select([process.stdout.fileno()], [], [], 0)[0])
        self.kill()
        if not ended:
            raise RuntimeError(f"there is no verdict after {VERDICT_TIMEOUT_SECONDS:g} s")
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, which is started if need be. Raises RuntimeError if it does not start."""
        if self._closed:
            raise RuntimeError("the process that tries grammars has ended for good")
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        if self._process is None:
            # Silent, because all that it prints is about a client's grammar.
            process = self._process = start_child(
                "pipeinfer.grammars.validation", {"RAYON_NUM_THREADS": "1"}, silent=True
            )
            if self._closed:  # meanwhile
                process.kill()
            assert process.stdin is not None and process.stdout is not None
            write_frame(cast(BinaryIO, process.stdin), self._setup)
            if read_frame(process.stdout.fileno(), START_SECONDS) is None:
                self.kill()
                raise RuntimeError("the process that tries grammars did not start")
        return self._process


def _in_fork(work: Callable[[], str], task: ValidationTask) -> ValidationOutcome:
    """Runs `work` in a fork of this process, which ends when this process does. `work` returns the
    refusal.
    """
    source, sink = os.pipe()
    life, held = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(held)
        _run_in_child(work, task, sink, life)
    os.close(sink)
    os.close(life)
    said = read_frame(source)
    os.close(source)
    os.close(held)
    _, status = os.waitpid(pid, 0)
    if said is not None:
        return ValidationOutcome(said.decode())
    slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return ValidationOutcome(slow=slow, died=not slow)


def _run_in_child(work: Callable[[], str], task: ValidationTask, sink: int, life: int) -> NoReturn:
    try:
        signal.setitimer(signal.ITIMER_PROF, task.seconds)  # SIGPROF ends the fork
        os.nice(task.niceness)
        threading.Thread(target=_exit_when_closed, args=(life,), daemon=True).start()
        with os.fdopen(sink, "wb", buffering=0) as answer:
            write_frame(cast(BinaryIO, answer), work().encode())
    finally:
        os._exit(0)


def _exit_when_closed(life: int) -> NoReturn:
    os.read(life, 1)  # nothing is ever written: returns when the parent closes its end
    os._exit(0)


def sample_walk(grammar: Grammar, executor: LLExecutor) -> str:
    """Samples WALK_TOKENS tokens of the grammar, at random with a fixed seed, and measures the
    masks.

    Returns why the grammar is refused: an error of a mask, or masks that cost too much; "": it is
    not.
    """
    from pipeinfer.grammars.compiling import mask_cost
    from pipeinfer.grammars.masks import GrammarSource, fill_masks

    source, chance = GrammarSource(grammar), Random(0)
    words = np.zeros((1, grammar.vocabulary.words), dtype=np.int32)
    begun = mask_cost(grammar.matcher())
    for _ in range(WALK_TOKENS):
        [said] = fill_masks(executor, [source], words)
        matcher = source.matcher
        if said or matcher is None:
            return said
        cost = mask_cost(matcher).since(begun)
        if (
            cost.units > WALK_TOKENS * MAX_UNITS_A_TOKEN
            or cost.fuel > WALK_TOKENS * MAX_FUEL_A_TOKEN
        ):
            return "its masks take too much work: it is too ambiguous, or counts too far"
        goes_on = (words & grammar.vocabulary.no_end_mask).view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(goes_on, bitorder="little"))
        if not len(allowed):
            return ""
        if said := source.feed([int(chance.choice(allowed))]):
            return said
    return ""


def main() -> None:
    """The validation process. Ends when stdin does, even while it compiles."""
    from llguidance import LLExecutor

    from pipeinfer.grammars.compiling import Grammar, vocabulary_of

    frames, answers = incoming_frames()
    # Python warns of forks with several threads. Here it is safe: a fork has only the thread that
    # forks, and the other thread just waits for a frame.
    warnings.simplefilter("ignore", DeprecationWarning)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = msgspec.msgpack.decode(frames.get(), type=VocabularySetup)
    threading.stack_size(setup.stack)
    vocabulary = vocabulary_of(setup)
    del setup  # takes as much memory as the tokenizer's file
    write_frame(answers, b"")

    def validate(spec: StructuredOutputs, outcome: list[str]) -> None:
        # Stays so after a panic of the compiler, which is not caught.
        error_text = "it does not compile"
        try:
            # A fork has none of its parent's threads, so the executor is made here.
            error_text = sample_walk(Grammar(vocabulary, spec), LLExecutor(1))
        except (GrammarError, ValueError) as error:
            error_text = str(error) or error_text
        finally:
            outcome.append(error_text)

    def with_stack(spec: StructuredOutputs) -> str:
        outcome: list[str] = []
        thread = threading.Thread(target=validate, args=(spec, outcome))
        thread.start()
        thread.join()
        return outcome[0]

    while True:
        task = msgspec.msgpack.decode(frames.get(), type=ValidationTask)
        outcome = _in_fork(partial(with_stack, task.spec), task)
        write_frame(answers, msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
