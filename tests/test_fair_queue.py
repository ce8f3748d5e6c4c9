"""Whoever else waits, and however often, a client has its turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.fair_queue import FairQueue


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
