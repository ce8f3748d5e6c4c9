"""The replay tool's judgement: what is a difference, where it is, what may differ."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest

from pipeinfer import core, messages
from pipeinfer.core import Send, StepDone
from pipeinfer.messages import Abort, Plan, Result, Text, TextRow, TokenRow, Tokens
from pipeinfer.replay.serve import rewritten
from pipeinfer.replay.traces import (
    IGNORED_FIELDS,
    TraceEntry,
    TraceExchange,
    canonical_changes,
    first_difference,
    first_mismatch,
    ignored_fields,
)
from pipeinfer.wire import pack


def result(**fields) -> Result:
    base = Result(1, 2, pack([3]), pack([0]), pack([4]), pack([1]), pack([9]), b"", 5, 6, 7)
    return type(base)(*(fields.get(n, getattr(base, n)) for n in base.__struct_fields__))


def entry(seq: int, message, direction="out", channel="tokens", peer="detokenizer-0") -> TraceEntry:
    return TraceEntry(seq, 0.5, direction, channel, peer, 0, 0.0, message, 1)


def test_difference_is_named_down_to_the_token():
    one = Tokens((TokenRow("a", 0, pack([1, 2])), TokenRow("b", 4, pack([7, 8, 9]))))
    other = Tokens((TokenRow("a", 0, pack([1, 2])), TokenRow("b", 4, pack([7, 0, 9]))))
    assert first_mismatch(one, other) == ("rows[1].ids[1]", 8, 0)
    assert first_mismatch(one, one) is None


def test_what_masks_cost_may_differ_in_a_replay_and_what_fails_may_not():
    """A slow machine counts earlier, and rows that share a lexer pay in the order of threads."""
    one = StepDone(1, 2, pack([1]), pack([9]), 0.5)
    costly = msgspec.structs.replace(one, mask_units={0: 5_000}, seconds=0.1)
    assert first_mismatch(one, costly, ignored_fields) is None
    failed = msgspec.structs.replace(one, refused={0: "the grammar allows no token"})
    assert first_mismatch(one, failed, ignored_fields) is not None


@pytest.mark.parametrize(
    ("recorded", "replayed", "field", "values"),
    [
        (pack([1, 2, 3]), pack([1, 2]), "token_ids[2]", (3, "(missing)")),
        (pack([1]), pack([1, 5]), "token_ids[1]", ("(missing)", 5)),
        (pack([-1]), pack([1]), "token_ids[0]", (-1, 1)),
    ],
)
def test_missing_and_surplus_tokens_are_differences(recorded, replayed, field, values):
    found = first_mismatch(result(token_ids=recorded), result(token_ids=replayed))
    assert found == (field, *values)


def test_first_field_that_differs_is_the_one_named():
    assert first_mismatch(result(), result(free=1, digest=2)) == ("free", 5, 1)


@pytest.mark.parametrize(("a", "b"), [(None, ""), (1, 2), ("1", 1)])
def test_values_of_different_types_differ(a, b):
    row = TextRow("r", 1, "t", 0, 0, b"", stop_reason=a)
    other = TextRow("r", 1, "t", 0, 0, b"", stop_reason=b)
    assert first_mismatch(Text((row,)), Text((other,))) == ("rows[0].stop_reason", a, b)


def test_what_may_differ_does_not_count():
    one, other = (StepDone(1, 2, pack([1]), pack([9]), seconds) for seconds in (0.25, 9.0))
    assert first_mismatch(one, other) is None


def test_table_of_what_may_differ_is_what_the_protocol_says():
    """Each field that is marked in the protocol stands in the table, under its message."""
    marked: dict[str, set[str]] = {}
    for module in (messages, core):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ != module.__name__:
                continue
            found = re.findall(
                r"^    (\w+): .*# differs between a run", inspect.getsource(kind), re.M
            )
            if found:
                marked[name] = set(found)
    assert marked  # the remark has not been renamed
    assert all(fields <= ignored_fields(name) for name, fields in marked.items())
    kinds = {**vars(messages), **vars(core)}
    for name, fields in IGNORED_FIELDS.items():
        assert fields <= set(kinds[name].__struct_fields__)


def exchange(*outputs: TraceEntry) -> TraceExchange:
    return TraceExchange(entry(1, Abort("r", 1), "in"), list(outputs))


def test_output_too_many_and_one_too_few_are_found():
    sends = [Send("tokens", "detokenizer-0", Abort("r", 1))]
    recorded = entry(2, Abort("r", 1))
    assert first_difference(exchange(recorded), sends, ignored_fields) is None
    surplus = first_difference(exchange(), sends, ignored_fields)
    assert (surplus.seq, surplus.field, surplus.recorded) == (1, "", "(missing)")
    lost = first_difference(exchange(recorded, entry(3, Abort("q", 1))), sends, ignored_fields)
    assert (lost.seq, lost.replayed) == (3, "(missing)")
    assert lost.recorded == {
        "Abort": {"request_id": "q", "attempt": 1, "reason": "client", "group": -1}
    }


def test_message_to_somebody_else_is_a_difference():
    sends = [Send("tokens", "detokenizer-1", Abort("r", 1))]
    found = first_difference(exchange(entry(2, Abort("r", 1))), sends, ignored_fields)
    assert (found.field, found.recorded, found.replayed) == ("to", "detokenizer-0", "detokenizer-1")


def test_outputs_missing_where_the_recording_broke_off_are_no_difference():
    sends = [Send("tokens", "detokenizer-0", Abort("r", 1))]
    assert first_difference(exchange(), sends, ignored_fields, tail=True) is None


def test_two_runs_of_the_same_requests_become_equal_under_plain_names():
    def run(first: str, second: str, epoch: int):
        changes = canonical_changes()
        plan = Plan(epoch, 0, (), (), b"", b"")
        rows = Tokens((TokenRow(second, 0, b""), TokenRow(first, 0, b"")))
        return [rewritten(m, changes) for m in (Abort(first, 1), plan, rows)]

    assert run("x1", "x2", 10**18) == run("y7", "y8", 3)
    assert run("x1", "x2", 5) != run("x2", "x2", 5)


def test_rewriting_leaves_alone_what_it_need_not_touch():
    message = Tokens((TokenRow("a", 0, b""),))
    assert rewritten(message, {"epoch": lambda _: 1}) is message
