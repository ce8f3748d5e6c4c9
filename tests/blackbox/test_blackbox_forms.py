"""Answers that are held to a form: the expressions and grammars that SGLang and vLLM try, and what
is read from them by Python's own means."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from asked import MODEL, USER

EXPRESSIONS = [
    r"^user@example\.com$",
    r"^(Hello|Hi|Hey)$",
    r"^\d{3}$",
    r"^\(\d{3}\) \d{3}-\d{4}$",
    r"^2024-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
    r"^#[0-9A-F]{6}$",
    r'^\{"name": "[a-zA-Z0-9 ]{1,9}", "age": [1-9][0-9]{0,2}, "city": "[a-z]{1,9}"\}$',
    r"^\[2024-01-01T12:00:00Z\] INFO: System\.process - Operation [a-z]{1,9} successfully$",
    r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)",
    r"[\d.]{4}[^\D]\d",
    '\\{\n   "name": "[a-z]{1,9}",\n   "population": \\d{1,9}\n\\}',
]
# Grammars in GBNF, some over several lines and indented, with what their texts must look like.
GRAMMARS = [
    ('root ::= "user@example.com"', r"user@example\.com"),
    ('root ::= "Hello" | "Hi" | "Hey"', "Hello|Hi|Hey"),
    ("\n        root ::= digit digit digit\n        digit ::= [0-9]\n        ", "[0-9]{3}"),
    (
        'root ::= "(" area ")" " " area "-" line\narea ::= [0-9] [0-9] [0-9]\n'
        "line ::= [0-9] [0-9] [0-9] [0-9]",
        r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    ),
    (
        'root ::= year "-" month\nyear ::= "2024"\nmonth ::= "01" | "02" |\n   "11" |\n   "12"\n',
        "2024-(01|02|11|12)",
    ),
    ('root ::= "#" hex hex hex\nhex ::= [0-9] | [A-F]', "#[0-9A-F]{3}"),
    (
        'root ::= "{" ws pair ("," ws pair)? "}"\npair ::= "\\"name\\"" ":" string |\n'
        '   "\\"age\\"" ":" number\nstring ::= "\\"" [a-z] [a-z] "\\""\nnumber ::= [1-9]\n'
        "ws ::= [ ]?",
        r'\{ ?("name":"[a-z]{2}"|"age":[1-9])(, ?("name":"[a-z]{2}"|"age":[1-9]))?\}',
    ),
    (
        'root ::= "{" ( "\\"theme\\":" ("\\"light\\"" | "\\"dark\\"") ( ",\\"on\\":" bool )? '
        '| "\\"on\\":" bool )? "}"\nbool ::= "true" | "false"',
        r'\{("theme":"(light|dark)"(,"on":(true|false))?|"on":(true|false))?\}',
    ),
]
PROFILE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "history": {
            "type": "array",
            "items": {"$ref": "#/$defs/job"},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "skills", "history"],
    "$defs": {
        "job": {
            "type": "object",
            "properties": {"title": {"enum": ["x", "y"]}, "years": {"enum": [1, 2.5, None]}},
            "required": ["title"],
        }
    },
}


@pytest.fixture
def made(api):
    def made(**form) -> list[str]:
        """Texts of two choices."""
        asked = {"model": MODEL, "prompt": "Generate:", "temperature": 0.5, "max_tokens": 80}
        answer = api.completions.create(n=2, seed=1, extra_body=form, **asked)
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        return [choice.text for choice in answer.choices]

    return made


def test_expressions_hold_as_python_reads_them(made):
    for expression in EXPRESSIONS:
        for text in made(regex=expression):
            assert re.search(expression, text, re.ASCII), (expression, text)
            assert re.fullmatch(expression.strip("^$"), text), (expression, text)


def test_grammars_hold(made):
    for grammar, expression in GRAMMARS:
        for text in made(ebnf=grammar):
            assert re.fullmatch(expression, text), (grammar, text)


def test_digits_are_those_that_every_engine_knows(api):
    """Also where the model would rather say digits of other scripts."""
    others = {"240": 100, "217": 99, "224": 98}  # the first bytes of most of them
    for expression in (r"\d{3}", r"[\d.]{3}", r"(\d|x)+y"):
        text = api.completions.create(
            model=MODEL, prompt="1", logit_bias=others, temperature=0, max_tokens=9,
            extra_body={"regex": expression},
        ).choices[0].text  # fmt: skip
        assert text.isascii(), (expression, text)


def test_schemas_and_choices_hold_in_chats(api):
    def said(**form) -> str:
        asked = {"model": MODEL, "messages": USER, "temperature": 0.7, "seed": 2}
        return api.chat.completions.create(**asked, **form).choices[0].message.content

    schema = {"name": "profile", "schema": PROFILE}
    forms = [
        {"extra_body": {"structured_outputs": {"json": PROFILE}}},
        {"extra_body": {"structured_outputs": {"json": json.dumps(PROFILE)}}},
        {"extra_body": {"json_schema": json.dumps(PROFILE)}},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ]
    for form in forms:
        jsonschema.validate(json.loads(said(**form)), PROFILE)
    choices = ["Python", "Rust", "C++", "日本語", 'a"b', "a\nb"]
    for choice in choices:
        bias = {str(choice.encode()[0]): 100}
        form = {"extra_body": {"structured_outputs": {"choice": choices}}, "logit_bias": bias}
        assert said(**form) in choices
    nothing = {
        "json": None, "regex": "[ab]{2}", "choice": None, "grammar": None, "json_object": None,
        "disable_fallback": False, "disable_any_whitespace": False,
        "disable_additional_properties": False, "whitespace_pattern": None, "structural_tag": None,
    }  # fmt: skip
    assert re.fullmatch("[ab]{2}", said(extra_body={"structured_outputs": nothing}))


def test_a_forms_log_probs_are_numbers_of_json(api):
    answer = api.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=5, max_tokens=10,
        extra_body={"structured_outputs": {"choice": ["Python", "Rust"]}},
    )  # fmt: skip
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens - 1, "the end has no text, and no entry"
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 5
        assert all(-9999 <= top.logprob <= 0 for top in (token, *token.top_logprobs))


def test_any_object_is_one_also_in_a_stream(api):
    """The model would go on for ever, but for biases that close it."""
    asked = {
        "model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 60,
        "response_format": {"type": "json_object"}, "logit_bias": {"125": 100, "34": 60},
    }  # fmt: skip
    whole = api.chat.completions.create(**asked).choices[0].message.content
    assert isinstance(json.loads(whole), dict)
    chunks = api.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
