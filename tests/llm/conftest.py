"""What the tests of the offline classes share: settings for a busy machine, and prompts."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeinfer import LLM
from pipeinfer.demo import copy_task, count_task, demo_path, recall_task, sum_task

SMALL: dict[str, Any] = {"threads": 1, "kv_pages": 1024, "log_level": "warning"}
# Starts in a tenth of the time, for what is the same in any process.
IN_PROCESS: dict[str, Any] = {**SMALL, "in_process": True}


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Settings of every model in these tests."""
    return SMALL


@pytest.fixture(scope="session")
def in_process() -> dict[str, Any]:
    """Settings of those whose stages are all in this process."""
    return IN_PROCESS


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Questions of different lengths, in the demo model's chat form."""
    rng = Random(7)
    turns = [copy_task(rng, length) for length in (3, 30, 9, 17, 1, 24)]
    turns += [count_task(rng), sum_task(rng), recall_task(rng, 8)]
    return [chat_text(question) for question, _ in turns]


@pytest.fixture(scope="session")
def prompt_ids(prompts: list[str]) -> list[list[int]]:
    """The same as token ids."""
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(prompts)]


@pytest.fixture(scope="session")
def llm(small: dict[str, Any], shared: ExitStack) -> LLM:
    """The demo model, one for all tests of the files that one worker has, see tests/conftest.py."""
    return shared.enter_context(LLM(**small))


def chat_text(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
