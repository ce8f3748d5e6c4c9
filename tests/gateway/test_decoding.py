"""Whole numbers with a point are those without one, wherever a body has them and nowhere else."""

from __future__ import annotations

import msgspec
import pytest

from pipeinfer.gateway.anthropic import MessagesRequest
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import ChatRequest, CompletionRequest
from pipeinfer.gateway.serving import decode


def read(kind, **fields):
    return decode(msgspec.json.encode(fields), kind, lambda _: None)


def test_every_place_takes_them() -> None:
    found = read(CompletionRequest, prompt=[[1.0, 2]], max_tokens=5.0, stop_token_ids=[7.0], seed=0)
    assert (found.prompt, found.max_tokens, found.stop_token_ids) == ([[1, 2]], 5, [7])
    assert all(type(n) is int for n in (*found.prompt[0], found.max_tokens, *found.stop_token_ids))
    thinking = {"type": "enabled", "budget_tokens": 64.0}
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9.0}
    found = read(MessagesRequest, **asked, thinking=thinking)
    assert found.thinking is not None and found.thinking.budget_tokens == 64


def test_other_numbers_stay_what_they_are() -> None:
    schema = {"type": "number", "minimum": 2.0}
    asked = {"messages": [{"role": "user", "content": "1.0"}], "n": 1.0, "temperature": 2.0}
    found = read(ChatRequest, **asked, json_schema=schema, logit_bias={"1": 3.0})
    assert found.n == 1 and type(found.temperature) is float
    assert found.json_schema == schema and type(found.json_schema["minimum"]) is float
    assert found.messages[0].content == "1.0" and found.logit_bias == {1: 3.0}


@pytest.mark.parametrize("value", [5.5, "5", "5.0", True, 1e300])
def test_what_is_no_whole_number_is_refused(value) -> None:
    with pytest.raises(ApiError) as caught:
        read(CompletionRequest, prompt="a", max_tokens=value, n=1.0)
    assert caught.value.param == "max_tokens"


def test_a_long_list_is_not_gone_through() -> None:
    with pytest.raises(ApiError) as caught:
        read(CompletionRequest, prompt=[1.0] * 20_000)
    assert caught.value.param == "prompt[0]"
