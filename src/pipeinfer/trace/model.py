"""Which checkpoint this is, told cheaply: from small files and the headers of the large ones.

Reads no weights and knows no model.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path

from pipeinfer.gguf.header import is_gguf
from pipeinfer.trace.format import ModelIdentity

MOST_HEADER = 100 << 20  # bytes; what safetensors itself allows
MOST_GGUF_HEADER = 16 << 20  # bytes; with it a large vocabulary


def identify(name: str, folder: str) -> ModelIdentity:
    """The identity of the checkpoint in `folder`; digest "" if it has no readable config.json.

    `folder` may be a GGUF file."""
    try:
        return ModelIdentity(name, folder, _digest(Path(folder)))
    except OSError:
        return ModelIdentity(name, folder)  # the stages that need the files say what is wrong


def _digest(folder: Path) -> str:
    if is_gguf(folder):
        return _header_digest(folder)
    total = sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        total.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            size = min(struct.unpack("<Q", prefix)[0], MOST_HEADER) if len(prefix) == 8 else 0
            total.update(file.read(size))
    return total.hexdigest()


def _header_digest(file: Path) -> str:
    """Of size and first bytes: there are key-values, vocabulary and a list of tensors."""
    total = sha256(f"{file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        total.update(stream.read(MOST_GGUF_HEADER))
    return total.hexdigest()
