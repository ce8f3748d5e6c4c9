"""Answers that think, by every pair of tags, are read the same whole and in pieces: the same
thoughts, content and calls, wherever the prompt leaves the thoughts."""

from __future__ import annotations

import codecs
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from call_formats import FORMS, texts
from tokenizers import Tokenizer

from pipeinfer.demo import __file__ as demo
from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.tool_parsers.base import OutputParser
from pipeinfer.gateway.tool_parsers.registry import (
    ANY_MODEL,
    TOOL_PARSERS,
    OutputParsers,
)
from pipeinfer.params import ReasoningState
from pipeinfer.text import REASONING_PARSERS, ReasoningTags

# One name of each pair of tags.
PARSERS = sorted({tags: name for name, tags in REASONING_PARSERS.items()}.values())


class Answer(NamedTuple):
    """`text`: with "(" and ")" in place of the tags, "«" and "»" in place of those of answers."""

    left: ReasoningState
    text: str
    reasoning: str
    content: str
    calls: tuple[str, ...] = ()


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWERS = [
    Answer("before", "(\nIs it 1 < 2?\nYes.\n)\n\nIt is.", "Is it 1 < 2?\nYes.", "It is."),
    Answer("before", "(\n\n)\n\nIt is.", "", "It is."),
    Answer("before", "()It is.", "", "It is."),
    Answer("before", "\n (hm) It is. ", "hm", "It is. "),
    Answer("before", "It is. (hm) Yes.", "", "It is. (hm) Yes."),
    Answer("before", ") It is.", "", ") It is."),
    Answer("before", "  It is.\n", "", "  It is.\n"),
    Answer("before", "(hm, cut", "hm, cut", ""),
    Answer("before", "(hm ( again ) It is ) so.", "hm ( again", "It is ) so."),
    Answer("open", "Ärger, 😀\n\nhm\n)\n\nJa, 你好.", "Ärger, 😀\n\nhm", "Ja, 你好."),
    Answer("open", "(\nhm)It is.", "hm", "It is."),
    Answer("open", ")It is.", "", "It is."),
    Answer("open", " \n)", "", ""),
    Answer("open", "hm, cut\n", "hm, cut", ""),
    Answer("open", f"I call. {CALL[:11]} )\n{CALL}", f"I call. {CALL[:11]}", "", ("now",)),
    Answer("before", f"(\nI call.\n)\n\nSo: {CALL}", "I call.", "So:", ("now",)),
    Answer("over", "It is.", "", "It is."),
    Answer("over", "(hm) It is. )", "", "(hm) It is. )"),
    Answer("over", f"\n\n{CALL}", "", "", ("now",)),
    Answer("open", f"hm {CALL} )", f"hm {CALL}", ""),
]

ENCLOSED = [
    Answer("before", "(\nhm\n)\n«\nIt is.\n\nSo.\n»", "hm", "It is.\n\nSo."),
    Answer("open", "hm)«It is.»\n", "hm", "It is."),
    Answer("open", "hm)« It is. » So.", "hm", "It is.So."),
    Answer("open", "hm)It is. «Yes»", "hm", "It is. «Yes»"),
    Answer("open", "hm)«It is, cut ", "hm", "It is, cut "),
    Answer("before", "«»", "", ""),
    Answer("before", " «It is.»", "", "It is."),
    Answer("over", "«It is. « »", "", "It is. «"),
    Answer("over", "It is. »", "", "It is. »"),
]


def spelled(text: str, tags: ReasoningTags) -> str:
    first, last = tags.answer
    table = {"(": tags.opening, ")": tags.closing, "«": first or "«", "»": last or "»"}
    return text.translate(str.maketrans(table))


def cuts(text: str, tags: ReasoningTags) -> Iterator[list[str]]:
    """Whole, letter by letter, in tokens, amid each marker, and anywhere."""
    yield [text]
    yield list(text)
    markers = [*map(re.escape, filter(None, (*tags.pair, *tags.answer))), "</?tool_call>"]
    yield re.findall("|".join((*markers, r" ?\w+", r"\s+", ".")), text)
    within = {m.start() + len(m[0]) // 2 for m in re.finditer("|".join(markers), text)}
    yield _at(text, within)
    for seed in range(5):
        draws = random.Random(seed)
        yield _at(text, {draws.randrange(len(text) + 1) for _ in range(6)})


def _at(text: str, places: set[int]) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def heard(reader: OutputParser, pieces: list[str]) -> tuple[str, str, tuple[str, ...]]:
    said = ParsedOutput()
    for piece in pieces:
        said.add(reader.feed(piece))
    said.add(reader.finish())
    return "".join(said.reasoning), "".join(said.content), tuple(name for name, *_ in said.calls)


@pytest.mark.parametrize("parser", PARSERS)
def test_thoughts_and_content_are_the_same_however_an_answer_is_cut(parser: str) -> None:
    made = OutputParsers("hermes", parser, True).parser_factory({"now": {}})
    assert made is not None and len(ANSWERS) >= 17
    tags = REASONING_PARSERS[parser]
    for answer in (*ANSWERS, *(ENCLOSED if tags.answer[0] else ())):
        text = spelled(answer.text, tags)
        meant = spelled(answer.reasoning, tags), spelled(answer.content, tags), answer.calls
        for pieces in cuts(text, tags):
            assert "".join(pieces) == text
            assert heard(made(answer.left), pieces) == meant, (answer, pieces)


def test_thoughts_that_are_not_shown_are_in_no_content() -> None:
    made = OutputParsers("", "qwen3").parser_factory(None, include_reasoning=False)
    assert made is not None
    assert heard(made("open"), list("hm</think>It is.")) == ("", "It is.", ())


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
LEFT: dict[str, ReasoningState] = {"qwen3": "before", "deepseek_r1": "open"}
ANSWER_PARSERS = {**dict.fromkeys(TOOL_PARSERS), **LEFT, "json_list": None}


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


def parsed(parser: str, pieces: Iterable[str]) -> Heard:
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


@pytest.mark.parametrize("parser", ANSWER_PARSERS)
def test_answers_are_read_as_their_models_meant_them(parser):
    for answer in answers(parser):
        said = parsed(parser, [answer["text"]])
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


@pytest.mark.parametrize("parser", ANSWER_PARSERS)
def test_answers_are_read_the_same_wherever_they_are_cut(parser):
    """Letter by letter, token by token, at random, and in two at every third place, from the first,
    the second or the third on: in the many answers of a parser so at every place of its markers."""
    for number, answer in enumerate(answers(parser)):
        text = answer["text"]
        whole = parsed(parser, [text])
        for seed in range(5):
            assert parsed(parser, at_random(text, seed)) == whole, (answer["of"], seed)
        assert parsed(parser, letters(text)) == whole, answer["of"]
        assert parsed(parser, tokens(text)) == whole, answer["of"]
        for cut in range(1 + number % 3, len(text), 3):
            assert parsed(parser, [text[:cut], text[cut:]]) == whole, (
                answer["of"],
                text[:cut],
            )


@pytest.mark.parametrize("parser", ANSWER_PARSERS)
def test_there_are_many_answers_of_every_parser(parser):
    found = answers(parser)
    assert len({answer["text"] for answer in found}) >= (17 if parser in FORMS else 50)
    assert len({answer["of"] for answer in texts(parser)} if parser in FORMS else "x" * 17) >= 17
