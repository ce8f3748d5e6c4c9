"""The tokens that a tokenizer's files add to its vocabulary by name, such as `</think>`.

Read without loading the tokenizer, for who need not encode anything. Of files that say different
things of a token, those win that win in transformers' AutoTokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeinfer.checkpoint.fields import read_object
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.settings import ConfigurationError

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class AddedId(NamedTuple):
    """`special`: it controls the model, and has no text of its own."""

    id: int
    special: bool


class TokenFlags(NamedTuple):
    """A token with the flags that the tokenizers library knows."""

    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class _InFile(msgspec.Struct):
    """One of tokenizer.json's."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_InFile] = []


def special_tokens(config: JsonObject) -> dict[str, str]:
    """{"eos_token": "</s>", ...}: the named tokens as text, also the model's own named ones."""
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    for name, token in config.items():  # image_token, and whatever else a model calls one
        if name.endswith("_token") and name not in named and _is_token(token):
            named[name] = token
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    return {name: text_of(token) for name, token in named.items() if token is not None}


def tokens_by_files(
    folder: Path, config: JsonObject, own: Mapping[int, TokenFlags]
) -> list[tuple[int, TokenFlags]]:
    """Every added token with its flags, in the order in which they are to be added to `own`,
    tokenizer.json's by their ids: those that are there keep their place and take the flags. The ids
    are those of the files, -1 where they say none. `config`: what read_tokenizer_config gave.
    Raises ConfigurationError."""
    named = special_tokens(config)
    listed = _listed(config)
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        given = [(n, t) for n, t in decoder.items() if n.isdecimal() and _is_token(t)]
        by_id = {int(n): _token(t, named.values()) for n, t in given}
    else:
        special = {*(named[name] for name in NAMED_TOKENS if name in named), *map(text_of, listed)}
        by_id = {
            number: TokenFlags(
                content, content in special, False, False, False, content not in special
            )
            for content, number in (read_object(folder, "added_tokens.json") or {}).items()
            if isinstance(number, int)
        }
        by_id = {
            number: token._replace(special=token.special or token.content in named.values())
            for number, token in (by_id | dict(own)).items()
        }
    found = sorted(by_id.items())
    contents = {token.content for token in (*own.values(), *by_id.values())}
    others = (*(config.get(name) or text for name, text in named.items()), *listed)
    found += [(-1, _token(t, named.values())) for t in others if text_of(t) not in contents]
    return found


def added_tokens(folder: Path, config: JsonObject) -> dict[str, AddedId]:
    """By their text. `config`: what read_tokenizer_config gave. Raises ConfigurationError for a
    file that cannot be read."""
    path = folder / "tokenizer.json"
    tokens: list[_InFile] = []
    if path.is_file():
        try:
            tokens = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).added_tokens
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from None
    own = {
        t.id: TokenFlags(t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
        for t in tokens
    }
    found = {token.content: AddedId(number, token.special) for number, token in own.items()}
    for number, token in tokens_by_files(folder, config, own):
        known = found.get(token.content)
        if known is not None:
            found[token.content] = known._replace(special=token.special)
        elif number >= 0:
            found[token.content] = AddedId(number, token.special)
    return found


def text_of(token: JsonValue) -> str:
    """Of a text, or of an object that has one as its content."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _listed(config: JsonObject) -> list[JsonValue]:
    """Special tokens without a name."""
    extra = config.get("extra_special_tokens")
    given = extra if extra and isinstance(extra, list) else config.get("additional_special_tokens")
    return list(given) if isinstance(given, list) else []


def _is_token(token: JsonValue) -> bool:
    return isinstance(token, str) or (isinstance(token, dict) and "content" in token)


def _token(token: JsonValue, named: Collection[str]) -> TokenFlags:
    """A text alone is one of the special ones', and so is whatever has a name. Special tokens are
    looked for before a text is normalized, unless they say otherwise."""
    flags = token if isinstance(token, dict) else JsonObject(special=True)
    special = flags.get("special") is True or text_of(token) in named
    return TokenFlags(
        text_of(token),
        special,
        flags.get("single_word") is True,
        flags.get("lstrip") is True,
        flags.get("rstrip") is True,
        flags.get("normalized", not special) is True,
    )


def read_tokenizer_config(folder: Path) -> JsonObject:
    """tokenizer_config.json; tokens that it does not name, and flags of those that it only names,
    come from special_tokens_map.json, unless it says itself which tokens are added."""
    config = read_object(folder, "tokenizer_config.json") or {}
    if isinstance(config.get("added_tokens_decoder"), dict):
        return config
    merged = dict(config)
    for name, token in (read_object(folder, "special_tokens_map.json") or {}).items():
        if isinstance(token, dict) and "content" in token:
            token = {**token, "special": True}
            if merged.get(name) in (None, token["content"]):
                merged[name] = token
        elif merged.get(name) is None:
            merged[name] = token
    return merged


def template_sources(folder: Path, config: JsonObject, override: str) -> dict[str, str]:
    """Jinja text by name, of the checkpoint in `folder`, or only that of the file `override` if it
    is not empty. A file chat_template.jinja goes before the text in `config`, the tokenizer's
    configuration. Raises ConfigurationError for a file that cannot be read.
    """
    if override:
        return {"default": _read(Path(override))}
    sources: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict)]
        sources = {str(entry["name"]): str(entry["template"]) for entry in named}
    if (folder / "chat_template.jinja").exists():
        sources = {"default": _read(folder / "chat_template.jinja")}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = _read(path)
    return sources


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read chat template {path}: {error}") from None


# Names of files and folders, of which some are paths on the machine that saved the checkpoint.
OF_FILES = (
    "auto_map",
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)
LONGEST = 2**53  # tokens; files say 10**30 where a tokenizer has no bound of its own


def tokenizer_info(config: JsonObject, templates: Mapping[str, str], context_length: int) -> bytes:
    """As JSON. `config`: what read_tokenizer_config gave, `templates`: what template_sources gave;
    `context_length`: tokens, 0 if not known. Named tokens are texts, null where there is none."""
    told: JsonObject = {name: value for name, value in config.items() if name not in OF_FILES}
    told |= dict.fromkeys(NAMED_TOKENS) | special_tokens(config)
    told["tokenizer_class"] = config.get("tokenizer_class") or "PreTrainedTokenizerFast"
    told["chat_template"] = templates.get("default")
    most = config.get("model_max_length")
    if not isinstance(most, int) or not 0 < most <= LONGEST:
        told["model_max_length"] = context_length or None
    return json.dumps(told).encode()
