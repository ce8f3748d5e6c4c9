"""Rules that the grammars of tool calls share, in llguidance's Lark.

The grammar of each format stands beside its parser.

- GrammarRequest: the functions that may be called, their schemas, and what may stand beside calls.
- start_rule, tagged_calls, call_object, json_arguments and the like: the rules that formats share.
- grammar_to_regex: a client's Lark grammar of a custom tool's input as a regular expression, which
  can stand within a call. A call has tags and escapes, and a compiler matches terminals greedily: a
  terminal that ends where an escape begins would swallow the escape. One expression for the whole
  text avoids that. A recursive grammar has no expression; for it the characters of its texts can be
  found (may_contain).

What a grammar allows, the parser of the same format parses, and arguments fit their schemas.
Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from pipeinfer.gateway.tool_parsers.base import INPUT_PARAMETER, schema_types
from pipeinfer.grammars.bounds import DEFINITIONS, schema_of
from pipeinfer.grammars.rewriting import with_plain_digits
from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs
from pipeinfer.text import AddedId

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = "/(?s:.*)/"
NO_TOOLS_HINT = "tool_choice none offers no tools"
# Keywords of a schema that say nothing about the value.
ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated"}
_OBJECT_KEYWORDS = ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
    "x-guidance",
}  # fmt: skip
# A schema that stands within another one takes only its definitions along.
_NON_LOCAL_REF = re.compile(r'"\$(ref|dynamicRef|recursiveRef)":"#(?!/(\$defs|definitions)/)')
_INPUT_OPENING = f'{{"{INPUT_PARAMETER}": "'
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}"
_CLASSES = {"D": r"\P{Nd}", "w": f"[{_WORD}]", "W": f"[^{_WORD}]"}


class UnsupportedSchema(ValueError):
    """A schema that the format cannot enforce; the message says which, for the client."""


class UnsupportedInputGrammar(UnsupportedSchema):
    """An input grammar that no call of this format can enforce; `tool`: the custom tool's name."""

    def __init__(self, tool: str, message: str) -> None:
        super().__init__(message)
        self.tool = tool


@dataclass(frozen=True)
class GrammarRequest:
    """Requirements that a grammar of tool calls must enforce.

    Attributes:
    - schemas: of the parameters of each function that may be called, by name; None: any object
    - parallel: several calls may follow each other
    - allow_content: content may stand around or in place of calls
    - added_tokens: of the model, by their text
    - after_reasoning: white space may come first
    - content_constraint: of an answer without calls; None if there must be calls, or any content is
      allowed
    - input_grammars: by name of a custom tool, the constraint of its one parameter
    """

    schemas: Mapping[str, JsonObject | None]
    parallel: bool
    allow_content: bool = False
    added_tokens: Mapping[str, AddedId] | None = None
    after_reasoning: bool = False
    content_constraint: StructuredOutputs | None = None
    input_grammars: Mapping[str, StructuredOutputs] = field(
        default_factory=dict[str, StructuredOutputs]
    )

    def tag(self, text: str) -> str:
        """A rule for `text` with the special tokens that the model has for it or its parts."""
        return sequence(
            quoted(lead) if (lead := self.text_before_special(text)) else "",
            self.from_first_special(text),
        )

    def has_special_token(self, text: str) -> bool:
        """Whether `text` is or contains a special token, which no other text can spell."""
        return bool(self.from_first_special(text))

    def text_before_special(self, text: str) -> str:
        """The text before the first special token; all of it if there is none."""
        return self._parts(text)[0]

    def from_first_special(self, text: str) -> str:
        """A rule for the special tokens and the text between and behind them; empty if there is
        none.
        """
        tokens = self.added_tokens or {}
        parts = self._parts(text)[1:]
        return sequence(
            *(f"<[{tokens[part].id}]>" if part in tokens else quoted(part) for part in parts)
        )

    def _parts(self, text: str) -> list[str]:
        """Special tokens and the texts between them; the first part is a text, maybe empty."""
        if text not in self._parts_by_tag:
            inside = (each for each in self._special_tokens if each in text)
            longest = "|".join(re.escape(each) for each in sorted(inside, key=len, reverse=True))
            lead, *rest = re.split(f"({longest})", text) if longest else [text]
            self._parts_by_tag[text] = [lead, *filter(None, rest)]
        return self._parts_by_tag[text]

    @cached_property
    def _parts_by_tag(self) -> dict[str, list[str]]:
        """Cache of _parts: every parameter has the same tags, and there may be a thousand
        parameters.
        """
        return {}

    @cached_property
    def _special_tokens(self) -> list[str]:
        return [each for each, token in (self.added_tokens or {}).items() if token.special]


CallGrammar = Callable[[GrammarRequest], str]


def tagged_calls(
    request: GrammarRequest, opening: str, bodies: list[str], never: str, between: str
) -> str:
    """Calls that each begin with the tag `opening`. `never`: text that content must not contain."""
    tag, body = request.tag(opening), rule("body", bodies)
    if not request.allow_content:
        call = f"call: {tag} body"
        start = start_rule(request, repeated(request, "call", between), re.escape(opening))
        return "\n".join((start, call, body))
    sign = "*" if request.parallel else "?"
    if request.has_special_token(opening):
        text, lead = text_without(never), request.text_before_special(opening)
        ends = f" & /(?s:.*){escaped_in_slashes(lead)}/" if lead else ""
        rules = (f"before: BEFORE\nBEFORE: {text}{ends}", f"rest: REST\nREST: {text}", body)
        return "\n".join(
            (f"start: (before {request.from_first_special(opening)} body){sign} rest", *rules)
        )
    # Content may not begin with a newline there: the lexer would not know which is meant.
    before = f"before[suffix={tag}]: {text_without(never)}"
    after = f"REST: {text_without(opening, never)}"
    return "\n".join((f"start: (before body){sign} rest", before, "rest: REST", after, body))


def text_without(*texts: str) -> str:
    """A regular expression for texts that contain none of `texts`."""
    escaped = "|".join(escaped_in_slashes(text) for text in texts if text)
    return f"{ANY_TEXT} & ~/(?s:.*)({escaped})(?s:.*)/" if escaped else ANY_TEXT


def escaped_in_slashes(text: str) -> str:
    """A text, escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def start_rule(request: GrammarRequest, calls: str, never: str = "") -> str:
    """Calls, or content that fits the constraint. Behind reasoning models begin a paragraph.
    `never`: see _content_rule.
    """
    space = "/\\n\\n?/? " if request.after_reasoning else ""
    if request.content_constraint is None:
        return f"start: {space}{calls}"
    return f"start: {space}({calls} | form)\n{_content_rule(request.content_constraint, never)}"


def _content_rule(form: StructuredOutputs, never: str) -> str:
    """The rule of content that must fit `form`. `never`: a regular expression of what calls
    begin with.
    """
    if form.json is not None:
        return f"form: %json {constraint_schema(form.json)}"
    if form.choice is not None:
        return rule("form", [quoted(text) for text in form.choice])
    if form.regex is None:
        raise UnsupportedSchema(f"a grammar cannot stand beside that of calls; {NO_TOOLS_HINT}")
    if not never:
        reason = "beside this model's calls, a form must be a schema or a choice"
        raise UnsupportedSchema(f"{reason}; {NO_TOOLS_HINT}")
    return f"form: FORM\nFORM: /{slashed(form.regex)}/ & ~/{slashed(never)}(?s:.*)/"


def slashed(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    closed = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", regex, flags=re.DOTALL)
    return closed.replace("\n", "\\n")


def constraint_schema(text: str) -> str:
    """The JSON schema of a constraint, for %json. Raises UnsupportedSchema and GrammarError."""
    schema = schema_of(text)
    if schema is False:
        raise UnsupportedSchema("the form's schema must be an object")
    schema = {} if schema is True else schema
    return msgspec.json.encode(without_guidance(schema)).decode()


def without_guidance(schema: JsonObject) -> JsonObject:
    """The schema without its options for llguidance."""
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def repeated(request: GrammarRequest, name: str, between: str) -> str:
    """The rule `name` once, or several times if calls may follow each other."""
    return f"{name} ({between} {name})*" if request.parallel else name


def rule(name: str, alternatives: Iterable[str]) -> str:
    """A grammar rule that allows one of the alternatives."""
    return f"{name}: " + "\n  | ".join(alternatives)


def call_object(request: GrammarRequest, name: str, key: str) -> str:
    """A call as {"name": ..., key: arguments}."""
    head = f'{{"name": {quoted(name)}, "{key}": '
    return f'{quoted(head)} {json_arguments(request, name)} "}}"'


def call_schema(request: GrammarRequest, name: str, key: str) -> str:
    """A call in the form of call_object, as one JSON schema."""
    text = request.input_grammars.get(name)
    regex = None if text is None else input_regex(name, text, None)
    arguments = _arguments(arguments_schema(request, name, regex))
    if _NON_LOCAL_REF.search(msgspec.json.encode(arguments).decode()):
        raise UnsupportedSchema(f"{name}: beside a form, a $ref may only name a definition")
    call: JsonObject = {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
        **{each: arguments[each] for each in DEFINITIONS if each in arguments},
    }
    return f"%json {msgspec.json.encode(call).decode()}"


def json_arguments(request: GrammarRequest, name: str) -> str:
    """Arguments by the schema of the parameters, or, of a custom tool, by the constraint of its
    input."""
    text = request.input_grammars.get(name)
    regex = None if text is None else input_regex(name, text, JSON_ESCAPED_CHARS)
    if text is None or regex is not None:
        schema = arguments_schema(request, name, regex)
        return f"%json {msgspec.json.encode(_arguments(schema)).decode()}"
    return f'{quoted(_INPUT_OPENING)} {nested_grammar(text)} "\\"}}"'


def arguments_schema(request: GrammarRequest, name: str, regex: str | None) -> JsonObject | None:
    """The schema to enforce; None: any object. `regex`: of a custom tool's text."""
    if regex is None:
        return request.schemas[name]
    return input_schema({"pattern": f"^(?:{_regex_in_schema(regex)})$"})


def _regex_in_schema(regex: str) -> str:
    """For a schema, in which some classes have fewer characters than in an expression by itself."""
    return re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), regex, flags=re.DOTALL)


def input_schema(keywords: JsonObject) -> JsonObject:
    """The schema of a custom tool's parameters: one string, its input. `keywords`: keywords of that
    string.
    """
    return {
        "type": "object",
        "properties": {INPUT_PARAMETER: {"type": "string", **keywords}},
        "required": [INPUT_PARAMETER],
        "additionalProperties": False,
    }


def input_regex(tool: str, text: StructuredOutputs, excluded: str | None) -> str | None:
    """The regular expression of a custom tool's text. Raises UnsupportedInputGrammar.

    None for a grammar without one that can be nested instead, because its texts have none of the
    characters `excluded`; with `excluded` None no grammar can be nested.
    """
    if text.grammar is None:
        return with_plain_digits(text.regex or "")
    try:
        return grammar_to_regex(text.grammar)
    except RecursiveGrammar as error:
        reason = error
    except UnsupportedGrammar as error:
        raise UnsupportedInputGrammar(tool, str(error)) from None
    try:
        if excluded is not None and not may_contain(text.grammar, excluded):
            return None
    except UnsupportedGrammar as error:
        raise UnsupportedInputGrammar(tool, str(error)) from None
    where = "beside a form" if excluded is None else "with letters that are escaped or begin a tag"
    raise UnsupportedInputGrammar(
        tool, f"{where} it cannot stand within a call of this model: {reason}"
    )


def nested_grammar(text: StructuredOutputs) -> str:
    """A grammar with rules of its own, nested in a rule."""
    return f"%lark {{\n{text.grammar}\n}}"


def _arguments(schema: JsonObject | None) -> JsonObject:
    """`schema` is that of an object."""
    return {**without_guidance({} if schema is None else schema or NO_PARAMETERS), "type": "object"}


def quoted(text: str) -> str:
    """A text as it stands in a rule."""
    return msgspec.json.encode(text).decode()


def optional_text(text: str) -> str:
    """The rule of a separator; empty for none."""
    return quoted(text) if text else ""


def sequence(*parts: str) -> str:
    """Grammar parts in sequence; texts that follow each other become one text."""
    joined: list[str] = []
    for part in filter(None, parts):
        if joined and joined[-1].startswith('"') and part.startswith('"'):
            joined[-1] = joined[-1][:-1] + part[1:]
        else:
            joined.append(part)
    return " ".join(joined)


def is_text_schema(schema: JsonValue) -> bool:
    """Whether all values of that schema are texts."""
    return schema_types(schema) == frozenset(("string",))


def parameter_schemas(
    function: str, given: JsonObject, key: str
) -> tuple[JsonObject, Collection[JsonValue], JsonObject]:
    """(schemas of the parameters, names that are required, definitions), for formats that write
    each parameter by itself. `key`: a regular expression of names. Raises UnsupportedSchema.
    """
    schema = given or NO_PARAMETERS
    properties, required = schema.get("properties", {}), schema.get("required", [])
    strange = sorted(set(schema) - _OBJECT_KEYWORDS)
    if strange or not isinstance(properties, dict) or not isinstance(required, list):
        names = strange[0] if strange else "properties"
        raise UnsupportedSchema(
            f"{function}: calls of this model cannot be constrained by {names[:100]!r}"
        )
    missing = [each for each in required if each not in properties]
    if missing:
        raise UnsupportedSchema(
            f"{function}: {str(missing[0])[:100]!r} is required and has no schema"
        )
    for each in properties:
        if not re.fullmatch(key, each):
            raise UnsupportedSchema(f"{function}: {each[:100]!r} cannot be the name of a parameter")
    return properties, required, {each: schema[each] for each in DEFINITIONS if each in schema}


# ------------------------------------------------------------------- Lark as a regular expression

MAX_DEFINITION_CHARS = 64 * 1024  # characters of a grammar
# Characters of an expression: rules that are put in each other's places may multiply.
MAX_REGEX_CHARS = 32 * 1024
MAX_EXPANDED_CHARS = 16 * MAX_REGEX_CHARS  # characters of all intermediate expressions
MAX_ATOMS = 1_000  # different characters and classes in which may_contain() searches
MAX_NESTING = 64  # of rules and brackets within each other
# A JSON string has these as escapes alone.
JSON_ESCAPED_CHARS = '"\\' + "".join(map(chr, range(32)))
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<first>"(?:\\.|[^"\\\n])*")\s*\.\.\s*(?P<last>"(?:\\.|[^"\\\n])*")
      | (?P<string>"(?:\\.|[^"\\\n])*")(?P<fold>i?)
      | /(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
      | %import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
      | %import\s+common\s*\((?P<several>[\w\s,]*)\)
      | (?P<ignore>%ignore)
      | (?:[?!])?(?P<head>\b[A-Za-z_]\w*)\s*:
      | (?P<times>\{[\s\d,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?|[?*+])
      | (?P<name>[A-Za-z_]\w*)
      | (?P<named>->\s*\w+)
      | (?P<mark>[()\[\]|])
      | (?P<line>\s*\n\s*)
      | (?P<space>\s+)
      | (?P<other>[%@<]?[^\s]{1,40}|.)""",
    re.VERBOSE,
)
_TERMINALS = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "_EXP": r"[eE][+\-]?[0-9]+",
    "FLOAT": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?|[0-9]+[eE][+\-]?[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*(?s:.)*?\*\/",
}
_TERMINALS["NUMBER"] = f"(?:{_TERMINALS['FLOAT']}|[0-9]+)"
_TERMINALS["SIGNED_FLOAT"] = rf"[+\-]?{_TERMINALS['FLOAT']}"
_TERMINALS["SIGNED_NUMBER"] = rf"[+\-]?{_TERMINALS['NUMBER']}"
# Characters with a meaning in an expression.
_METACHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_FLAGS = frozenset("imsux")


class UnsupportedGrammar(ValueError):
    """A grammar that is not converted; the message says why, for the client."""


class RecursiveGrammar(UnsupportedGrammar):
    """A grammar without an expression: a rule refers to itself."""


class _Token(NamedTuple):
    """`kind`: the name of its group in _TOKEN; texts and expressions are "regex" all."""

    kind: str
    text: str


def grammar_to_regex(definition: str) -> str:
    """A regular expression for all texts of the grammar. Raises RecursiveGrammar,
    UnsupportedGrammar."""
    return _Grammar(definition).expression()


def may_contain(definition: str, letters: str) -> bool:
    """Whether a text of the grammar may contain one of `letters` (ASCII); True when in doubt.
    Raises UnsupportedGrammar.
    """
    atoms: set[_Atom] = set()
    for tokens in _Grammar(definition).bodies():
        for token in tokens:
            atoms.update(_atoms(token.text) if token.kind == "regex" else ())
            if len(atoms) > MAX_ATOMS:
                return True
    return any(_matches_any(atom, letters) for atom in atoms)


class _Grammar:
    """Rules and terminals by name, each as its tokens."""

    def __init__(self, definition: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._ignored: list[list[_Token]] = []
        self._regex_by_rule: dict[str, str] = {}
        self._expanded_chars = 0  # characters of all intermediate expressions
        self._open_rules: list[str] = []  # rules that are being expanded
        if len(definition) > MAX_DEFINITION_CHARS:
            raise UnsupportedGrammar(
                f"it has {len(definition)} characters, at most {MAX_DEFINITION_CHARS} are read"
            )
        self._parse(definition)
        self._ignored_regex = ""

    def bodies(self) -> Iterator[list[_Token]]:
        """The tokens of all rules and of what is ignored."""
        yield from self._rules.values()
        yield from self._ignored

    def expression(self) -> str:
        """The expression of `start`."""
        ignored = [self._expand(tokens, within=False) for tokens in self._ignored]
        self._ignored_regex = f"(?:{'|'.join(ignored)})*" if ignored else ""
        return self._expand_rule("start") + self._ignored_regex

    def _parse(self, definition: str) -> None:
        body: list[_Token] = []
        for found in _TOKEN.finditer(definition):
            kind = found.lastgroup or ""
            if found["head"]:
                body = self._rules[found["head"]] = []
            elif found["ignore"]:
                body = []
                self._ignored.append(body)
            elif found["common"]:
                self._import(found["common"], found["alias"] or found["common"])
            elif found["several"] is not None:
                for name in found["several"].replace(",", " ").split():
                    self._import(name, name)
            elif found["other"]:
                raise UnsupportedGrammar(
                    f"{found['other'][:40]!r} in it cannot stand within a call"
                )
            elif (expression := _token_regex(found)) is not None:
                body.append(_Token("regex", expression))
            elif kind in ("times", "name", "mark"):
                body.append(_Token(kind, found[0]))

    def _import(self, name: str, alias: str) -> None:
        if name not in _TERMINALS:
            raise UnsupportedGrammar(f"there is no common.{name[:100]}")
        self._rules[alias] = [_Token("regex", _TERMINALS[name])]

    def _expand_rule(self, name: str) -> str:
        if name in self._open_rules:
            raise RecursiveGrammar(f"its rule {name[:100]} refers to itself")
        if name not in self._rules:
            raise UnsupportedGrammar(f"it has no rule {name[:100]}")
        if name not in self._regex_by_rule:
            self._open_rules.append(name)
            self._regex_by_rule[name] = self._expand(self._rules[name], within=not name.isupper())
            self._open_rules.pop()
        return self._regex_by_rule[name]

    def _expand(self, tokens: list[_Token], within: bool) -> str:
        expanded, at = self._expand_choice(tokens, 0, within, 0)
        if at < len(tokens):
            raise UnsupportedGrammar(f"a bracket {tokens[at].text} closes none")
        return expanded

    def _expand_choice(
        self, tokens: list[_Token], at: int, within: bool, level: int
    ) -> tuple[str, int]:
        """(alternatives from `at` on, where they end). `within`: a rule, in which what is ignored
        may stand before terminals."""
        if level + len(self._open_rules) > MAX_NESTING:
            raise UnsupportedGrammar(f"its rules are nested deeper than {MAX_NESTING} levels")
        choices: list[list[str]] = [[]]
        while at < len(tokens) and tokens[at].text not in (")", "]"):
            token = tokens[at]
            if token == _Token("mark", "|"):
                choices.append([])
            elif token.kind == "mark":
                expanded, at = self._expand_choice(tokens, at + 1, within, level + 1)
                if at == len(tokens) or tokens[at].text != {"(": ")", "[": "]"}[token.text]:
                    raise UnsupportedGrammar(f"a bracket {token.text} is not closed")
                choices[-1].append(expanded + "?" * (token.text == "["))
            elif token.kind == "times":
                if not choices[-1]:
                    raise UnsupportedGrammar(f"{token.text} repeats nothing")
                choices[-1][-1] = f"(?:{choices[-1][-1]}){_repetition(token.text)}"
            elif token.kind == "regex":
                choices[-1].append(f"{self._ignored_regex if within else ''}{token.text}")
            else:
                ignored = self._ignored_regex if within and token.text.isupper() else ""
                choices[-1].append(ignored + self._expand_rule(token.text))
            at += 1
            self._count_chars(len(choices[-1][-1]) if choices[-1] else 1)
        parts = ["".join(choice) for choice in choices]
        expanded = parts[0] if len(parts) == 1 and level == 0 else f"(?:{'|'.join(parts)})"
        self._count_chars(len(expanded))
        return expanded, at

    def _count_chars(self, letters: int) -> None:
        """Adds characters to the work done. Raises UnsupportedGrammar beyond the limits."""
        self._expanded_chars += letters
        if letters > MAX_REGEX_CHARS or self._expanded_chars > MAX_EXPANDED_CHARS:
            raise UnsupportedGrammar("it is too large when its rules are put together")


def _token_regex(found: re.Match[str]) -> str | None:
    """The expression of a string, a range of characters or a regex; None for any other token."""
    if found["first"]:
        first, last = (_regex_of_text(_literal_text(found[name])) for name in ("first", "last"))
        return f"[{first}-{last}]"
    if found["string"]:
        expanded = _regex_of_text(_literal_text(found["string"]))
        return f"(?i:{expanded})" if found["fold"] else f"(?:{expanded})"
    if not found["regex"]:
        return None
    flags = found["flags"]
    if set(flags) - _FLAGS:
        raise UnsupportedGrammar(f"the flags {flags} of /{found['regex'][:100]}/ are not known")
    return f"(?{flags}:{found['regex']})"


def _repetition(text: str) -> str:
    """A repetition as expressions write it."""
    bare = re.sub(r"[\s{}~]", "", text)
    return bare if bare in ("?", "*", "+") else f"{{{bare.replace('..', ',')}}}"


def _literal_text(literal: str) -> str:
    try:
        return json.loads(literal, strict=False)
    except ValueError:
        raise UnsupportedGrammar(f"the text {literal[:100]} is not written as in JSON") from None


def _regex_of_text(text: str) -> str:
    """An expression that matches exactly this text."""
    return _METACHARACTERS.sub(r"\\\g<0>", text).replace("\n", "\\n")


# ---------------------------------------------------------------------- characters of an expression

_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[a-z-]*)(?P<alone>[:)])))?")
_CLASS_NAMES = {  # of POSIX, in ASCII
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "word": r"\w", "xdigit": "0-9a-fA-F", "space": r"\s", "blank": r" \t", "cntrl": r"\x00-\x1f",
    "punct": r"!-\/:-@\[-`{-~", "graph": "!-~", "print": " -~", "ascii": r"\x00-\x7f",
}  # fmt: skip
_IN_CLASS = re.compile(r"\[:(\w+):\]|\\x\{([0-9a-fA-F]{1,6})\}")
_ESCAPE = re.compile(
    r"\\(?:[pP](?:\{[^{}]*\}|\w)|[xuU]\{[0-9a-fA-F]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|U[0-9a-fA-F]{8}|.)"
)
_TIMES = re.compile(r"\{\d*,?\d*\}")


class _Atom(NamedTuple):
    """Part of an expression that matches one letter. `dotall`: a dot matches a line end."""

    text: str
    dotall: bool


def _matches_any(atom: _Atom, letters: str) -> bool:
    """Whether the atom may match one of `letters`."""
    text = atom.text
    if text == ".":
        return atom.dotall or letters != "\n"
    if text[0] == "[":
        text = _IN_CLASS.sub(_in_python, text)
        if re.search(r"&&|--|~~|(?<!\\)\[|\\[pPuU]\{|\\[pP]", text[1:]):
            return True
    elif text[:2] in (r"\p", r"\P") or text[1:3] in ("x{", "u{", "U{"):
        return True
    try:
        return re.search(text, letters, re.ASCII) is not None
    except re.error:
        return True


def _in_python(found: re.Match[str]) -> str:
    if found[2]:
        return rf"\U{int(found[2], 16):08x}"
    return _CLASS_NAMES.get(found[1], r"\x00-\x7f")


def _atoms(body: str) -> Iterator[_Atom]:
    """The atoms of an expression, in order."""
    dotall, at = False, 0
    outside: list[bool] = []
    while at < len(body):
        text = letter = body[at]
        if letter == "(":
            group = _GROUP.match(body, at)
            if group is None:
                raise UnsupportedGrammar(
                    f"{body[at : at + 100]} in an expression cannot stand within a call"
                )
            on, _, off = (group["flags"] or "").partition("-")
            if group["alone"] != ")":
                outside.append(dotall)
            dotall = ("s" in on or dotall) and "s" not in off
            text = group[0]
        elif letter == ")":
            dotall = outside.pop() if outside else dotall
        elif letter == "{" and (times := _TIMES.match(body, at)):
            text = times[0]
        elif letter == "[":
            text = body[at : _class_end(body, at)]
            yield _Atom(text, dotall)
        elif letter == "\\":
            escape = _ESCAPE.match(body, at)
            text = escape[0] if escape else letter
            yield _Atom(text, dotall)
        elif letter == ".":
            yield _Atom(letter, dotall)
        elif letter not in "|*+?^$":
            yield _Atom(re.escape(letter), dotall)
        at += len(text)


def _class_end(body: str, at: int) -> int:
    """Index behind the bracket that closes the class that opens at `at`."""
    depth, i = 0, at
    while i < len(body):
        if body[i] == "[":
            depth += 1
            i += 1 + body.startswith("^", i + 1)
            i += body.startswith("]", i)  # the first one is a letter
            continue
        if body[i] == "]":
            depth -= 1
            if not depth:
                return i + 1
        i += 1 + (body[i] == "\\")
    raise UnsupportedGrammar(f"the class {body[at : at + 100]} has no end")
