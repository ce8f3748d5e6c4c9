"""The bundled demo model: a Qwen3 checkpoint small enough to live in the repository.

This module knows where the checkpoint lies; it neither loads nor runs it.
"""

from pathlib import Path


def demo_path() -> Path:
    """Return the folder that holds the demo checkpoint, its tokenizer and its chat template."""
    return Path(__file__).resolve().parent
