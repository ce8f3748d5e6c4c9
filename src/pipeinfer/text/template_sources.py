"""The texts of a checkpoint's chat templates, and the tokenizer configuration that holds them.

Knows files; compiles nothing, and needs no tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from pipeinfer.checkpoint.fields import read_object
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError


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
