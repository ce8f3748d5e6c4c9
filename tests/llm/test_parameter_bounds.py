"""Parameters that no engine could take are refused before a call leaves the caller."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer.engine.step_builder import RequestTable
from pipeinfer.llm import RequestError
from pipeinfer.messages import Admit
from pipeinfer.offline.calls import checked
from pipeinfer.wire import pack

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
          "frequency_penalty")  # fmt: skip
INTS = ("top_k", "max_tokens", "min_tokens", "seed")


def admitted(params: SamplingParams) -> RequestTable:
    """An engine's table with a request of these parameters."""
    table = RequestTable(1)
    ids = pack([1, 2, 3])
    table.put(Admit(0, "r", ids, 3, 9, params, 0))
    return table


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError) as caught:
        checked(SamplingParams(**{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**31),
        ("min_tokens", 2**63),
        ("min_tokens", 2**31),
        ("max_tokens", 2**31),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", tuple(range(1025))),
        ("stop", ("x" * 1025,)),
        ("stop", "x" * 1025),
        ("temperature", 1e300),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e38),
        ("logit_bias", {7: 100.5}),
        ("logit_bias", {7: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {"seven": 1.0}),
        ("logit_bias", {7: "much"}),
        ("logit_bias", [7]),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", (2**31,)),
        ("allowed_token_ids", tuple(range(1025))),
        ("bad_words", ("a", " ")),
        ("bad_words", ("x" * 65,)),
        ("bad_words", tuple(map(str, range(129)))),
    ],
)
def test_a_caller_of_llm_is_told_which_parameter_is_out_of_bounds(name: str, value: Any) -> None:
    """Without a started engine: nothing is sent."""
    params = SamplingParams(**{"max_tokens": None, name: value})
    with pytest.raises(RequestError) as caught:
        AsyncLLM().generate("x", params)
    assert caught.value.param == name


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{name: st.floats() | st.sampled_from([1e-300, 1e-45, 1e-39]) for name in FLOATS},
            **{name: st.integers() | st.integers(2**31 - 2, 2**31 + 1) for name in INTS},
            "stop_token_ids": st.lists(st.integers(-1, 2**32), max_size=3).map(tuple),
            "logit_bias": st.dictionaries(st.integers(-1, 2**32), st.floats(), max_size=3),
        },
    )
)
def test_what_is_taken_fits_the_engines_arrays_and_means_the_same_there(
    fields: dict[str, Any],
) -> None:
    try:
        params = checked(SamplingParams(**{"max_tokens": None, **fields}))
    except RequestError:
        return
    table = admitted(params)
    rows = table.fields(np.array([0]))
    assert all(np.isfinite(values).all() for values in rows.values())
    assert (rows["top_p"] > 0).all(), "0 would turn the truncation off"
    assert rows["top_k"][0] == params.top_k
    counts = np.array([params.min_tokens, *params.stop_token_ids], dtype=np.int32)
    assert (counts >= 0).all()
    changes = table.take_changes()
    assert changes is not None
    said = [pair for edits in changes[2] for pair in zip(edits.ids, edits.values, strict=True)]
    assert dict(said) == {token: np.float32(bias) for token, bias in params.logit_bias.items()}


@pytest.mark.parametrize("given", [{"7": 1, 8: -2.5}, {7: 1.0, 8: -2.5}, {"7": 1.0, "8": -2.5}])
def test_ids_of_biases_may_be_texts_as_in_json(given: Any) -> None:
    assert checked(SamplingParams(logit_bias=given)).logit_bias == {7: 1.0, 8: -2.5}
    for nothing in (None, {}):
        assert checked(SamplingParams(logit_bias=nothing)) == checked(SamplingParams())


def test_the_largest_biases_pass() -> None:
    most = {token: 100.0 * (-1) ** token for token in range(1024)}
    assert checked(SamplingParams(logit_bias=most)).logit_bias == most


def test_the_smallest_top_p_stays_above_zero_in_float32() -> None:
    for value in (5e-324, 1e-300, 1.4e-45, 1e-40):
        top_p = np.float32(checked(SamplingParams(top_p=value)).top_p)
        assert top_p >= np.finfo(np.float32).smallest_normal
    assert checked(SamplingParams(top_p=1e-30)).top_p == 1e-30
