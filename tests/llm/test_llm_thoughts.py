"""Forms of chats in Python begin where the thoughts end, also where no tag is a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeinfer import LLM, SamplingParams, StructuredOutputsParams
from thinking_models import QUESTION, SCHEMA, TEMPLATES, make_thinking


@pytest.fixture(scope="module")
def thinking(in_process: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Whose tags are several tokens each."""
    folder: Path = tmp_path_factory.mktemp("thinking") / "m"
    model = make_thinking(folder, TEMPLATES["opens or is silent"])
    with LLM(str(model), **in_process) as llm:
        yield llm


@pytest.mark.parametrize("after", ["", "</think>"])
def test_a_form_begins_where_the_prompt_leaves_the_thoughts(thinking: LLM, after: str) -> None:
    spec = StructuredOutputsParams(json=json.dumps(SCHEMA), after=after)
    params = SamplingParams(
        temperature=0, max_tokens=60, structured_outputs=spec, thinking_token_budget=3
    )
    off = {"enable_thinking": False}
    [silent] = thinking.chat(QUESTION, params, chat_template_kwargs=off)
    assert json.loads(silent.outputs[0].text) == {"sum": 22}
    [opened] = thinking.chat(QUESTION, params)
    reasoning, closed, content = opened.outputs[0].text.partition("</think>")
    assert closed and len(reasoning) <= 3 and json.loads(content)["sum"] in (20, 21, 22)
    several = thinking.chat([QUESTION, QUESTION], params, chat_template_kwargs=off)
    assert [one.outputs[0].text for one in several] == [silent.outputs[0].text] * 2
