"""Every way to ask for a form of an answer is one StructuredOutputs, and two at a time are none."""

import json

import pytest

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.reading.registry import Reading
from pipeinfer.gateway.requests import Terms, chat_job, completion_job
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest, decode
from pipeinfer.params import SamplingParams, StructuredOutputs
from pipeinfer.text.added import Added, added_tokens

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
OBJECT = StructuredOutputs(json='{"type": "object"}')
BY_SCHEMA = StructuredOutputs(json=json.dumps(SCHEMA, separators=(",", ":")))
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
VLLM = "structured_outputs"
TERMS = Terms(SamplingParams())


def asked(terms=TERMS, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest, lambda names: pytest.fail(str(names)))
    [call] = chat_job(request, "r", terms, "").calls
    return call.params.structured_outputs


FORMS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (
        {"response_format": NAMED},
        BY_SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, BY_SCHEMA),
    ({"structured_outputs": {"json": TEXT}}, StructuredOutputs(json=TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ({"structured_outputs": {"grammar": "start: /a/"}}, StructuredOutputs(grammar="start: /a/")),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, OBJECT),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_json": TEXT}, StructuredOutputs(json=TEXT)),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ({"guided_grammar": "start: /a/"}, StructuredOutputs(grammar="start: /a/")),
    ({"regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"ebnf": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ({"json_schema": TEXT}, StructuredOutputs(json=TEXT)),
    ({"format": "json"}, OBJECT),
    ({"format": SCHEMA}, BY_SCHEMA),
    ({"format": ""}, None),
]


@pytest.mark.parametrize(("fields", "spec"), FORMS)
def test_each_form(fields, spec):
    assert asked(**fields) == spec


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "given",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "none of"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "regex and",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "not",
        ),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "no such member"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "text"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "at most"),
        ({"format": "xml"}, "format", "schema"),
        ({"regex": "a", "format": "json"}, "format", "regex and format"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "both"),
        ({"guided_grammar": 'start: %json {"x-guidance": {}}'}, "guided_grammar", "x-guidance"),
    ],
)
def test_what_is_wrong_is_named(fields, param, says):
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in str(caught.value)


def test_completions_take_them_too():
    body = json.dumps({"prompt": "x", "guided_regex": "a"}).encode()
    request = decode(body, CompletionRequest, lambda names: None)
    [call] = completion_job(request, "r", TERMS, "").calls
    assert call.params.structured_outputs == StructuredOutputs(regex="a")


def test_a_grammar_begins_behind_thoughts_where_a_model_thinks():
    thinks = Terms(
        SamplingParams(), reading=Reading("", "qwen3", True, {"</think>": Added(7, False)})
    )
    assert asked(thinks, regex="a").after == "</think>"
    assert asked(thinks, regex="a", chat_template_kwargs={"enable_thinking": False}).after == ""
    spelled = Terms(SamplingParams(), reading=Reading("", "qwen3", True))
    assert asked(spelled, regex="a").after == "", "no token of the model"


def test_tokens_are_known_from_both_files(tmp_path):
    body = {"added_tokens": [{"id": 3, "content": "<x>", "special": True}], "model": {"vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    config = {"added_tokens_decoder": {"4": {"content": "</think>", "special": False}}}
    assert added_tokens(tmp_path, config) == {"<x>": Added(3, True), "</think>": Added(4, False)}
