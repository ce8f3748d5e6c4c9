"""Masks are a function of a row's ids, hold nothing that cannot be sampled, and their errors fail
one row. Walks at random over them give what the schema says."""

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor, LLParserLimits
from vocabulary import ALONE, ENDS, KNOWN, TOKENIZER, VOCABULARY, WIDTH, allowed, ids_of, source

from pipeinfer.grammars import compiling, masks
from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.grammars.masks import GrammarSource, RowSource, ThinkingBudgetSource, fill_masks
from pipeinfer.params import ReasoningContext, StructuredOutputs

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def walk(row, choose, most=300):
    """Output ids of a row that samples what `choose` takes of the allowed ones, ends included."""
    ids = []
    while len(ids) < most:
        token = choose(allowed(row))
        assert row.feed([token]) == ""
        ids.append(token)
        if token in ENDS:
            break
    return ids


def test_a_complete_grammar_allows_its_ends_alone():
    row = source(json='{"type": "boolean"}')
    assert not set(allowed(row)) & set(ENDS)
    assert row.feed(ids_of("true")) == ""
    assert set(allowed(row)) == set(ENDS)


def test_a_choice_of_thousands_allows_them_and_nothing_else():
    """Letters that mean something in a regular expression are letters."""
    texts = ("a.b", "x|y", "\\d", "[a-z]", "a/b", "(?i)a", "é\n", *(f"{n}x" for n in range(4000)))
    for text in (*texts[:7], "3999x"):
        row = source(ids_of(text), choice=texts)
        assert row.error == "" and set(allowed(row)) & set(ENDS)
    for text in ("azb", "x", "7", "b", "A", "4000x"):
        row = source(ids_of(text), choice=texts)
        assert row.error or not set(allowed(row)) & set(ENDS)


def test_ends_are_not_fed_to_the_matcher():
    row = source(json='{"type": "boolean"}')
    assert row.feed([*ids_of("true"), ENDS[0]]) == ""
    assert set(allowed(row)) == set(ENDS)


def test_what_the_grammar_does_not_allow_is_an_error_that_stays():
    row = source(choice=("yes", "no"))
    assert "does not allow" in row.feed(ids_of("maybe"))
    assert allowed(row) == []
    assert row.feed(ids_of("yes")) != ""


@pytest.mark.parametrize("text", ['{"a" : 1', '{ "a"', "\n{", '{"a":  1', '{"a":\n1'])
def test_white_space_cannot_be_opened_by_the_schema(text):
    """Its own pattern would win over an override."""
    own = {"whitespace_flexible": True, "whitespace_pattern": "\\s*", "item_separator": "\\s*,"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    row = source(json=json.dumps({**schema, "x-guidance": own}))
    assert row.feed(ids_of(text)) != ""
    assert source(ids_of('{"a": 1}'), json=json.dumps({**schema, "x-guidance": own})).error == ""


def test_only_ids_of_the_tokenizer_are_allowed():
    """Also in the padding of the model's vocabulary and in the last word's."""
    row = source(regex="(.|\n)*")
    assert set(allowed(row)) <= set(KNOWN)
    assert max(allowed(row)) < WIDTH


def test_an_id_that_is_not_to_be_sampled_leaves_the_mask():
    fewer = [i for i in KNOWN if i != ids_of("7")[0]]
    vocabulary = compiling.GrammarVocabulary(TOKENIZER.to_str(), WIDTH, ENDS, fewer)
    grammar = compiling.Grammar(vocabulary, compiling.StructuredOutputs(regex="[0-9]"))
    assert sorted(allowed(GrammarSource(grammar))) == ids_of("012345689")
    only = compiling.Grammar(vocabulary, compiling.StructuredOutputs(regex="7"))
    row = GrammarSource(only)
    assert allowed(row) == [] and "no token of this model" in row.error


def test_special_tokens_only_where_the_grammar_names_them():
    special = {i for i in KNOWN if i >= 256}
    free = set(allowed(source(json='{"type": "string"}')))
    inside = source(ids_of('"<|'), json='{"type": "string"}')
    assert not (free | set(allowed(inside))) & special
    lark = 'start: /[a-z ]*/ <|reserved_0|> %json {"type": "integer"} <|reserved_1|>'
    row = source(ids_of("let me see "), grammar=lark)
    first, second = (TOKENIZER.token_to_id(f"<|reserved_{i}|>") for i in (0, 1))
    assert set(allowed(row)) & special == {first}
    assert row.feed([first, *ids_of("42")]) == ""
    assert set(allowed(row)) & special == {second}
    assert row.feed([second]) == "" and set(allowed(row)) == set(ENDS)


def test_a_limit_that_trips_while_generating_fails_that_row_alone(monkeypatch):
    """Its mask would be that of an ordinary end."""
    monkeypatch.setattr(compiling, "limits", lambda: LLParserLimits(step_lexer_fuel=50))
    sick = source(regex="(a|b)*a(a|b){12}c")
    monkeypatch.undo()
    well = source(regex="(a|b)*a(a|b){12}c")
    trouble = ["", ""]
    for _ in range(30):
        masks = np.zeros((2, VOCABULARY.words), dtype=np.int32)
        trouble = fill_masks(LLExecutor(2), [sick, well], masks)
        if trouble[0]:
            break
        assert np.array_equal(*masks), "the fill that trips says so, before anything is fed"
        assert not [row.feed(ids_of("a")) for row in (sick, well)][1]
    assert trouble[0] and not trouble[1]
    assert not masks[0].any() and masks[1].any()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([{"json": PERSON}, {"regex": "[ab]{2,9}(c|dé)*"}]))
def test_a_row_that_is_built_anew_from_its_ids_has_the_same_masks(data, spec):
    row, ids = source(**spec), []
    for _ in range(data.draw(st.integers(0, 25))):
        token = data.draw(st.sampled_from(allowed(row)))
        if token in ENDS:
            break
        assert row.feed([token]) == ""
        ids.append(token)
    assert allowed(source(ids, **spec)) == allowed(row)


def test_rows_filled_together_are_as_rows_filled_alone():
    texts = ["", '{"name": "', '{"name": "ab", "age": 1', '{"name": "ab", "age": 15, "tags": [']
    together = [source(ids_of(text), json=PERSON) for text in texts]
    masks = np.zeros((len(texts), VOCABULARY.words), dtype=np.int32)
    assert fill_masks(LLExecutor(2), together, masks) == [""] * len(texts)
    for text, words in zip(texts, masks, strict=True):
        alone = np.zeros(VOCABULARY.words, dtype=np.int32)
        assert fill_masks(ALONE, [source(ids_of(text), json=PERSON)], alone[None]) == [""]
        assert np.array_equal(words, alone) and words.any()


def schemas():
    leaf = st.sampled_from(
        [
            {"type": "integer", "minimum": -9, "maximum": 99},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 6},
            {"enum": ["x", 'q"', 3, None]},
            {"const": {"k": [1]}},
        ]
    )

    def deeper(inner):
        lists = st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        )
        objects = st.builds(
            lambda members, need: {
                "type": "object",
                "properties": members,
                "required": sorted(members)[:need],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
            st.integers(0, 3),
        )
        either = st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
        return lists | objects | either

    return st.recursive(leaf, deeper, max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(schemas(), st.randoms(use_true_random=False))
def test_walks_at_random_give_what_the_schema_says(schema, chance):
    try:
        row = source(json=json.dumps(schema))
    except GrammarError:
        return  # the compiler says so; what it takes is the claim
    ids = walk(row, chance.choice)
    if ids[-1] in ENDS:
        text = TOKENIZER.decode(ids[:-1])
        jsonschema.validate(json.loads(text), schema)


@given(st.lists(st.sampled_from("({ab.)}"), max_size=12), st.integers(0, 12), st.integers(0, 4))
@settings(deadline=None)
def test_a_budget_of_thoughts_is_a_function_of_the_ids(letters, cut, budget):
    """However many of them were there before; `(` opens at the beginning, `)` closes."""
    ids = [ord(letter) for letter in letters]
    reasoning, behind = ReasoningContext("(", ")", "before"), masks.UnconstrainedSource(VOCABULARY)
    told = ThinkingBudgetSource(VOCABULARY, behind, budget, reasoning, ids[:cut])
    for token in ids[cut:]:
        assert told.feed([token]) == ""
    text = "".join(letters)
    forced = text.startswith("(") and ")" not in text and len(text) - 1 >= budget
    assert allowed(told) == ([ord(")")] if forced else sorted(KNOWN))


KEYS = json.dumps(
    {
        "type": "object",
        "properties": {"has agreed": {"type": "boolean"}, "kind": {"enum": ["all", "none"]}},
        "required": ["has agreed", "kind"],
        "additionalProperties": False,
    }
)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_what_is_forced_is_what_would_be_sampled_however_it_comes(data):
    """A row that is told what is forced, at any time, allows what one allows that samples all."""
    plain, row = source(json=KEYS), RowSource(source(json=KEYS), 7)
    ids: list[int] = []  # of the output, whether the row has them or not
    has = 0  # tokens
    while not (ids and ids[-1] in ENDS):
        if has < len(ids):
            if data.draw(st.booleans(), "told"):
                first = data.draw(st.integers(0, has), "first")
                end = data.draw(st.integers(has + 1, len(ids)), "end")
                assert row.feed_from(7 + first, ids[first:end]) == ""
                has = end
            else:
                assert allowed(row) == [ids[has]], "nothing else is allowed"
                assert row.feed(ids[has : has + 1]) == ""
                has += 1
            assert row.force() == [] or has == len(ids)
            continue
        assert allowed(row) == allowed(plain)
        token = data.draw(st.sampled_from(allowed(plain)), "token")
        assert row.feed([token]) == ""
        forced = row.force()
        assert plain.feed([token]) == ""
        for one in forced:
            assert allowed(plain) == [one]
            assert plain.feed([one]) == ""
        ids += [token, *forced]
        has += 1
    assert json.loads(TOKENIZER.decode(ids[:-1]))["has agreed"] in (True, False)


def test_another_token_than_the_forced_one_fails_the_row():
    row = RowSource(source(json=KEYS), 0)
    row.feed(ids_of("{"))
    assert row.force() == ids_of('"has agreed": ')
    assert "forces another token" in row.feed(ids_of("x"))
    words = np.zeros((1, VOCABULARY.words), dtype=np.int32)
    assert "forces another token" in fill_masks(ALONE, [row], words)[0]
    assert not words.any()


def test_a_row_that_does_not_jump_forces_nothing():
    row = RowSource(source(json=KEYS), 0, jumps=False)
    row.feed(ids_of("{"))
    assert row.force() == [] and allowed(row) == ids_of('"')


def test_ids_that_cannot_be_sampled_are_never_forced():
    """Of a vocabulary that lacks a letter in the middle of a forced text."""
    known = [i for i in KNOWN if i not in ids_of("g")]
    few = compiling.GrammarVocabulary(TOKENIZER.to_str(), WIDTH, ENDS, known)
    grammar = compiling.Grammar(few, StructuredOutputs(json=KEYS))
    row = GrammarSource(grammar, ids_of("{"))
    assert row.force() == ids_of('"has a')


def test_a_long_forced_text_comes_in_parts():
    row = GrammarSource(compiling.Grammar(VOCABULARY, StructuredOutputs(choice=("x" * 3000,))))
    parts = [row.force() for _ in range(4)]
    assert [len(part) for part in parts] == [1024, 1024, 952, 0]
    assert TOKENIZER.decode([i for part in parts for i in part]) == "x" * 3000


def test_nothing_is_forced_amid_thoughts():
    behind = source(regex="<[ab]>abcdef")
    row = ThinkingBudgetSource(VOCABULARY, behind, 5, ReasoningContext("<", ">", "before"))
    row.feed(ids_of("<"))
    assert row.force() == []
    row.feed(ids_of("a>"))
    assert row.force() == ids_of("abcdef")
