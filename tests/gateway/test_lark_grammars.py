"""Grammars of custom tools as regular expressions: what the grammar says, the expression allows,
and nothing else. What cannot be one says why."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from test_tool_call_grammars import SIZE, TOKENIZER, VOCABULARY

from pipeinfer.gateway.tool_parsers.grammars import (
    JSON_ESCAPED_CHARS,
    RecursiveGrammar,
    UnsupportedGrammar,
    grammar_to_regex,
    may_contain,
)
from pipeinfer.grammars.compiling import Grammar
from pipeinfer.params import StructuredOutputs

# The form in which agents edit files.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SUMS = """// Sums of products.
?start: sum
sum: product (SP ADD SP product)*  # none of these refers to itself
!product: factor (SP "*" SP factor)~0..2
        | factor
factor: INT [unit]
unit: "km"i | "m" | "a".."c"
SP: " "
ADD: "+"
%import common.INT
"""
SPACED = """
start: "(" NAME ("," NAME)* ")"
NAME: LETTER (LETTER | DIGIT){1,3}
%import common (LETTER, DIGIT)
%import common.WS_INLINE -> BLANK
%ignore BLANK
%ignore /\\n/
"""
QUOTED = 'start: ESCAPED_STRING "/" /x\\/y/i\n%import common.ESCAPED_STRING'
SAYS: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        ['*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-\tx\n+y\n*** End Patch',
         "*** Begin Patch\n*** Delete File: x\n*** End Patch\n"],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Delete File: \n*** End Patch",
         "*** Begin Patch\n*** Delete File: x\n!\n*** End Patch"],
    ),
    (SUMS, ["1", "12KM + 3 * 4b * 5", "1 * 2 * 3 + 1"], ["1 * 2 * 3 * 4", "1+2", "1Mm", "1d", ""]),
    (SPACED, ["(ab,c1)", "( ab , c12d\n)"], ["()", "(a)", "(1a)", "(abcde)", "(a b)"]),
    (QUOTED, ['"a \\" b"/X/y'], ['"a"/x', '"a" b"/x/y', '"a"x/y']),
    ('start: "a" | \n  | "b"', ["a", "b", ""], ["c", "ab"]),
    ("start: /[^\\n]+/", ["ab"], ["a\nb"]),
    ("start: /.+/s", ["a\nb"], [""]),
]  # fmt: skip


def allows(spec: StructuredOutputs, text: str) -> bool:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    matcher = Grammar(VOCABULARY, spec).matcher()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "texts", "others"), SAYS)
def test_an_expression_says_what_the_grammar_says(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    spec = StructuredOutputs(regex=grammar_to_regex(grammar))
    for text in texts:
        assert allows(spec, text), text
        assert allows(StructuredOutputs(grammar=grammar), text), text
    for text in others:
        assert not allows(spec, text), text


@pytest.mark.parametrize("grammar", [each for each, *_ in SAYS[:4]])
def test_random_texts_of_a_grammar_are_those_of_its_expression(grammar: str) -> None:
    original, chance = Grammar(VOCABULARY, StructuredOutputs(grammar=grammar)), random.Random(7)
    spec = StructuredOutputs(regex=grammar_to_regex(grammar))
    mask = allocate_token_bitmask(1, SIZE)
    ended = 0
    for _ in range(12):
        matcher, ids = original.matcher(), list[int]()
        for _ in range(120):
            if matcher.is_accepting() and (matcher.is_stopped() or chance.random() < 0.3):
                break
            fill_next_token_bitmask(matcher, mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE]
            bits[256] = 0  # the end
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                break
            ids.append(int(chance.choice(allowed)))
            assert matcher.consume_token(ids[-1])
        matched = Grammar(VOCABULARY, spec).matcher()
        assert matched.try_consume_tokens(ids) == len(ids)
        ended += matcher.is_accepting()
        assert not matcher.is_accepting() or matched.is_accepting()
    assert ended or grammar == PATCH


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: "a" | "(" start ")"', "start refers to itself"),
        ('start: x\nx: y "a"\ny: x?', "x refers to itself"),
    ],
)
def test_a_grammar_that_refers_to_itself_has_no_expression(grammar: str, said: str) -> None:
    with pytest.raises(RecursiveGrammar, match=said):
        grammar_to_regex(grammar)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: x", "no rule x"),
        ("x: /a/", "no rule start"),
        ('start: "a', "cannot stand"),
        ('start: ("a"', r"\( is not closed"),
        ('start: "a")', r"bracket \) closes none"),
        ('start: ["a")', r"\[ is not closed"),
        ("start: *", "repeats nothing"),
        ('start: "a" & ~"b"', "cannot stand"),
        ('start[lazy]: "a"', "cannot stand"),
        ('start: %json {"type": "string"}', "%json"),
        ("start: <|im_end|>", "im_end"),
        ("start: <[7]>", "<"),
        ("start: @other", "@other"),
        ('start: "a"\n}\nstart: "b"', "}"),
        ("start: WS\n%import common.NOTHING", "NOTHING"),
        ("start: /a/l", "flags l"),
        (r'start: "\d"', "not written as in JSON"),
        ("", "no rule start"),
    ],
)
def test_what_is_not_read_of_a_grammar_is_named(grammar: str, said: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=said):
        grammar_to_regex(grammar)


def test_hostile_grammars_are_refused_soon() -> None:
    doubling = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60))
    chain = "\n".join(f"r{n}: r{n + 1}" for n in range(3000)) + "\nr3000: /a/"
    begun = time.process_time()
    for grammar, said in (
        (f"start: r0\n{doubling}\nr60: /abcdefgh/", "too large"),
        (f"start: r0\n{chain}", "deeper"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "deeper"),
        ("start: " + '"a" ' * 8_000, "too large"),
        ("start: /" + "a" * 70_000 + "/", "70009 characters"),
        ("start: /" + "[" * 30_000 + "/", ""),
    ):
        if said:
            with pytest.raises(UnsupportedGrammar, match=said):
                grammar_to_regex(grammar)
        else:
            assert grammar_to_regex(grammar), "the compiler says what is wrong with it"
            with pytest.raises(UnsupportedGrammar, match="no end"):
                may_contain(grammar, JSON_ESCAPED_CHARS)
    with pytest.raises(UnsupportedGrammar):
        grammar_to_regex("start: {" + " " * 60_000 + "x")
    many = "".join(f"[{chr(letter)}x]" for letter in range(0x4E00, 0x4E00 + 15_000))
    assert may_contain(f"start: /{many}/ start", JSON_ESCAPED_CHARS), "more than are looked at"
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: "(" start ")" | INT\n%import common.INT', False),
        ('start: "(" start ")" | WS\n%import common.WS', True),
        ('start: "\\"" start', True),
        ("start: /[a-z]+/ start", False),
        ("start: /[^a-z]+/ start", True),
        ("start: /./ start", True),
        (r"start: /\w\d[[:alpha:]]\x41[\x{41}-\x{5a}]\// start", False),
        (r"start: /\s/ start", True),
        (r"start: /[[:punct:]]/ start", True),
        (r"start: /\p{L}/ start", True),
        (r"start: /[a&&b]/ start", True),
        (r"start: /(?s:a{2,3}){1}[]^]/ start", False),
        (r"start: /[!-~]/ start", True),
        ('start: "a".."z" start', False),
        ('start: " ".."~" start', True),
    ],
)
def test_letters_that_json_escapes_are_found(grammar: str, says: bool) -> None:
    assert may_contain(grammar, JSON_ESCAPED_CHARS) is says
