"""The tokens that a tokenizer's files add to its vocabulary by name, such as `</think>`.

Read without loading the tokenizer, for who need not encode anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.settings import ConfigurationError


class Added(NamedTuple):
    """`special`: it controls the model, and has no text of its own."""

    id: int
    special: bool


class _Token(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


def added_tokens(folder: Path, config: JsonObject) -> dict[str, Added]:
    """By their text. `config`: what read_tokenizer_config gave. Raises ConfigurationError for a
    tokenizer.json that cannot be read."""
    found: dict[str, Added] = {}
    decoder = config.get("added_tokens_decoder")
    for number, token in (decoder if isinstance(decoder, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if isinstance(token, dict) and isinstance(content, str) and number.isdecimal():
            found[content] = Added(int(number), _true(token.get("special")))
    path = folder / "tokenizer.json"
    if not path.is_file():
        return found
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    return found | {t.content: Added(t.id, t.special) for t in tokenizer.added_tokens}


def _true(value: JsonValue) -> bool:
    return value is True
