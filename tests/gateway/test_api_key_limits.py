"""Limits of a key, against models that know every request and token by its time."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.gateway.api_keys import KeyLimits, KeyUsage, TokenBucket

steps = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(1, 12)), max_size=60
)  # (milliseconds since the last, amount)


class ExactBucket:
    """The same in fractions, refilled millisecond by millisecond."""

    def __init__(self, a_minute: int) -> None:
        self.size, self.level = Fraction(a_minute), Fraction(a_minute)

    def pass_time(self, ms: int) -> None:
        self.level = min(self.size, self.level + self.size * ms / 60_000)


@given(st.integers(1, 100), steps)
def test_a_bucket_is_what_its_definition_says(a_minute: int, taken: list[tuple[int, int]]) -> None:
    now, bucket, exact = 1000.0, TokenBucket(a_minute, 1000.0), ExactBucket(a_minute)
    for ms, amount in taken:
        now += ms / 1000
        exact.pass_time(ms)
        assert abs(bucket.level(now) - exact.level) < 1e-6
        bucket.take(amount, now)
        exact.level -= amount
    wait = bucket.seconds_until(1, now)
    assert bucket.level(now + wait) >= 1 - 1e-5, "after that wait there is one"
    assert wait == 0 or bucket.level(now + wait * 0.9) < 1


@given(st.integers(1, 20), st.integers(0, 5), steps)
def test_no_minute_has_more_requests_than_two_buckets_and_no_moment_more_than_may_run(
    a_minute: int, concurrent: int, asked: list[tuple[int, int]]
) -> None:
    """Each request asks for some prompts and ends when the next comes."""
    now, account = 0.0, KeyUsage(KeyLimits(concurrent, a_minute, 0), 0.0)
    let_in: list[tuple[float, int]] = []
    for ms, prompts in asked:
        now += ms / 1000
        before = account.remaining(now)[0]
        excess = account.admit(now)
        if excess is not None:
            prompts = 1  # no more is known of it yet
        elif prompts > 1:
            excess = account.admit_choices(prompts, prompts, now)
            if excess is not None:
                account.release()
        if excess is None:
            let_in.append((now, prompts))
            assert account.running == prompts
            assert not concurrent or prompts <= concurrent
            account.release(prompts)
        else:
            assert account.remaining(now)[0] == before, "what was refused cost nothing"
            if excess.wait:
                later = now + excess.wait + 1e-6
                again = KeyUsage(KeyLimits(0, a_minute, 0), 0.0)
                for at, count in let_in:
                    again.admit(at)
                    again.admit_choices(count, count, at)
                assert again.admit(later) is None
                assert prompts == 1 or again.admit_choices(prompts, prompts, later) is None
            else:
                assert prompts > a_minute or (concurrent and prompts > concurrent)
        assert account.running == 0
        last_minute = sum(count for at, count in let_in if now - at < 60)
        assert last_minute <= 2 * a_minute, "a full bucket, and what refilled meanwhile"


@given(st.integers(1, 500), steps)
def test_tokens_are_taken_as_they_come_and_later_requests_wait(
    tokens: int, used: list[tuple[int, int]]
) -> None:
    now, account, exact = 0.0, KeyUsage(KeyLimits(0, 0, tokens), 0.0), ExactBucket(tokens)
    for ms, amount in used:
        now += ms / 1000
        exact.pass_time(ms)
        excess = account.admit(now)
        if exact.level > Fraction(1, 10**6):
            assert excess is None
            account.release()
        elif exact.level < -Fraction(1, 10**6):
            assert excess is not None and excess.wait > 0
            assert account.remaining(now) == (None, 0)
        account.use_tokens(50 * amount, now)  # of requests that run: also below zero
        exact.level -= 50 * amount
    excess = account.admit(now)
    if excess is not None:
        assert account.admit(now + excess.wait) is None


def test_concurrent_requests_make_room_when_they_end() -> None:
    account = KeyUsage(KeyLimits(concurrent=2), 0.0)
    assert account.admit(0.0) is None and account.admit(0.0) is None
    excess = account.admit(0.0)
    assert excess is not None and excess.wait == 1.0
    account.release()
    assert account.admit(0.0) is None
    excess = account.admit_choices(2, 2, 0.0)
    assert excess is not None and excess.wait == 1.0, "it could run later"
    excess = account.admit_choices(3, 3, 0.0)
    assert excess is not None and excess.wait == 0, "three prompts never can"
    assert account.running == 2


@given(st.integers(1, 50), st.integers(0, 60), st.integers(1, 50))
def test_other_limits_keep_what_was_used(before: int, used: int, after: int) -> None:
    account = KeyUsage(KeyLimits(tokens=before), 0.0)
    account.use_tokens(used, 0.0)
    account.set_limits(KeyLimits(tokens=after, requests=5), 0.0)
    assert account.remaining(0.0) == (5, max(0, after - used))
    account.set_limits(KeyLimits(), 0.0)
    assert account.remaining(0.0) == (None, None) and account.admit(0.0) is None


def test_further_prompts_wait_until_there_is_room_for_the_whole_request() -> None:
    """Ten a minute: one in six seconds. With eight used, three find two; then one is missing."""
    account = KeyUsage(KeyLimits(requests=10), 0.0)
    for _ in range(8):
        assert account.admit(0.0) is None
    assert account.admit(0.0) is None
    excess = account.admit_choices(3, 3, 0.0)
    assert excess is not None and excess.wait == pytest.approx(6.0)
    account.release()
    assert account.remaining(0.0) == (2, None), "its first has its request back"
    assert account.admit(6.0) is None and account.admit_choices(3, 3, 6.0) is None
    assert account.running == 8 + 3 and account.remaining(6.0) == (0, None)


def test_more_prompts_than_a_minute_allows_never_come() -> None:
    account = KeyUsage(KeyLimits(requests=3), 0.0)
    assert account.admit(0.0) is None
    excess = account.admit_choices(4, 4, 0.0)
    assert excess is not None and excess.wait == 0 and "4 prompts" in excess.reason
    assert account.admit(0.0) is None and account.admit_choices(3, 3, 0.0) is None


def test_a_key_whose_tokens_are_used_up_waits_for_one() -> None:
    account = KeyUsage(KeyLimits(tokens=60), 0.0)
    account.use_tokens(60, 0.0)
    excess = account.admit(0.0)
    assert excess is not None and excess.wait == pytest.approx(1.0)
    account.use_tokens(-1, 0.0)
    assert account.admit(0.0) is None
    assert account.running == 1


def test_choices_run_beside_each_other_and_cost_one_request_of_the_minutes() -> None:
    account = KeyUsage(KeyLimits(concurrent=5, requests=3), 0.0)
    assert account.admit(0.0) is None and account.admit_choices(1, 4, 0.0) is None
    assert (account.running, account.remaining(0.0)) == (4, (2, None))
    assert account.admit(0.0) is None
    excess = account.admit_choices(1, 2, 0.0)
    assert excess is not None and excess.wait == 1.0 and "5 answers" in excess.reason
    assert account.remaining(0.0) == (2, None), "what was refused cost nothing"
    account.release()
    account.release(4)
    assert account.admit(0.0) is None
    excess = account.admit_choices(1, 6, 0.0)
    assert excess is not None and excess.wait == 0 and "6 choices" in excess.reason
    account.release()
    assert account.running == 0
