"""Grammars of llama.cpp's form are served, and no schema within a grammar allows white space again.

A grammar is compiled once; a grammar that has grown is replaced by one that is compiled again.
"""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import weakref

import numpy as np
import pytest
from llguidance import LLExecutor
from vocabulary import SETUP, VOCABULARY, ids_of

from pipeinfer.grammars import compiling
from pipeinfer.grammars.bounds import GrammarError, VocabularySetup
from pipeinfer.grammars.compiling import Grammar, GrammarStore, with_options
from pipeinfer.grammars.masks import MAX_REFED_IDS, GrammarSource, fill_masks
from pipeinfer.params import StructuredOutputs

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def taken(grammar, text):
    """Whether all of `text` is allowed."""
    ids = ids_of(text)
    matcher = Grammar(VOCABULARY, StructuredOutputs(grammar=grammar)).matcher()
    return matcher.validate_tokens(ids) == len(ids)


def test_gbnf_is_served():
    gbnf = 'root ::= "a" digits ws\ndigits ::= [0-9]+\nws ::= " "?\n'
    assert taken(gbnf, "a12 ") and not taken(gbnf, "b")


@pytest.mark.parametrize("text", ["root ::= nobody", 'root ::= ("a"', 'other ::= "a"'])
def test_wrong_gbnf_is_refused(text):
    with pytest.raises(GrammarError, match="GBNF"):
        Grammar(VOCABULARY, StructuredOutputs(grammar=text))


def test_white_space_within_schemas_is_bounded():
    grammar = f'start: "x" %json {SCHEMA} " y" %json {SCHEMA}'
    assert taken(grammar, 'x{"a": 1} y{"a": 2}')
    assert not taken(grammar, 'x{"a":  1}') and not taken(grammar, 'x{"a": 1} y{\n"a": 2}')


@pytest.mark.parametrize("name", ["x-guidance", r"x\u002dguidance", r"\u0078-guid\u0061nce"])
def test_a_schema_within_a_grammar_tells_the_compiler_nothing(name):
    schema = f'{{"type": "object", "{name}": {{"whitespace_flexible": true}}}}'
    with pytest.raises(GrammarError, match="x-guidance"):
        Grammar(VOCABULARY, StructuredOutputs(grammar=f"start: %json {schema}"))


@pytest.mark.parametrize(
    "text", ['start: "%json {}"', "start: /%json {}/", "start: A // %json {}\nA: /a/", "# %json {}"]
)
def test_what_only_looks_like_a_schema_stays(text):
    assert with_options(text, {"a": 1}) == text


@pytest.mark.parametrize("opening", ['"', "/"])
def test_a_string_without_an_end_is_looked_at_once(opening: str) -> None:
    """Else each escaped quote in it begins a search to its end: 64 kB took 14 seconds."""
    line = opening + f"\\{opening}" * 1000
    found = compiling._SCHEMA.search(f'{line}\nb: %json {{"a": 1}}')
    assert found is not None and found.span() == (0, len(line))
    assert with_options(line, {"a": 1}) == line
    assert with_options(f'{line}\nb: %json {{"a": 1}}', {"b": 2}).endswith(
        '"x-guidance": {"b": 2}}'
    )


SPEC = StructuredOutputs(regex="[ab]{3}")
NUMBERS = itertools.count()


@pytest.fixture
def store():
    made = GrammarStore(lambda: SETUP)
    yield made
    made.close()


def settled(store):
    """All that was asked for before is done: one thread does it, in the order of asking."""
    done = threading.Event()
    another = StructuredOutputs(regex=f"{next(NUMBERS)}")
    store.prepare(another, lambda _: done.set())
    assert done.wait(30)


def test_what_is_asked_for_twice_is_compiled_once(store):
    assert store.grammar(SPEC) is store.grammar(SPEC)


def test_what_the_vocabulary_was_built_from_is_freed():
    class Setup:
        tokenizer, width, end_ids, known_ids = SETUP.tokenizer, SETUP.width, SETUP.end_ids, (1, 2)

    given = [Setup()]
    seen = weakref.ref(given[0])
    store = GrammarStore(given.pop)
    try:
        store.wait()
        settled(store)
        assert seen() is None
    finally:
        store.close()


def test_the_vocabulary_is_built_when_the_first_grammar_needs_it():
    asked: list[None] = []

    def setup() -> VocabularySetup:
        asked.append(None)
        return SETUP

    store = GrammarStore(setup)
    try:
        assert asked == []
        for regex in "ab":
            store.grammar(StructuredOutputs(regex=regex))
        assert len(asked) == 1
    finally:
        store.close()


def test_the_vocabulary_can_be_built_ahead():
    begun = threading.Event()
    store = GrammarStore(lambda: (begun.set(), SETUP)[1], ahead=True)
    try:
        assert begun.wait(30)
    finally:
        store.close()


def test_what_takes_long_holds_up_nothing_that_does_not(store, monkeypatch):
    go, said = threading.Event(), queue.SimpleQueue()
    slow = StructuredOutputs(regex="slow")

    def compiled(vocabulary, spec):
        assert spec != slow or go.wait(30)
        return Grammar(vocabulary, spec)

    with monkeypatch.context() as patched:
        patched.setattr(compiling, "Grammar", compiled)
        store.prepare(slow, lambda why: said.put(("slow", why)), slow=True)
        settled(store)
        store.prepare(SPEC, lambda why: said.put(("quick", why)))
        assert said.get(timeout=30) == ("quick", "")
        go.set()
        assert said.get(timeout=30) == ("slow", "")


def test_a_worn_grammar_is_renewed_once_however_often_it_is_said(store):
    worn = store.grammar(SPEC)
    gate = threading.Event()
    store._jobs.put(gate.wait)
    for _ in range(3):
        store.recompile(worn)
    gate.set()
    settled(store)
    assert worn.generation == 1 and store.grammar(SPEC) is worn


def test_a_worn_grammar_stays_where_no_other_compiles(store, monkeypatch):
    worn = store.grammar(SPEC)

    def no_more(_):
        raise GrammarError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Grammar, "_compile", no_more)
        store.recompile(worn)
        done = threading.Event()
        store._jobs.put(done.set)
        assert done.wait(30)
    assert worn.generation == 0
    store.recompile(worn)
    settled(store)
    assert worn.generation == 1, "it may be tried again"


def test_rows_of_a_renewed_grammar_go_on_as_if_it_had_not_been():
    spec = StructuredOutputs(regex="[ab]{3}-[0-9]{2,200}")
    grammar, alone = Grammar(VOCABULARY, spec), GrammarSource(Grammar(VOCABULARY, spec))
    row, executor = GrammarSource(grammar), LLExecutor(1)
    for number, token in enumerate(ids_of("aba-" + "12345678" * 12)):
        if number in (3, 90):
            grammar.add_fuel(1000)
            grammar.recompile()
            assert not grammar.has_grown
        words = np.zeros((2, VOCABULARY.words), dtype=np.int32)
        assert fill_masks(executor, [alone, row], words) == ["", ""]
        assert (words[0] == words[1]).all()
        assert row.feed([token]) == alone.feed([token]) == ""


def distinct(number):
    return StructuredOutputs(regex=f"[ab]{{3}}-{number}")


def test_grammars_that_nobody_uses_go_when_bytes_run_short_the_oldest_first():
    one = Grammar(VOCABULARY, distinct(0)).bytes
    store = GrammarStore(lambda: SETUP, max_bytes=4 * one + one // 2)
    try:
        used = store.grammar(distinct(0))
        used.num_rows += 1
        others = [store.grammar(distinct(n)) for n in range(1, 4)]
        before = others[1]
        others.clear()
        for n in range(4, 40):
            if n == 20:
                assert store.grammar(distinct(0)) is used, "it is in use"
            store.grammar(distinct(n))
            if store.bytes > 4 * one + one // 2 + before.bytes:
                gc.collect()  # some may be in circles
            assert store.bytes <= 4 * one + one // 2 + before.bytes
        assert store.grammar(distinct(0)) is used
        assert store.grammar(distinct(2)) is not before
    finally:
        store.close()


def test_where_those_in_use_take_all_no_other_is_taken_until_one_is_free():
    one = Grammar(VOCABULARY, distinct(0)).bytes
    store = GrammarStore(lambda: SETUP, max_bytes=2 * one + one // 2)
    try:
        used = [store.grammar(distinct(n)) for n in range(2)]
        for grammar in used:
            grammar.num_rows += 1
        for _ in range(2):
            with pytest.raises(GrammarError, match="leave no memory"):
                store.grammar(distinct(2))
        used.pop().num_rows -= 1
        assert store.grammar(distinct(2)).bytes
    finally:
        store.close()


def test_a_grammar_that_grows_is_renewed_before_it_takes_too_much():
    one = Grammar(VOCABULARY, distinct(0)).bytes
    store = GrammarStore(lambda: SETUP, max_bytes=compiling.RECOMPILE_SHARE * one * 3)
    try:
        grammar = store.grammar(distinct(0))
        grammar.num_rows += 1
        most = 0
        for _ in range(50):
            store.on_mask_cost(grammar, one // 20)  # half as many bytes
            most = max(most, grammar.bytes)
            settled(store)
        assert grammar.generation > 5 and most <= 4 * one
    finally:
        store.close()


def test_what_does_not_compile_is_said_each_time(store):
    wrong = StructuredOutputs(regex="(")
    for _ in range(2):
        with pytest.raises(GrammarError):
            store.grammar(wrong)


def test_without_a_vocabulary_every_grammar_says_why():
    def broken():
        raise RuntimeError("no tokenizer")

    store = GrammarStore(broken)
    with pytest.raises(GrammarError, match="this model serves no grammars: no tokenizer"):
        store.grammar(SPEC)
    store.close()


def widened(store, grammar, lanes=4):
    store.add_copies(grammar, lanes)
    while not grammar.has_all_copies:
        settled(store)


def test_a_grammar_that_several_rows_use_gets_more_lanes_once(store):
    grammar = store.grammar(SPEC)
    store.add_copies(grammar, 1)
    settled(store)
    assert grammar.num_copies == 1 and not grammar.has_all_copies
    widened(store, grammar)
    widened(store, grammar)
    assert grammar.num_copies == 4


def test_all_grammars_together_have_few_lanes(store, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_EXTRA_COPIES", 5)
    specs = [StructuredOutputs(regex=f"x{n}") for n in range(3)]
    grammars = [store.grammar(spec) for spec in specs]
    for grammar in grammars:
        widened(store, grammar)
    assert [grammar.num_copies for grammar in grammars] == [4, 3, 1]


def test_what_compiles_slowly_has_one_lane(store, monkeypatch):
    monkeypatch.setattr(compiling, "FAST_COMPILE_SECONDS", 0.0)
    grammar = store.grammar(SPEC)
    widened(store, grammar)
    assert grammar.num_copies == 1


def test_rows_that_move_to_another_lane_go_on_as_if_they_had_not():
    spec = StructuredOutputs(regex="[ab]{3}-[0-9]{2,5}")
    grammar, alone = Grammar(VOCABULARY, spec), GrammarSource(Grammar(VOCABULARY, spec))
    rows = [GrammarSource(grammar, row=row) for row in range(5)]
    executor = LLExecutor(2)
    for number, token in enumerate(ids_of("aba-1234")):
        if number == 3:
            for _ in range(2):
                grammar.add_copy()
            grammar.has_all_copies = True
        words = np.zeros((6, VOCABULARY.words), dtype=np.int32)
        assert fill_masks(executor, [alone, *rows], words) == [""] * 6
        assert (words == words[0]).all()
        for row in (alone, *rows):
            assert row.feed([token]) == ""
    assert [row._copy for row in rows] == [0, 1, 2, 0, 1]
    assert [row.feed(ids_of("x")) for row in rows] == [alone.feed(ids_of("x"))] * 5 != [""] * 5


def test_rows_that_have_read_much_stay_where_they_are():
    grammar = Grammar(VOCABULARY, StructuredOutputs(regex="a*"))
    row = GrammarSource(grammar, ids_of("a") * (MAX_REFED_IDS + 1), row=1)
    grammar.add_copy()
    grammar.has_all_copies = True
    row.feed(ids_of("a"))
    assert row._copy == 0
