"""Compiles grammars with llguidance: JSON schemas, regular expressions, choices, Lark and GBNF.

- GrammarVocabulary: the model's tokens, and masks of them.
- Grammar: a compiled grammar; `Grammar.matcher` makes the state of one row.
- mask_cost: the cost of a matcher's masks, by the compiler's own counters.

Limits and costs are counts, never times, so that all ranks and every replay agree. A hostile
grammar may crash the process or take minutes to compile, so another process validates it first
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
from pipeinfer.params import JsonObject, StructuredOutputs

# Bytes of stack of a thread that compiles. A chain of 3,000 rules overflows 8 MB. The longest chain
# that fits into MAX_GRAMMAR_BYTES, about 5,900 rules, overflows 16 MB but not 32 MB, the stack of a
# validation.
COMPILE_STACK_BYTES = 64 * 1024 * 1024
# Options for JSON: no flexible white space, which a model could repeat without end. They replace
# the options in a schema, because a schema's own white space pattern would win over an override.
JSON_OPTIONS: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
_LOG_NOTHING = 0
# The most items of the parser for one mask. With MAX_ITEMS_IN_ROW it bounds a mask and the token
# behind it to 40 ms. The library's default is 50,000.
MAX_PARSER_ITEMS = 5_000
# The most items in one row of the parser, whose time grows with their square. An object with n
# optional keys takes 4 n. The library's default is 2,000.
MAX_ITEMS_IN_ROW = 1_400
# Estimates for Grammar.bytes, in bytes:
BASE_BYTES = 1 << 20  # for each compiled copy
TEXT_BYTES = 100  # for each byte of the grammar's definition
COMPILED_BYTES = 32  # for each unit of fuel that the lexer used to compile
GROWN_BYTES = 10  # for each unit of fuel that the lexer used since; 1 to 9 bytes were measured
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # special characters of a regex

# Numbered lines of a grammar's text in an error, and the lines of carets below them.
_SHOWN = re.compile(r"(?m)^ *\d+ \| .*\n?|^ {7,}\^+ *\n?")
_PLACE = re.compile(r"^at \d+\(\d+\): (?=failed to compile JSON schema)")


def limits() -> LLParserLimits:
    """The limits of every matcher. They are the library's defaults except for the parser's items,
    and are written down because a replay depends on them. verbose_errors puts the matcher's
    state into errors, from which `mask_cost` reads counters; `error_message` leaves the state
    out, because it has a client's text.
    """
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
    """The model's tokens, for grammars. Masks are int32 [words], one bit a token, lowest bit first.

    width: of the logits.
    end_ids: ids that end a request.
    tokens: the tokenizer, in llguidance's form.
    sampled_mask: all ids that the tokenizer has; other ids are never sampled.
    no_end_mask: the same without `end_ids`.
    space_mask: ids of tokens that are white space alone.
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
        """int32 words of a mask."""
        return (self.width + 31) // 32

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, also of a special one."""
        return self._texts[token]

    def tokens_of_text(self, text: str) -> list[int]:
        """Ids of `text`; one id if a token has exactly this text."""
        return self.tokens.tokenize_str(text)

    def tokens_completing(self, text: bytes, begun: int) -> np.ndarray | None:
        """A mask of the tokens that complete a text and go on with more than white space; None:
        there are none.

        text: to be completed, such as a closing tag.
        begun: bytes of it that are there already.
        """
        if (text, begun) not in self._beyond:
            found = [
                token
                for token, said in enumerate(self._texts)
                if text[-1:] in said and (text[:begun] + said).partition(text)[2].strip()
            ]
            self._beyond[text, begun] = self.mask(found) if found else None
        return self._beyond[text, begun]

    def count_known(self, ids: Sequence[int]) -> int:
        """The length of the longest prefix of `ids` that the tokenizer has and that ends no
        request.
        """
        some = np.array(ids)
        there = (self.no_end_mask[some >> 5] >> (some & 31)) & 1
        return len(ids) if there.all() else int(there.argmin())

    def mask(self, ids: Sequence[int]) -> np.ndarray:
        """A mask of `ids`; ids beyond the logits' width are left out."""
        bits = np.zeros(self.words * 32, dtype=bool)
        bits[[i for i in ids if i < self.width]] = True
        return np.packbits(bits, bitorder="little").view("<i4")


class Grammar:
    """A compiled grammar; matchers are copies of it.

    vocabulary: of the model.
    allows_leading_space: whether white space in front of the grammar's text is harmless: it is
        JSON.
    seconds: that compiling took.
    num_copies: compiled copies.
    has_all_copies: whether no more copies will be made.
    generation: how often the grammar was compiled again.
    num_rows: rows that use it.

    Matchers of one compiled copy share its lexer, and wait for each other when they fill masks, so
    for many rows there may be several copies. A lexer keeps the states that it has built, so
    `bytes` grows until the grammar is compiled again.
    """

    def __init__(self, vocabulary: GrammarVocabulary, spec: StructuredOutputs) -> None:
        """Compiles `spec`. Raises GrammarError with the compiler's message."""
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
        self._fuel = 0  # that the lexers used since compiling

    @property
    def num_copies(self) -> int:
        """Compiled copies."""
        return len(self._copies)

    @property
    def bytes(self) -> int:
        """An upper estimate of the grammar's memory in bytes, with the states of its lexers, by
        counts.
        """
        return self._compiled_bytes * self.num_copies + GROWN_BYTES * self._fuel

    @property
    def has_grown(self) -> bool:
        """Whether compiling it again would free more than half of `bytes`."""
        return self.bytes > 2 * self._compiled_bytes

    def add_fuel(self, fuel: int) -> None:
        """Counts `fuel` that its lexers used for masks."""
        self._fuel += fuel

    def recompile(self) -> None:
        """Compiles it again, without the states of its lexers; rows move to the new copy. May be
        called from any thread, one call at a time. Raises GrammarError.
        """
        self._copies = [self._compile()]
        self._fuel = 0
        self.generation += 1

    def add_copy(self) -> None:
        """Compiles one more copy. May be called from any thread, one call at a time. Raises
        GrammarError.
        """
        self._copies.append(self._compile())

    def matcher(self, place: int = 0) -> LLMatcher:
        """A matcher at the beginning of the grammar.

        place: the number of the row, which decides which compiled copy it uses.
        """
        originals = self._copies
        return originals[place % len(originals)].deep_copy()

    def _compile(self) -> LLMatcher:
        tokens = self.vocabulary.tokens
        made = LLMatcher(tokens, self._text, log_level=_LOG_NOTHING, limits=limits())
        if made.is_error():
            raise GrammarError(error_message(made))
        return made


def error_message(matcher: LLMatcher) -> str:
    """The error of a matcher, without the matcher's state, which has a client's text, and without
    the grammar's text, which the client may not have written.
    """
    said = _SHOWN.sub("", matcher.get_error().partition("\n<state>")[0])
    return _PLACE.sub("", said).strip() or "the grammar failed"


def _definition(spec: StructuredOutputs) -> str:
    """The grammar in llguidance's own form. Raises GrammarError."""
    form = check(spec)
    if form == "json":
        return _from_schema(spec.json or "")
    if form == "regex":
        return LLMatcher.grammar_from_regex(with_plain_digits(spec.regex or ""))
    if form == "choice":
        # One regular expression, because the parser needs an item in each mask for an alternative.
        texts = (_SPECIAL.sub(r"\\\g<0>", text) for text in spec.choice or ())
        return LLMatcher.grammar_from_regex("|".join(texts))
    return LLMatcher.grammar_from_lark(with_options(as_lark(spec.grammar or ""), JSON_OPTIONS))


def _from_schema(text: str) -> str:
    """The grammar of a JSON schema in llguidance's form. Raises GrammarError for malformed
    keywords, and for those that cannot be enforced.
    """
    found = compilable_schema(schema_of(text), closed=False, narrow=True)
    if found.malformed:
        raise GrammarError(f"{', '.join(found.malformed[:5])}: this is no JSON Schema")
    if found.unsupported:
        raise GrammarError(f"an answer cannot be held to {', '.join(found.unsupported[:5])}")
    said = found.schema
    schema: JsonObject = {} if said is True else {"not": {}} if said is False else said
    own = {**schema, "x-guidance": JSON_OPTIONS}
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(own).decode())


# Matches %json in front of a schema. Also matches strings, regular expressions and comments, in
# which %json has no meaning. One without an end is matched up to the end of its line: searching
# again behind each escaped quote would take quadratic time.
_SCHEMA = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<json>%json\s*)(?=\{)'
)
_decode = json.JSONDecoder().raw_decode


def as_lark(text: str) -> str:
    """A grammar as Lark: GBNF (`root ::= ...`) is translated, Lark stays. Raises GrammarError."""
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        said = str(error).partition("\n")[0] or "it is nested too deeply"
        raise GrammarError(f"the grammar is no GBNF: {said}") from None


def with_options(text: str, options: JsonObject) -> str:
    """A Lark grammar in which each JSON schema behind %json has `options` for the compiler."""
    parts: list[str] = []
    at = 0
    while (found := _SCHEMA.search(text, at)) is not None:
        parts.append(text[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                schema, at = _decode(text, at)
            except (ValueError, RecursionError):
                continue  # the compiler reports the error
            parts.append(json.dumps({**schema, "x-guidance": options}))
    return "".join((*parts, text[at:]))


# Units of work, for a mask and the tokens behind it. They order grammars by cost, and are no times:
# a unit takes 0.05 to 0.3 microseconds in ambiguous rules, and about ten in a lexer that is being
# built (docs/benchmarks.md). Fitted with vocabularies of 49,000 and 262,000 tokens.
UNITS_PER_ITEM = 2.0  # for each item of the parser
UNITS_PER_FUEL = 1 / 40  # for each unit of the lexer's fuel
UNITS_PER_NODE = 1 / 250  # for each node of the tree of all tokens that is walked

_NO_TOKEN = 1 << 30  # an id that no vocabulary has
_STATISTICS = re.compile(r'\nParser: \{\n((?:  "\w+": \d+,?\n)+)\}')
_COUNT = re.compile(r'"(\w+)": (\d+)')


class MaskCost(NamedTuple):
    """What a matcher has cost since its grammar was compiled, or between two moments.

    items: of the parser.
    fuel: of the lexer.
    nodes: of the tree of all tokens that were walked.
    """

    items: int = 0
    fuel: int = 0
    nodes: int = 0

    @property
    def units(self) -> int:
        """The cost in units of work."""
        return round(
            self.items * UNITS_PER_ITEM + self.fuel * UNITS_PER_FUEL + self.nodes * UNITS_PER_NODE
        )

    def since(self, before: MaskCost) -> MaskCost:
        """The difference to `before`, an earlier cost of the same matcher."""
        return MaskCost(
            self.items - before.items, self.fuel - before.fuel, self.nodes - before.nodes
        )


def mask_cost(matcher: LLMatcher) -> MaskCost:
    """The cost of `matcher` and of what it was copied from. Takes about 0.1 ms: the library shows
    its counters only in an error message, so a copy of the matcher is made to fail.
    """
    copy = matcher.deep_copy()
    copy.consume_token(_NO_TOKEN)
    found = _STATISTICS.search(copy.get_error())
    counts = dict(_COUNT.findall(found[1])) if found else {}
    items, fuel, nodes = (
        int(counts.get(name, 0)) for name in ("all_items", "lexer_cost", "trie_nodes_walked")
    )
    return MaskCost(items, fuel, nodes)
