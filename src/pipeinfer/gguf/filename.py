"""Which checkpoints are GGUF files.

Knows names only, for whoever needs nothing else of them.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(checkpoint: Path) -> bool:
    """Whether a checkpoint is such a file; by its name, so that nobody reads it for that."""
    return checkpoint.suffix.lower() == SUFFIX
