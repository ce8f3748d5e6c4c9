"""A grammar is compiled once; one that is worn is replaced by one that compiles."""

import itertools
import queue
import threading

import numpy as np
import pytest
from llguidance import LLExecutor
from vocabulary import SETUP, VOCABULARY, ids_of

from pipeinfer.grammars import store as stores
from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.grammars.compiling import Grammar
from pipeinfer.grammars.masks import MOST_READ, GrammarSource, fill_all
from pipeinfer.grammars.store import GrammarStore
from pipeinfer.params import StructuredOutputs

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


def test_what_takes_long_holds_up_nothing_that_does_not(store, monkeypatch):
    go, said = threading.Event(), queue.SimpleQueue()
    slow = StructuredOutputs(regex="slow")

    def compiled(vocabulary, spec):
        assert spec != slow or go.wait(30)
        return Grammar(vocabulary, spec)

    with monkeypatch.context() as patched:
        patched.setattr(stores, "Grammar", compiled)
        store.prepare(slow, lambda why: said.put(("slow", why)), slow=True)
        settled(store)
        store.prepare(SPEC, lambda why: said.put(("quick", why)))
        assert said.get(timeout=30) == ("quick", "")
        go.set()
        assert said.get(timeout=30) == ("slow", "")


def test_a_worn_grammar_is_replaced_once_however_often_it_is_said(store):
    worn = store.grammar(SPEC)
    for _ in range(3):
        store.renew(SPEC, worn)
    settled(store)
    fresh = store.grammar(SPEC)
    assert fresh is not worn
    store.renew(SPEC, worn)  # who says so late began with the old one
    assert store.grammar(SPEC) is fresh


def test_a_worn_grammar_stays_where_no_other_compiles(store, monkeypatch):
    worn = store.grammar(SPEC)

    def no_more(vocabulary, spec):
        raise GrammarError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(stores, "Grammar", no_more)
        store.renew(SPEC, worn)
        settled(store)
    assert store.grammar(SPEC) is worn
    store.renew(SPEC, worn)
    settled(store)
    assert store.grammar(SPEC) is not worn, "it may be tried again"


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
    store.widen(grammar, lanes)
    while not grammar.settled:
        settled(store)


def test_a_grammar_that_several_rows_use_gets_more_lanes_once(store):
    grammar = store.grammar(SPEC)
    store.widen(grammar, 1)
    settled(store)
    assert grammar.lanes == 1 and not grammar.settled
    widened(store, grammar)
    widened(store, grammar)
    assert grammar.lanes == 4


def test_all_grammars_together_have_few_lanes(store, monkeypatch):
    monkeypatch.setattr(stores, "MOST_LANES", 5)
    specs = [StructuredOutputs(regex=f"x{n}") for n in range(3)]
    grammars = [store.grammar(spec) for spec in specs]
    for grammar in grammars:
        widened(store, grammar)
    assert [grammar.lanes for grammar in grammars] == [4, 3, 1]


def test_what_compiles_slowly_has_one_lane(store, monkeypatch):
    monkeypatch.setattr(stores, "QUICK", 0.0)
    grammar = store.grammar(SPEC)
    widened(store, grammar)
    assert grammar.lanes == 1


def test_rows_that_move_to_another_lane_go_on_as_if_they_had_not():
    spec = StructuredOutputs(regex="[ab]{3}-[0-9]{2,5}")
    grammar, alone = Grammar(VOCABULARY, spec), GrammarSource(Grammar(VOCABULARY, spec))
    rows = [GrammarSource(grammar, place=place) for place in range(5)]
    executor = LLExecutor(2)
    for number, token in enumerate(ids_of("aba-1234")):
        if number == 3:
            for _ in range(2):
                grammar.widen()
            grammar.settled = True
        words = np.zeros((6, VOCABULARY.words), dtype=np.int32)
        assert fill_all(executor, [alone, *rows], words) == [""] * 6
        assert (words == words[0]).all()
        for row in (alone, *rows):
            assert row.feed([token]) == ""
    assert [row._lane for row in rows] == [0, 1, 2, 0, 1]
    assert [row.feed(ids_of("x")) for row in rows] == [alone.feed(ids_of("x"))] * 5 != [""] * 5


def test_rows_that_have_read_much_stay_where_they_are():
    grammar = Grammar(VOCABULARY, StructuredOutputs(regex="a*"))
    row = GrammarSource(grammar, ids_of("a") * (MOST_READ + 1), place=1)
    grammar.widen()
    grammar.settled = True
    row.feed(ids_of("a"))
    assert row._lane == 0
