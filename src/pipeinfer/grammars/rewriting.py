"""Rewrites JSON schemas and regular expressions for llguidance, which knows only some of each.

- compilable_schema: a keyword that llguidance does not know is expressed by others that allow the
  same values, or fewer: sets, conditions, dependencies, negations, and oneOf with branches that
  exclude each other. What cannot be expressed is left out and reported. Knows JSON Schema 2020-12
  and drafts 4 to 7. Source: https://json-schema.org/draft/2020-12.
- without_lookaround: a look-ahead at the beginning of a pattern becomes patterns of their own, all
  of which must match. Common patterns have such look-aheads: pydantic's for decimal numbers, zod's
  for addresses, rules for passwords.
- with_plain_digits: `\\d` matches digits of all scripts in llguidance.

Compiles nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from typing import cast

from pipeinfer.grammars.bounds import (
    DEFINITIONS,
    MAX_REFERENCE_STEPS,
    REMARKS,
    Schema,
    SchemaFacts,
    different,
    exactly,
    fits,
    list_at,
    malformed,
    named,
    normalized,
    split,
    type_of,
    types,
    values,
)
from pipeinfer.params import JsonObject, JsonValue

# Formats of strings that the compiler knows. JSON Schema allows to ignore all others.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
     "unknown")
)  # fmt: skip
MAX_SET_ARRAYS = 400  # the most arrays that a schema with uniqueItems is written out to
MAX_ALTERNATIVES = 64  # the most branches of oneOf that are compared, each with each
MAX_BRANCHES = 8  # the most dependencies of a schema, and the most items of minContains
EXACT = 2**53  # whole numbers up to here are exact in the compiler's float64
LEAST_INT64, LARGEST_INT64 = -(2**63), 2**63 - 1
LEAST_COMPILABLE = LEAST_INT64 + 1024  # the float64 above LEAST_INT64, which does not compile

# Keywords that the compiler enforces, and keywords that references need. The others are removed.
_SUPPORTED = frozenset(
    ("anyOf", "oneOf", "allOf", "$ref", "const", "enum", "type", "items", "additionalItems",
     "prefixItems", "minItems", "maxItems", "properties", "additionalProperties",
     "patternProperties", "required", "minProperties", "maxProperties", "minLength", "maxLength",
     "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
     "multipleOf", "$anchor", "$defs", "definitions", "$schema", "$id", "id")
)  # fmt: skip
# Keywords that are reported as unsupported where no rule in this module has replaced them.
_UNKNOWN = (
    "not", "uniqueItems", "contains", "propertyNames", "dependentRequired", "unevaluatedProperties",
    "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_TYPES = {"null", "boolean", "object", "array", "number", "string"}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_CONDITION = ("if", "then", "else")
_DEFINED = re.compile(r"#/(?:\$defs|definitions)/[^/]*$")


@dataclass(frozen=True)
class CompilableSchema:
    """A schema for the compiler.

    Attributes:
    - schema: the schema that is compiled
    - unsupported: keywords that `schema` does not enforce, each with its place, such as
      "uniqueItems at properties.tags"
    - malformed: those of `unsupported` whose values are not valid in JSON Schema
    """

    schema: JsonObject | bool
    unsupported: tuple[str, ...] = ()
    malformed: tuple[str, ...] = ()


def compilable_schema(
    schema: JsonObject | bool, closed: bool = True, narrow: bool = False
) -> CompilableSchema:
    """Returns `schema` with only the keywords that the compiler supports.

    - closed: whether objects have no properties but the named ones, unless `additionalProperties`
      or a similar keyword is given
    - narrow: whether to allow fewer values rather than to leave a keyword out

    Raises GrammarError if the schema is too large.
    """
    if isinstance(schema, bool):
        return CompilableSchema(schema)
    rewriting = _SchemaRewriter(schema, closed, narrow)
    made = rewriting.whole(schema)
    return CompilableSchema(made, tuple(rewriting.unsupported), tuple(rewriting.malformed))


class _SchemaRewriter:
    """Rewrites one schema, subschema by subschema. Each subschema is copied and the copy changed.

    Attributes:
    - unsupported, malformed: as in CompilableSchema; the keys are an ordered set

    In the methods, `made` is the copy that is changed, `at` its place in the schema, and `more`
    collects schemas that must hold beside it.
    """

    def __init__(self, root: JsonObject, closed: bool, narrow: bool) -> None:
        self._facts = SchemaFacts(root)
        self._closed = closed
        self._narrow = narrow
        self.unsupported: dict[str, None] = {}
        self.malformed: dict[str, None] = {}
        self._moved: dict[str, str] = {}  # new names in $defs, by the references to them

    def whole(self, root: JsonObject) -> JsonObject:
        """Rewrites the root. Targets of references outside of its definitions are moved into
        $defs.
        """
        made = cast(JsonObject, self.schema(root, ""))
        moved, taken = JsonObject(), named(made, "$defs")
        while len(moved) < len(self._moved):  # a moved schema may refer to others
            to, name = list(self._moved.items())[len(moved)]
            moved[name] = self.schema(self._facts.at(to), to.removeprefix("#/"))
        return {**made, "$defs": {**taken, **moved}} if moved else made

    def schema(self, given: Schema, at: str, within: bool = False) -> Schema:
        """Rewrites the subschema `given` at place `at`.

        - within: whether it is about the same value as the schema around it, which then closes the
          object
        """
        if isinstance(given, bool):
            return given
        self._facts.count_visit()
        if not isinstance(given, dict):
            self._note_malformed("schema", at)
            return True
        made, more = normalized(given), list[Schema]()
        for key in malformed(made):
            del made[key]
            self._note_malformed(key, at)
        if self._closed and not within and "additionalProperties" not in made:
            self._close(made, self._facts.names(made))
        self._literals(made, at)
        self._numbers(made, at)
        self._text(made, more, at)
        self._negation(made)
        self._one_of(made, more, at, within)
        self._conditions(made, at)
        self._set(made)
        self._contains(made, at)
        self._property_names(made, at)
        self._count(made, more, at)
        self._dependencies(made, more, at)
        self._unevaluated(made)
        for key in _UNKNOWN:
            if key in made:
                self._note_unsupported(key, at)
        self._reference(made, at)
        made = {key: value for key, value in made.items() if key in _SUPPORTED}
        if more:
            made["allOf"] = [*list_at(made, "allOf"), *more]
        self._inner(made, at, within)
        return made

    def _inner(self, made: JsonObject, at: str, within: bool) -> None:
        """Rewrites the subschemas of `made`."""
        for key in ("properties", "patternProperties", *DEFINITIONS):
            if key in made:
                made[key] = {
                    name: self.schema(part, _at(at, key, name))
                    for name, part in named(made, key).items()
                }
        for key in ("items", "additionalItems", "additionalProperties"):
            if key in made and not isinstance(made[key], list):
                made[key] = self.schema(made[key], _at(at, key))
        for key in ("items", "prefixItems", "anyOf", "allOf"):
            same = key == "allOf" or (key == "anyOf" and (within or "properties" in made))
            if isinstance(made.get(key), list):
                made[key] = [
                    self.schema(part, _at(at, key, str(i)), same)
                    for i, part in enumerate(list_at(made, key))
                ]

    def _note_unsupported(self, key: str, at: str) -> None:
        self.unsupported[f"{key} at {at}" if at else key] = None

    def _note_malformed(self, key: str, at: str) -> None:
        self._note_unsupported(key, at)
        self.malformed[f"{key} at {at}" if at else key] = None

    def _reference(self, made: JsonObject, at: str) -> None:
        """Mends references: a reference outside of the definitions gets a moved target, a reference
        without a target is removed.
        """
        to = made.get("$ref")
        if not isinstance(to, str):
            return
        if self._facts.has_reference(to):
            if to.startswith("#/") and not _DEFINED.match(to):
                name = self._moved.setdefault(to, f"moved-{len(self._moved)}")
                made["$ref"] = f"#/$defs/{name}"
            return
        del made["$ref"]
        if to.startswith("#"):
            self._note_malformed("$ref", at)
        else:
            self._note_unsupported("$ref", at)

    # ------------------------------------------------------------------------------------- scalars

    def _literals(self, made: JsonObject, at: str) -> None:
        """Removes const and enum with whole numbers that the compiler would round."""
        for key in ("const", "enum"):
            some = values({key: made[key]}) if key in made else None
            if some is not None and any(map(_rounded, some)):
                made.setdefault("type", cast(JsonValue, sorted(set(map(type_of, some)))))
                del made[key]
                self._note_unsupported(key, at)

    def _numbers(self, made: JsonObject, at: str) -> None:
        """Removes limits of numbers that are not exact in float64, or beyond what the compiler
        counts to.
        """
        whole = made.get("type") == "integer"
        for key in _NUMBERS:
            limit = made.get(key)
            if not isinstance(limit, int | float) or isinstance(limit, bool):
                continue
            if whole and key == "maximum" and limit == LARGEST_INT64:
                continue
            if whole and key == "minimum" and limit == LEAST_INT64 and self._narrow:
                made[key] = LEAST_COMPILABLE
            elif abs(limit) > (LARGEST_INT64 if whole else EXACT) or _rounded(limit):
                del made[key]
                self._note_unsupported(key, at)

    def _text(self, made: JsonObject, more: list[Schema], at: str) -> None:
        """Removes unknown formats, and replaces a pattern with look-ahead by several patterns."""
        if made.get("format") not in FORMATS:
            made.pop("format", None)
        pattern = made.pop("pattern", None)
        if isinstance(pattern, str):
            patterns, whole = _patterns(pattern)
            if patterns:
                made["pattern"] = patterns[0]
            for other in patterns[1:]:
                more.append({"pattern": other})
            if not whole:
                self._note_unsupported("pattern", at)
        if "patternProperties" in made:
            made["patternProperties"] = self._by_pattern(made, at)

    def _by_pattern(self, made: JsonObject, at: str) -> JsonObject:
        """patternProperties with patterns in the compiler's dialect."""
        plain = JsonObject()
        for name, part in named(made, "patternProperties").items():
            patterns, whole = _patterns(name)
            if patterns:
                plain[patterns[0]] = part
            if len(patterns) != 1 or not whole:
                self._note_unsupported("patternProperties", at)
        return plain

    def _negation(self, made: JsonObject) -> None:
        """Replaces `not` with types, with listed values, or with one required property."""
        no = self._facts.resolved(made.get("not"))
        options = values(made)
        if no is False:
            del made["not"]
        elif no is True or no == {}:
            del made["not"]
            made["enum"] = []
        elif not isinstance(no, dict):
            return
        elif set(no) - REMARKS == {"type"}:
            kinds, mine = types(no), types(made) or _TYPES
            if options is not None:
                _allow_only(made, [one for one in options if not fits(one, kinds)])
                del made["not"]
            elif "integer" not in kinds or "number" not in mine:
                gone = kinds | {"integer"} if "number" in kinds else kinds
                made["type"] = cast(JsonValue, sorted(mine - gone))
                del made["not"]
        elif options is not None and (never := exactly(no)) is not None:
            _allow_only(made, split(options, never)[1])
            del made["not"]
        elif set(no) <= {"required", "type"} and types(made) == {"object"}:
            names = list_at(no, "required")
            if len(names) == 1:
                made["properties"] = {**named(made, "properties"), str(names[0]): False}
                del made["not"]

    # ------------------------------------------------------------------------------------ branches

    def _one_of(self, made: JsonObject, more: list[Schema], at: str, within: bool) -> None:
        """Replaces oneOf by anyOf, where no value fits two branches. If a property tells the
        branches apart, the property becomes required in all of them.
        """
        branches: list[Schema] = list_at(made, "oneOf")
        if "oneOf" not in made:
            return
        closed = self._closed and not within and "properties" not in made
        if name := self._facts.discriminator(branches):
            must: Schema = {"required": [name]}
            branches = [
                branch if name in self._facts.required(branch) else _both(branch, must)
                for branch in branches
            ]
        elif len(branches) > MAX_ALTERNATIVES or not all(
            self._facts.are_disjoint(one, other, closed) for one, other in combinations(branches, 2)
        ):
            self._note_unsupported("oneOf", at)
        del made["oneOf"]
        if "anyOf" in made:
            more.append({"anyOf": branches})
        else:
            made["anyOf"] = branches

    def _conditions(self, made: JsonObject, at: str) -> None:
        """Replaces if, then and else, of the schema and of its allOf, by branches for the values of
        a property.
        """
        parts = list_at(made, "allOf")
        if "if" in made:
            parts = [*parts, {key: made[key] for key in _CONDITION if key in made}]
        remaining: list[Schema] = []
        for part in parts:
            if not isinstance(part, dict) or "if" not in part:
                remaining.append(part)
                continue
            rest = {key: value for key, value in part.items() if key not in _CONDITION}
            branches = self._branches(made, part)
            if branches is None:
                self._note_unsupported("if", at)
            elif branches:
                rest["allOf"] = [*list_at(rest, "allOf"), {"anyOf": branches}]
            if rest:
                remaining.append(rest)
        if remaining:
            made["allOf"] = remaining
        else:
            made.pop("allOf", None)

    def _branches(self, made: JsonObject, part: JsonObject) -> list[Schema] | None:
        """The branches of a condition; [] if it demands nothing; None if they cannot be told apart.

        - part: has if, and may have then and else
        """
        then, other = part.get("then", True), part.get("else", True)
        if then is True and other is True:
            return []
        condition = self._facts.resolved(part["if"])
        if isinstance(condition, bool):
            return [then if condition else other]
        if not isinstance(condition, dict) or types(made) != {"object"}:
            return None
        asked, required = named(condition, "properties"), list_at(condition, "required")
        strange = set(condition) - {"properties", "required", "type"} - REMARKS
        if strange or len(asked) != 1 or required not in ([], list(asked)):
            return None
        ((name, wanted),) = asked.items()
        every = self._facts.values_of(self._facts.properties(made).get(name, []))
        some = exactly(self._facts.resolved(wanted))
        if every is None or some is None:
            return None
        fit, rest = split(every, some)
        must: JsonObject = {"required": [name]}
        yes: JsonObject = {"properties": {name: {"enum": fit}}, **(must if required else {})}
        no: JsonObject = {"properties": {name: {"enum": rest}}, **({} if required else must)}
        return [_both(yes, then), _both(no, other)]

    # -------------------------------------------------------------------------------------- arrays

    def _set(self, made: JsonObject) -> None:
        """Replaces uniqueItems: few arrays are written out as an enum."""
        if made.get("uniqueItems") is not True:
            made.pop("uniqueItems", None)
            return
        most, least = made.get("maxItems"), made.get("minItems", 0)
        some = exactly(self._facts.resolved(made.get("items")))
        if isinstance(most, int) and most <= 1:
            del made["uniqueItems"]
            return
        if some is None or types(made) != {"array"} or not isinstance(least, int):
            return
        if any(map(_rounded, some)) or "prefixItems" in made or "contains" in made:
            return
        arrays = _arrays(some, least, most if isinstance(most, int) else len(some))
        if arrays is not None:
            for key in ("uniqueItems", "items", "minItems", "maxItems"):
                made.pop(key, None)
            _allow_only(made, arrays)

    def _contains(self, made: JsonObject, at: str) -> None:
        """Replaces contains by prefixItems: the items that must be there come first."""
        part, least = made.get("contains"), made.get("minContains", 1)
        if part is None:
            return
        if "maxContains" in made:
            self._note_unsupported("maxContains", at)
        if least == 0:
            del made["contains"]
        elif isinstance(least, int) and 0 < least <= MAX_BRANCHES and types(made) == {"array"}:
            items, given = made.get("items", True), made.get("minItems", 0)
            if "prefixItems" not in made and not isinstance(items, list):
                del made["contains"]
                made["prefixItems"] = [_both(part, items)] * least
                made["minItems"] = max(given if isinstance(given, int) else 0, least)

    # ------------------------------------------------------------------------------------- objects

    def _property_names(self, made: JsonObject, at: str) -> None:
        """Replaces propertyNames with a list, a pattern or lengths, by properties or
        patternProperties.
        """
        names = self._facts.resolved(made.get("propertyNames"))
        if names is True or (isinstance(names, dict) and set(names) <= {"type"} | REMARKS):
            del made["propertyNames"]
            return
        if not isinstance(names, dict) or made.get("properties") or made.get("patternProperties"):
            return
        value = made.get("additionalProperties", True)
        options = exactly(names)
        keys = set(names) - REMARKS - {"type"}
        if options is not None:
            made["properties"] = {one: value for one in options if isinstance(one, str)}
        elif keys == {"pattern"} and isinstance(names["pattern"], str):
            made["patternProperties"] = {names["pattern"]: value}
            made["patternProperties"] = self._by_pattern(made, at)
        elif keys <= {"minLength", "maxLength"}:
            least, most = names.get("minLength", 0), names.get("maxLength", "")
            made["patternProperties"] = {f"^[\\s\\S]{{{least},{most}}}$": value}
        else:
            return
        made["additionalProperties"] = False
        del made["propertyNames"]

    def _count(self, made: JsonObject, more: list[Schema], at: str) -> None:
        """Removes minProperties and maxProperties where the compiler cannot count: it can only if
        all named properties are required.
        """
        known, required = named(made, "properties"), set(list_at(made, "required"))
        if not known or set(known) <= required:
            return
        shut = made.get("additionalProperties") is False and "patternProperties" not in made
        least, most = made.get("minProperties", 0), made.get("maxProperties")
        made.pop("minProperties", None)
        made.pop("maxProperties", None)
        if isinstance(least, int) and least > len(required):
            if least == 1 and shut:
                more.append({"anyOf": [{"required": [name]} for name in known]})
            else:
                self._note_unsupported("minProperties", at)
        if isinstance(most, int) and not (shut and most >= len(known)):
            self._note_unsupported("maxProperties", at)

    def _dependencies(self, made: JsonObject, more: list[Schema], at: str) -> None:
        """Replaces dependencies: either the property is absent, or the demanded schema holds."""
        asked: list[tuple[str, Schema]] = []
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, part in named(made, key).items():
                asked.append((name, {"required": part} if isinstance(part, list) else part))
            made.pop(key, None)
        if len(asked) > MAX_BRANCHES:
            self._note_unsupported("dependentRequired", at)
            return
        for name, part in asked:
            there: Schema = {"required": [name], "allOf": [part]}
            more.append({"allOf": [{"anyOf": [there, {"properties": {name: False}}]}]})

    def _unevaluated(self, made: JsonObject) -> None:
        """Replaces unevaluatedProperties and unevaluatedItems by additionalProperties and items."""
        beside = any(key in made for key in ("allOf", "anyOf", "$ref"))
        for key, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if key not in made:
                continue
            part = made[key]
            names = self._facts.names({k: v for k, v in made.items() if k != key})
            if part is True:
                del made[key]
            elif not beside:
                made.setdefault(plain, made.pop(key))
            elif part is False and plain == "additionalProperties" and names:
                del made[key]
                self._close(made, names)

    def _close(self, made: JsonObject, names: list[str] | None) -> None:
        """Allows no properties but `names`, which are those of all schemas about the object. None
        or []: changes nothing.
        """
        if not names:
            return
        own = named(made, "properties")
        made["properties"] = {**own, **{name: True for name in names if name not in own}}
        made["additionalProperties"] = False
        parts = [*list_at(made, "allOf"), *([{"$ref": made.pop("$ref")}] if "$ref" in made else [])]
        if parts:
            made["allOf"] = [self._written_out(part) for part in parts]
        for key in ("anyOf", "oneOf"):
            if key in made:
                made[key] = [self._written_out(part) for part in list_at(made, key)]

    def _written_out(self, part: Schema, level: int = 0) -> Schema:
        """`part` with its references replaced by their targets: a definition on its own would be
        closed to the properties beside the reference.
        """
        target = self._facts.resolved(part)
        if not isinstance(target, dict) or target is part or level > MAX_REFERENCE_STEPS:
            return part
        made = {key: value for key, value in target.items() if key not in DEFINITIONS}
        for key in ("allOf", "anyOf", "oneOf"):
            if key in made:
                made[key] = [self._written_out(one, level + 1) for one in list_at(made, key)]
        return made


def _at(at: str, *steps: str) -> str:
    return ".".join((at, *steps)) if at else ".".join(steps)


def _both(one: Schema, other: Schema) -> Schema:
    return {"allOf": [one, other]}


def _allow_only(made: JsonObject, values: list[JsonValue]) -> None:
    """Makes `made` allow the values in `values` alone."""
    made.pop("const", None)
    made.pop("type", None)
    made["enum"] = values


def _patterns(pattern: str) -> tuple[list[str], bool]:
    """Returns the result of `without_lookaround`, in the compiler's dialect; there may be no
    pattern left.
    """
    patterns, whole = without_lookaround(pattern)
    each = [to_compiler_dialect(one) for one in patterns]
    return [one for one in each if one is not None], whole and None not in each


def _rounded(value: JsonValue) -> bool:
    """Whether `value` has a whole number that float64 would change."""
    if isinstance(value, list):
        return any(map(_rounded, value))
    if isinstance(value, dict):
        return any(map(_rounded, value.values()))
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) <= EXACT:
        return False
    return abs(value) > LARGEST_INT64 or int(float(value)) != value


def _arrays(values: list[JsonValue], least: int, most: int) -> list[JsonValue] | None:
    """All arrays of distinct values in `values`, with `least` to `most` items. If they are more
    than MAX_SET_ARRAYS, those in the order of `values` alone; None if these are too many, too.
    """
    unique = different(values)
    for ways in (permutations, combinations):
        many = range(least, min(most, len(unique)) + 1)
        every = (list(array) for count in many for array in ways(unique, count))
        found: list[JsonValue] = list(islice(every, MAX_SET_ARRAYS + 1))
        if len(found) <= MAX_SET_ARRAYS:
            return found
    return None


# One character, or a class of characters.
_ONE = r"(?P<one>\[(?:\\.|[^\]\\])+\]|\\[dDsSwW]|\\[^A-Za-z0-9]|[^\\.*+?()\[\]{}|^$])"
_ALL_OF = re.compile(rf"\^?{_ONE}[*+]\$")
_SOMEWHERE = re.compile(rf"\.\*{_ONE}")
_TWICE = re.compile(rf"\.\*{_ONE}(?P=one)")
_FIRST = re.compile(_ONE)
# An escaped character; the beginning of a class, with a "]" that is a member; the end of a class.
_DIGITS_AND_CLASSES = re.compile(r"\\.|\[\^?\]?|\]|[^\\\[\]]+|\\", re.DOTALL)
_LOOKS = re.compile(r"\(\?(?:=|!|<=|<!)")


def with_plain_digits(pattern: str) -> str:
    """`pattern` with 0 to 9 in place of `\\d`, also within classes. Within negated classes `\\d`
    stays: `[^\\d]` excludes digits of all scripts.
    """
    parts: list[str] = []
    negated: list[bool] = []  # for each class around the place
    for piece in _DIGITS_AND_CLASSES.findall(pattern):
        if piece == "\\d" and not any(negated):
            piece = "0-9" if negated else "[0-9]"
        elif piece[0] == "[":
            negated.append(piece.startswith("[^"))
        elif piece == "]" and negated:
            negated.pop()
        parts.append(piece)
    return "".join(parts)


def without_lookaround(pattern: str) -> tuple[list[str], bool]:
    """Returns (patterns, exact): patterns without look-around that must all match, at least one.

    exact: whether together they mean the same as `pattern`. If not, they allow more.
    """
    if not _LOOKS.search(pattern):
        return [pattern], True
    found, whole, anchored = list[str](), True, pattern.startswith("^")
    at = int(anchored)
    while anchored and pattern.startswith(("(?=", "(?!"), at):
        end = _closing(pattern, at)
        if end < 0:
            break
        negative, body = pattern[at + 2] == "!", pattern[at + 3 : end]
        said = _never(body) if negative else f"^(?:{body.removeprefix('^')})"
        if said is None or _LOOKS.search(said):
            whole = False
        else:
            found.append(said)
        at = end + 1
    bare = _bare(pattern, at)
    whole = whole and len(bare) == len(pattern) - at
    return ["^" * anchored + bare, *found], whole


def _never(body: str) -> str | None:
    """A pattern for the texts at whose beginning `body` does not match; None: there is no rule for
    it.
    """
    if found := _ALL_OF.fullmatch(body):
        # `body` matches texts of such characters alone; with +, not the empty text.
        other = _other(found["one"])
        return other if "*$" in body[-2:] else f"^$|{other}"
    if found := _TWICE.fullmatch(body):
        one, other = found["one"], _other(found["one"])
        return f"^(?:{one}?{other})*{one}?$"
    if found := _SOMEWHERE.fullmatch(body):
        return f"^{_other(found['one'])}*$"
    if found := _FIRST.fullmatch(body):
        return f"^(?:$|{_other(found['one'])})"
    return None


def _other(one: str) -> str:
    """Returns a class of all characters but those of `one`, a character or a class."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    if one.startswith("["):
        return f"[^{one[1:]}"
    return f"[^{one}]"


def _bare(pattern: str, at: int) -> str:
    """The pattern from position `at` on, without look-around; it may allow more."""
    parts: list[str] = []
    while found := _LOOKS.search(pattern, at):
        end = _closing(pattern, found.start())
        if end < 0:
            return ""
        parts.append(pattern[at : found.start()])
        at = end + 1
    return "".join((*parts, pattern[at:]))


def _closing(pattern: str, at: int) -> int:
    """The position of the bracket that closes the group at position `at`; -1: there is none."""
    level, inside, i = 0, False, at
    while i < len(pattern):
        letter = pattern[i]
        if letter == "\\":
            i += 1
        elif inside:
            inside = letter != "]"
        elif letter == "[":
            inside = True
        elif letter == "(":
            level += 1
        elif letter == ")":
            level -= 1
            if not level:
                return i
        i += 1
    return -1


# ----------------------------------------------------------------------------------------- dialects

_PIECE = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\c[A-Za-z]|\\[pPux]\{[^}]*\}|\\.|\{\d+(?:,\d*)?\}|\(\?.|\{,\d|.",
    re.S,
)
# Not in the dialect: word boundaries, references to groups, atomic groups.
_UNKNOWN_SYNTAX = re.compile(r"\\[1-9bBGkZ]|\(\?[>#(]|\{,\d")
_BEGINS = re.compile(r"(?:^|[(|]|\(\?:|\(\?P?<\w+>)$")
# Characters that are literal within classes of other dialects, but operators for the compiler,
# which has [a&&b] and [[a]b].
_CLASS = re.compile(
    r"(?<=.)(?:\\.|\[|&(?=&)|~(?=~)|-(?=-|\\[dDsSwW])|(?<=\\[dDsSwW])-(?!\]$))", re.S
)


def to_compiler_dialect(pattern: str) -> str | None:
    """A pattern without look-around in llguidance's dialect; None: it cannot be expressed there.

    Patterns of JSON Schema are those of ECMA-262; in practice they are often Python's or Go's.
    """
    parts: list[str] = []
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if len(piece) > 1 and piece[0] == "[":
            piece = _CLASS.sub(_in_class, piece)
        elif _UNKNOWN_SYNTAX.match(piece):
            return None
        elif piece.startswith("\\c") and len(piece) > 2:
            piece = f"\\x{ord(piece[2]) % 32:02x}"
        elif piece == "\\0":
            piece = "\\x00"
        elif piece == "{":
            piece = "\\{"
        elif (piece == "^" and not _BEGINS.search(pattern[: found.start()])) or (
            piece == "$" and pattern[found.end() : found.end() + 1] not in ("", ")", "|")
        ):
            return None
        parts.append(piece)
    return "".join(parts)


def _in_class(found: re.Match[str]) -> str:
    piece = found[0]
    if piece[0] != "\\":
        return f"\\{piece}"
    return "\\x08" if piece == "\\b" else piece
