"""A stage's span store: in order, published when spans change, and bounded whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.control import RequestSpan
from pipeinfer.observe.spans import MAX_EVENTS, SpanStore


def book(ended: list[RequestSpan], most: int = 100) -> SpanStore:
    return SpanStore("engine-0-0", ended.append, most)


def test_a_passage_is_told_while_it_goes_on_and_once_when_it_is_over():
    ended: list[RequestSpan] = []
    one = book(ended)
    assert one.begin("a", 1.0, "00-t-s-01", 1) and not one.begin("a", 9.0)
    one.mark("a", 2.0, "admitted", slot=3)
    one.amend("a", "admitted", cached_tokens=7)
    one.amend("a", "never", x=1)
    (told,) = one.changes(10)
    assert (told.began, told.ended, told.trace) == (1.0, 0.0, "00-t-s-01")
    assert told.moments[0].values == {"slot": 3, "cached_tokens": 7}
    assert one.changes(10) == []
    one.mark("a", 3.0, "released")
    one.end("a", 4.0, "stop")
    one.end("a", 5.0, "abort")
    one.mark("a", 6.0, "late")
    assert one.changes(10) == [] and len(ended) == 1
    assert (ended[0].ended, ended[0].outcome) == (4.0, "stop")
    assert [moment.name for moment in ended[0].moments] == ["admitted", "released"]
    assert told.moments[0].name == "admitted" and len(told.moments) == 1, "what was told stays"


def test_only_the_first_output_and_the_last_are_worth_a_look():
    one = book([])
    assert one.needing_mark("a", "stop") is None, "it has no passage"
    one.begin("a", 1.0)
    assert one.needing_mark("a", None) is one.get("a")
    one.mark_first_output("a", 2.0, "first_text", tokens=1)
    one.mark_first_output("a", 3.0, "first_text", tokens=1)
    one.mark_first_output("b", 3.0, "first_text")
    assert one.needing_mark("a", None) is None
    assert one.needing_mark("a", "stop") is one.get("a")
    (told,) = one.changes(10)
    assert [(moment.at, moment.name) for moment in told.moments] == [(2.0, "first_text")]


def test_of_too_many_moments_the_first_and_the_latest_stay():
    ended: list[RequestSpan] = []
    one = book(ended)
    one.begin("a", 0.0)
    for at in range(3 * MAX_EVENTS):
        one.mark("a", float(at), "again")
    one.end("a", 999.0)
    times = [moment.at for moment in ended[0].moments]
    assert times == [*range(MAX_EVENTS - 1), 3 * MAX_EVENTS - 1]


NAMES = st.sampled_from([f"r{n}" for n in range(12)])
ACTIONS = st.lists(st.tuples(st.sampled_from(("begin", "mark", "end", "tell")), NAMES), max_size=80)


@given(ACTIONS)
def test_every_passage_ends_at_most_once_and_none_is_kept_beyond_the_bound(actions):
    """Beside a model without bounds: the book has the newest five of its open requests at most."""
    ended: list[RequestSpan] = []
    one = book(ended, most=5)
    began: dict[str, int] = {}
    for at, (action, name) in enumerate(actions):
        match action:
            case "begin":
                if one.begin(name, float(at)):
                    began.pop(name, None)
                    began[name] = at
                while len(began) > 5:
                    del began[next(iter(began))]
            case "mark":
                one.mark(name, float(at), "something")
            case "end":
                one.end(name, float(at))
                if name in began:
                    assert ended[-1].request_id == name and ended[-1].began == began.pop(name)
                    assert ended[-1].ended == at
            case "tell":
                told = one.changes(3)
                assert len(told) <= 3 and {p.request_id for p in told} <= began.keys()
        assert {name for name in began if name in one} == began.keys() and len(one) == len(began)
    assert len({(passage.request_id, passage.began) for passage in ended}) == len(ended)
    for passage in ended:
        times = [passage.began, *(moment.at for moment in passage.moments), passage.ended]
        assert times == sorted(times)
