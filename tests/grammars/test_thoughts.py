"""Forms and budgets begin where an answer's thoughts end, however the tags are cut into tokens.

All of it is a function of the ids: ranks, replays and rows that come back allow the same."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary
from pipeinfer.grammars.masks import (
    MAX_SPACE_TOKENS,
    ThinkingBudgetSource,
    UnconstrainedSource,
    fill_masks,
    make_source,
)
from pipeinfer.params import ReasoningContext, StructuredOutputs

ALONE = LLExecutor(1)
# Pairs of bytes that are one token. Some hold the end of a tag and more, as models' do.
PAIRS = (">{", ">\n", '>"', "\n\n", "</", "ab")
THINK = ("<think>", "</think>")
SUM = json.dumps({"type": "object", "properties": {"sum": {"enum": [20, 22]}}, "required": ["sum"],
                  "additionalProperties": False})  # fmt: skip
SAID = '{"sum": 22}'


def vocabulary(*tokens: str) -> tuple[Tokenizer, GrammarVocabulary]:
    """Of bytes and pairs of them, an end, and `tokens`."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    as_bytes = ["".join(piece for piece, _ in split.pre_tokenize_str(pair)) for pair in PAIRS]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *as_bytes]
    made = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [(*p,) for p in as_bytes]))
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    made.add_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken(token, special=False) for token in tokens])
    width, end = made.get_vocab_size(), made.token_to_id("<|end|>")
    assert end is not None
    return made, GrammarVocabulary(made.to_str(), width, [end], range(width))


TOKENS, WITH_TOKENS = vocabulary(*THINK)
PLAIN, WITHOUT = vocabulary()
MADE = {"one token": (TOKENS, WITH_TOKENS), "several tokens": (PLAIN, WITHOUT)}
BOTH = pytest.mark.parametrize("tags", MADE)
SPECS = {"json": StructuredOutputs(json=SUM), "choice": StructuredOutputs(choice=("yes", "no"))}
GRAMMARS = {
    (tags, name): Grammar(words, spec) for tags, (_, words) in MADE.items()
    for name, spec in SPECS.items()
}  # fmt: skip


def row(tags, name, state, output=()):
    return make_source(GRAMMARS[tags, name], output, ReasoningContext(*THINK, state))


def ids_of(tags, text):
    return MADE[tags][0].encode(text, add_special_tokens=False).ids


def allowed(source, words=WITH_TOKENS):
    mask = np.zeros(words.words, dtype=np.int32)
    assert fill_masks(ALONE, [source], mask[None]) == [""]
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def texts(tags, source):
    """What it allows next."""
    words = MADE[tags][1]
    return {words.bytes_of(token).decode(errors="replace") for token in allowed(source, words)}


def takes(tags, source, text):
    """Feeds a text token by token, each of which must be allowed."""
    for token in ids_of(tags, text):
        assert token in allowed(source, MADE[tags][1]), MADE[tags][1].bytes_of(token)
        assert source.feed([token]) == ""


@BOTH
def test_a_form_begins_at_once_where_no_thought_has_begun(tags):
    for state in ("before", "over"):
        source = row(tags, "json", state)
        takes(tags, source, SAID)
        assert allowed(source, MADE[tags][1]) == MADE[tags][1].end_ids


def test_a_form_may_be_preceded_by_the_opening_tag_and_white_space_alone():
    assert texts("one token", row("one token", "choice", "before")) == {"y", "n", "<think>"}
    source = row("one token", "json", "before")
    assert texts("one token", source) >= {"{", "<think>", " ", "\n", "\n\n"}
    assert not texts("one token", source) & {"a", "</think>", "<|end|>"}
    takes("one token", source, "\n\n <think>hm { <")
    takes("one token", source, "</think>")
    takes("one token", source, SAID)


def test_where_thoughts_are_over_nothing_precedes_a_form():
    assert texts("one token", row("one token", "json", "over")) == {"{"}


def test_white_space_before_a_form_has_an_end():
    source = row("one token", "json", "before")
    for _ in range(MAX_SPACE_TOKENS):
        takes("one token", source, " ")
    assert texts("one token", source) == {"{", "<think>"}
    takes("one token", source, SAID)


def test_thoughts_may_follow_white_space_that_the_form_knows():
    grammar = Grammar(WITH_TOKENS, StructuredOutputs(regex="\n(yes|no)"))
    source = make_source(grammar, (), ReasoningContext(*THINK, "before"))
    assert texts("one token", source) == {"\n", "<think>"}
    takes("one token", source, "\n")
    assert texts("one token", source) == {"y", "n", "<think>"}
    takes("one token", source, "<think>hm</think>")
    takes("one token", source, "\nyes")


@BOTH
def test_a_form_begins_behind_thoughts_that_are_open(tags):
    source = row(tags, "json", "open")
    assert "{" in texts(tags, source) and "<|end|>" not in texts(tags, source)
    takes(tags, source, 'hm, {"a": 1} < </thin </think>')
    takes(tags, source, SAID)
    assert allowed(source, MADE[tags][1]) == MADE[tags][1].end_ids


@BOTH
def test_no_token_ends_the_thoughts_and_says_more(tags):
    source = row(tags, "json", "open")
    for token in ("</", "t", "h", "i", "n", "k"):
        assert source.feed(ids_of(tags, token)) == ""
    assert texts(tags, source) >= {">", ">\n"} and not texts(tags, source) & {">{", '>"'}
    assert source.feed(ids_of(tags, ">\n")) == ""
    assert texts(tags, source) == {"{"}


def test_an_opening_tag_of_several_tokens_is_read_where_the_form_allows_it():
    grammar = Grammar(WITHOUT, StructuredOutputs(regex="(.|\n)*!"))
    source = make_source(grammar, (), ReasoningContext(*THINK, "before"))
    assert source.feed(ids_of("several tokens", "<think> hm! </think>")) == ""
    assert "<|end|>" not in texts("several tokens", source), "nothing of it was the form"
    takes("several tokens", source, "so!")
    assert "<|end|>" in texts("several tokens", source)


@pytest.mark.parametrize(
    ("tags", "state"),
    [("one token", "before"), ("one token", "open"), ("several tokens", "open")],
)
def test_a_budget_ends_thoughts_by_tags_of_any_length(tags, state):
    behind = row(tags, "json", state)
    reasoning = ReasoningContext(*THINK, state)
    source = ThinkingBudgetSource(MADE[tags][1], behind, 3, reasoning)
    opening = "<think>" if state == "before" else ""
    takes(tags, source, opening + "hm ")
    takes(tags, source, "</think>")
    takes(tags, source, SAID)


def test_a_spent_budget_allows_the_closing_tag_alone():
    reasoning = ReasoningContext(*THINK, "open")
    source = ThinkingBudgetSource(WITHOUT, UnconstrainedSource(WITHOUT), 2, reasoning)
    assert source.feed(ids_of("several tokens", "h<")) == ""
    said = b""
    while len(found := allowed(source, WITHOUT)) == 1:
        said += WITHOUT.bytes_of(next(iter(found)))
        assert source.feed(list(found)) == ""
    assert said == b"</think>"


@BOTH
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_masks_are_a_function_of_the_ids_however_they_come(tags, data):
    """Sampled, told, or known when a row comes back; with a budget and without."""
    state = data.draw(st.sampled_from(["before", "open", "over"]))
    name = data.draw(st.sampled_from(sorted(SPECS)))
    budget = data.draw(st.none() | st.integers(0, 6))
    words, reasoning = MADE[tags][1], ReasoningContext(*THINK, state)

    def made(output):
        source = row(tags, name, state, output)
        if budget is None:
            return source
        return ThinkingBudgetSource(words, source, budget, reasoning, output)

    likely = [*ids_of(tags, "<think>a</think>\n\n{"), *words.end_ids]
    stepped, ids = made(()), []
    while len(ids) < 40 and not (ids and ids[-1] in words.end_ids):
        now = sorted(allowed(stepped, words))
        some = [token for token in likely if token in now] or now
        token = data.draw(st.sampled_from(some) | st.sampled_from(now))
        ids.append(token)
        assert stepped.feed([token]) == ""
        at = data.draw(st.integers(0, len(ids)))
        again = made(ids[:at])
        assert again.feed(ids[at:]) == ""
        assert allowed(again, words) == allowed(stepped, words)
