"""Compiled grammars of one engine: made on a thread of their own, kept as long as they are used.

The thread has the stack that compiling needs, and the vocabulary is built there. All grammars
together take a bounded number of bytes, by counts (compiling.py): grammars without rows go first,
oldest first, grammars that have grown are compiled again, and if that is not enough, no new grammar
is accepted. Knows no row, no step and no request.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from pipeinfer.grammars.bounds import NO_GRAMMAR_MEMORY, GrammarError, VocabularySetup
from pipeinfer.grammars.compiling import COMPILE_STACK_BYTES, Grammar, GrammarVocabulary
from pipeinfer.params import StructuredOutputs

log = logging.getLogger(__name__)

MAX_GRAMMARS = 256  # twice as many as a scheduler counts on (scheduler/queue.py)
MAX_BYTES = 512 << 20  # of all grammars
RECOMPILE_SHARE = 8  # a grammar that has grown beyond MAX_BYTES / RECOMPILE_SHARE is compiled again
# Seconds that a grammar with several copies takes to compile at most: others wait for the thread.
FAST_COMPILE_SECONDS = 0.05
MAX_EXTRA_COPIES = 256  # copies beyond the first, of all grammars together
SLOW_COMPILE_SECONDS = 0.1  # grammars that took longer are compiled again on a thread of their own

Job = Callable[[], None]


class GrammarStore:
    """The compiled grammars of an engine. All methods may be called from any thread.

    setup: gives the vocabulary's setup; called on the thread that compiles, at once.
    most_bytes: of all grammars that are kept or used.
    _futures: grammars by spec, least recently used first.
    _live: grammars that are kept or used.
    _recompiling: those that are being compiled again.
    _with_copies: those that were asked to have several copies.
    """

    def __init__(self, setup: Callable[[], VocabularySetup], most_bytes: int = MAX_BYTES) -> None:
        self._setup = setup
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._futures: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._slow_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._built = threading.Event()
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_error = ""
        self._live: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._recompiling: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._with_copies: weakref.WeakSet[Grammar] = weakref.WeakSet()
        _start_thread(self._work)
        _start_thread(partial(_run, self._slow_jobs))

    def wait(self) -> None:
        """Until the vocabulary is there, which holds the interpreter while it is built."""
        self._built.wait()

    def prepare(
        self, spec: StructuredOutputs, then: Callable[[str], None], slow: bool = False
    ) -> None:
        """Has it compiled; `then`, from another thread if it was not yet, is told why it cannot be,
        or "". `slow`: that takes long, and others must not wait for it."""
        self._future(spec, slow).add_done_callback(lambda one: then(_error_of(one)))

    def grammar(self, spec: StructuredOutputs) -> Grammar:
        """Waits for it if need be. Raises GrammarError."""
        return self._future(spec).result()

    @property
    def bytes(self) -> int:
        """What the grammars take that are kept or used, by counts."""
        with self._lock:
            return sum(one.bytes for one in self._live)

    def recompile(self, worn: Grammar) -> None:
        """`worn` has tripped a limit, or grown too large. Matchers share with the grammar what its
        lexer has found out, of which there is a limit, too: it is compiled again in the background.
        If it cannot be, it stays: a request that begins with it may yet end before the limit.
        """
        with self._lock:
            if worn in self._recompiling:
                return
            self._recompiling.add(worn)
        self._queue(worn.seconds > SLOW_COMPILE_SECONDS).put(partial(self._recompile, worn))

    def on_mask_cost(self, grammar: Grammar, fuel: int) -> None:
        """Masks of it have cost so much fuel of its lexers, which are larger now."""
        grammar.add_fuel(fuel)
        if grammar.has_grown and grammar.bytes > self._most_bytes // RECOMPILE_SHARE:
            self.recompile(grammar)
        with self._lock:
            self._make_room()

    def add_copies(self, grammar: Grammar, copies: int) -> None:
        """Several rows use it now: in the background it gets up to so many copies, if it compiles
        fast, as long as all grammars together have few. To be asked by one thread."""
        if copies > 1 and not grammar.has_all_copies and grammar not in self._with_copies:
            with self._lock:
                self._with_copies.add(grammar)
            self._jobs.put(partial(self._add_copy, grammar, copies))

    def _recompile(self, worn: Grammar) -> None:
        try:
            worn.recompile()
        except BaseException:  # a panic of the compiler is no Exception; why is a client's text
            log.warning("a grammar that is worn out cannot be compiled again")
        with self._lock:
            self._recompiling.discard(worn)

    def _make_room(self) -> bool:
        """Forgets what nobody uses, the oldest first, until the others fit; whether they do. Where
        they do not, the largest one that has grown is renewed."""
        left = sum(one.bytes for one in self._live) - self._most_bytes
        for spec, asked in list(self._futures.items())[:-1]:  # the last one is about to be used
            if left <= 0:
                break
            if asked.done() and asked.exception() is None and not asked.result().num_rows:
                left -= asked.result().bytes
                del self._futures[spec]
        if left > 0:
            worn = [one for one in self._live if one.has_grown and one not in self._recompiling]
            if worn:
                largest = max(worn, key=lambda one: one.bytes)
                self._recompiling.add(largest)
                self._queue(largest.seconds > SLOW_COMPILE_SECONDS).put(
                    partial(self._recompile, largest)
                )
        return left <= 0

    def vocabulary(self) -> GrammarVocabulary:
        """Waits for it if need be. Raises GrammarError where there is none."""
        self._built.wait()
        if self._vocabulary is None:
            raise GrammarError(self._vocabulary_error)
        return self._vocabulary

    def close(self) -> None:
        """What is under way is left behind: nothing can cancel it."""
        self._jobs.put(None)
        self._slow_jobs.put(None)

    def _queue(self, slow: bool) -> queue.SimpleQueue[Job | None]:
        return self._slow_jobs if slow else self._jobs

    def _future(self, spec: StructuredOutputs, slow: bool = False) -> Future[Grammar]:
        with self._lock:
            found = self._futures.get(spec)
            if found is None:
                found = self._futures[spec] = Future()
                self._queue(slow).put(partial(self._compile, spec, found))
            self._futures.move_to_end(spec)
            while len(self._futures) > MAX_GRAMMARS:
                self._futures.popitem(last=False)
        return found

    def _work(self) -> None:
        try:
            setup = self._setup()
            self._vocabulary = GrammarVocabulary(
                setup.tokenizer, setup.width, setup.end_ids, setup.known_ids
            )
        except Exception as error:  # told to whoever asks for a grammar; nobody may ever
            self._vocabulary_error = f"this model serves no grammars: {error}"
        self._built.set()
        _run(self._jobs)

    def _compile(self, spec: StructuredOutputs, asked: Future[Grammar]) -> None:
        try:
            made = Grammar(self.vocabulary(), spec)
        except BaseException as error:  # as above
            asked.set_exception(GrammarError(str(error) or "it does not compile"))
            return
        with self._lock:
            self._live.add(made)
            fits = self._make_room()
            if not fits and self._futures.get(spec) is asked:
                del self._futures[spec]  # there may be room when it is asked for again
        if fits:
            asked.set_result(made)
        else:
            asked.set_exception(GrammarError(NO_GRAMMAR_MEMORY))

    def _add_copy(self, grammar: Grammar, copies: int) -> None:
        """Compiles one more copy; the next one comes behind the jobs that wait meanwhile."""
        with self._lock:
            more = sum(one.num_copies - 1 for one in self._with_copies)
        if (
            grammar.num_copies < copies
            and grammar.seconds < FAST_COMPILE_SECONDS
            and more < MAX_EXTRA_COPIES
        ):
            try:
                grammar.add_copy()
            except BaseException:  # as above; why would be a client's text
                log.warning(
                    "a grammar has %d compiled copies and cannot get more", grammar.num_copies
                )
            else:
                self._jobs.put(partial(self._add_copy, grammar, copies))
                return
        grammar.has_all_copies = True


def _run(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _error_of(asked: Future[Grammar]) -> str:
    error = asked.exception()
    return "" if error is None else str(error)


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """A running thread with STACK bytes of it; others that are started meanwhile have it, too."""
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
