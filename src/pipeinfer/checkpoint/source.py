"""From the name of a model to where its files are: a folder, a GGUF file, the bundled demo, or the
hub.

Knows no torch and not what the files say.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from pipeinfer.checkpoint.fields import read_object
from pipeinfer.checkpoint.hub import fetch
from pipeinfer.demo import demo_path
from pipeinfer.gguf.filename import is_gguf
from pipeinfer.settings import DEMO, ConfigurationError, Settings

log = logging.getLogger(__name__)

DUMMY_WEIGHTS = "dummy"  # of --load-format


def find_model(settings: Settings, say: Callable[[str], object]) -> Path:
    """`resolve_model` of `settings`: what everything that loads a model asks."""
    return resolve_model(
        settings.model, settings.revision, say, settings.load_format != DUMMY_WEIGHTS
    )


def resolve_model(
    name: str,
    revision: str = "",
    say: Callable[[str], object] = log.info,
    weights: bool = True,
) -> Path:
    """The folder or GGUF file of model `name`, downloaded if it is a hub id.

    `revision`: branch, tag or commit on the hub. `say` is told, in words, what takes time.
    `weights`: whether a model of the hub without any is an error. Raises ConfigurationError that
    says what was tried.
    """
    if name in ("", DEMO):
        return demo_path()
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 (a Path raises for a user that is none)
    if folder.is_dir():
        _check_whole(folder)
        return folder.resolve()
    if folder.exists() and is_gguf(folder):
        return folder.resolve()
    if folder.exists():
        raise ConfigurationError(
            f"model {name!r} is a file; give the folder with config.json, or a .gguf file"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or is_gguf(folder):
        raise ConfigurationError(f"model {name!r}: there is no such folder or file")
    return fetch(name, revision, say, weights)


def _check_whole(folder: Path) -> None:
    """ConfigurationError for a folder that has an adapter alone."""
    adapter = read_object(folder, "adapter_config.json")
    if adapter is not None and not (folder / "config.json").exists():
        base = adapter.get("base_model_name_or_path") or "its base model"
        raise ConfigurationError(
            f"model {str(folder)!r} is an adapter of {base}, not a model: merge it into that first"
        )
