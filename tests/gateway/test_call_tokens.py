"""Markers of calls that are special tokens of a tokenizer: their texts reach the reader, grammars
demand the tokens, and no text spells them."""

from __future__ import annotations

import json
from functools import cache

import pytest
from call_forms import FORMS, MARKERS
from tokenizers import AddedToken, Tokenizer

from pipeinfer.demo import __file__ as demo
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.tool_parsers.grammars import GrammarRequest
from pipeinfer.gateway.tool_parsers.json_calls import DEEPSEEK_SEPARATOR, KIMI_ARGUMENT_BEGIN
from pipeinfer.gateway.tool_parsers.registry import TOOL_PARSERS, choose_parsers
from pipeinfer.grammars.compiling import Grammar, Vocabulary
from pipeinfer.params import StructuredOutputs
from pipeinfer.text.added import Added

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "stop": {},
}
CALLS = [("weather", {"city": 'W "ü" 🌧', "days": 3}), ("stop", {})]


@cache
def tokenizer(name: str) -> Tokenizer:
    """With the form's markers as special tokens, as DeepSeek's, Kimi's and others have them."""
    made = Tokenizer.from_file(demo.replace("__init__.py", "tokenizer.json"))
    markers = {*TOOL_PARSERS[name].markers, *MARKERS[name]} - {"functools"}
    markers |= (
        {DEEPSEEK_SEPARATOR}
        if "deepseek" in name
        else {KIMI_ARGUMENT_BEGIN}
        if "kimi" in name
        else set()
    )
    wanted = sorted(m for m in markers if m[0] in "<[" and m[-1] in ">]")
    if "DSML" in "".join(wanted):  # of whose markers a part is a token
        wanted = ["｜DSML｜"]
    made.add_special_tokens([AddedToken(marker, special=True) for marker in wanted])
    return made


def added(name: str) -> dict[str, Added]:
    tokens = tokenizer(name).get_added_tokens_decoder()
    return {token.content: Added(i, token.special) for i, token in tokens.items()}


@pytest.mark.parametrize("name", FORMS)
def test_calls_between_special_tokens_are_read_as_they_are_generated(name: str) -> None:
    ids = tokenizer(name).encode(FORMS[name].write(*CALLS), add_special_tokens=False).ids
    found = choose_parsers(name, "none", "{{ tools }}", added(name))
    decoder = DecoderFactory(tokenizer(name)).open(
        [], skip_special_tokens=not found.calls_need_special_tokens
    )
    make = found.parser_factory(SCHEMAS)
    assert make is not None
    reader, said = make(), ParsedOutput()
    for token in ids:
        said.add(reader.read(decoder.step(token)))
    said.add(reader.read(decoder.flush()))
    said.add(reader.end())
    assert [(call, json.loads("".join(rest))) for call, *rest in said.calls] == CALLS
    assert not "".join(said.content)


@cache
def vocabulary(name: str) -> Vocabulary:
    size = tokenizer(name).get_vocab_size()
    return Vocabulary(tokenizer(name).to_str(), size, (256,), tuple(range(size)))


def allows(name: str, grammar: str, ids: list[int]) -> bool:
    matcher = Grammar(vocabulary(name), StructuredOutputs(grammar=grammar)).matcher()
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    )


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_grammars_demand_the_tokens_and_not_their_texts(name: str, free: bool) -> None:
    wanted = GrammarRequest(SCHEMAS, parallel=True, allow_content=free, added_tokens=added(name))
    grammar = TOOL_PARSERS[name].grammar(wanted)
    text = FORMS[name].write(*CALLS)
    assert allows(name, grammar, tokenizer(name).encode(text, add_special_tokens=False).ids)
    wrong = FORMS[name].write(("weather", {"city": "Wien", "days": "x"}))
    assert not allows(name, grammar, tokenizer(name).encode(wrong, add_special_tokens=False).ids)
    plain = Tokenizer.from_file(demo.replace("__init__.py", "tokenizer.json"))
    spelled = plain.encode(text, add_special_tokens=False).ids
    opening = "".join(TOOL_PARSERS[name].markers[:1])
    special = any(token.special and each in opening for each, token in added(name).items())
    if not free and special and name != "llama3_json":
        assert not allows(name, grammar, spelled)
