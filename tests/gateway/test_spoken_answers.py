"""Answers as models of each family write them, whole and broken, are read the same wherever they
are cut: the same calls, thoughts and content, and arguments that are JSON.

Answers in the folder are written by hand, after the chat templates and what people report of
slips. call_forms.py writes the same answers in each form of calls, as chat templates do."""

from __future__ import annotations

import codecs
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from call_forms import FORMS, texts
from tokenizers import Tokenizer

from pipeinfer.demo import __file__ as demo
from pipeinfer.gateway.tool_parsers.base import OutputParser
from pipeinfer.gateway.tool_parsers.registry import (
    ANY_MODEL,
    TOOL_PARSERS,
    OutputParsers,
)
from pipeinfer.params import ThoughtState

FOLDER = Path(__file__).with_name("spoken")
TEXT = {"type": "string"}
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": TEXT,
            "days": {"type": "integer"},
            "wind": {"type": "number"},
            "units": {"type": "object"},
            "places": {"type": "array"},
            "note": {"anyOf": [TEXT, {"type": "null"}]},
            "kind": {"enum": ["3", "4"]},
        },
    },
    "now": {},
    "write_file": {"type": "object", "properties": {"path": TEXT, "text": TEXT}},
    "run_shell": {"type": "object", "properties": {"command": TEXT}},
    "search": {
        "type": "object",
        "properties": {
            "query": TEXT,
            "exact": {"type": "boolean"},
            "sorted": {"type": "boolean"},
            "limit": {"type": ["integer", "null"]},
        },
    },
}
# Of thoughts, where the prompts of these answers leave them.
LEFT: dict[str, ThoughtState] = {"qwen3": "before", "deepseek_r1": "open"}
PARSERS = {**dict.fromkeys(TOOL_PARSERS), **LEFT, "json_list": None}


@dataclass
class Heard:
    """`calls`: of each its name and the text of its arguments."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def answers(parser: str) -> list[dict]:
    written = texts(parser) if parser in FORMS else []
    path = FOLDER / f"{parser}.jsonl"
    if not path.is_file():
        return written
    with path.open(encoding="utf-8") as lines:
        return [*(json.loads(line) for line in lines), *written]


def reader(parser: str) -> OutputParser:
    if parser == "json_list":
        return ANY_MODEL.make_parser(SCHEMAS)
    if parser == "openai":
        both = OutputParsers(
            tool_parser_name=parser, reasoning_parser_name="openai_gptoss"
        ).parser_factory(SCHEMAS)
        assert both is not None
        return both()
    reading = (
        OutputParsers(reasoning_parser_name=parser)
        if parser in LEFT
        else OutputParsers(tool_parser_name=parser)
    )
    make = reading.parser_factory(None if parser in LEFT else SCHEMAS)
    assert make is not None
    return make(LEFT.get(parser, "before"))


def heard(parser: str, pieces: Iterable[str]) -> Heard:
    """Pieces come as a client gets them: a call's name before its arguments, in their order."""
    reading, said = reader(parser), Heard("", "", [])
    for found in [*(reading.feed(piece) for piece in pieces), reading.finish()]:
        for piece in found:
            if piece.kind == "call":
                assert piece.call_index == len(said.calls)
                said.calls.append((piece.text, ""))
            elif piece.kind == "arguments":
                name, arguments = said.calls[piece.call_index]
                said.calls[piece.call_index] = (name, arguments + piece.text)
            elif piece.kind == "reasoning":
                said.reasoning += piece.text
            else:
                said.content += piece.text
    return said


def letters(text: str) -> Iterable[str]:
    """Byte for byte: a letter of several bytes comes with the last of them, before it nothing."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    return [decode(bytes((byte,))) for byte in text.encode()]


@pytest.mark.parametrize("parser", PARSERS)
def test_answers_are_read_as_their_models_meant_them(parser):
    for answer in answers(parser):
        said = heard(parser, [answer["text"]])
        assert said.content == answer["content"], answer["of"]
        assert said.reasoning == answer.get("reasoning", ""), answer["of"]
        expected = answer.get("calls", [])
        assert [name for name, _ in said.calls] == [name for name, *_ in expected], answer["of"]
        for (_, arguments), (_, value, *cut) in zip(said.calls, expected, strict=True):
            if cut:  # what came of arguments that never ended
                assert arguments == cut[0], answer["of"]
            else:
                assert json.loads(arguments) == value, answer["of"]


TOKENIZER = Tokenizer.from_file(demo.replace("__init__.py", "tokenizer.json"))


def tokens(text: str) -> Iterable[str]:
    """As a detokenizer gives it, one token at a time."""
    offsets = TOKENIZER.encode(text, add_special_tokens=False).offsets
    ends = sorted({0, len(text), *(end for _, end in offsets)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def at_random(text: str, seed: int) -> Iterable[str]:
    ends = random.Random(seed).choices(range(len(text) + 1), k=7)
    return [text[a:b] for a, b in itertools.pairwise(sorted((0, len(text), *ends)))]


@pytest.mark.parametrize("parser", PARSERS)
def test_answers_are_read_the_same_wherever_they_are_cut(parser):
    """Letter by letter, token by token, at random, and in two at every place: so within each
    marker, too."""
    for answer in answers(parser):
        text = answer["text"]
        whole = heard(parser, [text])
        for seed in range(5):
            assert heard(parser, at_random(text, seed)) == whole, (answer["of"], seed)
        assert heard(parser, letters(text)) == whole, answer["of"]
        assert heard(parser, tokens(text)) == whole, answer["of"]
        for cut in range(1, len(text)):
            assert heard(parser, [text[:cut], text[cut:]]) == whole, (answer["of"], text[:cut])


@pytest.mark.parametrize("parser", PARSERS)
def test_there_are_many_answers_of_every_parser(parser):
    found = answers(parser)
    assert len({answer["text"] for answer in found}) >= (17 if parser in FORMS else 50)
    assert len({answer["of"] for answer in texts(parser)} if parser in FORMS else "x" * 17) >= 17
