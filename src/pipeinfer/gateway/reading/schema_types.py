"""Which types of JSON a schema allows, where it says so in plain words.

Knows no model and no call.
"""

from __future__ import annotations

from pipeinfer.json_values import JsonValue

_ANY_OF = ("anyOf", "oneOf")
_MOST_LEVELS = 8  # of choices within choices


def schema_types(schema: JsonValue, level: int = 0) -> frozenset[str]:
    """Their names; empty where nothing is known."""
    if not isinstance(schema, dict) or level > _MOST_LEVELS:
        return frozenset()
    given = schema.get("type")
    named = given if isinstance(given, list) else [given]
    found: set[str] = {name for name in named if isinstance(name, str)}
    for key in _ANY_OF:
        choices = schema.get(key)
        if not found and isinstance(choices, list):
            each = [schema_types(choice, level + 1) for choice in choices]
            found = {name for one in each for name in one} if all(each) else found
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(options, list):
        found = {"string"} if all(isinstance(option, str) for option in options) else found
    return frozenset(found)
