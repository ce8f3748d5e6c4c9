"""Size and depth of a grammar are checked on its text, before any compiler sees it."""

import json

import pytest

from pipeinfer.grammars.bounds import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH, GrammarError, check
from pipeinfer.params import StructuredOutputs


def nested(levels):
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "not none"),
        ({"json": "{}", "regex": "a"}, "not json and regex"),
        ({"choice": ()}, "at least one"),
        ({"choice": ("a", "")}, "none of them empty"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "65537 bytes"),
        ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "65538 bytes"),
        ({"choice": ("a" * MAX_GRAMMAR_BYTES, "b")}, "65537 bytes"),
        ({"json": nested(MAX_GRAMMAR_DEPTH)}, "deeper than 128"),
        ({"grammar": "start: " + "(" * 129 + '"a"' + ")" * 129}, "deeper than 128"),
        ({"regex": "(" * 3000 + "a" + ")" * 3000}, "deeper than 128"),
    ],
)
def test_refused(spec, says):
    with pytest.raises(GrammarError, match=says):
        check(StructuredOutputs(**spec))


@pytest.mark.parametrize(
    "spec",
    [
        {"json": nested(MAX_GRAMMAR_DEPTH - 1)},
        {"json": json.dumps({"const": "[{" * 500 + '"\\'})},
        {"regex": "a" * MAX_GRAMMAR_BYTES},
        {"choice": ("a" * (MAX_GRAMMAR_BYTES - 1), "b")},
        {"regex": "\\)\\)(a)"},
    ],
)
def test_just_within(spec):
    assert check(StructuredOutputs(**spec)) == next(iter(spec))
