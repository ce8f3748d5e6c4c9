"""Answers that think, by every pair of tags, are read the same whole and in pieces: the same
thoughts, content and calls, wherever the prompt leaves the thoughts."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.tool_parsers.base import OutputParser
from pipeinfer.gateway.tool_parsers.registry import OutputParsers
from pipeinfer.params import ThoughtState
from pipeinfer.text.thoughts import REASONING_PARSERS, Tags

# One name of each pair of tags.
PARSERS = sorted({tags: name for name, tags in REASONING_PARSERS.items()}.values())


class Answer(NamedTuple):
    """`text`: with "(" and ")" in place of the tags, "«" and "»" in place of those of answers."""

    left: ThoughtState
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


def spelled(text: str, tags: Tags) -> str:
    first, last = tags.answer
    table = {"(": tags.opening, ")": tags.closing, "«": first or "«", "»": last or "»"}
    return text.translate(str.maketrans(table))


def cuts(text: str, tags: Tags) -> Iterator[list[str]]:
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
