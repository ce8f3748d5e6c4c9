"""The model, and what transformers says, which is computed once for all processes of a test run."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from smollm2_prompts import CONVERSATIONS, NAME, PROMPTS, TOKENS, TURN_TOKENS

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
def expected(request, tmp_path_factory) -> dict[str, Any]:
    """transformers' texts: "greedy" of PROMPTS, "conversations" of CONVERSATIONS.

    The first worker that wants them makes them.
    """
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "smollm2-texts"
    shared.mkdir(exist_ok=True)
    file = shared / "texts.json"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            theirs = request.getfixturevalue("theirs")  # not loaded where another worker has been
            texts = {
                "greedy": theirs.greedy(list(PROMPTS), TOKENS),
                "conversations": [
                    theirs.conversation(turns, TURN_TOKENS) for turns in CONVERSATIONS
                ],
            }
            file.write_text(json.dumps(texts))
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def server(model):
    with Server(str(model), "--served-model-name", NAME, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0
    ) as client:
        yield client
