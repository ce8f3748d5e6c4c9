"""Compiles grammars of strangers in a process that may die of them; also `python -m` of that one.

The compiler cannot be cancelled, and a small text can overflow its stack. So a grammar is tried
here, with less time, memory and stack than an engine has, and what was found is remembered. What
its masks cost is found out, too, by counts: every trial of it says the same.
"""

from __future__ import annotations

import resource
import select
import subprocess
import threading
from collections import OrderedDict
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec
import numpy as np

from pipeinfer import pipes
from pipeinfer.grammars.bounds import GrammarError, check
from pipeinfer.params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from pipeinfer.grammars.compiling import Grammar

# 5,000 optional keys take 4 s; what needs more is refused.
SECONDS = 5.0
START_SECONDS = 60.0  # to import and to build the vocabulary, 4 s for 262,000 tokens
# Bytes of address space; with 264 tokens and a chain of 5,900 rules it takes 320 MB.
MEMORY = 2 * 1024**3
REMEMBERED = 1024  # verdicts
STACK = 32 * 1024 * 1024  # bytes; half of what an engine's thread has (compiling.py)
WALK = 24  # tokens that a trial goes, each drawn of those that are allowed
# What a token of it may cost on average (work.py). In units: 4 ms of each step in which a row has
# the grammar; an honest one takes up to 700, with a vocabulary of 262,000 up to 2,200. In fuel of
# the lexer, which grows by half a MB for so much: an honest one takes up to 7,000.
MOST_UNITS = 4_000
MOST_FUEL = 16_000
TRIES = 2  # processes that may end over a grammar: one may have been killed by somebody else


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What the vocabulary is made of, see compiling.Vocabulary; `stack`: bytes, to compile with."""

    tokenizer: str
    width: int
    ends: tuple[int, ...]
    known: tuple[int, ...]
    stack: int = STACK


class Trial:
    """One process that tries grammars, started when it is first needed. Calls of `verdict` block
    and come from one thread, and `kill` while there is none."""

    def __init__(self, setup: Setup, seconds: float = SECONDS) -> None:
        self._setup = msgspec.msgpack.encode(setup)
        self._seconds = seconds
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.ended = 0  # processes that a grammar has cost

    def verdict(self, spec: StructuredOutputs) -> str:
        """Why the grammar is not served, for the client; "" if it is."""
        try:
            check(spec)
        except GrammarError as error:
            return str(error)
        asked = msgspec.msgpack.encode(spec)
        key = blake2b(asked, digest_size=32).digest()  # 1,024 of the largest would be 64 MB
        known = self._verdicts.get(key)
        if known is None:
            known = self._tried(asked)
        self._verdicts[key] = known
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return known

    def kill(self) -> None:
        """Ends the process, also while it compiles."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """From any thread: no process from now on, and RuntimeError for who waits for a verdict.
        `kill` is still to be called then, to clear up."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _tried(self, asked: bytes) -> str:
        for _ in range(TRIES):
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            pipes.write(cast(BinaryIO, process.stdin), asked)
            answer = pipes.read(process.stdout.fileno(), self._seconds)
            if answer is not None:
                return msgspec.msgpack.decode(answer, type=str)
            if self._closed:
                raise RuntimeError("the process that tries grammars has ended for good")
            slow = not _at_end(process.stdout.fileno())
            self.ended += 1
            self.kill()
            if slow:
                return f"it takes longer than {self._seconds:g} s to compile"
        return "it is too complex to compile"

    def _running(self) -> subprocess.Popen[bytes]:
        """Raises RuntimeError if it does not start, which is no grammar's fault."""
        if self._closed:
            raise RuntimeError("the process that tries grammars has ended for good")
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        if self._process is None:
            # It has nothing to print but a client's grammar, and how it died of it.
            process = self._process = pipes.start(
                "pipeinfer.grammars.trial", {"RAYON_NUM_THREADS": "1"}, silent=True
            )
            if self._closed:  # meanwhile
                process.kill()
            assert process.stdin is not None and process.stdout is not None
            pipes.write(cast(BinaryIO, process.stdin), self._setup)
            if pipes.read(process.stdout.fileno(), START_SECONDS) is None:
                self.kill()
                raise RuntimeError("the process that tries grammars did not start")
        return self._process


def _at_end(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def walked(grammar: Grammar, executor: LLExecutor) -> str:
    """What is wrong with the grammar's masks, or with what they cost, along one walk; "" if nothing
    is."""
    from pipeinfer.grammars.masks import GrammarSource, fill_all
    from pipeinfer.grammars.work import work_of

    source, chance = GrammarSource(grammar), Random(0)
    words = np.zeros((1, grammar.vocabulary.words), dtype=np.int32)
    begun = work_of(grammar.matcher())
    for _ in range(WALK):
        [said] = fill_all(executor, [source], words)
        matcher = source.matcher
        if said or matcher is None:
            return said
        cost = work_of(matcher).since(begun)
        if cost.units > WALK * MOST_UNITS or cost.fuel > WALK * MOST_FUEL:
            return "its masks take too much work: it is too ambiguous, or counts too far"
        goes_on = (words & grammar.vocabulary.no_end).view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(goes_on, bitorder="little"))
        if not len(allowed):
            return ""
        if said := source.feed([int(chance.choice(allowed))]):
            return said
    return ""


def main() -> None:
    """Serves until stdin ends, also while it compiles."""
    from llguidance import LLExecutor

    from pipeinfer.grammars.compiling import Grammar, Vocabulary

    frames, answers = pipes.served()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = msgspec.msgpack.decode(frames.get(), type=Setup)
    threading.stack_size(setup.stack)
    vocabulary = Vocabulary(setup.tokenizer, setup.width, setup.ends, setup.known)
    executor = LLExecutor(1)
    pipes.write(answers, b"")

    def tried(spec: StructuredOutputs) -> None:
        said = "it does not compile"  # also for a panic of the compiler, which passes by
        try:
            said = walked(Grammar(vocabulary, spec), executor)
        except (GrammarError, ValueError) as error:
            said = str(error) or said
        finally:
            pipes.write(answers, msgspec.msgpack.encode(said))

    while True:
        spec = msgspec.msgpack.decode(frames.get(), type=StructuredOutputs)
        thread = threading.Thread(target=tried, args=(spec,))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
