"""Calls that a grammar demands: what it allows its reader reads, and arguments fit schemas."""

from __future__ import annotations

import gzip
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from call_formats import ALONE, ANY, MARKERS
from call_formats import FORMS as CALL_FORMATS
from tokenizers import AddedToken, Tokenizer

from pipeinfer.demo import __file__ as demo
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.requests import RequestDefaults, parse_chat
from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.serving import decode
from pipeinfer.gateway.tool_parsers.grammars import GrammarRequest, UnsupportedSchema
from pipeinfer.gateway.tool_parsers.json_calls import DEEPSEEK_SEPARATOR, KIMI_ARGUMENT_BEGIN
from pipeinfer.gateway.tool_parsers.registry import (
    ANY_MODEL,
    TOOL_PARSERS,
    OutputParsers,
    choose_parsers,
)
from pipeinfer.gateway.tool_parsers.xml_calls import XmlTags
from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.text import AddedId

TOKENIZER = Tokenizer.from_file(demo.replace("__init__.py", "tokenizer.json"))
SIZE = TOKENIZER.get_vocab_size()
VOCABULARY = GrammarVocabulary(TOKENIZER.to_str(), SIZE, (256,), tuple(range(SIZE)))
PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "any"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": PARAMETERS, "stop": {}}
FAMILIES = {**{name: TOOL_PARSERS[name] for name in CALL_FORMATS}, "any": ANY_MODEL}
ELEMENTS = tuple(
    name
    for name in CALL_FORMATS
    if isinstance(getattr(TOOL_PARSERS[name].make_parser, "args", ("",))[0], XmlTags)
)


@lru_cache(maxsize=4)
def compiled(grammar: str) -> Grammar:
    """Of which each text gets a matcher of its own."""
    return Grammar(VOCABULARY, StructuredOutputs(grammar=grammar))


def allows(grammar: str, text: str) -> bool:
    """Whether all of `text` is allowed, and may be the end."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    matcher = compiled(grammar).matcher()
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    )


def read(family: str, text: str) -> ParsedOutput:
    reader, said = FAMILIES[family].make_parser(SCHEMAS), ParsedOutput()
    for letter in text:
        said.add(reader.feed(letter))
    said.add(reader.finish())
    return said


WIEN = {"city": 'Wi"en', "days": 2, "unit": "C"}
WRITTEN = {**CALL_FORMATS, "any": ANY}
# By family: the calls, and what stands between two.
SAID = {
    family: (form.one("weather", WIEN), form.one("stop", {}), form.between)
    for family, form in WRITTEN.items()
}


def said(family: str, *calls: str) -> str:
    return WRITTEN[family].all(*calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_must_be_made_are_read_with_their_arguments(family: str) -> None:
    weather, stop, _ = SAID[family]
    many = FAMILIES[family].grammar(GrammarRequest(SCHEMAS, parallel=True))
    both = said(family, weather, stop)
    assert allows(many, both) and allows(many, said(family, stop))
    found = read(family, both)
    assert [(name, json.loads("".join(rest))) for name, *rest in found.calls] == [
        ("weather", {"city": 'Wi"en', "days": 2, "unit": "C"}),
        ("stop", {}),
    ]
    assert not "".join(found.content).strip()
    one = FAMILIES[family].grammar(GrammarRequest(SCHEMAS, parallel=False))
    assert allows(one, said(family, weather)) and not allows(one, both)
    assert allows(
        FAMILIES[family].grammar(GrammarRequest(SCHEMAS, False, after_reasoning=True)),
        "\n\n" + said(family, stop),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_else_may_be_said(family: str) -> None:
    weather, _, _ = SAID[family]
    grammar = FAMILIES[family].grammar(GrammarRequest(SCHEMAS, parallel=True))
    text = said(family, weather)
    assert not allows(grammar, "") and not allows(grammar, "Yes, " + text)
    for old, new in (("weather", "wether"), ("city", "town"), ("2", '"2"'), ('"C"', '"K"')):
        if old in text:
            assert not allows(grammar, text.replace(old, new)), new


@pytest.mark.parametrize("family", CALL_FORMATS)
def test_strict_functions_are_held_to_their_schemas_where_calls_are_free(family: str) -> None:
    weather, stop, _ = SAID[family]
    free = GrammarRequest({"weather": PARAMETERS, "stop": None}, parallel=True, allow_content=True)
    grammar = FAMILIES[family].grammar(free)
    for text in ("", "No {calls} at all.", said(family, weather), said(family, stop)):
        assert allows(grammar, text), text
    assert not allows(grammar, said(family, weather).replace("city", "town"))
    if family not in ALONE:
        assert allows(grammar, "I look. " + said(family, weather))


PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["name", "days"],
    "additionalProperties": False,
}
FORMS: Any = {
    "schema": (
        StructuredOutputs(json=json.dumps(PERSON)),
        ('{"name": "wea", "days": 2}', '{"name": "", "days": 2}'),
        ("", "no", '{"name": "weather"}', '{"days": 2, "name": "x"}', '"x"'),
    ),
    "object": (
        StructuredOutputs(json='{"type":"object","x-guidance":{"whitespace_pattern":"x"}}'),
        ("{}", '{"name": "wea", "days": 2}', '{"other": [1, {"a": "b"}]}'),
        ("", "[]", "{x}", "no"),
    ),
    "anything": (StructuredOutputs(json="true"), ("{}", "[[1, 2]]", '"x"', "3"), ("", "no")),
    "choice": (StructuredOutputs(choice=("yes", 'say "no"')), ("yes", 'say "no"'), ("", "no")),
    "regex": (
        StructuredOutputs(regex=r"[a-z/]+(\/|/)?(?s:.)*"),
        ("abc", "a/b", "a\n{}", "x <tool_call"),
        ("", "1"),
    ),
}


@pytest.mark.parametrize("family", CALL_FORMATS)
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_calls_or_has_the_form(family: str, name: str) -> None:
    for thinks in (False, True):
        check_form(family, name, thinks)


def check_form(family: str, name: str, thinks: bool) -> None:
    form, good, bad = FORMS[name]
    schemas = {"weather": PARAMETERS, "stop": None}
    wanted = GrammarRequest(schemas, parallel=True, after_reasoning=thinks, content_constraint=form)
    if family in ALONE and name == "regex":
        with pytest.raises(UnsupportedSchema, match="schema or a choice"):
            FAMILIES[family].grammar(wanted)
        return
    grammar = FAMILIES[family].grammar(wanted)
    weather, stop, _ = SAID[family]
    before = "\n\n" if thinks else ""
    calls = (said(family, weather), said(family, stop), said(family, weather, stop))
    for text in (*calls, *good):
        assert allows(grammar, text) and allows(grammar, before + text), text
    for text in bad:
        assert not allows(grammar, text), text
    for text in good:
        assert not read(family, text).calls and "".join(read(family, text).content) == text
    if name == "schema":
        assert not allows(grammar, calls[0] + good[0]) and not allows(grammar, good[0] + calls[0])
        assert not allows(grammar, said(family, weather).replace("city", "town"))
        one = FAMILIES[family].grammar(
            GrammarRequest(schemas, parallel=False, content_constraint=form)
        )
        assert allows(one, calls[0]) and not allows(one, calls[2]) and allows(one, good[0])


def test_a_form_of_a_regular_expression_leaves_out_what_a_call_begins_with() -> None:
    wanted = GrammarRequest(
        SCHEMAS, parallel=False, content_constraint=StructuredOutputs(regex="(?s:.)*")
    )
    grammar = FAMILIES["hermes"].grammar(wanted)
    assert allows(grammar, said("hermes", SAID["hermes"][0]))
    assert allows(grammar, "Yes.") and not allows(grammar, "<tool_call>Yes.")


def test_definitions_of_arguments_hold_beside_a_form() -> None:
    place: Any = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}},
                  "required": ["city"], "additionalProperties": False,
                  "$defs": {"city": {"enum": ["Wien"]}}}  # fmt: skip
    form = StructuredOutputs(json=json.dumps(PERSON))
    for family in CALL_FORMATS:
        if family in ELEMENTS:
            continue  # say texts without quotes
        grammar = FAMILIES[family].grammar(
            GrammarRequest({"weather": place}, parallel=False, content_constraint=form)
        )
        text = WRITTEN[family].write(("weather", {"city": "Wien"}))
        assert allows(grammar, text) and not allows(grammar, text.replace("Wien", "Rom"))
    itself = {"properties": {"again": {"$ref": "#"}}}
    with pytest.raises(UnsupportedSchema, match="may only name a definition"):
        FAMILIES["llama3_json"].grammar(
            GrammarRequest({"weather": itself}, parallel=False, content_constraint=form)
        )


@pytest.mark.parametrize(
    ("form", "error", "said"),
    [
        ({"grammar": 'start: "a"'}, UnsupportedSchema, "cannot stand beside that of calls"),
        ({"json": "{"}, GrammarError, "not valid JSON"),
        ({"json": "[]"}, GrammarError, "must be an object"),
        ({"json": "false"}, UnsupportedSchema, "must be an object"),
    ],
)
def test_forms_that_cannot_stand_beside_calls_are_refused(
    form: Any, error: type[ValueError], said: str
) -> None:
    wanted = GrammarRequest(SCHEMAS, parallel=False, content_constraint=StructuredOutputs(**form))
    with pytest.raises(error, match=said):
        FAMILIES["hermes"].grammar(wanted)


def test_tags_that_are_special_tokens_are_written_as_these() -> None:
    tokens = {"<tool_call>": AddedId(259, True), "</tool_call>": AddedId(260, False)}
    grammar = TOOL_PARSERS["hermes"].grammar(GrammarRequest(SCHEMAS, False, added_tokens=tokens))
    inside = TOKENIZER.encode('\n{"name": "stop", "arguments": {}}\n</tool_call>').ids
    matcher = Grammar(VOCABULARY, StructuredOutputs(grammar=grammar)).matcher()
    assert matcher.validate_tokens([259, *inside]) == len(inside) + 1
    assert not allows(grammar, said("hermes", SAID["hermes"][1]))


@pytest.mark.parametrize("family", ELEMENTS)
def test_what_elements_cannot_say_is_refused(family: str) -> None:
    for schema in (
        {"properties": {"a": {"type": "string", "pattern": "b+"}}},
        {"properties": {"a b": {}}},
        {"required": ["a"]},
        {"anyOf": []},
    ):
        with pytest.raises(UnsupportedSchema):
            FAMILIES[family].grammar(GrammarRequest({"f": schema}, parallel=False))


def asked(reading: OutputParsers, **fields: Any) -> Any:
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest, lambda names: None)
    job = parse_chat(request, "r", RequestDefaults(RequestParams(), parsers=reading), "")
    [call] = job.calls
    return job, call.params.structured_outputs


NAMED = {"type": "function", "function": {"name": "weather"}}


def test_choices_of_tools_become_grammars() -> None:
    hermes = OutputParsers("hermes", "", True)
    assert asked(hermes)[1] is None
    assert "weather" in asked(hermes, tool_choice="required")[1].grammar
    job, spec = asked(hermes, tool_choice=NAMED)
    assert (
        job.tool_call_options.function_forced
        and not asked(hermes, tool_choice="required")[0].tool_call_options.function_forced
    )
    assert allows(spec.grammar, said("hermes", SAID["hermes"][0]))
    _, spec = asked(OutputParsers(), tool_choice="required")
    assert allows(spec.grammar, said("any", SAID["any"][0])), "a model that knows no tools"


def test_a_form_holds_for_content_and_calls_have_none() -> None:
    hermes, form = (
        OutputParsers("hermes", "qwen3", True),
        {"response_format": {"type": "json_object"}},
    )
    call = said("hermes", SAID["hermes"][0])
    _, either = asked(hermes, **form)
    assert allows(either.grammar, call) and allows(either.grammar, '{"a": 1}')
    assert not allows(either.grammar, "Yes.")
    for forced in ("required", NAMED):
        _, calls = asked(hermes, **form, tool_choice=forced)
        assert allows(calls.grammar, call) and not allows(calls.grammar, '{"a": 1}')
    assert asked(hermes, **form, tool_choice="none")[1].json == '{"type":"object"}'


def called(reading: OutputParsers, schema: Any, *, strict: bool = False, **fields: Any) -> Any:
    """The job of a chat, and its call, with a function that has these parameters and another."""
    function = {"name": "weather", "parameters": schema, "strict": strict}
    beside = {"name": "beside", "parameters": PARAMETERS, "strict": True}
    tools = [{"type": "function", "function": one} for one in (function, beside)]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    request = decode(json.dumps(body).encode(), ChatRequest, lambda names: None)
    job = parse_chat(request, "r", RequestDefaults(RequestParams(), parsers=reading), "")
    [call] = job.calls
    return job, call


def compiles(spec: StructuredOutputs) -> bool:
    try:
        Grammar(VOCABULARY, spec)
    except GrammarError:
        return False
    return True


PACKED = Path(__file__).parents[1] / "grammars/tool_schemas.json.gz"
BY_TOOLS: Any = json.loads(gzip.decompress(PACKED.read_bytes()))[::65]
UNHELD: Any = [
    {"type": "object", "properties": {"a": {"type": "float", "required": True}}},
    {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": "a"},
    {"type": "object", "properties": {"a": {"enum": [f"{n:099}" for n in range(900)]}}},
    {"type": "array", "items": {"type": "string"}},
    {"properties": [], "required": None},
]


@pytest.mark.parametrize("family", [*CALL_FORMATS, "any"])
def test_no_schema_of_a_function_that_is_not_strict_is_refused(family: str) -> None:
    """In every form of calls. Where it cannot be compiled, or is too large, arguments are any
    object; strict functions beside it are held to theirs all the same."""
    reading = OutputParsers() if family == "any" else OutputParsers(family, "", True)
    call = {"weather": WRITTEN[family].one("weather", {"zz": 1})}
    call |= {"beside": WRITTEN[family].one("beside", {"city": "Wien", "days": 2})}
    for schema in UNHELD + BY_TOOLS:
        job, made = called(reading, schema, tool_choice="required")
        spec = made.params.structured_outputs
        if compiles(spec) and schema not in UNHELD:
            continue
        if not compiles(spec):
            assert (
                job.constraint.fallback_omits == "parameters of weather"
                and made.fallback_grammar is not None
            )
            spec = made.fallback_grammar
        else:
            assert job.constraint.unenforced or "type" in schema, schema
        assert allows(spec.grammar, said(family, call["beside"]))
        town = said(family, call["beside"]).replace("city", "town")
        assert not allows(spec.grammar, town), "it is strict"
    many = UNHELD[3]
    job, made = called(reading, many, tool_choice="required")
    assert any(place.startswith("parameters of weather: ") for place in job.constraint.unenforced)
    assert allows(made.params.structured_outputs.grammar, said(family, call["weather"]))
    with pytest.raises(ApiError) as caught:
        called(reading, many, tool_choice="required", strict=True)
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_a_form_beside_calls_is_any_json_where_nobody_can_hold_its_schema() -> None:
    """Unless it is strict. Functions that the model may call or not have any arguments there."""
    hermes = OutputParsers("hermes", "qwen3", True)
    unsatisfiable = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
    asked_for = {"name": "x", "schema": unsatisfiable, "strict": False}
    form = {"response_format": {"type": "json_schema", "json_schema": asked_for}}
    job, made = called(hermes, PARAMETERS, **form)
    assert not compiles(StructuredOutputs(json=json.dumps(unsatisfiable)))
    assert job.constraint.fallback_omits == "schema"
    assert allows(made.fallback_grammar.grammar, '{"b": 1}')
    assert allows(made.fallback_grammar.grammar, said("hermes", SAID["hermes"][0]))
    asked_for["strict"] = True
    assert called(hermes, PARAMETERS, **form)[1].fallback_grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"guided_grammar": 'start: "a"'}, "tools"),
    ],
)
def test_wrong_choices_are_refused(fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(OutputParsers("hermes", "", True), **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("family", ELEMENTS)
def test_a_text_cannot_hold_what_would_end_it(family: str) -> None:
    """Else the reader would take what follows for something else, and lose it."""
    grammar = FAMILIES[family].grammar(GrammarRequest({"weather": PARAMETERS}, parallel=False))
    end = TOOL_PARSERS[family].make_parser.args[0].value_end
    for city in ("Wien <b>", "a\n\nb", "</param", "<tool_call>"):
        text = said(family, WRITTEN[family].one("weather", {"city": city}))
        assert allows(grammar, text), city
        assert json.loads("".join(read(family, text).calls[0][1:])) == {"city": city}
    for city in (f"a{end}b", f"{end}", f"a\n{end}"):
        assert not allows(grammar, said(family, WRITTEN[family].one("weather", {"city": city})))


PYTHONIC = ("pythonic", "lfm2", "olmo3")
SOME: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"type": "boolean"},
        "d": {"type": ["null", "array"], "items": {"$ref": "#/$defs/e"}},
        "e": {"type": "null"},
    },
    "$defs": {"e": {"enum": [1, "x"]}},
}


def in_parentheses(family: str, inside: str) -> str:
    return said(family, f"f({inside})")


@pytest.mark.parametrize("family", PYTHONIC)
def test_commas_stand_between_the_arguments_that_are_there(family: str) -> None:
    """Whichever are left out, in the order of the schema."""
    values = {"a": "3", "b": '"x"', "c": "True", "d": '[1, "x"]', "e": "None"}
    whole = [f"{key}={value}" for key, value in values.items()]
    for required in ("", "a", "b", "e", "ac", "be", "abcde"):
        wanted = GrammarRequest({"f": {**SOME, "required": list(required)}}, parallel=False)
        grammar = FAMILIES[family].grammar(wanted)
        for count in range(2 ** len(values)):
            chosen = [key for i, key in enumerate(values) if count >> i & 1]
            text = in_parentheses(family, ", ".join(f"{key}={values[key]}" for key in chosen))
            assert allows(grammar, text) == set(chosen).issuperset(required), (required, text)
        for wrong in (", ".join(reversed(whole)), ",".join(whole[:2]), ", ".join([*whole, ""])):
            assert not allows(grammar, in_parentheses(family, wrong)), (required, wrong)


@pytest.mark.parametrize("family", PYTHONIC)
def test_what_a_grammar_allows_in_python_is_read_as_that_value(family: str) -> None:
    grammar = FAMILIES[family].grammar(
        GrammarRequest({"f": {**SOME, "required": []}}, parallel=False)
    )
    texts = {
        "b=\"\\/ \\b\\f\\n\\r\\t\\\" \\\\ \\u00e9\\ud83c\\udf27 ' [f(b=1), f(b='x')]\"": {
            "b": "/ \b\f\n\r\t\" \\ é🌧 ' [f(b=1), f(b='x')]"
        },
        "c=True, e=None": {"c": True, "e": None},
        "c=true, e=null": {"c": True, "e": None},
        "d=null": {"d": None},
        'd=[1,\n"x"]': {"d": [1, "x"]},
    }
    for inside, value in texts.items():
        text = in_parentheses(family, inside)
        [[name, *rest]] = read_with(family, {"f": SOME}, text).calls
        assert name == "f" and json.loads("".join(rest)) == value, inside
        assert allows(grammar, text) or "\n" in inside or "\\/" in inside, inside


def read_with(family: str, schemas: Any, text: str) -> ParsedOutput:
    reader, heard = FAMILIES[family].make_parser(schemas), ParsedOutput()
    heard.add([*reader.feed(text), *reader.finish()])
    return heard


@pytest.mark.parametrize("family", PYTHONIC)
def test_what_python_cannot_call_is_refused(family: str) -> None:
    for name in ("f g", "f(", "a=b", "", "f" * 129):
        for schemas in ({name: {}}, {"f": {"properties": {name: {}}}}):
            with pytest.raises(UnsupportedSchema):
                FAMILIES[family].grammar(GrammarRequest(schemas, parallel=False))


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("family", PYTHONIC)
def test_many_tools_are_held_in_python(family: str, free: bool) -> None:
    names = {f"tool_{i}": {"properties": {"a": {}, "b": {"type": "string"}}} for i in range(200)}
    grammar = FAMILIES[family].grammar(GrammarRequest(names, parallel=True, allow_content=free))
    assert allows(grammar, said(family, 'tool_199(b="x")'))
    assert not allows(grammar, said(family, 'tool_200(b="x")'))


TOKEN_SCHEMAS = {
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


def added(name: str) -> dict[str, AddedId]:
    tokens = tokenizer(name).get_added_tokens_decoder()
    return {token.content: AddedId(i, token.special) for i, token in tokens.items()}


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_calls_between_special_tokens_are_read_as_they_are_generated(name: str) -> None:
    ids = tokenizer(name).encode(CALL_FORMATS[name].write(*CALLS), add_special_tokens=False).ids
    found = choose_parsers(name, "none", "{{ tools }}", added(name))
    decoder = DecoderFactory(tokenizer(name)).open(
        [], skip_special_tokens=not found.calls_need_special_tokens
    )
    make = found.parser_factory(TOKEN_SCHEMAS)
    assert make is not None
    reader, said = make(), ParsedOutput()
    for token in ids:
        said.add(reader.feed(decoder.step(token)))
    said.add(reader.feed(decoder.flush()))
    said.add(reader.finish())
    assert [(call, json.loads("".join(rest))) for call, *rest in said.calls] == CALLS
    assert not "".join(said.content)


@cache
def vocabulary(name: str) -> GrammarVocabulary:
    size = tokenizer(name).get_vocab_size()
    return GrammarVocabulary(tokenizer(name).to_str(), size, (256,), tuple(range(size)))


def allows_ids(name: str, grammar: str, ids: list[int]) -> bool:
    matcher = Grammar(vocabulary(name), StructuredOutputs(grammar=grammar)).matcher()
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    )


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_grammars_demand_the_tokens_and_not_their_texts(name: str, free: bool) -> None:
    wanted = GrammarRequest(
        TOKEN_SCHEMAS, parallel=True, allow_content=free, added_tokens=added(name)
    )
    grammar = TOOL_PARSERS[name].grammar(wanted)
    text = CALL_FORMATS[name].write(*CALLS)
    assert allows_ids(name, grammar, tokenizer(name).encode(text, add_special_tokens=False).ids)
    wrong = CALL_FORMATS[name].write(("weather", {"city": "Wien", "days": "x"}))
    assert not allows_ids(
        name, grammar, tokenizer(name).encode(wrong, add_special_tokens=False).ids
    )
    plain = Tokenizer.from_file(demo.replace("__init__.py", "tokenizer.json"))
    spelled = plain.encode(text, add_special_tokens=False).ids
    opening = "".join(TOOL_PARSERS[name].markers[:1])
    special = any(token.special and each in opening for each, token in added(name).items())
    if not free and special and name != "llama3_json":
        assert not allows_ids(name, grammar, spelled)
