"""Reads a checkpoint's tokenizer files: tokenizer.json and the JSON files beside it.

Gives the same ids as the tokenizer that transformers would load from the folder, without importing
it. Knows no request and no template.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from pipeinfer.gguf.documents import tokenizer as gguf_tokenizer
from pipeinfer.gguf.filename import is_gguf
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


def special_tokens(config: JsonObject) -> dict[str, str]:
    """{"eos_token": "</s>", ...}: the named tokens as text, also the model's own named ones."""
    named = {name: config.get(name) for name in NAMED_TOKENS}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    return {name: _text(token) for name, token in named.items() if token is not None}


def load_tokenizer(folder: Path, config: JsonObject) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where there is no tokenizer.json.

    `config`: what `read_tokenizer_config` gave; of `add_bos_token` and `add_eos_token` there,
    tokenizer.json knows better. Raises ConfigurationError for a broken file.
    """
    tokenizer = _read(folder)
    if tokenizer is None:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, config)
    return tokenizer


def _read(folder: Path) -> Tokenizer | None:
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else None
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot read {path}: {error}") from None


def _add_tokens(tokenizer: Tokenizer, config: JsonObject) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = set(special_tokens(config).values())
    decoder = config.get("added_tokens_decoder")
    by_id = decoder.items() if isinstance(decoder, dict) else ()
    tokens = [token for _, token in sorted(by_id, key=lambda item: int(item[0]))]
    tokens += [config[name] for name in NAMED_TOKENS if config.get(name) is not None]
    tokens += _listed(config.get("additional_special_tokens"))
    tokens += _listed(config.get("extra_special_tokens"))
    for token in tokens:
        if _text(token) not in known:
            known.add(_text(token))
            added = _added(token, _text(token) in named)
            # A bare list in the library's stub.
            tokenizer.add_tokens([added])  # pyright: ignore[reportUnknownMemberType]


def _text(token: JsonValue) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _listed(value: JsonValue) -> list[JsonValue]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _added(token: JsonValue, named: bool) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), special=True)
    flags = {
        key: bool(token[key])
        for key in ("single_word", "lstrip", "rstrip", "normalized")
        if key in token
    }
    return AddedToken(_text(token), special=named or bool(token.get("special")), **flags)
