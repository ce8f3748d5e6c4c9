"""How far a request has come: what is left of it, what its rows in flight will compute."""

from __future__ import annotations

import pytest

from pipeinfer.core import remaining_decodes
from pipeinfer.messages import Delivered, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.request import UNKNOWN_OUTPUT, Request, request_of
from pipeinfer.wire import logprob_bytes, pack


def request(prompt: int = 10, max_tokens: int | None = 5) -> Request:
    params = RequestParams(max_tokens=max_tokens)
    made = request_of(TokenizedRequest("r", 1, 0, 0, pack(range(prompt)), params, 0), 1, 0.0)
    made.max_total = prompt + (max_tokens or 1000)
    return made


def test_what_is_left_are_the_tokens_to_be_computed():
    one = request()
    assert one.remaining_tokens == 10 + 5
    one.admit()
    one.phase, one.computed = "running", 4
    assert one.remaining_tokens == 6 + 5
    one.computed = 11
    one.outputs.extend([1, 2])
    assert one.remaining_tokens == 0 + 3


def test_nothing_more_is_left_of_one_that_is_longer_than_it_was_taken_to_be():
    one = request(max_tokens=None)
    assert one.remaining_tokens == 10 + UNKNOWN_OUTPUT
    one.outputs.extend([1] * (UNKNOWN_OUTPUT + 7))
    one.admit()
    one.phase, one.computed = "running", one.known_len
    assert one.remaining_tokens == 0


def test_rows_in_flight_are_projected_and_projected_anew_when_one_did_less():
    one = request()
    one.admit()
    assert [one.project(4), one.project(4), one.project(4), one.project(1)] == [4, 4, 2, 1]
    assert (one.projected, one.steps_in_flight, one.counts_in_flight) == (11, 4, [4, 4, 4, 1])
    one.confirm(1)
    assert (one.computed, one.projected, one.counts_in_flight) == (1, 10, [4, 4, 1])


def test_nothing_is_projected_beyond_its_length():
    one = request(10, 2)
    one.admit()
    assert [one.project(10), one.project(1), one.project(1)] == [10, 1, 0]
    assert one.exhausted
    one.confirm(10)
    assert one.projected == 11


def test_a_request_decodes_as_often_as_its_length_allows():
    one = request(10, 4)
    one.admit()
    one.project(10)
    while not one.exhausted:
        fits = remaining_decodes(one.projected, one.max_total)
        assert fits > 0
        assert one.project(1) == 1
        assert remaining_decodes(one.projected, one.max_total) == fits - 1
    assert (one.project(1), one.projected) == (0, one.max_total - 1)
    one.confirm(10)  # the rows in flight are projected anew
    assert remaining_decodes(one.projected, one.max_total) == 0


def test_one_that_begins_again_knows_its_outputs_and_has_nothing_in_flight():
    one = request()
    one.admit()
    one.project(10)
    one.outputs.extend([1, 2])
    one.deferrals = one.cache_hit = 3
    one.admit()
    assert (one.admission, one.known_len, one.computed, one.projected) == (2, 12, 0, 0)
    assert (one.counts_in_flight, one.deferrals, one.cache_hit) == ([], 0, 0)
    assert list(one.sampled_ids) == []


@pytest.mark.parametrize(
    ("tokens", "outputs", "end"),
    [
        ([7, 3, 9], [7, 3], ("stop", 3)),
        ([7] * 9, [7] * 5, ("length", None)),
        ([7], [7], (None, None)),
    ],
)
def test_what_follows_an_end_does_not_exist(tokens, outputs, end):
    one = request()
    one.stops = frozenset([3])
    assert one.append(tokens) == end
    assert list(one.outputs) == outputs


def ahead(known: int = 6) -> Request:
    """One that has sampled a token, behind which so many ids are forced; a decode is in flight."""
    one = request(10, 50)
    one.phase = "running"
    one.admit()
    one.project(10)
    one.project(1)
    one.confirm(10)
    one.append([1, *range(2, 2 + known)])
    return one


def test_a_jump_tells_what_the_engine_lacks_and_leaves_nothing_to_compute():
    one = ahead()
    assert (one.computed, one.projected, one.num_forced_ahead) == (10, 11, 6)
    assert list(one.jump(6)) == [1, 2, 3, 4, 5, 6, 7]
    assert one.project(6) == 6
    known = one.known_len, one.projected, one.num_forced_ahead, one.prefilling
    assert known == (17, 17, 0, False)
    one.confirm(11)
    one.confirm(17)
    one.append([8])
    assert list(one.sampled_ids) == [8] and one.sampled
    assert one.admitted_len == 10


def test_a_jump_over_a_part_leaves_the_rest_known():
    one = ahead()
    assert list(one.jump(3)) == [1, 2, 3, 4]
    one.project(3)
    assert (one.projected, one.num_forced_ahead) == (14, 3)


def test_what_is_released_of_one_that_is_ahead_was_sampled():
    """What is forced and was not told is not in the engine."""
    one = ahead()
    assert list(one.sampled_ids) == [1]
    one.jump(6)
    assert list(one.sampled_ids) == []
    assert one.sampled


def test_one_that_jumped_lends_its_prompt_all_the_while():
    one = ahead()
    assert one.provides_prefix
    one.jump(6)
    one.project(6)
    assert one.provides_prefix


def test_a_jump_without_pages_is_computed_later_like_a_prompt():
    one = ahead()
    one.jump(6)
    one.project(6)
    one.confirm(11)
    one.confirm(11)
    assert (one.prefilling, one.projected, one.num_forced_ahead) == (True, 11, 6)


def request_with_logprobs(prompt: int = 4) -> Request:
    """One that wants log-probs of its output and of its prompt, without alternatives."""
    params = RequestParams(max_tokens=8, logprobs=0, prompt_logprobs=0)
    made = request_of(TokenizedRequest("r", 1, 0, 0, pack(range(prompt)), params, 0), 1, 0.0)
    made.max_total = prompt + 8
    return made


def test_what_is_cut_off_takes_its_log_probs_with_it():
    one, width = request_with_logprobs(), logprob_bytes(0)
    one.append([5, 6, 7], b"".join(bytes([n]) * width for n in (5, 6, 7)))
    one.truncate(2)
    assert list(one.outputs) == [5, 6]
    assert one.logprobs == bytes([5]) * width + bytes([6]) * width


def test_of_what_was_delivered_and_what_is_known_the_longer_log_probs_of_the_prompt_stay():
    """A detokenizer may have got less of them than another scheduler has told already."""
    one, width = request_with_logprobs(), logprob_bytes(0)
    assert one.num_prompt_logprobs == 1, "the first token has none, which is known"
    whole = bytes(width) + bytes([9]) * 2 * width
    for told in (whole, whole[: 2 * width], b""):
        one.resume(Delivered("r", 1, b"", prompt_logprobs=told))
        assert one.prompt_logprobs == whole and one.num_prompt_logprobs == 3


def test_log_probs_of_what_a_gateway_alone_knows_are_zeros_that_the_next_ones_stand_behind():
    one, width = request_with_logprobs(), logprob_bytes(0)
    one.resume(Delivered("r", 1, pack([7, 8])))
    assert one.prompt_logprobs_from == -1, "all of the prompt's came before the first token"
    one.append([9], bytes([9]) * width)
    assert one.logprobs == bytes(2 * width) + bytes([9]) * width
    assert one.prompt_logprobs == bytes(4 * width) and one.num_prompt_logprobs == 4


def test_log_probs_of_a_prompt_that_overlap_what_is_known_count_once():
    one, width = request_with_logprobs(), logprob_bytes(0)
    assert one.add_prompt_logprobs(1, bytes([1]) * 2 * width) == 2
    assert one.add_prompt_logprobs(2, bytes([2]) * 2 * width) == 1
    assert one.prompt_logprobs == bytes(width) + bytes([1]) * 2 * width + bytes([2]) * width
