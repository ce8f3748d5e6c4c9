"""Readers find the same calls, thoughts and content however the text of an answer is cut."""

from __future__ import annotations

import gc
import itertools
import json
import time

import pytest
from call_formats import FORMS, MARKERS, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeinfer.gateway.response_json import ParsedOutput
from pipeinfer.gateway.tool_parsers.base import PlainTextParser
from pipeinfer.gateway.tool_parsers.registry import (
    MAX_FEED_CHARS,
    TOOL_PARSERS,
    BoundedFeedParser,
    OutputParsers,
    choose_parsers,
)
from pipeinfer.params import ReasoningState
from pipeinfer.settings import ConfigurationError
from pipeinfer.text import AddedId

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["3", "4"]},
            "wind": {"type": ["number", "boolean"]},
        },
    },
    "now": {},
}

Calls = list[tuple[str, object]]


def call(name: str, arguments: object, key: str = "arguments", **dumping: object) -> str:
    return json.dumps({"name": name, key: arguments}, **dumping)  # type: ignore[arg-type]


def hermes(*objects: str, before: str = "", after: str = "") -> str:
    return before + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects) + after


def coder(name: str, **parameters: str) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def harmony(name: str, arguments: object, start: str = "") -> str:
    head = f"{start}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(arguments)}<|call|>"


VIENNA = {"city": "Wien", "days": 3}
HARD = {
    "city": 'a "b" \\ {c} [d] </tool_call> \n',
    "units": {"x": [1, {"y": None}], "z": "ü\u2028😀"},
}
FLAT = {"city": "a \\u00fc </tool> {", "days": -1.5e3}
W = "get_weather"

# (parser, text, content, calls)
ANSWERS: list[tuple[str, str, str, Calls]] = [
    ("hermes", "Hello there.", "Hello there.", []),
    ("hermes", " two\n\nlines \n", " two\n\nlines \n", []),
    ("hermes", "", "", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", "<tool_cal> and <<tool_call", "<tool_cal> and <<tool_call", []),
    ("hermes", hermes(call(W, VIENNA)), "", [(W, VIENNA)]),
    ("hermes", hermes(call(W, VIENNA), before="Let me see.\n\n"), "Let me see.", [(W, VIENNA)]),
    ("hermes", hermes(call(W, VIENNA), call("now", {})), "", [(W, VIENNA), ("now", {})]),
    ("hermes", hermes(call(W, VIENNA), after="\nDone."), "Done.", [(W, VIENNA)]),
    ("hermes", hermes(call(W, HARD)), "", [(W, HARD)]),
    ("hermes", hermes(call(W, HARD, ensure_ascii=False)), "", [(W, HARD)]),
    ("hermes", hermes(call(W, HARD, indent=2)), "", [(W, HARD)]),
    ("hermes", hermes(call(W, json.dumps(VIENNA))), "", [(W, VIENNA)]),
    ("hermes", hermes('{"arguments": {"days": 1}, "name": "now"}'), "", [("now", {"days": 1})]),
    ("hermes", hermes('{"name": "now"}'), "", [("now", {})]),
    ("hermes", hermes('{"name": "now", "arguments": null}'), "", [("now", {})]),
    ("hermes", hermes('{"name": "now", "id": 7, "arguments": {}}'), "", [("now", {})]),
    ("hermes", hermes(call(W, VIENNA, "parameters")), "", [(W, VIENNA)]),
    ("hermes", "<tool_call>" + call("now", {}) + "</tool_call>", "", [("now", {})]),
    ("hermes", "<tool_call>" + call("now", {}), "", [("now", {})]),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", '<tool_call>{"city": 1}</tool_call>', '<tool_call>{"city": 1}</tool_call>', []),
    ("hermes", '<tool_call>\n{"nam', '<tool_call>\n{"nam', []),
    ("hermes", '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    ("hermes", "x <tool_call>", "x <tool_call>", []),
    ("hermes", hermes(call("now", {}))[:-13] + " Bye.", "Bye.", [("now", {})]),
    ("hermes", "<tool_call>" + call("now", {}) + "\n<tool_call>" + call(W, VIENNA), "",
     [("now", {}), (W, VIENNA)]),
    ("hermes", hermes(call("now", {}) + "}", after=" Bye."), "Bye.", [("now", {})]),
    ("hermes", hermes('{"name": "now", "arguments": {"a": 1}, "parameters": {}}'), "",
     [("now", {"a": 1})]),
    ("hermes", hermes('{"name": "now", "arguments": [1]}'), "", [("now", [1])]),
    ("hermes", hermes('{"name": "now", "arguments": "soon"}'), "", [("now", "soon")]),
    ("hermes", hermes('{"name": "a\\ud800"}'), hermes('{"name": "a\\ud800"}'), []),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", "Just text {a}", "Just text {a}", []),
    ("llama3_json", call(W, VIENNA, "parameters"), "", [(W, VIENNA)]),
    ("llama3_json", "\n " + call(W, HARD, "parameters"), "", [(W, HARD)]),
    ("llama3_json", "<|python_tag|>" + call(W, VIENNA, "parameters"), "", [(W, VIENNA)]),
    ("llama3_json", call(W, VIENNA) + "; " + call("now", {}), "", [(W, VIENNA), ("now", {})]),
    ("llama3_json", call("now", {}) + "\n", "", [("now", {})]),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"answer": 42', '{"answer": 42', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", call("now", {}) + " ok", "ok", [("now", {})]),
    ("mistral", "Hello [TOOL", "Hello [TOOL", []),
    ("mistral", "[TOOL_CALLS][" + call(W, VIENNA) + "]", "", [(W, VIENNA)]),
    ("mistral", "[TOOL_CALLS] [" + call(W, HARD) + ", " + call("now", {}) + "]", "",
     [(W, HARD), ("now", {})]),
    ("mistral", "Ja.[TOOL_CALLS]get_weather[ARGS]" + json.dumps(VIENNA), "Ja.", [(W, VIENNA)]),
    ("mistral", "[TOOL_CALLS]now{}", "", [("now", {})]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]" + json.dumps(HARD), "",
     [("now", {}), (W, HARD)]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "", [("now", {})]),
    ("mistral", "[TOOL_CALLS]now", "[TOOL_CALLS]now", []),
    ("mistral", "[TOOL_CALLS] [1, 2] x", "[TOOL_CALLS] [1, 2] x", []),
    ("mistral", '[TOOL_CALLS] [{"x": 1}] x', '[TOOL_CALLS] [{"x": 1}] x', []),
    ("mistral", "[TOOL_CALLS] I say {1}", "[TOOL_CALLS] I say {1}", []),
    ("mistral", "[TOOL_CALLS]" + 300 * "x" + "{}", "[TOOL_CALLS]" + 300 * "x" + "{}", []),
    ("mistral", "[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
    ("qwen3_coder", "No call, a <b> only.", "No call, a <b> only.", []),
    ("qwen3_coder", coder(W, city="Wien", days="3"), "", [(W, VIENNA)]),
    ("qwen3_coder", "I look.\n\n" + coder("now"), "I look.", [("now", {})]),
    ("qwen3_coder", coder("now") + "\n" + coder(W, city="3"), "",
     [("now", {}), (W, {"city": "3"})]),
    ("qwen3_coder", coder(W, units='{"x": [1, 2]}', other="plain words"), "",
     [(W, {"units": {"x": [1, 2]}, "other": "plain words"})]),
    ("qwen3_coder", coder(W, city="two\nlines <b>\n", days="None"), "",
     [(W, {"city": "two\nlines <b>\n", "days": None})]),
    ("qwen3_coder", "<function=now>\n</function>", "", [("now", {})]),
    ("qwen3_coder", coder(W, city="Wien").partition("</function>")[0], "", [(W, {"city": "Wien"})]),
    ("qwen3_coder", "<function=no", "<function=no", []),
    ("qwen3_coder", "<function=" + "x" * 300 + ">", "<function=" + "x" * 300 + ">", []),
    ("qwen3_coder", "<function=now><parameter=" + "x" * 300 + ">a</function>", "", [("now", {})]),
    ("qwen3_coder", coder(W, note="3", kind="4", wind="True"), "",
     [(W, {"note": "3", "kind": "4", "wind": True})]),
    ("qwen3_coder", coder(W, note="null", city="", days="12345678901234567890"), "",
     [(W, {"note": None, "city": "", "days": 12345678901234567890})]),
    ("qwen3_coder", coder(W, city='ü\u2028😀 "\\\t{</parameter', wind="-1.5e3"), "",
     [(W, {"city": 'ü\u2028😀 "\\\t{</parameter', "wind": -1500})]),
    ("qwen3_coder", coder(W, city="Wien", days="3").replace("\n</parameter>", "") + " Bye.", "Bye.",
     [(W, VIENNA)]),
    ("openai", "<|channel|>final<|message|> two\n\nlines \n<|return|>", " two\n\nlines \n", []),
    ("openai", "<|channel|>commentary<|message|>I look.<|end|>" + harmony(W, VIENNA), "I look.",
     [(W, VIENNA)]),
    ("openai", harmony(W, HARD, "<|start|>assistant") + harmony("now", {}), "",
     [(W, HARD), ("now", {})]),
    ("openai", "Hello there.", "Hello there.", []),
    # Digits of other scripts are letters to JSON.
    ("pythonic", "[now(x=٣, y=[१२, 3])]", "", [("now", {"x": "٣", "y": ["१२", 3]})]),
]  # fmt: skip


def read(
    settings: OutputParsers,
    pieces: list[str],
    one_call: bool = False,
    left: ReasoningState = "before",
) -> ParsedOutput:
    made = settings.parser_factory(SCHEMAS if settings.tool_parser_name else None, one_call)
    assert made is not None
    reader, said = made(left), ParsedOutput()
    for piece in pieces:
        said.add(reader.feed(piece))
    said.add(reader.finish())
    return said


def calls_of(said: ParsedOutput) -> Calls:
    return [(name, json.loads("".join(parts))) for name, *parts in said.calls]


@pytest.mark.parametrize("parser", {parser: None for parser, *_ in ANSWERS})
def test_calls_and_content_are_found_wherever_the_text_is_cut(parser):
    settings = OutputParsers(tool_parser_name=parser)
    for text, content, calls in [answer for of, *answer in ANSWERS if of == parser]:
        whole = read(settings, [text])
        assert "".join(whole.content) == content, text
        assert calls_of(whole) == calls, text
        for pieces in (list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
            assert _joined(read(settings, pieces)) == _joined(whole), pieces


DEEP = "[" * 3000 + "]" * 3000  # deeper than decoders of JSON go
DEEP_ANSWERS = [
    ("hermes", hermes(f'{{"name": "now", "x": {DEEP}, "arguments": {DEEP}}}'), DEEP),
    ("hermes", hermes(f'{{"name": {DEEP}}}'), None),
    ("mistral", f"[TOOL_CALLS]now{{{DEEP}", f"{{{DEEP}"),
    ("qwen3_coder", coder("now", x=DEEP), json.dumps({"x": DEEP})),
    ("openai", f"<|channel|>commentary to=functions.now<|message|>{DEEP}<|call|>", DEEP),
    (
        "openai",
        f'<|channel|>commentary to=functions.now<|message|>{{"x": {DEEP}}}',
        f'{{"x": {DEEP}}}',
    ),
    ("glm47", f"<tool_call>now<arg_key>x</arg_key><arg_value>{DEEP}", '{"x": '),
    ("deepseek_v31", f"<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{{DEEP}", f"{{{DEEP}"),
]


@pytest.mark.parametrize(("parser", "text", "arguments"), DEEP_ANSWERS)
def test_an_answer_that_is_nested_deeply_is_read_like_any_other(parser, text, arguments):
    for pieces in ([text], list(text)):
        calls = [
            "".join(parts)
            for _, *parts in read(OutputParsers(tool_parser_name=parser), pieces).calls
        ]
        assert calls == ([] if arguments is None else [arguments])


LONG = 200_000
LONG_ANSWERS = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "' + "x" * LONG),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}} ' + "x" * LONG),
    ("hermes", '<tool_call>{"x": "' + "x" * LONG),
    ("llama3_json", '{"x": "' + "x" * LONG),
    ("mistral", "[TOOL_CALLS]" + "x" * LONG),
    ("glm45", "<tool_call>" + "x" * LONG),
    ("glm45", "<tool_call>now<arg_key>" + "x" * LONG),
    ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>" + "x" * LONG),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>" + " " * LONG),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + "x" * LONG),
    ("deepseek_v31", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "' + "x" * LONG),
    ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{} " + "x" * LONG),
    ("hunyuan_a13b", "<tool_calls>[" + "," * LONG),
    ("pythonic", "[" * LONG),
    ("pythonic", "[now" * (LONG // 4)),
    ("pythonic", "[now(x=" + "x" * LONG),
    ("pythonic", "[now(x='" + "'" * LONG),
    ("pythonic", "[now(x='" + "' " * (LONG // 2)),
    ("pythonic", "[now(x='" + "', " * (LONG // 3)),
    ("pythonic", "[now(x=" + "(" * LONG),
    ("lfm2", "<|tool_call_start|>[now(x={'" + "x" * LONG),
    ("lfm2", "<|tool_call_start|>[now(x=[" + "'a'," * (LONG // 4)),
    ("olmo3", "<function_calls>" + "now()\n" * (LONG // 6)),
    ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="' + "x" * LONG),
    ("qwen3_coder", "<function=get_weather><parameter=units>[" + "x" * LONG + "</parameter>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">' + "\n" * LONG),
    ("qwen3_coder", "<function=" + "x" * LONG),
    ("qwen3_coder", "<function=f><parameter=" + "x" * LONG),
    ("qwen3_coder", "<function=get_weather><parameter=city>" + "x" * LONG),
    ("qwen3_coder", "<function=get_weather><parameter=units>" + "x" * LONG),
    ("openai", "x" * LONG),
    ("openai", " " * LONG),
    ("openai", "to=" + "x" * LONG),
    ("openai", "<|start|>assistant" + "x" * LONG),
    ("openai", "<|channel|>final" + " x" * (LONG // 2)),
    ("openai", "<|channel|>commentary to=functions.now<|message|>" + "x" * LONG),
    ("openai", '<|channel|>commentary to=functions.now<|message|>{"x": "' + "x" * LONG),
]


@pytest.mark.parametrize(("parser", "text"), LONG_ANSWERS)
def test_the_work_for_a_piece_does_not_grow_with_the_answer(parser, text):
    # What a piece costs at least is less than what it would cost to look at a long answer again.
    pieces = [text[at : at + 16] for at in range(0, len(text), 16)]
    gc.disable()  # a search for garbage takes as long as the worker's other tests have left
    try:
        begun = time.process_time()
        read(OutputParsers(tool_parser_name=parser), pieces[: len(pieces) // 8])
        middle = time.process_time()
        read(OutputParsers(tool_parser_name=parser), pieces)
        ended = time.process_time()
    finally:
        gc.enable()
    assert ended - middle < 2 * 8 * (middle - begun) + 0.05


def test_arguments_that_are_cut_off_amid_a_text_are_not_closed():
    said = read(
        OutputParsers(tool_parser_name="qwen3_coder"), ["<function=get_weather><parameter=city>Wi"]
    )
    assert said.calls == [["get_weather", "{", '"city": ', '"Wi']]


def _joined(said: ParsedOutput) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(name, "".join(parts)) for name, *parts in said.calls]
    return "".join(said.content), "".join(said.reasoning), calls


def test_there_are_answers_of_every_parser():
    others = {"openai"}  # whose answers are messages, with tests of their own
    assert set(FORMS) == set(MARKERS) == set(TOOL_PARSERS) - others
    assert all(len(texts(name)) >= 17 for name in FORMS)
    assert len(ANSWERS) >= 50


OTHERS = [
    "[ARGS]",
    "<think>",
    "</think>",
    "<function=f>",
    "</function>",
    "<parameter=p>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜tool▁sep｜>",
    "```json",
    "<｜tool▁call▁end｜>",
    "</invoke>",
    '">',
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    "to=f",
    "[now(",
    "now()",
    "a=",
    "'",
    ")",
    "', b='",
    "r'",
    '" string="true">',
    "json",
    "f",
    ":",
    "ü",
    "<",
    ";",
    ",",
    "[",
    "]",
    "{",
    "}",
]
PARTS = st.sampled_from(
    [
        *sorted({marker for markers in MARKERS.values() for marker in markers}),
        *OTHERS,
        *('<parameter name="', '"', "\\", "\n", " ", '{"name": "f", "arguments": {"a": [1, "}"]}}'),
    ]
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a machine that others use
@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.sampled_from(["", "qwen3"]),
    st.sampled_from(["before", "open", "over"]),
    st.lists(PARTS, max_size=12).map("".join),
    st.data(),
)
def test_any_text_is_read_the_same_however_it_is_cut(parser, reasoning, left, text, data):
    settings = OutputParsers(tool_parser_name=parser, reasoning_parser_name=reasoning)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    ends = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    whole = read(settings, [text], left=left)
    assert _joined(read(settings, pieces, left=left)) == _joined(whole)


CALL = '{"name": "f", "arguments": {}}'
ENDLESS = [
    ("", " "), ("", "\n<"), ("<think>", " "), ("<think>a", " "), ("<think>a</think>", " "),
    ("a", " "), ("<tool_call>", " "), (f"<tool_call>{CALL}", "}"), (f"<tool_call>{CALL}", " "),
    ("<tool_call><function=f>", " "), ("<tool_call><function=f", " "), (CALL, "}"), (CALL, ";"),
    ("<|python_tag|>", " "), ("[TOOL_CALLS]", " "), ("[TOOL_CALLS][", ","), ("[TOOL_CALLS]f", " "),
    (f"<tool_call>{CALL[:-2]}", "</tool_call>"), ("<tool_call><function=f><parameter=a>", "<"),
    ("", "<|start|>"), ("<|channel|>", "f "), ("<|start|>assistant to=", "f"), ("to=", "f"),
    ("<|channel|>final<|message|>", "<|"), ("<|channel|>commentary to=f<|message|>", "<|message|"),
    ("", "<tool_call>"), ("", "[TOOL_CALLS]"), ("[", "["), ("[TOOL_CALLS][", f"{CALL},"),
    ("[", "f"), ("[f(", "a"), ("[f(", " "), ("[f(a=", "1"), ("[f(a=", "'"), ("[f(a='", "',"),
    ("[f(a='", "', "), ("[f(a='", "\\"), ("[f(a='x',", "b"), ("[f(a={", "'"), ("[f(),", " "),
    ("[f(a='x')", " "), ("<|tool_call_start|>", " "), ("<function_calls>f()", "\n"),
    ("<tool_call>", "f"), ("<tool_call>f<arg_key>", "k"), ("<tool_call>f<arg_key>k</arg_key>", " "),
    ("<tool_call>f<arg_key>k</arg_key><arg_value>", "</arg_value"), ("<tool_calls>[", ","),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>"), ("<｜tool▁calls▁begin｜>", " "),
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>", " "), ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "`"),
    ("<|tool_call_begin|>f<|tool_call_argument_begin|>{", "{"), ("functools[", " "),
    ('<minimax:tool_call><invoke name="f"><parameter name="', "a"),
]  # fmt: skip


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
def test_what_a_reader_looks_at_again_stays_short_however_long_an_answer_is(parser):
    """Else an answer of blanks or braces would take the square of its length, beside everybody's
    events."""

    def unread(reader):
        inner = [getattr(reader, name, None) for name in ("_parser", "_next_parser")]
        return len(getattr(reader, "_buffer", "")) + sum(map(unread, filter(None, inner)))

    # ReasoningContext are read alike in front of all parsers of calls.
    lefts: list[ReasoningState] = ["before", "over", "open"] if parser == "hermes" else ["over"]
    for left in lefts:
        for begun, again in ENDLESS:
            make = OutputParsers(
                tool_parser_name=parser, reasoning_parser_name="qwen3"
            ).parser_factory({"f": {}}, False, True)
            assert make is not None
            reader = make(left)
            reader.feed(begun)
            for _ in range(40):
                for _ in range(10):
                    reader.feed(again)
                assert unread(reader) < 300, (left, begun, again)


def test_a_text_that_comes_at_once_is_read_in_parts():
    class Seen(PlainTextParser):
        def __init__(self):
            self.most = 0

        def feed(self, text):
            self.most = max(self.most, len(text))
            return super().feed(text)

    seen, text = Seen(), "".join(map(str, range(3000)))
    assert "".join(piece.text for piece in BoundedFeedParser(seen).feed(text)) == text
    assert seen.most == MAX_FEED_CHARS
    make = OutputParsers(tool_parser_name="hermes").parser_factory({"f": {}}, True, True)
    assert make is not None and isinstance(make("before"), BoundedFeedParser)


THOUGHTS = [
    ("before", "<think>\nhm, 1 < 2\n</think>\n\nYes.", "hm, 1 < 2", "Yes."),
    ("before", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("before", "Yes. <think>", "", "Yes. <think>"),
    ("before", "<think>hm", "hm", ""),
    ("before", "<thi", "", "<thi"),
    ("open", "hm\n\nhm\n</think>\nYes. ", "hm\n\nhm", "Yes. "),
    ("open", "<think>\nhm</think>Yes.", "hm", "Yes."),
    ("open", "hm </thin", "hm </thin", ""),
    ("over", "Yes. <think>", "", "Yes. <think>"),
    ("over", " <think>hm</think>", "", " <think>hm</think>"),
]


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(("left", "text", "reasoning", "content"), THOUGHTS)
def test_where_the_prompt_leaves_thoughts_decides_and_no_name(
    parser, left, text, reasoning, content
):
    settings = OutputParsers(reasoning_parser_name=parser)
    for pieces in ([text], list(text)):
        said = read(settings, pieces, left=left)
        assert ("".join(said.reasoning), "".join(said.content)) == (reasoning, content)


@pytest.mark.parametrize("parser", sorted(FORMS))
def test_calls_come_after_thoughts_and_none_is_found_in_them(parser):
    calls = FORMS[parser].write(("now", {}), (W, VIENNA))
    text = f"<think>\nhm {calls}\n</think>\n\n{calls}"
    for pieces in ([text], list(text)):
        said = read(OutputParsers(parser, "qwen3"), pieces)
        assert "".join(said.reasoning) == f"hm {calls}"
        assert calls_of(said) == [("now", {}), (W, VIENNA)]
        assert not said.content


def test_only_the_first_call_is_shown_where_one_is_wanted():
    text = hermes(call("now", {}), call(W, VIENNA))
    assert calls_of(read(OutputParsers("hermes"), [text], one_call=True)) == [("now", {})]


JSON = r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}"
# Names of parsers, and what templates of their models have of calls.
TEMPLATES = [
    ("{% if tools %}" + JSON + "{% endif %}", "hermes", ""),
    ("{{ tools }}<tool_call>\n' }}{{- '{\"arguments\": <args-dict>, \"name\": f}", "hermes", ""),
    ("{{ tools }}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}", "hermes", ""),
    ("{{ tools }}<tool_call><function=f><parameter=p>", "qwen3_coder", ""),
    ("{{ tools }}<seed:tool_call><function=f><parameter=p>", "seed_oss", ""),
    ("{{ tools }}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>", "glm45", ""),
    (r"{{ tools }}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v", "glm45", ""),
    ("{{ tools }}<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>", "glm47", ""),
    ('{{ tools }}<minimax:tool_call><invoke name="f"><parameter name="p">', "minimax_m2", ""),
    ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "deepseek_v3", ""),
    ("{{ tools }}<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "deepseek_v31", ""),
    ("{{ tools }}<|tool_call_begin|>f:0<|tool_call_argument_begin|>", "kimi_k2", ""),
    ("{{ available_tools }}<|tool_call|> and a JSON list", "granite", ""),
    ('{{ tools }}<tool_calls>[{"name": "f"}]</tool_calls>', "hunyuan_a13b", ""),
    ('{{ tools }}functools[{"name": "f"}]', "phi4_mini_json", ""),
    ("{{ tools }}[TOOL_CALLS]", "mistral", ""),
    ("{{ tools }}<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
    ("<|im_start|>{{ tools }}<|message|>", "", ""),
    ('{{ tools }}{"name": function name, "parameters": dictionary', "llama3_json", ""),
    ("{{ tools }}[func_name1(params_name1=params_value1...), func_name2(params)]", "pythonic", ""),
    ("{{ tools }}[func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic", ""),
    ("{{ tools }}<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "lfm2", ""),
    ("List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2", ""),
    ("List of tools: [{{ tools }}]", "lfm2", ""),
    ('{{ tools }}[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]', "xlam", ""),
    ("{{ tools }}<|role_sep|><|function_call|>", "gigachat3", ""),
    ("{{ tools }}<function_calls>f(a=1)</function_calls>", "olmo3", ""),
    ("{{ tools }}{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>' }}", "deepseek_v32", ""),
    ("{{ tools }}<｜DSML｜tool_calls><｜DSML｜invoke name=", "deepseek_v4", ""),
    # What looks like one of them, and is another form.
    ("{{ tools }}<tool_call> and </tool_call>", "", ""),
    ('{{ tools }}]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">' + JSON, "", ""),
    ("{{ tools }}<|python_tag|><function=f>{}</function>", "", ""),
    ('{{ tools }}{"name": "f", "description": "d", "parameters": {}}', "", ""),
    ("{{ tools }}<|tool_call>call:f{}<tool_call|>", "", ""),
    ("{{ tools }}<|tool_call_begin|>", "", ""),
    ("{{ messages }}", "", ""),
    ("</think>{% if add_generation_prompt %}A<think>\n{% endif %}", "", "qwen3"),
    ("{{ m.content.split('</think>')[-1] }}", "", "qwen3"),
    ("<seed:think>{{ thoughts }}</seed:think>", "", "seed_oss"),
    ("{{ tools }}[TOOL_CALLS][THINK]{{ thoughts }}[/THINK]", "mistral", "mistral"),
    ("{{ tools }}" + JSON + "</think>{% if add_generation_prompt %}A{% if not enable_thinking %}"
     "<think>\n\n</think>{% endif %}{% endif %}", "hermes", "qwen3"),
]  # fmt: skip


def test_parsers_are_chosen_as_the_template_shows():
    for template, tools, reasoning in TEMPLATES:
        found = choose_parsers("auto", "auto", template)
        assert (found.tool_parser_name, found.reasoning_parser_name) == (tools, reasoning), template
        assert found.template_has_tools == ("tools" in template)
        assert choose_parsers("none", "none", template).parser_factory(None, False) is None
        told = [name for name, one in TOOL_PARSERS.items() if one.matches_template(template)]
        assert told == [tools] * bool(tools), template


@pytest.mark.parametrize(
    ("shows", "name"),
    [
        ("<start_function_call>call:f{a:1}<end_function_call>", "functiongemma"),
        ("<|tool_call>call:f{a:1}<tool_call|>", "gemma4"),
        ("set ns = ']<]minimax[>['", "minimax_m3"),
        ("<|close|>message<|sep|><|end_of_msg|>", "kimi_k3"),
        ("function call<|role_sep|>", "gigachat3_0"),
        (">>>${recipient}\n${content}", "functionary"),
        ("<{start_tag}={function_name}> with start_tag => `<function`", "functionary"),
        ('<atem:function_calls>\n<atem:invoke name="f">', "muse_glimmer"),
        ("<tool_call{}>'.format(mark)", "hy_v3"),
        ("<|tool_call:begin|>a<|tool_call:name|>f", "solar_open"),
        (r"Write \'Action:\' followed by a list", "command_r_plus"),
        ("somehow", ""),
    ],
)
def test_a_form_that_no_parser_reads_is_refused_by_its_name(shows: str, name: str) -> None:
    found = choose_parsers("auto", "auto", "{{ tools }}" + shows)
    assert (found.tool_parser_name, found.unsupported_form) == ("", name)
    assert (
        f"calls in {name}{', ' * bool(name)}a form that no --tool-parser" in found.why_no_tool_calls
    )


def test_markers_that_are_special_tokens_in_a_tokenizer_keep_their_text():
    added = {"<tool_call>": AddedId(5, special=True), "</tool_call>": AddedId(6, special=False)}
    assert choose_parsers("hermes", "none", "", added).calls_need_special_tokens
    assert not choose_parsers(
        "hermes", "none", "", {"<tool_call>": AddedId(5, special=False)}
    ).calls_need_special_tokens
    assert not choose_parsers("none", "none", "", added).calls_need_special_tokens
    assert choose_parsers(
        "glm45", "none", "", {"</arg_key>": AddedId(7, special=True)}
    ).calls_need_special_tokens
    assert choose_parsers("deepseek_v3", "none", "").calls_need_special_tokens


def test_the_parsers_of_harmony_come_together_unless_one_is_named_otherwise():
    template = "{{ tools }}<|start|><|channel|><|message|>"
    text = "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>Yes."
    for named in (
        ("openai", "auto", ""),
        ("auto", "openai_gptoss", ""),
        ("auto", "auto", template),
    ):
        found = choose_parsers(*named)
        assert (found.tool_parser_name, found.reasoning_parser_name) == ("openai", "openai_gptoss")
        assert _joined(read(found, [text]))[:2] == ("Yes.", "hm")
    calls_alone = choose_parsers("auto", "none", template)
    assert _joined(read(calls_alone, [text]))[:2] == ("hm\nYes.", "")
    assert choose_parsers("none", "auto", template) == OutputParsers(
        "", "openai_gptoss", True, tools_disabled=True
    )


@pytest.mark.parametrize("flag", ["tool", "reasoning"])
def test_an_unknown_parser_is_refused_by_name(flag):
    names = {"tool": "auto", "reasoning": "auto", flag: "gpt"}
    with pytest.raises(
        ConfigurationError, match=rf"--{flag}-parser: 'gpt' is none of auto, none, "
    ):
        choose_parsers(names["tool"], names["reasoning"], "")
