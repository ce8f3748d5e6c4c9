"""The input of a custom tool's call is the text that its arguments say, however they are cut."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from call_formats import ANY, FORMS, as_json
from hypothesis import given
from hypothesis import strategies as st
from test_lark_grammars import PATCH
from test_tool_call_grammars import allows

from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.tool_parsers.base import ParsedDelta
from pipeinfer.gateway.tool_parsers.grammars import (
    GrammarRequest,
    UnsupportedInputGrammar,
    input_schema,
)
from pipeinfer.gateway.tool_parsers.partial_json import CustomToolParser
from pipeinfer.gateway.tool_parsers.registry import ANY_MODEL, TOOL_PARSERS, OutputParsers
from pipeinfer.params import StructuredOutputs
from pipeinfer.text import AddedId

FAMILIES = {**{name: TOOL_PARSERS[name] for name in FORMS}, "any": ANY_MODEL}
WRITTEN = {**FORMS, "any": ANY}
HARD = 'a "b" \\ {c}\n\tü \u2028 😀 \\n \\" </x> \x01'
EDIT = (
    '*** Begin Patch\n*** Update File: a "b".py\n@@\n-\tx = "\\n"\n+y = \'é{}</p>\'\n*** End Patch'
)


class Argued:
    """A reader whose text is the arguments of one call, behind one of another tool."""

    def __init__(self) -> None:
        self._named = False

    def feed(self, text: str) -> list[ParsedDelta]:
        before = [
            ParsedDelta("call", "now", 0),
            ParsedDelta("arguments", "{}", 0),
            ParsedDelta("call", "query", 1),
        ]
        named, self._named = self._named, True
        return [*([] if named else before), ParsedDelta("arguments", text, 1)]

    def finish(self) -> list[ParsedDelta]:
        return []


def read(arguments: str, size: int) -> str:
    reader, said = CustomToolParser(Argued(), {"query"}), ParsedOutput()
    pieces: list[ParsedDelta] = []
    for at in range(0, len(arguments), size):
        pieces += reader.feed(arguments[at : at + size])
    said.add([*pieces, *reader.finish()])
    assert said.calls[0] == ["now", "{}"] and said.custom == {1}
    return "".join(said.calls[1][1:])


def surrogates(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (as_json({"input": HARD}), HARD),
        (surrogates(HARD), HARD),
        ('{ \n"input" :\t"a\\/b\\u00e9" , "x": 1}', "a/bé"),
        ('{"input": ""}', ""),
        ("{}", ""),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"input": {"a": [1]}}', '{"a":[1]}'),
        ('{"code": "x"}', '{"code": "x"}'),
        (as_json(HARD), HARD),
        ("[1, 2]", "[1, 2]"),
        ('{"input": "cut of', "cut of"),
        ('{"inp', '{"inp'),
        (r'{"input": "\ud83d"}', "\ufffd"),
        (r'{"input": "\ud83dx\ude00\uzzzz"}', "\ufffdx\ufffd\ufffd"),
        (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd😀"),
    ],
)
def test_arguments_say_a_text(arguments: str, text: str) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert read(arguments, size) == text, size


@given(st.text(), st.booleans(), st.integers(1, 9))
def test_every_text_comes_back(text: str, ascii_only: bool, size: int) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=ascii_only), size) == text


def test_a_text_goes_on_as_it_comes() -> None:
    reader = CustomToolParser(Argued(), {"query"})
    pieces = [piece for letter in surrogates("ab\n😀c") for piece in reader.feed(letter)]
    assert [piece.text for piece in pieces if piece.kind == "input"] == ["a", "b", "\n", "😀", "c"]
    assert reader.finish() == []


def test_long_arguments_take_time_by_their_length() -> None:
    begun = time.process_time()
    for arguments in (" " * 50_000, "[" + "1," * 25_000, as_json({"input": "\\" * 25_000})):
        read(arguments, 1)
    assert time.process_time() - begun < 8


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_every_form_are_read(family: str) -> None:
    text = WRITTEN[family].write(("query", {"input": HARD.replace("\x01", "")}), ("now", {}))
    reading = OutputParsers("" if family == "any" else family, "", True)
    made = reading.parser_factory({"query": input_schema({}), "now": {}}, custom_tools={"query"})
    assert made is not None
    reader, said = made("before"), ParsedOutput()
    for letter in text:
        said.add(reader.feed(letter))
    said.add(reader.finish())
    assert [name for name, *_ in said.calls] == ["query", "now"] and said.custom == {0}
    assert "".join(said.calls[0][1:]) == HARD.replace("\x01", "")


def held(family: str, text: StructuredOutputs, **more: Any) -> str:
    wanted = GrammarRequest({"edit": {}, "now": None}, True, input_grammars={"edit": text}, **more)
    return FAMILIES[family].grammar(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_custom_tool_is_held_in_every_form(family: str) -> None:
    written = WRITTEN[family]
    line = StructuredOutputs(regex=r'SELECT "\w+"\n[^;]+;')
    cases = [
        (StructuredOutputs(grammar=PATCH), EDIT, EDIT.replace("@@", "!!")),
        (line, 'SELECT "é"\n\tx;', 'SELECT "é"\n\tx'),
        (StructuredOutputs(regex="^(?P<m>Jan|Feb)$"), "Feb", "Febr"),
        (StructuredOutputs(regex=r"\W\d[\w-]+"), "-3é-", "é1a"),
        (StructuredOutputs(regex=r"\W\d[\w-]+"), "-3é-", "-\u0663é-"),
        (line, 'SELECT "a"\n<b>;', 'say SELECT "a"\n<b>;'),
    ]
    for text, right, wrong in cases:
        grammar = held(family, text)
        assert allows(grammar, written.write(("edit", {"input": right})))
        assert not allows(grammar, written.write(("edit", {"input": wrong})))
        if family == "any":
            continue
        free = held(family, text, allow_content=True)
        assert allows(free, written.write(("edit", {"input": right}), ("now", {})))
        assert allows(free, "") and not allows(free, written.write(("edit", {"input": wrong})))


NESTED = 'start: "(" start ")" | INT\n%import common.INT'


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grammar_that_refers_to_itself_is_held_where_its_letters_stand_for_themselves(
    family: str,
) -> None:
    grammar = held(family, StructuredOutputs(grammar=NESTED))
    written = WRITTEN[family]
    for text in ("7", "(((12)))"):
        assert allows(grammar, written.write(("edit", {"input": text})))
        assert not allows(grammar, written.write(("edit", {"input": text + ")"})))
    quoted = StructuredOutputs(grammar=NESTED.replace("INT\n", 'INT | "\\"" | "<" | "\\n"\n'))
    with pytest.raises(UnsupportedInputGrammar, match="start refers to itself") as refused:
        held(family, quoted)
    assert refused.value.tool == "edit"


def test_between_special_tokens_any_grammar_is_held() -> None:
    tokens = {"</arg_value>": AddedId(259, True)}
    grammar = held("glm47", StructuredOutputs(grammar=NESTED.replace("INT", '/[^()]/', 1)),
                   added_tokens=tokens)  # fmt: skip
    assert "<[259]>" in grammar and "%lark" in grammar


def test_beside_a_form_a_grammar_is_held_or_refused() -> None:
    form = StructuredOutputs(json='{"type": "object", "additionalProperties": false}')
    grammar = held("llama3_json", StructuredOutputs(grammar=PATCH), content_constraint=form)
    call = WRITTEN["llama3_json"].write(("edit", {"input": EDIT}))
    assert allows(grammar, call) and not allows(grammar, call.replace("@@", "!!"))
    with pytest.raises(UnsupportedInputGrammar, match="beside a form"):
        held("llama3_json", StructuredOutputs(grammar=NESTED), content_constraint=form)
