"""Small grammars that compile in no time and cost much later, and honest ones that are large.
Import it as `import costly_grammars`."""

import json
from random import Random

# Each letter may go on, or begin, any of 600 rules: the parser keeps all of them, in each mask.
AMBIGUOUS = (
    "start: r+\nr: "
    + " | ".join(f"t{i}" for i in range(600))
    + "\n"
    + "\n".join(f"t{i}: /[a-z]{{1,{i + 1}}}/ t{i * 7 % 600}?" for i in range(600))
)


def growing(name: str) -> str:
    """The lexer finds new states with each letter; `name` tells it from others."""
    numbers = range(400)
    lexemes = "\n".join(f"T{k}: /[a-z]{{0,{k}}}x[a-z]{{0,{k}}}/" for k in numbers)
    return f"start: ({' | '.join(f'T{k}' for k in numbers)})+\n{lexemes}\n// {name}"


# What costs little where it begins: free text, until a letter that the walk of a trial may miss.
LATE = "start: /[^Z]*/ (/Z/ r+)?\n" + AMBIGUOUS.partition("\n")[2]


def late_growing(name: str) -> str:
    """As `growing`, behind free text and that letter."""
    start, _, rest = growing(name).partition("\n")
    return f"start: /[^Z]*/ (/Z/ {start.removeprefix('start: ')})?\n{rest}"


_random = Random(5)
WORDS = ["".join(_random.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(5000)]


def _object(properties: dict, required: bool = True) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required else [],
        "additionalProperties": False,
    }


_KINDS = [
    _object({"kind": {"const": word}, word: {"type": "number"}, "note": {"type": "string"}})
    for word in WORDS[:100]
]
HONEST = {
    "a long text": {"json": json.dumps(_object({"a": {"type": "string", "maxLength": 10_000}}))},
    "an enum of 4,000": {"json": json.dumps({"enum": WORDS[:4000]})},
    "a choice of 5,000": {"choice": tuple(WORDS)},
    "300 optional keys": {
        "json": json.dumps(_object({word: {"type": "string"} for word in WORDS[:300]}, False))
    },
    "100 kinds of objects": {"json": json.dumps({"type": "array", "items": {"anyOf": _KINDS}})},
    "words": {"regex": r"(\w{1,20}\s){0,300}\p{L}{1,500}"},
    "anything": {"json": "{}"},
    "arithmetic": {
        "grammar": 'start: expr\nexpr: term (("+"|"-") term)*\nterm: fac (("*"|"/") fac)*\n'
        'fac: NUM | "(" expr ")" | ID\nNUM: /[0-9]+(\\.[0-9]+)?/\nID: /[a-z_][a-z0-9_]*/'
    },
}
