"""Grammars in a form of llama.cpp's are served as well, and no schema within one opens white
space again."""

import pytest
from vocabulary import VOCABULARY, ids_of

from pipeinfer.grammars import compiling
from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.grammars.compiling import Grammar, with_options
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
