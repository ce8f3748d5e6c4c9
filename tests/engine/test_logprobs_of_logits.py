"""Entries of log-probs out of logits: in one order whatever is equal, on one rank or several."""

from __future__ import annotations

import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.engine.sampling import log_probs
from pipeinfer.kernels import host
from pipeinfer.wire import (
    PositionLogprobs,
    json_logprob,
    logprob_bytes,
    narrow_logprobs,
    no_logprob,
    unpack_logprobs,
)
from rank_threads import ThreadCollectives, ThreadGroup


def by_definition(logits: np.ndarray, token: int, most: int) -> PositionLogprobs:
    """Of one row float32 [vocab]."""
    values = logits.astype(np.float64)
    total = np.log(np.exp(values - values.max()).sum()) + values.max()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    best = order[:most]
    return PositionLogprobs(
        float(values[token] - total), order.index(token) + 1, best,
        [float(values[i] - total) for i in best],
    )  # fmt: skip


def check(found: PositionLogprobs, expected: PositionLogprobs) -> None:
    assert (found.rank, found.ids) == (expected.rank, expected.ids)
    for one, other in zip(
        [found.logprob, *found.logprobs], [expected.logprob, *expected.logprobs], strict=True
    ):
        assert one == other or abs(one - other) < 1e-5


ON_HOST = sys.modules[host.local_topk.__module__]
# Few values, so that many are equal; both zeros, and what must not be sampled.
VALUES = st.sampled_from([0.0, -0.0, 1.5, -1.5, 30.0, -30.0, float("-inf"), 2.0**-20])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(VALUES, min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 20), st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 128]), st.randoms(),
)  # fmt: skip
def test_entries_are_what_they_say_however_the_vocabulary_is_split(
    rows, most, ranks, block, random
):
    for row in rows:
        row[random.randrange(9)] = 0.5  # not all of them are impossible
    logits = np.array(rows, dtype=np.float32)
    ids = [random.randrange(9) for _ in rows]
    share = -(-9 // ranks)
    group = ThreadGroup(ranks)

    def one(collectives: ThreadCollectives) -> bytes:
        rank = collectives.rank
        first = min(rank * share, 9)
        mine = torch.from_numpy(logits[:, first : first + share].copy())
        if ranks == 1:
            return host.logprobs(mine, torch.tensor(ids), most).numpy().tobytes()
        return log_probs(
            host, mine, torch.tensor(ids), most, first, collectives.all_gather_stacked
        ).numpy().tobytes()  # fmt: skip

    with patch.object(ON_HOST, "TOPK_BLOCK", block):
        told = group.run(one)
    assert len(set(told)) == 1, "all ranks say the same"
    found = list(unpack_logprobs(told[0], most))
    assert len(told[0]) == len(rows) * logprob_bytes(most)
    for row, token, entry in zip(logits, ids, found, strict=True):
        check(entry, by_definition(row, token, min(most, 9)))


def test_of_equal_logits_the_lowest_ids_come_first():
    logits = torch.zeros(1, 5000)
    (entry,) = unpack_logprobs(host.logprobs(logits, torch.tensor([4999]), 3).numpy().tobytes(), 3)
    assert (entry.ids, entry.rank) == ([0, 1, 2], 5000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_logits_are(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(2, 3000) * 4).to(dtype)
    raw = host.logprobs(logits, torch.tensor([5, 77]), 4).numpy().tobytes()
    for n, entry in enumerate(unpack_logprobs(raw, 4)):
        check(entry, by_definition(logits[n].float().numpy(), (5, 77)[n], 4))


def test_an_entry_with_fewer_alternatives_is_the_beginning_of_one_with_more():
    torch.manual_seed(1)
    table = host.logprobs(torch.randn(3, 100), torch.tensor([1, 2, 3]), 7).numpy()
    for most in (0, 2, 7):
        cut = list(unpack_logprobs(narrow_logprobs(table, most).tobytes(), most))
        for entry, whole in zip(cut, unpack_logprobs(table.tobytes(), 7), strict=True):
            assert entry[:2] == whole[:2]
            assert (entry.ids, entry.logprobs) == (whole.ids[:most], whole.logprobs[:most])


def test_a_token_that_nothing_comes_before_has_no_log_prob():
    (entry,) = unpack_logprobs(no_logprob(3), 3)
    assert (entry.rank, entry.ids, entry.logprobs) == (0, [], [])


def test_json_gets_a_number_where_a_token_is_impossible():
    assert json_logprob(float("-inf")) == json_logprob(float("nan")) == -9999.0
    assert json_logprob(-3.5) == -3.5
