"""From the name of a model to where its files are: a folder, a GGUF file, the bundled demo, or the
hub.

Knows no torch and not what the files say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeinfer.checkpoint.fields import read_object
from pipeinfer.demo import demo_path
from pipeinfer.gguf.filename import is_gguf
from pipeinfer.settings import DEMO, ConfigurationError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
UNWANTED = ["original/*", "consolidated*", "onnx/*", "adapter_*"]


def resolve_model(
    name: str, revision: str = "", progress: Callable[[str], None] | None = None
) -> Path:
    """The folder or GGUF file of model `name`, downloaded if it is a hub id.

    `revision`: branch, tag or commit on the hub. `progress` is told, in words, what takes time.
    Raises ConfigurationError that says what was tried.
    """
    if name in ("", DEMO):
        return demo_path()
    folder = Path(name).expanduser()
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
    return _download(name, revision, progress)


def _check_whole(folder: Path) -> None:
    """ConfigurationError for a folder that has an adapter alone."""
    adapter = read_object(folder, "adapter_config.json")
    if adapter is not None and not (folder / "config.json").exists():
        base = adapter.get("base_model_name_or_path") or "its base model"
        raise ConfigurationError(
            f"model {str(folder)!r} is an adapter of {base}, not a model: merge it into that first"
        )


def _download(name: str, revision: str, progress: Callable[[str], None] | None) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    if progress is not None:
        progress(f"fetching {name} from the hub")
    try:
        path = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
    except Exception as error:  # the hub, the network and the disk each have their own families
        reason = " ".join(str(error).split()) or type(error).__name__
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigurationError(
            f"model {name!r}: there is no such folder, and the hub gave no model of that name{at}: "
            f"{reason}"
        ) from error
    return Path(path)
