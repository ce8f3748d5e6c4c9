"""Adapters that come and go: what is remembered is bounded, and all come to know the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.gateway.requests import AdapterRegistry
from pipeinfer.messages import REMEMBERED_UNLOADED, AdapterChanges
from pipeinfer.params import Adapter


def adapter(name: str, content: int = 0) -> Adapter:
    return Adapter(name, f"/{name}", f"{content:02x}")


def gateways() -> list[AdapterRegistry]:
    return [AdapterRegistry(True, 8, [adapter("settings'")]) for _ in range(2)]


def test_unloaded_names_are_forgotten_and_do_not_come_back() -> None:
    """Whoever was away, and remembers what was loaded then, hears that it was unloaded since."""
    first, second = gateways()
    tokenizer = AdapterChanges()
    first.change("settings'", None, 0)
    second.adopt(first.changes)
    for number in range(100):
        asked, other = (first, second) if number % 2 else (second, first)
        asked.change(f"user-{number}", adapter(f"user-{number}"), number % 2)
        other.adopt(asked.changes)
        tokenizer = tokenizer.updated(asked.changes)
        if number == 50:
            long_ago = tokenizer
        other.change(f"user-{number}", None, 1 - number % 2)
        asked.adopt(other.changes)
        tokenizer = tokenizer.updated(other.changes)
        assert first.names == second.names == ()
        assert first.changes == second.changes == tokenizer
        assert len(tokenizer.states) <= REMEMBERED_UNLOADED + 1
    [again, _] = gateways()
    assert again.adopt(long_ago) and again.names == ("user-50",)
    assert again.adopt(tokenizer) and again.names == ()
    assert not again.adopt(long_ago) and again.names == ()
    assert tokenizer.updated(long_ago) == tokenizer
    again.change("user-50", adapter("user-50", 1), 0)
    assert first.adopt(again.changes) and first.names == ("user-50",), (
        "later than what is forgotten"
    )


CHANGE = st.tuples(st.just("change"), st.integers(0, 2), st.integers(0, 30), st.booleans())
TELL = st.tuples(st.just("tell"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 5))


@given(st.lists(CHANGE | TELL, max_size=80))
def test_gateways_agree_whatever_was_said_late_or_never(steps: list) -> None:
    """Each is asked for changes of its own; what it says comes late, again, or never."""
    all_gateways = [AdapterRegistry(True, 8, [adapter("0")]) for _ in range(3)]
    said: list[list[AdapterChanges]] = [[], [], []]
    for kind, index, number, rest in steps:
        if kind == "change":
            name = str(number)
            all_gateways[index].change(name, adapter(name, index) if rest else None, index)
            said[index].append(all_gateways[index].changes)
        elif said[index]:
            all_gateways[number].adopt(said[index][-1 - rest % len(said[index])])
    for one in all_gateways * 3:
        for other in all_gateways:
            one.adopt(other.changes)
    states = [{s.name: s for s in one.changes.states} for one in all_gateways]
    assert states[0] == states[1] == states[2]
    contents = [{one.name: one for one in registry} for registry in all_gateways]
    assert contents[0] == contents[1] == contents[2]
    assert len({one.changes.forgotten for one in all_gateways}) == 1
    unloaded = [s for s in states[0].values() if s.adapter is None and not s.configured]
    assert len(unloaded) <= REMEMBERED_UNLOADED
    for one in all_gateways:
        assert not any(one.adopt(other.changes) for other in all_gateways)
