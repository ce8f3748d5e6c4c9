"""What is remembered of late: for how long, and how much of it."""

from __future__ import annotations

from pipeinfer.recent import SLICES, RecentTable

SECONDS, MOST = 60.0, 800


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
