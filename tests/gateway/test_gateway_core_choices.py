"""Several choices in the gateway's core: one Submit, and a record of each."""

from __future__ import annotations

from msgspec import structs
from test_gateway_core import Harness, row

from pipeinfer.core import Unsent
from pipeinfer.gateway.ledger import Call, Failed, Hangup, OutputDelta, Started
from pipeinfer.messages import Abort, Accepted, Submit, Text
from pipeinfer.params import SamplingParams

THREE = SamplingParams(seed=5, n=3)
NAMES = ["r", "r/1", "r/2"]


def test_choices_are_one_submit_and_told_again_as_one() -> None:
    harness = Harness()
    (submit,) = harness.upstream(Call("r", THREE, text="x"))
    assert isinstance(submit, Submit)
    assert (submit.choices, submit.seed, submit.params.n) == ((0, 1, 2), 5, 1)
    assert harness.core.stats()["waiting"] == 3
    started = harness.local(Accepted("r", 1, 0, 7, choices=(0, 1, 2)))
    assert [s.request_id for s in started if isinstance(s, Started)] == NAMES
    assert [s.prompt_tokens for s in started if isinstance(s, Started)] == [7, 0, 0]
    assert harness.upstream(Hangup("r/1")) == [Abort("r/1", 1, "client")]
    again, *ended = harness.recovered()
    assert isinstance(again, Submit) and (again.choices, again.group) == ((0, 2), 0)
    assert ended == [Abort("r/1", 1, "client")]


def test_a_prompt_is_counted_by_its_first_choice() -> None:
    harness = Harness()
    harness.do(Call("r", THREE, text="x"))
    harness.do(Accepted("r", 1, 0, 7, choices=(0, 1, 2)))
    ends: list[OutputDelta] = []
    for name in NAMES:
        last = row("a", 0, 0, finish="length", output_tokens=1, cached_tokens=4)
        (delta,) = harness.local(Text((structs.replace(last, request_id=name),)))
        assert isinstance(delta, OutputDelta)
        ends.append(delta)
    counted = [(end.prompt_tokens, end.output_tokens, end.cached_tokens) for end in ends]
    assert counted == [(7, 1, 4), (0, 1, 0), (0, 1, 0)]
    assert harness.core.idle()


def test_each_choice_fails_where_none_is_taken() -> None:
    failed = Harness(ready=False).local(Call("r", THREE, text="x"))
    assert [one.request_id for one in failed if isinstance(one, Failed)] == NAMES
    full = Harness(max_queue=2).local(Call("r", THREE, text="x"))
    assert [(f.request_id, f.status) for f in full if isinstance(f, Failed)] == [
        (name, 429) for name in NAMES
    ]


def test_what_cannot_be_sent_fails_all_choices_that_live() -> None:
    harness = Harness()
    harness.do(Call("r", THREE, text="x"))
    harness.do(Hangup("r/1"))
    failed = harness.local(Unsent("r", 1, "too odd"))
    assert [one.request_id for one in failed if isinstance(one, Failed)] == ["r", "r/2"]
    assert harness.core.idle()
