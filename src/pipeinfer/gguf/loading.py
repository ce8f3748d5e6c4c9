"""Builds the tokenizer of a GGUF file without writing its tokenizer.json out in between.

Several processes do so when they start: the vocabulary as JSON would take them twice as long.
"""

from __future__ import annotations

import json
from typing import TypedDict, cast

from tokenizers import AddedToken, Tokenizer, models

from pipeinfer.gguf.tokenizer import MODEL, tokenizer_json
from pipeinfer.gguf.values import Metadata, metadata_error


class _Added(TypedDict):
    content: str
    special: bool
    normalized: bool


def load_tokenizer(metadata: Metadata) -> Tokenizer:
    """What `Tokenizer.from_str` makes of `tokenizer_json`. Raises ConfigurationError."""
    parts = tokenizer_json(metadata)
    model = cast(dict[str, object], parts["model"])
    added = cast(list[_Added], parts["added_tokens"])
    rest = {**parts, "model": {**model, "vocab": {}, "merges": []}, "added_tokens": []}
    given = {key: value for key, value in model.items() if value is not None and key != "type"}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(rest))
        tokenizer.model = models.BPE(**given)  # pyright: ignore[reportArgumentType]
        tokenizer.add_tokens(
            [
                AddedToken(
                    token["content"], special=token["special"], normalized=token["normalized"]
                )
                for token in added
            ]
        )
    except Exception as error:  # the library raises bare Exception
        raise metadata_error(MODEL, f"cannot be built: {error}") from None
    return tokenizer
