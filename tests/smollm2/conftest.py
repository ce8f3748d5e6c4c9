"""The model, and what transformers says, which takes long to load and longer to ask.

One worker runs all tests of this folder, see tests/conftest.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from smollm2_prompts import NAME

from gguf_models import smollm2
from servers import Server


@pytest.fixture(scope="session")
def model() -> Path:
    """The GGUF file."""
    return smollm2()


@pytest.fixture(scope="session")
def theirs(model):
    """The model in transformers."""
    from smollm2_reference import Reference

    return Reference(model)


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    """transformers' texts: "greedy" of PROMPTS, "conversations" of CONVERSATIONS."""
    from smollm2_reference import stored_texts

    return stored_texts()


@pytest.fixture(scope="session")
def server(model, shared):
    settings = ("--served-model-name", NAME, "--dtype", "float32")
    return shared.enter_context(Server(str(model), *settings))


@pytest.fixture(scope="session")
def api(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
    ) as client:
        yield client
