"""Reads values of a GGUF file's metadata and says which key is wrong.

Knows types and lengths, not what a value is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeinfer.settings import ConfigurationError

Metadata = Mapping[str, object]

SHOWN = 60  # characters of a wrong value that an error repeats


def metadata_error(key: str, problem: str) -> ConfigurationError:
    """An error of one line that names the key of the file."""
    name = key if key.isprintable() and len(key) <= SHOWN else quote(key)
    return ConfigurationError(f"the GGUF file's {name}: {problem}")


def quote(text: str) -> str:
    """A text of the file as an error may repeat it: short, on one line."""
    return ascii(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def read_text(metadata: Metadata, key: str) -> str | None:
    """A text, None where the key is absent. Raises ConfigurationError for anything else."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise metadata_error(key, f"not a text but {_kind(value)}")
    _check_unicode(key, value, "the text")
    return value


def read_flag(metadata: Metadata, key: str, default: bool) -> bool:
    """True or false, `default` where the key is absent. Raises ConfigurationError."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise metadata_error(key, f"not true or false but {_kind(value)}")
    return value


def read_index(metadata: Metadata, key: str, size: int) -> int | None:
    """An id below `size`, None where the key is absent. Raises ConfigurationError."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise metadata_error(key, f"not a whole number but {_kind(value)}")
    if not 0 <= value < size:
        raise metadata_error(key, f"no token has this id, there are {size}")
    return value


def read_texts(metadata: Metadata, key: str) -> list[str]:
    """A list of texts. Raises ConfigurationError, also where the key is absent."""
    value = _list(metadata, key)
    texts = [item for item in value if isinstance(item, str)]
    if len(texts) != len(value):
        raise metadata_error(key, "holds something that is not a text")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        for number, text in enumerate(texts):
            _check_unicode(key, text, f"entry {number}")
    return texts


def read_integers(metadata: Metadata, key: str, size: int) -> list[int]:
    """A list of `size` whole numbers. Raises ConfigurationError, also where the key is absent."""
    value = _list(metadata, key)
    numbers = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
    if len(numbers) != len(value):
        raise metadata_error(key, "holds something that is not a whole number")
    _check_size(key, numbers, size)
    return numbers


def read_numbers(metadata: Metadata, key: str, size: int) -> list[float]:
    """A list of `size` numbers, none of them NaN. Raises ConfigurationError, also where the key
    is absent."""
    value = _list(metadata, key)
    numbers: list[float] = [
        item for item in value if isinstance(item, float | int) and not isinstance(item, bool)
    ]
    if len(numbers) != len(value) or any(number != number for number in numbers):
        raise metadata_error(key, "holds something that is not a number")
    _check_size(key, numbers, size)
    return numbers


def _list(metadata: Metadata, key: str) -> list[object]:
    value = metadata.get(key)
    if value is None:
        raise metadata_error(key, "missing")
    if not isinstance(value, list):
        raise metadata_error(key, f"not a list but {_kind(value)}")
    return value


def _check_size(key: str, values: Sequence[object], size: int) -> None:
    if len(values) != size:
        raise metadata_error(key, f"has {len(values)} entries for {size} tokens")


def _check_unicode(key: str, text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise metadata_error(key, f"{name} is not Unicode: {quote(text)}") from None


def _kind(value: object) -> str:
    return type(value).__name__
