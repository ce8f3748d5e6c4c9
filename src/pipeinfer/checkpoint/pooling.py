"""Pooling of a checkpoint: how it makes a vector of a text, by sentence-transformers' modules.json.

The vector of a text is the hidden state of its last token, after the model's last norm. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeinfer.checkpoint.config import is_headless
from pipeinfer.checkpoint.files import Fields, read_json, read_object
from pipeinfer.gguf.header import is_gguf
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
# Modules that modules.json may have after the first, by the last part of their type.
TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
LAST_TOKEN = "lasttoken"
LABELS = ("no", "yes")  # the answers of a model that is asked for scores, a token each
# Names of the size of hidden states; the first that config.json has.
HIDDEN_SIZES = ("word_embed_proj_dim", "n_embd", "d_model", "hidden_size")


@dataclass(frozen=True)
class Pooling:
    """How vectors of texts, or scores of pairs of texts, are made.

    Attributes:
    - hidden_size: numbers of a vector
    - scores: the model rates how well a pair of texts fits, and makes no vectors
    - normalize: vectors are scaled to length 1
    - prompts: texts that come before a text, by name, as "query" and "document"
    - default_prompt: the name of the prompt of texts whose request names none; "": no prompt
    """

    hidden_size: int
    scores: bool = False
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str = ""


def label_ids(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids of LABELS. Raises ConfigurationError where one is no token."""
    ids: list[list[int]] = []
    if tokenizer is not None:
        ids = [tokenizer.encode(label, add_special_tokens=False).ids for label in LABELS]
    if not ids or any(len(found) != 1 for found in ids):
        raise ConfigurationError(
            f"--task score: {' and '.join(LABELS)} must be tokens of the model's vocabulary"
        )
    return tuple(found[0] for found in ids)


def read_pooling(checkpoint: Path, task: str) -> Pooling | None:
    """Returns how the checkpoint, a folder or a GGUF file, makes vectors or scores; None if it
    generates texts.

    - task: as in Settings. With "auto", a checkpoint makes vectors if it has a modules.json, or has
      no weights for logits

    Raises ConfigurationError for pooling other than the last token's vector.
    """
    modules = None if is_gguf(checkpoint) else _modules(checkpoint / MODULES)
    config = read_json(checkpoint, "config.json")
    headless = is_headless(config)
    if headless and task in ("generate", "score"):
        raise ConfigurationError(
            f"--task {task}: {checkpoint} has no head for logits, and makes vectors (--task embed)"
        )
    if task == "generate" or (task == "auto" and modules is None and not headless):
        return None
    hidden_size = _hidden_size(config)
    if task == "score" or modules is None:
        return Pooling(hidden_size, scores=task == "score")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    strange = [kind for kind in kinds if kind not in (TRANSFORMER, POOLING, NORMALIZE)]
    if strange:
        raise ConfigurationError(
            f"{checkpoint / MODULES}: {strange[0] or 'a module without a type'} is not supported, "
            f"only {TRANSFORMER}, {POOLING} and {NORMALIZE}"
        )
    if kinds[:2] != [TRANSFORMER, POOLING] or POOLING in kinds[2:] or TRANSFORMER in kinds[2:]:
        raise ConfigurationError(
            f"{checkpoint / MODULES}: {', '.join(kinds) or 'no module'}, where {TRANSFORMER}, "
            f"{POOLING} and perhaps {NORMALIZE} are expected, in this order"
        )
    _check_pooling(_within(checkpoint, str(modules[1].get("path", ""))))
    return _with_prompts(hidden_size, NORMALIZE in kinds, checkpoint)


def _hidden_size(fields: Fields) -> int:
    """Numbers of a hidden state behind the last norm."""
    named = next((name for name in HIDDEN_SIZES if fields.raw.get(name) is not None), None)
    return fields.integer(named or HIDDEN_SIZES[-1])


def _modules(path: Path) -> list[dict[str, object]] | None:
    """Returns the entries of modules.json; None if there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise ConfigurationError(f"{path} must be a list of objects")
    return found


def _within(checkpoint: Path, path: str) -> Path:
    """The folder of a module. Raises ConfigurationError if it is not one of the checkpoint's."""
    parts = Path(path).parts
    if Path(path).is_absolute() or ".." in parts:
        raise ConfigurationError(f"{checkpoint / MODULES}: {path!r} is not in the checkpoint")
    return checkpoint / path


def _check_pooling(folder: Path) -> None:
    """Raises ConfigurationError unless the last token's hidden state is the vector."""
    fields = read_object(folder, "config.json") or {}
    given = fields.get("pooling_mode")
    flags = [name.removeprefix("pooling_mode_") for name, value in fields.items() if value is True]
    modes = given if isinstance(given, list) else [given] if given else flags
    named = [str(mode) for mode in modes if str(mode) != "include_prompt"]
    if named != [LAST_TOKEN]:
        what = ", ".join(named) or "nothing"
        raise ConfigurationError(
            f"{folder / 'config.json'} pools by {what}, only {LAST_TOKEN} is supported"
        )


def _with_prompts(hidden_size: int, normalize: bool, checkpoint: Path) -> Pooling:
    fields = Fields(checkpoint / PROMPTS, read_object(checkpoint, PROMPTS) or {})
    prompts, default = fields.raw.get("prompts") or {}, fields.raw.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise fields.error("prompts must be an object of texts")
    if not isinstance(default, str) or (default and default not in prompts):
        raise fields.error(f"default_prompt_name {default!r} is none of its prompts")
    texts = {str(name): str(text) for name, text in prompts.items()}
    return Pooling(hidden_size, normalize=normalize, prompts=texts, default_prompt=default)
