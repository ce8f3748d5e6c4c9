"""A grammar is compiled once; one that is worn is replaced by one that compiles."""

import itertools
import threading

import pytest
from vocabulary import SETUP

from pipeinfer.grammars import store as stores
from pipeinfer.grammars.bounds import GrammarError
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
