"""Compiles grammars with llguidance: JSON schemas, regular expressions, choices, Lark and GBNF.

- GrammarVocabulary: the model's tokens, and masks of them.
- Grammar: a compiled grammar; `Grammar.matcher` makes the state of one row.
- mask_cost: the cost of a matcher's masks, by the compiler's own counters.
- GrammarStore: the compiled grammars of one engine, made on a thread of its own, which has the
  stack that compiling needs. All grammars together take a bounded number of bytes. If they take
  more, these steps make room: grammars without rows are dropped, least recently used first;
  grammars that have grown are compiled again; no new grammar is accepted.

Limits and costs are counts, never times, so that all ranks and every replay agree. A hostile
grammar may crash the process or take minutes to compile, so another process validates it first
(validation.py).
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from pipeinfer.grammars.bounds import (
    NO_GRAMMAR_MEMORY,
    GrammarError,
    VocabularySetup,
    check,
    schema_of,
)
from pipeinfer.grammars.rewriting import compilable_schema, with_plain_digits
from pipeinfer.params import JsonObject, StructuredOutputs
from pipeinfer.processes import return_freed_memory

# Bytes of stack of a thread that compiles. A chain of 3,000 rules overflows 8 MB. The longest chain
# that fits into MAX_GRAMMAR_BYTES, about 5,900 rules, overflows 16 MB but not 32 MB, the stack of a
# validation.
COMPILE_STACK_BYTES = 64 * 1024 * 1024
# Options for JSON: no flexible white space, which a model could repeat without end. They replace
# the options in a schema, because a schema's own white space pattern would win over an override.
JSON_OPTIONS: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
_LOG_NOTHING = 0
# The most items of the parser for one mask. With MAX_ITEMS_IN_ROW it bounds a mask and the token
# behind it to 40 ms. The library's default is 50,000.
MAX_PARSER_ITEMS = 5_000
# The most items in one row of the parser, whose time grows with their square. An object with n
# optional keys takes 4 n. The library's default is 2,000.
MAX_ITEMS_IN_ROW = 1_400
# Estimates for Grammar.bytes, in bytes:
BASE_BYTES = 1 << 20  # for each compiled copy
TEXT_BYTES = 100  # for each byte of the grammar's definition
COMPILED_BYTES = 32  # for each unit of fuel that the lexer used to compile
GROWN_BYTES = 10  # for each unit of fuel that the lexer used since; 1 to 9 bytes were measured
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # special characters of a regex

# Numbered lines of a grammar's text in an error, and the lines of carets below them.
_SHOWN = re.compile(r"(?m)^ *\d+ \| .*\n?|^ {7,}\^+ *\n?")
_POSITION = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema)")


def limits() -> LLParserLimits:
    """The limits of every matcher. They are the library's defaults except for the parser's items,
    and are written down because a replay depends on them. verbose_errors puts the matcher's
    state into errors, from which `mask_cost` reads counters; `error_message` leaves the state
    out, because it has a client's text.
    """
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=MAX_PARSER_ITEMS,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        verbose_errors=True,
    )


class GrammarVocabulary:
    """The model's tokens, for grammars. Masks are int32 [words], one bit a token, lowest bit first.

    Attributes:
    - width: of the logits
    - end_ids: ids that end a request
    - tokens: the tokenizer, in llguidance's form
    - sampled_mask: all ids that the tokenizer has; other ids are never sampled
    - no_end_mask: the same without `end_ids`
    - space_mask: ids of tokens that are white space alone
    """

    def __init__(self, tokenizer: str, width: int, end_ids: Sequence[int], known: Sequence[int]):
        if not end_ids:
            raise ValueError("a grammar ends with an end token, and there is none")
        self.width = width
        self.end_ids = frozenset(end_ids)
        self.tokens = LLTokenizer(tokenizer, n_vocab=width, eos_token=list(end_ids))
        self.sampled_mask = self.mask(known)
        self.no_end_mask = self.mask([i for i in known if i not in self.end_ids])
        self._texts = [self.tokens.decode_bytes([i]) for i in range(width)]
        self.space_mask = self.mask([i for i in known if i < width and self._texts[i].isspace()])
        self._beyond: dict[tuple[bytes, int], np.ndarray | None] = {}

    @property
    def words(self) -> int:
        """int32 words of a mask."""
        return (self.width + 31) // 32

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, also of a special one."""
        return self._texts[token]

    def tokens_of_text(self, text: str) -> list[int]:
        """Returns the ids of `text`; one id if a token has exactly this text."""
        return self.tokens.tokenize_str(text)

    def tokens_completing(self, text: bytes, begun: int) -> np.ndarray | None:
        """A mask of the tokens that complete a text and go on with more than white space; None:
        there are none.

        - text: to be completed, such as a closing tag
        - begun: bytes of it that are there already
        """
        if (text, begun) not in self._beyond:
            found = [
                token
                for token, said in enumerate(self._texts)
                if text[-1:] in said and (text[:begun] + said).partition(text)[2].strip()
            ]
            self._beyond[text, begun] = self.mask(found) if found else None
        return self._beyond[text, begun]

    def count_known(self, ids: Sequence[int]) -> int:
        """The length of the longest prefix of `ids` that the tokenizer has and that ends no
        request.
        """
        some = np.array(ids)
        there = (self.no_end_mask[some >> 5] >> (some & 31)) & 1
        return len(ids) if there.all() else int(there.argmin())

    def mask(self, ids: Sequence[int]) -> np.ndarray:
        """A mask of `ids`; ids beyond the logits' width are left out."""
        bits = np.zeros(self.words * 32, dtype=bool)
        bits[[i for i in ids if i < self.width]] = True
        return np.packbits(bits, bitorder="little").view("<i4")


def vocabulary_of(setup: VocabularySetup) -> GrammarVocabulary:
    """Builds the vocabulary of `setup`. Pass `setup` on without keeping it: it takes MB that no
    grammar needs.
    """
    return GrammarVocabulary(setup.tokenizer, setup.width, setup.end_ids, setup.known_ids)


class Grammar:
    """A compiled grammar; matchers are copies of it.

    Attributes:
    - vocabulary: of the model
    - allows_leading_space: whether white space in front of the grammar's text is harmless, as in
      JSON
    - seconds: time of the compilation
    - num_copies: number of compiled copies
    - has_all_copies: whether no more copies will be made
    - generation: how often the grammar was compiled again
    - num_rows: rows that use it

    Matchers of one compiled copy share its lexer, and wait for each other when they fill masks, so
    for many rows there may be several copies. A lexer keeps the states that it has built, so
    `bytes` grows until the grammar is compiled again.
    """

    def __init__(self, vocabulary: GrammarVocabulary, spec: StructuredOutputs) -> None:
        """Compiles `spec`. Raises GrammarError with the compiler's message."""
        self.vocabulary = vocabulary
        self.allows_leading_space = spec.json is not None
        self._text = _definition(spec)
        begun = time.perf_counter()
        self._copies = [self._compile()]
        self.seconds = time.perf_counter() - begun
        self.has_all_copies = False
        self.generation = 0
        self.num_rows = 0
        self._compiled_bytes = BASE_BYTES + TEXT_BYTES * len(self._text)
        self._compiled_bytes += COMPILED_BYTES * mask_cost(self._copies[0]).fuel
        self._fuel = 0  # fuel that the lexers used since compiling

    @property
    def num_copies(self) -> int:
        """Number of compiled copies."""
        return len(self._copies)

    @property
    def bytes(self) -> int:
        """An upper estimate of the grammar's memory in bytes, with the states of its lexers, by
        counts.
        """
        return self._compiled_bytes * self.num_copies + GROWN_BYTES * self._fuel

    @property
    def has_grown(self) -> bool:
        """Whether compiling the grammar again would free more than half of `bytes`."""
        return self.bytes > 2 * self._compiled_bytes

    def add_fuel(self, fuel: int) -> None:
        """Counts `fuel` that its lexers used for masks."""
        self._fuel += fuel

    def recompile(self) -> None:
        """Compiles the grammar again, without the states of its lexers; rows move to the new copy.
        May be called from any thread, one call at a time. Raises GrammarError.
        """
        self._copies = [self._compile()]
        self._fuel = 0
        self.generation += 1

    def add_copy(self) -> None:
        """Compiles one more copy. May be called from any thread, one call at a time. Raises
        GrammarError.
        """
        self._copies.append(self._compile())

    def matcher(self, row: int = 0) -> LLMatcher:
        """A matcher at the beginning of the grammar.

        - row: the number of the row, which decides which compiled copy it uses
        """
        originals = self._copies
        return originals[row % len(originals)].deep_copy()

    def _compile(self) -> LLMatcher:
        tokens = self.vocabulary.tokens
        made = LLMatcher(tokens, self._text, log_level=_LOG_NOTHING, limits=limits())
        if made.is_error():
            raise GrammarError(error_message(made))
        return made


def error_message(matcher: LLMatcher) -> str:
    """The error of a matcher, without the matcher's state, which has a client's text, and without
    the grammar's text, which the client may not have written.
    """
    said = _SHOWN.sub("", matcher.get_error().partition("\n<state>")[0])
    return _POSITION.sub("", said).strip() or "the grammar failed"


def _definition(spec: StructuredOutputs) -> str:
    """The grammar in llguidance's own form. Raises GrammarError."""
    form = check(spec)
    if form == "json":
        return _from_schema(spec.json or "")
    if form == "regex":
        return LLMatcher.grammar_from_regex(with_plain_digits(spec.regex or ""))
    if form == "choice":
        # One regular expression, because the parser needs an item in each mask for an alternative.
        texts = (_SPECIAL.sub(r"\\\g<0>", text) for text in spec.choice or ())
        return LLMatcher.grammar_from_regex("|".join(texts))
    return LLMatcher.grammar_from_lark(with_options(as_lark(spec.grammar or ""), JSON_OPTIONS))


def _from_schema(text: str) -> str:
    """Returns the grammar of a JSON schema in llguidance's form. Raises GrammarError for malformed
    keywords, and for keywords that cannot be enforced.
    """
    found = compilable_schema(schema_of(text), closed=False, narrow=True)
    if found.malformed:
        raise GrammarError(f"{', '.join(found.malformed[:5])}: this is no JSON Schema")
    if found.unsupported:
        raise GrammarError(f"an answer cannot be held to {', '.join(found.unsupported[:5])}")
    said = found.schema
    schema: JsonObject = {} if said is True else {"not": {}} if said is False else said
    own = {**schema, "x-guidance": JSON_OPTIONS}
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(own).decode())


# Matches %json in front of a schema. Also matches strings, regular expressions and comments, in
# which %json has no meaning. One without an end is matched up to the end of its line: searching
# again behind each escaped quote would take quadratic time.
_SCHEMA = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<json>%json\s*)(?=\{)'
)
_decode = json.JSONDecoder().raw_decode


def as_lark(text: str) -> str:
    """A grammar as Lark: GBNF (`root ::= ...`) is translated, Lark stays. Raises GrammarError."""
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        said = str(error).partition("\n")[0] or "it is nested too deeply"
        raise GrammarError(f"the grammar is no GBNF: {said}") from None


def with_options(text: str, options: JsonObject) -> str:
    """A Lark grammar in which each JSON schema behind %json has `options` for the compiler."""
    parts: list[str] = []
    at = 0
    while (found := _SCHEMA.search(text, at)) is not None:
        parts.append(text[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                schema, at = _decode(text, at)
            except (ValueError, RecursionError):
                continue  # the compiler reports the error
            parts.append(json.dumps({**schema, "x-guidance": options}))
    return "".join((*parts, text[at:]))


# Units of work, for a mask and the tokens behind it. They order grammars by cost, and are no times:
# a unit takes 0.05 to 0.3 microseconds in ambiguous rules, and about ten in a lexer that is being
# built (docs/benchmarks.md). Fitted with vocabularies of 49,000 and 262,000 tokens.
UNITS_PER_ITEM = 2.0  # for each item of the parser
UNITS_PER_FUEL = 1 / 40  # for each unit of the lexer's fuel
UNITS_PER_NODE = 1 / 250  # for each node of the tree of all tokens that is walked

_NO_TOKEN = 1 << 30  # an id that no vocabulary has
_STATISTICS = re.compile(r'\nParser: \{\n((?:  "\w+": \d+,?\n)+)\}')
_COUNT = re.compile(r'"(\w+)": (\d+)')


class MaskCost(NamedTuple):
    """The cost of a matcher since its grammar was compiled, or between two moments.

    Attributes:
    - items: of the parser
    - fuel: of the lexer
    - nodes: nodes of the tree of all tokens that were walked
    """

    items: int = 0
    fuel: int = 0
    nodes: int = 0

    @property
    def units(self) -> int:
        """The cost in units of work."""
        return round(
            self.items * UNITS_PER_ITEM + self.fuel * UNITS_PER_FUEL + self.nodes * UNITS_PER_NODE
        )

    def since(self, before: MaskCost) -> MaskCost:
        """The difference to `before`, an earlier cost of the same matcher."""
        return MaskCost(
            self.items - before.items, self.fuel - before.fuel, self.nodes - before.nodes
        )


def mask_cost(matcher: LLMatcher) -> MaskCost:
    """Returns the cost of `matcher` and of the matcher that it was copied from. Takes about 0.1 ms:
    the library shows its counters only in an error message, so a copy of the matcher is made to
    fail.
    """
    copy = matcher.deep_copy()
    copy.consume_token(_NO_TOKEN)
    found = _STATISTICS.search(copy.get_error())
    counts = dict(_COUNT.findall(found[1])) if found else {}
    items, fuel, nodes = (
        int(counts.get(name, 0)) for name in ("all_items", "lexer_cost", "trie_nodes_walked")
    )
    return MaskCost(items, fuel, nodes)


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

    Arguments:
    - setup: returns the arguments of the vocabulary; called once, when the first grammar needs it
    - max_bytes: of all grammars that are kept or used
    - ahead: whether the vocabulary is built at once, in the background

    Attributes:
    - _futures: grammars by spec, least recently used first
    - _live: grammars that are kept or used
    - _recompiling: grammars that are being compiled again
    - _with_copies: grammars for which several copies were asked for
    """

    def __init__(
        self,
        setup: Callable[[], VocabularySetup],
        max_bytes: int = MAX_BYTES,
        ahead: bool = False,
    ) -> None:
        self._setup = setup
        self._most_bytes = max_bytes
        self._lock = threading.Lock()
        self._futures: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._slow_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._building = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_error = ""
        self._live: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._recompiling: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._with_copies: weakref.WeakSet[Grammar] = weakref.WeakSet()
        if ahead:
            self._jobs.put(self.wait)
        _start_thread(partial(_run, self._jobs))
        _start_thread(partial(_run, self._slow_jobs))

    def wait(self) -> None:
        """Returns when the vocabulary is built, or has failed. Building it holds the GIL."""
        with self._building:
            if self._vocabulary is None and not self._vocabulary_error:
                try:
                    self._vocabulary = vocabulary_of(self._setup())
                except Exception as error:  # raised when a grammar is asked for
                    self._vocabulary_error = f"this model serves no grammars: {error}"
                return_freed_memory()  # the setup is as large as the vocabulary

    def prepare(
        self, spec: StructuredOutputs, then: Callable[[str], None], slow: bool = False
    ) -> None:
        """Compiles a grammar in the background.

        - spec: the grammar
        - then: called with the error, or with "", once the grammar is compiled: at once if it is
          already, otherwise on another thread
        - slow: whether compiling takes long; it runs on a thread of its own then, and other
          grammars do not wait for it
        """
        self._future(spec, slow).add_done_callback(lambda one: then(_error_of(one)))

    def grammar(self, spec: StructuredOutputs) -> Grammar:
        """Returns the compiled grammar; waits for its compilation. Raises GrammarError."""
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
            self._evict()

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

    def _evict(self) -> bool:
        """Drops unused grammars, least recently used first, until the others fit. Returns whether
        they do; if not, the largest grammar that has grown is compiled again. The lock must be
        held.
        """
        left = sum(one.bytes for one in self._live) - self._most_bytes
        for spec, future in list(self._futures.items())[
            :-1
        ]:  # the last grammar is about to be used
            if left <= 0:
                break
            if future.done() and future.exception() is None and not future.result().num_rows:
                left -= future.result().bytes
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
        """The vocabulary, built if need be. Raises GrammarError if it could not be built."""
        self.wait()
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

    def _compile(self, spec: StructuredOutputs, future: Future[Grammar]) -> None:
        try:
            made = Grammar(self.vocabulary(), spec)
        except BaseException as error:  # also a panic of the compiler
            future.set_exception(GrammarError(str(error) or "it does not compile"))
            return
        with self._lock:
            self._live.add(made)
            fits = self._evict()
            if not fits and self._futures.get(spec) is future:
                del self._futures[spec]  # so that a later request tries again
        if fits:
            future.set_result(made)
        else:
            future.set_exception(GrammarError(NO_GRAMMAR_MEMORY))

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


def _error_of(future: Future[Grammar]) -> str:
    error = future.exception()
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
