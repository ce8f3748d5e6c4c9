"""What the JSON files of a checkpoint's folder would say, told from a GGUF file.

Who reads a checkpoint asks here by a file's name, and need not know that there is no folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from pipeinfer.gguf.header import Header, read_header
from pipeinfer.gguf.hyperparameters import config_json
from pipeinfer.gguf.tokenizer import MODEL, tokenizer_config
from pipeinfer.gguf.values import Metadata
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Made = TypeVar("Made")


def document(path: Path, name: str) -> JsonObject | None:
    """The object that file `name` would hold, None where there would be no such file.

    Raises ConfigurationError in one line that names `path`.
    """
    make = DOCUMENTS.get(name)
    return None if make is None else cast(JsonObject | None, make(read_header(path)))


def tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a file, None where it has none. Raises ConfigurationError."""
    from pipeinfer.gguf.loading import load_tokenizer  # most who read a file need none

    return _of_vocabulary(read_header(path), load_tokenizer)


def _tokenizer_config(header: Header) -> dict[str, object] | None:
    return _of_vocabulary(header, tokenizer_config)


def _of_vocabulary(header: Header, make: Callable[[Metadata], Made]) -> Made | None:
    if header.metadata.get(MODEL, "none") in ("none", "no_vocab"):
        return None
    try:
        return make(header.metadata)
    except ConfigurationError as error:
        text = str(error)
        raise error if str(header.path) in text else header.error(text) from None


DOCUMENTS: dict[str, Callable[[Header], dict[str, object] | None]] = {
    "config.json": config_json,
    "tokenizer_config.json": _tokenizer_config,
}
