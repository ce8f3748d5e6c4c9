"""The compiled grammars of one engine, made on a thread of their own and kept as long as they are
used.

The thread has the stack that compiling needs, and builds the vocabulary. All grammars together take
a bounded number of bytes, by counts (compiling.py). If they take more, these steps make room:
grammars without rows are dropped, least recently used first; grammars that have grown are compiled
again; no new grammar is accepted.
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

MAX_GRAMMARS = 256  # grammars that are kept; twice as many as scheduler/queue.py counts on
MAX_BYTES = 512 << 20  # of all grammars together
RECOMPILE_SHARE = 8  # a grammar that has grown beyond MAX_BYTES / RECOMPILE_SHARE is compiled again
# Only grammars that compile faster get several copies, because other grammars wait for the thread.
FAST_COMPILE_SECONDS = 0.05
MAX_EXTRA_COPIES = 256  # copies beyond the first, of all grammars together
SLOW_COMPILE_SECONDS = 0.1  # grammars that took longer are compiled again on a thread of their own

Job = Callable[[], None]


class GrammarStore:
    """The compiled grammars of an engine. All methods may be called from any thread.

    setup: returns what the vocabulary is built from; called at once, on the thread that compiles.
    most_bytes: of all grammars that are kept or used.

    _futures: grammars by spec, least recently used first.
    _live: grammars that are kept or used.
    _recompiling: grammars that are being compiled again.
    _with_copies: grammars for which several copies were asked for.
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
        """Waits until the vocabulary is built, or has failed. Building it holds the GIL."""
        self._built.wait()

    def prepare(
        self, spec: StructuredOutputs, then: Callable[[str], None], slow: bool = False
    ) -> None:
        """Compiles a grammar in the background.

        spec: the grammar.
        then: called with the error, or with "", once the grammar is compiled: at once if it is
            already, otherwise on another thread.
        slow: whether compiling takes long; it runs on a thread of its own then, and other grammars
            do not wait for it.
        """
        self._future(spec, slow).add_done_callback(lambda one: then(_error_of(one)))

    def grammar(self, spec: StructuredOutputs) -> Grammar:
        """The compiled grammar; waits for it if need be. Raises GrammarError."""
        return self._future(spec).result()

    @property
    def bytes(self) -> int:
        """Bytes of all grammars that are kept or used, by counts."""
        with self._lock:
            return sum(one.bytes for one in self._live)

    def recompile(self, worn: Grammar) -> None:
        """Compiles `worn` again in the background, because it has tripped a limit or has grown too
        large.

        Matchers share the states that the grammar's lexer has built, and there is a limit for the
        states, too. If compiling fails, the old grammar stays in use: requests may still end before
        they reach the limit.
        """
        with self._lock:
            if worn in self._recompiling:
                return
            self._recompiling.add(worn)
        self._queue(worn.seconds > SLOW_COMPILE_SECONDS).put(partial(self._recompile, worn))

    def on_mask_cost(self, grammar: Grammar, fuel: int) -> None:
        """Counts `fuel` that lexers of `grammar` used for masks, and makes room if grammars have
        grown too large.
        """
        grammar.add_fuel(fuel)
        if grammar.has_grown and grammar.bytes > self._most_bytes // RECOMPILE_SHARE:
            self.recompile(grammar)
        with self._lock:
            self._make_room()

    def add_copies(self, grammar: Grammar, copies: int) -> None:
        """Makes up to `copies` compiled copies of a grammar that several rows use, in the
        background.

        Makes none if the grammar compiles slowly, or if all grammars together have MAX_EXTRA_COPIES
        extra copies. To be called from one thread.
        """
        if copies > 1 and not grammar.has_all_copies and grammar not in self._with_copies:
            with self._lock:
                self._with_copies.add(grammar)
            self._jobs.put(partial(self._add_copy, grammar, copies))

    def _recompile(self, worn: Grammar) -> None:
        try:
            worn.recompile()
        except BaseException:  # also a panic of the compiler. The error is a client's text
            log.warning("a grammar that is worn out cannot be compiled again")
        with self._lock:
            self._recompiling.discard(worn)

    def _make_room(self) -> bool:
        """Drops unused grammars, least recently used first, until the others fit. Returns whether
        they do; if not, the largest grammar that has grown is compiled again. The lock must be
        held.
        """
        left = sum(one.bytes for one in self._live) - self._most_bytes
        for spec, asked in list(self._futures.items())[:-1]:  # the last grammar is about to be used
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
        """The vocabulary; waits for it if need be. Raises GrammarError if it could not be built."""
        self._built.wait()
        if self._vocabulary is None:
            raise GrammarError(self._vocabulary_error)
        return self._vocabulary

    def close(self) -> None:
        """Ends the threads after their current jobs, which cannot be cancelled."""
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
        except Exception as error:  # raised when a grammar is asked for, which may never happen
            self._vocabulary_error = f"this model serves no grammars: {error}"
        self._built.set()
        _run(self._jobs)

    def _compile(self, spec: StructuredOutputs, asked: Future[Grammar]) -> None:
        try:
            made = Grammar(self.vocabulary(), spec)
        except BaseException as error:  # also a panic of the compiler
            asked.set_exception(GrammarError(str(error) or "it does not compile"))
            return
        with self._lock:
            self._live.add(made)
            fits = self._make_room()
            if not fits and self._futures.get(spec) is asked:
                del self._futures[spec]  # so that a later request tries again
        if fits:
            asked.set_result(made)
        else:
            asked.set_exception(GrammarError(NO_GRAMMAR_MEMORY))

    def _add_copy(self, grammar: Grammar, copies: int) -> None:
        """Compiles one more copy, then queues the next one, so that other jobs get their turn
        between them.
        """
        with self._lock:
            more = sum(one.num_copies - 1 for one in self._with_copies)
        if (
            grammar.num_copies < copies
            and grammar.seconds < FAST_COMPILE_SECONDS
            and more < MAX_EXTRA_COPIES
        ):
            try:
                grammar.add_copy()
            except BaseException:  # also a panic of the compiler. The error is a client's text
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
    """Starts a daemon thread with COMPILE_STACK_BYTES of stack. Threads that others start at the
    same moment get as much.
    """
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
