"""Compiles grammars, by llguidance: JSON schemas, regular expressions, choices, Lark and GBNF.

- Vocabulary: the model's tokens, and masks of some of them.
- Grammar: a compiled grammar. A matcher, the state of one row, is a copy of it.
- mask_cost: what a matcher's masks have cost, by the compiler's own counts.

Limits and costs are counts and never times, so that all ranks and every replay agree. A hostile
grammar may end the process or take minutes: it is validated in another process first
(validation.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from pipeinfer.grammars.bounds import GrammarError, check, schema_of
from pipeinfer.grammars.json_schema import compilable_schema
from pipeinfer.grammars.regex import with_plain_digits
from pipeinfer.json_values import JsonObject
from pipeinfer.params import StructuredOutputs

# Bytes of stack of a thread that compiles. A chain of 3,000 rules overflows 8 MB; the longest chain
# of rules that fits into MAX_GRAMMAR_BYTES, about 5,900, overflows 16 MB and not 32, which
# a validation process has.
COMPILE_STACK_BYTES = 64 * 1024 * 1024
# White space that a model may repeat without end would never come to the closing bracket. These
# replace what a schema says of itself: its own pattern would win over an override.
JSON_OPTIONS: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
_LOG_NOTHING = 0
# Items of the parser in one mask. With the next limit, a mask and the token behind it take 40 ms at
# most. The library's default is 50,000.
MAX_PARSER_ITEMS = 5_000
# Items in one row of the parser, whose time grows with the square. An object with n optional keys
# takes 4 n. The library's default is 2,000.
MAX_ITEMS_IN_ROW = 1_400
BASE_BYTES = 1 << 20  # of each compiled copy, for Grammar.bytes
TEXT_BYTES = 100  # a byte of its definition
COMPILED_BYTES = 32  # a unit of fuel that the lexer took to compile
GROWN_BYTES = 10  # a unit of fuel that the lexer took since; 1 to 9 were measured
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # letters that mean something in a regex

# Lines of a grammar's text with their numbers, and what points at them.
_SHOWN = re.compile(r"(?m)^ *\d+ \| .*\n?|^ {7,}\^+ *\n?")
_PLACE = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema)")


def limits() -> LLParserLimits:
    """Of every matcher, written down because a replay depends on them; the library's own defaults,
    but for the parser's items. Errors have the matcher's state, which mask_cost reads and which has
    a client's text: `error_message` leaves it out."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=MAX_PARSER_ITEMS,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        verbose_errors=True,
    )


class GrammarVocabulary:
    """The tokens that grammars are about. Masks are int32 [words], one bit a token.

    tokenizer: tokenizer.json as text.
    width: of logits.
    end_ids: ids that end a request.
    known: ids of the tokenizer; other ids are never sampled.
    sampled_mask: all known ids.
    no_end_mask: known ids that do not end a request.
    space_mask: known ids of white space.
    """

    def __init__(self, tokenizer: str, width: int, end_ids: Sequence[int], known: Sequence[int]):
        if not end_ids:
            raise ValueError("a grammar ends with an end token, and there is none")
        self.width = width
        self.end_ids = frozenset(end_ids)
        self.tokens = LLTokenizer(tokenizer, n_vocab=width, eos_token=list(end_ids))
        self.sampled_mask = self.mask(known)
        self.no_end_mask = self.mask([i for i in known if i not in self.end_ids])
        self._texts = [self.tokens.decode_bytes([i]) for i in range(width)]
        self.space_mask = self.mask([i for i in known if i < width and self._texts[i].isspace()])
        self._beyond: dict[tuple[bytes, int], np.ndarray | None] = {}

    @property
    def words(self) -> int:
        """Words of a mask."""
        return (self.width + 31) // 32

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, special ones included."""
        return self._texts[token]

    def tokens_of_text(self, text: str) -> list[int]:
        """Tokens with the text `text`: one, if there is one."""
        return self.tokens.tokenize_str(text)

    def tokens_completing(self, text: bytes, begun: int) -> np.ndarray | None:
        """The mask of the tokens that complete `text`, of which `begun` bytes have come, and go on
        with more than white space. None if there are none."""
        if (text, begun) not in self._beyond:
            found = [
                token
                for token, said in enumerate(self._texts)
                if text[-1:] in said and (text[:begun] + said).partition(text)[2].strip()
            ]
            self._beyond[text, begun] = self.mask(found) if found else None
        return self._beyond[text, begun]

    def count_known(self, ids: Sequence[int]) -> int:
        """How many of `ids`, from the first on, are known and do not end a request."""
        some = np.array(ids)
        there = (self.no_end_mask[some >> 5] >> (some & 31)) & 1
        return len(ids) if there.all() else int(there.argmin())

    def mask(self, ids: Sequence[int]) -> np.ndarray:
        """The mask of those `ids` that the model has."""
        bits = np.zeros(self.words * 32, dtype=bool)
        bits[[i for i in ids if i < self.width]] = True
        return np.packbits(bits, bitorder="little").view("<i4")


class Grammar:
    """A compiled grammar, of which matchers are copies.

    Matchers of one compiled copy share its lexer, and wait for each other when they fill masks. For
    many rows there may be several copies. A lexer keeps the states that it has built, so `bytes`
    grows until the grammar is compiled again.

    vocabulary: of the model.
    allows_leading_space: white space before a text of the grammar means nothing.
    seconds: that it took to compile.
    num_copies: compiled copies.
    has_all_copies: there will not be more of them.
    generation: how often it was compiled again.
    num_rows: rows that use it.
    """

    def __init__(self, vocabulary: GrammarVocabulary, spec: StructuredOutputs) -> None:
        """Raises GrammarError with what the compiler says."""
        self.vocabulary = vocabulary
        self.allows_leading_space = spec.json is not None
        self._text = _definition(spec)
        begun = time.perf_counter()
        self._copies = [self._compile()]
        self.seconds = time.perf_counter() - begun
        self.has_all_copies = False
        self.generation = 0
        self.num_rows = 0
        self._compiled_bytes = BASE_BYTES + TEXT_BYTES * len(self._text)
        self._compiled_bytes += COMPILED_BYTES * mask_cost(self._copies[0]).fuel
        self._fuel = 0  # fuel

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    @property
    def bytes(self) -> int:
        """Bytes that it takes with the states of its lexers, by counts; rather too many."""
        return self._compiled_bytes * self.num_copies + GROWN_BYTES * self._fuel

    @property
    def has_grown(self) -> bool:
        """Whether it would take less than half the bytes if it were compiled again."""
        return self.bytes > 2 * self._compiled_bytes

    def add_fuel(self, fuel: int) -> None:
        """Its masks have cost so much fuel of its lexers."""
        self._fuel += fuel

    def recompile(self) -> None:
        """Compiles it again, without the states of its lexers: rows go on with the new copy. From
        any thread, one call at a time. Raises GrammarError."""
        self._copies = [self._compile()]
        self._fuel = 0
        self.generation += 1

    def add_copy(self) -> None:
        """Compiles one more copy; from any thread, one call at a time. Raises GrammarError."""
        self._copies.append(self._compile())

    def matcher(self, place: int = 0) -> LLMatcher:
        """A matcher at the beginning of the grammar, from the copy for row number `place`."""
        originals = self._copies
        return originals[place % len(originals)].deep_copy()

    def _compile(self) -> LLMatcher:
        tokens = self.vocabulary.tokens
        made = LLMatcher(tokens, self._text, log_level=_LOG_NOTHING, limits=limits())
        if made.is_error():
            raise GrammarError(error_message(made))
        return made


def error_message(matcher: LLMatcher) -> str:
    """The error of a matcher, without its state, which has a client's text, and without the text of
    the grammar, which the client may not have written."""
    said = _SHOWN.sub("", matcher.get_error().partition("\n<state>")[0])
    return _PLACE.sub("", said).strip() or "the grammar failed"


def _definition(spec: StructuredOutputs) -> str:
    """The grammar in the library's own form. Raises GrammarError."""
    form = check(spec)
    if form == "json":
        return _from_schema(spec.json or "")
    if form == "regex":
        return LLMatcher.grammar_from_regex(with_plain_digits(spec.regex or ""))
    if form == "choice":
        # One expression: the parser has an item for each alternative, in each mask.
        texts = (_SPECIAL.sub(r"\\\g<0>", text) for text in spec.choice or ())
        return LLMatcher.grammar_from_regex("|".join(texts))
    return LLMatcher.grammar_from_lark(with_options(as_lark(spec.grammar or ""), JSON_OPTIONS))


def _from_schema(text: str) -> str:
    """The grammar of a JSON schema. Raises GrammarError for keywords that no grammar enforces."""
    found = compilable_schema(schema_of(text), closed=False, narrow=True)
    if found.malformed:
        raise GrammarError(f"{', '.join(found.malformed[:5])}: this is no JSON Schema")
    if found.unsupported:
        raise GrammarError(f"an answer cannot be held to {', '.join(found.unsupported[:5])}")
    said = found.schema
    schema: JsonObject = {} if said is True else {"not": {}} if said is False else said
    own = {**schema, "x-guidance": JSON_OPTIONS}
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(own).decode())


# Strings, regular expressions and comments, in which %json is a text like any other. One that has
# no end is taken up to its line's: searching again behind each escaped quote takes a square's time.
_SCHEMA = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<json>%json\s*)(?=\{)'
)
_decode = json.JSONDecoder().raw_decode


def as_lark(text: str) -> str:
    """`text`, translated if it is GBNF (`root ::= ...`). GrammarError."""
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        said = str(error).partition("\n")[0] or "it is nested too deeply"
        raise GrammarError(f"the grammar is no GBNF: {said}") from None


def with_options(text: str, options: JsonObject) -> str:
    """With `options` for the compiler in each schema that stands behind %json."""
    parts: list[str] = []
    at = 0
    while (found := _SCHEMA.search(text, at)) is not None:
        parts.append(text[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                schema, at = _decode(text, at)
            except (ValueError, RecursionError):
                continue  # the compiler says what is wrong with it
            parts.append(json.dumps({**schema, "x-guidance": options}))
    return "".join((*parts, text[at:]))


# Units: of one mask, of the tokens that follow it. They order grammars by cost, and are no times: a
# unit of ambiguous rules takes 0.05 to 0.3 microseconds, of a lexer that is being built about ten
# (docs/benchmarks.md). Fitted with vocabularies of 49,000 and 262,000 tokens.
UNITS_PER_ITEM = 2.0  # of the parser
UNITS_PER_FUEL = 1 / 40  # of the lexer
UNITS_PER_NODE = 1 / 250  # of the tree of all tokens

_NO_TOKEN = 1 << 30  # whatever the vocabulary
_STATISTICS = re.compile(r'\nParser: \{\n((?:  "\w+": \d+,?\n)+)\}')
_COUNT = re.compile(r'"(\w+)": (\d+)')


class MaskCost(NamedTuple):
    """Since a matcher was made from its grammar. items: of its parser; fuel: of its lexer; nodes of
    the tree of tokens that it has walked."""

    items: int = 0
    fuel: int = 0
    nodes: int = 0

    @property
    def units(self) -> int:
        return round(
            self.items * UNITS_PER_ITEM + self.fuel * UNITS_PER_FUEL + self.nodes * UNITS_PER_NODE
        )

    def since(self, before: MaskCost) -> MaskCost:
        return MaskCost(
            self.items - before.items, self.fuel - before.fuel, self.nodes - before.nodes
        )


def mask_cost(matcher: LLMatcher) -> MaskCost:
    """All that `matcher` has cost, and what it was copied from. Takes about 0.1 ms: the library
    tells its counts in the message of an error alone, which a copy is made to have."""
    copy = matcher.deep_copy()
    copy.consume_token(_NO_TOKEN)
    found = _STATISTICS.search(copy.get_error())
    counts = dict(_COUNT.findall(found[1])) if found else {}
    items, fuel, nodes = (
        int(counts.get(name, 0)) for name in ("all_items", "lexer_cost", "trie_nodes_walked")
    )
    return MaskCost(items, fuel, nodes)
