"""What cores share: a roll call believes whole answers only; a plan counts once, in its turn; a
table of what is recent forgets by age and by size; heartbeats are bounded; a fair queue lets every
client have its turn; a histogram comes out of a heartbeat as it went in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core import (
    ANY_PLAN,
    HEARTBEAT_SECONDS,
    MAX_HEARTBEAT_RATE,
    MAX_STALE,
    RECOVER_RETRY_SECONDS,
    REQUEST_SECONDS,
    SLICES,
    Deadlines,
    FairQueue,
    Histogram,
    PlanFilter,
    RecentTable,
    RollCall,
    Send,
    block_hashes,
    bracketed_answer,
    heartbeat_period,
    histogram_names,
    read_histogram,
    remaining_decodes,
    silence_limit,
    stage_id,
    stage_number,
)
from pipeinfer.messages import Done, Recover, Recovered
from pipeinfer.wire import pack

LOST = st.lists(st.booleans(), max_size=30)


@given(lost=LOST, lost_again=st.lists(st.integers(0, 30), max_size=6), amid=st.booleans())
def test_each_plan_counts_once_and_in_turn_whatever_is_lost_and_published_again(
    lost, lost_again, amid
):
    """Whoever sees a gap has all from there on published again, of which some are lost, too."""
    count, plans, counted = len(lost), PlanFilter(ANY_PLAN if amid else 0), list[int]()
    first = next((n for n, gone in enumerate(lost) if not gone), count) if amid else 0
    coming = deque(n for n, gone in enumerate(lost) if not gone)
    losses = iter(lost_again)
    while True:
        if not coming:
            if plans.expected in (count, ANY_PLAN):
                break
            coming.extend(range(max(plans.expected, 0), count))
        number = coming.popleft()
        order = plans.take(number)
        assert order == ("next" if number == first + len(counted) else
                         "repeated" if number < first + len(counted) else "gap")  # fmt: skip
        if order == "next":
            counted.append(number)
        elif order == "gap":
            gone = next(losses, -1)
            coming.extend(n for n in range(plans.expected, count) if n != gone)
    assert counted == list(range(first, count))


ME, INCARNATION = "scheduler-0", 40
QUESTION = Recover(ME, INCARNATION)
OPENING, END = (
    [Recovered(peer, INCARNATION, opening=opening) for peer in ("a", "b")]
    for opening in (True, False)
)


def asked(*peers: str) -> list[Send]:
    return [Send("recovery", peer, QUESTION) for peer in peers]


def test_who_has_not_answered_is_asked_again_after_a_while():
    calls = RollCall(ME, INCARNATION, ["a", "b"])
    assert calls.ask(5.0) == asked("a", "b")
    assert calls.ask(5.0 + RECOVER_RETRY_SECONDS / 2) == []
    assert not calls.on_recovered(OPENING[0]) and not calls.on_recovered(END[0])
    assert calls.missing == ["b"] and not calls.complete
    assert calls.ask(5.0 + RECOVER_RETRY_SECONDS) == asked("b")
    assert calls.ask(5.0 + 1.5 * RECOVER_RETRY_SECONDS) == []
    assert not calls.on_recovered(OPENING[1])
    assert calls.ask(5.0 + 2 * RECOVER_RETRY_SECONDS) == asked("b"), "it has not told all"
    assert calls.on_recovered(END[1])
    assert calls.complete and calls.missing == []
    assert calls.ask(100.0) == []


def test_an_answer_counts_once_and_whole_and_to_this_question():
    calls = RollCall(ME, INCARNATION, ["a"])
    assert not calls.on_recovered(END[0]), "what came before it was lost"
    assert not calls.on_recovered(Recovered("a", INCARNATION - 1, opening=True))
    assert not calls.on_recovered(END[0])
    assert not calls.on_recovered(OPENING[1]) and not calls.on_recovered(END[1]), "nobody asked it"
    assert not calls.on_recovered(OPENING[0])
    assert not calls.on_recovered(Recovered("a", INCARNATION - 1))
    assert not calls.complete
    assert calls.on_recovered(END[0])
    assert not calls.on_recovered(OPENING[0]) and not calls.on_recovered(END[0])
    assert calls.complete


def test_an_answer_has_begun_with_its_opening_and_not_before():
    calls = RollCall(ME, INCARNATION, ["a", "b"])
    calls.on_recovered(Recovered("a", INCARNATION - 1, opening=True))
    assert not calls.has_begun("a") and calls.has_begun("who is not asked")
    calls.on_recovered(OPENING[0])
    assert calls.has_begun("a") and not calls.has_begun("b")
    calls.on_recovered(END[0])
    assert calls.has_begun("a")


def test_without_peers_all_is_known():
    calls = RollCall(ME, INCARNATION, [])
    assert calls.complete and calls.ask(0.0) == []


def test_an_answer_stands_between_brackets():
    known = Send("recovery", ME, Done(("r",)))
    first, told, last = bracketed_answer("a", QUESTION, [known])
    assert (first, last) == tuple(Send("recovery", ME, bracket[0]) for bracket in (OPENING, END))
    assert told is known


@pytest.mark.parametrize(
    ("stage", "found"),
    [
        ("scheduler-2", 2),
        ("scheduler-0", 0),
        ("scheduler-123456789", 123456789),
        ("scheduler-1234567890", None),
        ("scheduler-", None),
        ("scheduler", None),
        ("scheduler--1", None),
        ("scheduler-1-0", None),
        ("scheduler-²", None),
        ("gateway-2", None),
    ],
)
def test_the_number_in_a_stages_name(stage, found):
    assert stage_number(stage, "scheduler") == found


@pytest.mark.parametrize("name", ["gateway", "tokenizer", "detokenizer", "scheduler"])
def test_a_stages_id_and_its_number_are_inverse(name):
    assert stage_id(name, 12) == f"{name}-12"
    assert stage_number(stage_id(name, 12), name) == 12


def test_a_decode_fits_while_the_token_that_it_samples_does():
    computed = np.arange(6, dtype=np.int32)
    left = remaining_decodes(computed, np.full(6, 4, dtype=np.int32))
    assert left.dtype == np.int32
    assert (left > 0).tolist() == [n + 2 <= 4 for n in computed.tolist()]
    assert [remaining_decodes(n, 4) for n in computed.tolist()] == left.tolist()


SECONDS, MOST = 60.0, 800


@given(
    st.lists(st.integers(0, 1), max_size=12),
    st.lists(st.integers(0, 1), max_size=12),
    st.integers(1, 4),
    st.sampled_from(["", "salt"]),
)
def test_block_hashes_are_equal_as_far_as_prompts_and_salts_are(one, other, size, salt):
    hashes = block_hashes(pack(one), size, "")
    others = block_hashes(pack(other), size, salt)
    assert len(hashes) == len(one) // size
    for count, (a, b) in enumerate(zip(hashes, others, strict=False), start=1):
        assert (a == b) == (not salt and one[: count * size] == other[: count * size])
    assert len(set(hashes)) == len(hashes)


NAMES = st.sampled_from("abcdefgh")
TIMES = st.one_of(st.integers(0, 40).map(float), st.just(inf))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), NAMES, TIMES),
            st.tuples(st.just("remove"), NAMES, st.none()),
            st.tuples(st.just("take"), st.integers(0, 45), st.none()),
        ),
        max_size=300,
    )
)
def test_deadlines_are_taken_as_from_a_dict(steps):
    deadlines, known = Deadlines(), dict[str, float]()
    for kind, what, when in steps:
        if kind == "set":
            deadlines.set(what, when)
            known[what] = when
        elif kind == "remove":
            deadlines.remove(what)
            known.pop(what, None)
        else:
            due = sorted((when, name) for name, when in known.items() if when <= what)
            assert list(deadlines.take_due(what)) == [name for _, name in due]
            known = {name: when for name, when in known.items() if when > what}
        assert len(deadlines) == sum(when < inf for when in known.values())
        assert len(deadlines._heap) <= 2 * len(deadlines) + MAX_STALE + 1


def test_a_deadline_that_is_set_again_and_again_takes_no_more_memory():
    deadlines = Deadlines()
    for number in range(10 * MAX_STALE):
        deadlines.set("a", float(number))
        assert len(deadlines) == 1 and len(deadlines._heap) <= MAX_STALE + 3
    assert list(deadlines.take_due(0.5 * MAX_STALE)) == []
    assert list(deadlines.take_due(10.0 * MAX_STALE)) == ["a"]


def names(recent: RecentTable[int]) -> list[str]:
    return [name for name, _ in recent.items()]


def test_what_came_within_the_time_is_there_and_the_rest_goes_soon_after():
    recent = RecentTable[int](SECONDS, MOST)
    for second in range(1000):
        recent.put(f"at {second}", second, float(second))
        for age in range(min(second + 1, int(SECONDS))):
            assert recent.get(f"at {second - age}") == second - age
        assert len(recent) <= SECONDS * (1 + 1 / SLICES) + 2
    assert "at 100" not in recent and recent.get("at 100") is None


def test_of_many_the_latest_are_there_and_never_more():
    recent = RecentTable[int](SECONDS, MOST)
    for number in range(5 * MOST):
        recent.put(str(number), number, number * 1e-3)
        assert len(recent) <= MOST
        least = min(number + 1, MOST - MOST // SLICES)
        assert names(recent)[-least:] == [str(n) for n in range(number + 1 - least, number + 1)]


def test_few_and_then_many_are_never_more_either():
    recent = RecentTable[int](SECONDS, MOST)
    for number in range(3 * MOST):
        recent.put(str(number), number, number * 8.0 if number < SLICES else 59.0 + number * 1e-3)
        assert len(recent) <= MOST
    assert len(recent) >= MOST - MOST // SLICES


def test_what_is_put_again_is_there_once_as_the_latest():
    recent = RecentTable[int](SECONDS, MOST)
    recent.put("a", 1, 0.0)
    recent.put("b", 2, 10.0)
    recent.put("a", 3, 50.0)
    assert list(recent.items()) == [("b", 2), ("a", 3)] and len(recent) == 2
    recent.put("c", 4, 100.0)
    assert list(recent.items()) == [("a", 3), ("c", 4)], "b is 90 seconds old"


def test_after_a_pause_nothing_old_is_left():
    recent = RecentTable[int](SECONDS, MOST)
    for number in range(MOST):
        recent.put(str(number), number, 1.0)
    recent.put("later", 0, 1.0 + SECONDS)
    assert names(recent) == ["later"]


@given(st.integers(1, 100_000))
def test_all_heartbeats_together_are_bounded_and_silence_is_several_of_them(stages):
    assert stages <= MAX_HEARTBEAT_RATE * heartbeat_period(stages) * (1 + 1e-9)
    assert heartbeat_period(stages) >= HEARTBEAT_SECONDS
    assert silence_limit(stages) >= 3 * heartbeat_period(stages)


def test_a_small_deployment_hears_everybody_twice_a_second():
    assert (
        heartbeat_period(50) == 0.5 and silence_limit(50) == 5.0 and silence_limit(50, 3.0) == 3.0
    )
    assert heartbeat_period(256 * 9 + 3) < 24 and silence_limit(256, 3.0) < 8


def taken(queue: FairQueue[str], count: int) -> list[str]:
    return [queue.take() for _ in range(count)]


def test_what_one_client_sends_is_taken_in_its_order() -> None:
    queue = FairQueue[str]()
    for weight, item in ((9, "a"), (1, "b"), (5, "c")):
        queue.put("client", weight, item)
    assert (len(queue), taken(queue, 3), len(queue)) == (3, ["a", "b", "c"], 0)
    with pytest.raises(IndexError):
        queue.take()


def test_clients_take_turns_however_much_one_sends() -> None:
    queue = FairQueue[str]()
    for _ in range(100):
        queue.put("many", 1, "many")
    queue.put("few", 1, "few")
    assert "few" in taken(queue, 2)


def test_hosts_take_turns_however_many_connections_one_opens() -> None:
    queue = FairQueue[str]()
    for n in range(100):
        queue.put(f"hostile/{n}", 1, "hostile")
    queue.put("honest/1", 1, "honest")
    assert "honest" in taken(queue, 2)


def test_connections_of_a_host_take_turns() -> None:
    queue = FairQueue[str]()
    for _ in range(100):
        queue.put("proxy/hostile", 1, "hostile")
    queue.put("proxy/honest", 1, "honest")
    assert "honest" in taken(queue, 2)


def test_a_new_name_is_no_advantage() -> None:
    """A client that was here before waits no longer than one that never was."""
    queue = FairQueue[str]()
    for _ in range(50):
        queue.put("host/known", 1, "known")
        queue.take()
    queue.put("host/known", 1, "known")
    for n in range(20):
        queue.put(f"host/new{n}", 1, "new")
    assert queue.take() == "known"


def test_light_ones_of_ever_new_clients_overtake_a_heavy_one_by_its_own_weight_at_most() -> None:
    queue = FairQueue[str]()
    queue.put("host/heavy", 100, "heavy")
    overtook = 0
    while True:
        queue.put(f"host/{overtook}", 10, "light")
        if queue.take() == "heavy":
            break
        overtook += 1
    assert overtook <= 10


@dataclass(eq=False)
class Waiting:
    """An item of the model. `before`: weight that waited of its own client when it came, itself
    included; `overtook`: weight of each other client that came later and was taken before it."""

    client: str
    before: int
    weight: int
    overtook: dict[str, int] = field(default_factory=lambda: defaultdict(int))


PUTS = st.tuples(st.sampled_from("abcd"), st.integers(1, 40))


@pytest.mark.parametrize("form", ["{}", "{}/1", "host/{}"])
@given(script=st.lists(st.none() | PUTS, max_size=80))
def test_of_no_other_client_more_overtakes_an_item_than_waited_of_its_own(
    form: str, script: list[tuple[str, int] | None]
) -> None:
    queue, waiting = FairQueue[Waiting](), list[Waiting]()  # the latter in the order of coming
    for put in [*script, *[None] * len(script)]:
        if put is not None:
            client, weight = put
            before = sum(other.weight for other in waiting if other.client == client)
            waiting.append(Waiting(client, before + weight, weight))
            queue.put(form.format(client), weight, waiting[-1])
        elif waiting:
            item = queue.take()
            earlier = waiting[: waiting.index(item)]
            assert item.client not in [other.client for other in earlier], "in its client's order"
            for other in earlier:
                other.overtook[item.client] += item.weight
                assert other.overtook[item.client] <= other.before
            waiting.remove(item)
        assert len(queue) == len(waiting)


@given(st.lists(st.integers(1, 40), min_size=60, max_size=60))
def test_two_that_always_wait_are_given_about_the_same(weights: list[int]) -> None:
    queue, given_to = FairQueue[tuple[str, int]](), {"a": 0, "b": 0}
    for n, weight in enumerate(weights):
        client = "ab"[n % 2]
        queue.put(client, weight, (client, weight))
    left = {"a": 30, "b": 30}
    while all(left.values()):
        client, weight = queue.take()
        given_to[client] += weight
        left[client] -= 1
        assert abs(given_to["a"] - given_to["b"]) <= 2 * max(weights)


@given(st.lists(st.sampled_from(REQUEST_SECONDS) | st.floats(0, 10_000)))
def test_what_a_heartbeat_carries_is_what_was_observed(seconds: list[float]) -> None:
    made = Histogram()
    for one in seconds:
        made.observe(one)
    said = made.statistics("queue_seconds")
    assert tuple(said) == histogram_names("queue_seconds")
    at_most, total = read_histogram(said, "queue_seconds") or ([], -1.0)
    assert at_most == list(made.at_most()) and total == made.total
    assert at_most[-1] == (float("inf"), len(seconds))
    assert all(count == sum(one <= bound for one in seconds) for bound, count in at_most)


def test_who_says_nothing_of_it_has_no_histogram() -> None:
    assert read_histogram({"uptime_seconds": 1.0}, "queue") is None
