"""The handshake that begins an epoch, word by word: who counts, and what is said again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pipeinfer.messages import PROTOCOL, BeginEpoch, Hello, Ready
from pipeinfer.scheduler.epochs import AGREED, KILL_RETRY_SECONDS, Epochs

FIRST = 40


def hello(rank: int = 0, incarnation: int = 100, **other: Any) -> Hello:
    said = Hello(PROTOCOL, "0.1", rank, 2, incarnation + rank, "m", 4, 50, 8, 200, "torch")
    return replace(said, **other)


def begun(tp: int = 2) -> Epochs:
    """Everybody said hello, nobody is ready yet."""
    epochs = Epochs(tp, FIRST)
    for rank in range(tp):
        assert not epochs.hello(hello(rank))
    assert epochs.begin(1.0) == BeginEpoch(FIRST + 1, tuple(100 + rank for rank in range(tp)))
    return epochs


def running(tp: int = 2) -> Epochs:
    epochs = begun(tp)
    for rank in range(tp - 1):
        assert not epochs.ready(Ready(FIRST + 1, rank, 100 + rank))
    assert epochs.ready(Ready(FIRST + 1, tp - 1, 100 + tp - 1))
    return epochs


def test_until_all_ranks_are_there_those_of_an_earlier_scheduler_are_asked_for_a_hello():
    epochs = Epochs(2, FIRST)
    assert epochs.begin(0.0) == BeginEpoch(FIRST, ())
    epochs.hello(hello(1))
    assert epochs.begin(0.0) == BeginEpoch(FIRST, ())
    assert not epochs.running


def test_begin_is_said_again_with_the_same_number_until_all_are_ready():
    epochs = begun()
    assert epochs.begin(2.0) == epochs.begin(3.0) == BeginEpoch(FIRST + 1, (100, 101))
    assert epochs.reason == f"epoch {FIRST + 1} begins"
    epochs = running()
    assert epochs.running and epochs.reason == "" and epochs.begin(4.0) is None


@pytest.mark.parametrize(
    "answer",
    [
        Ready(FIRST, 1, 101),  # of the epoch before
        Ready(FIRST + 1, 1, 99),  # of the process before
        Ready(FIRST + 1, 2, 101),  # of a rank that there is not
    ],
)
def test_an_answer_of_another_epoch_or_process_does_not_count(answer):
    epochs = begun()
    assert not epochs.ready(Ready(FIRST + 1, 0, 100))
    assert not epochs.ready(answer)
    assert not epochs.running
    assert epochs.ready(Ready(FIRST + 1, 1, 101))


def test_an_answer_before_the_question_or_after_the_beginning_does_not_count():
    epochs = Epochs(1, FIRST)
    assert not epochs.ready(Ready(FIRST, 0, 100))
    epochs.hello(hello())
    assert not epochs.ready(Ready(FIRST, 0, 100))
    assert not epochs.running
    assert not running(1).ready(Ready(FIRST + 1, 0, 100))


def test_a_hello_that_came_before_begin_was_heard_changes_nothing():
    epochs = running()
    assert not epochs.hello(hello(1))
    assert epochs.running


def test_another_process_ends_the_epoch_and_the_next_one_says_why():
    epochs = running()
    assert epochs.hello(hello(1, 500))
    assert not epochs.running
    assert epochs.reason == "engine rank 1 was started again"
    assert epochs.begin(2.0) == BeginEpoch(FIRST + 2, (100, 501))
    assert epochs.reason == f"epoch {FIRST + 2} begins (engine rank 1 was started again)"
    assert not epochs.ready(Ready(FIRST + 2, 0, 100)), "the other has not answered anew"
    assert epochs.ready(Ready(FIRST + 2, 1, 501))


def test_a_process_that_is_started_again_amid_the_handshake_gets_another_epoch():
    epochs = begun()
    epochs.ready(Ready(FIRST + 1, 0, 100))
    assert not epochs.hello(hello(1, 500))
    assert epochs.begin(2.0) == BeginEpoch(FIRST + 2, (100, 501))
    epochs.hello(hello(1, 500))
    assert epochs.begin(3.0) == BeginEpoch(FIRST + 2, (100, 501)), "the same process, once more"


@pytest.mark.parametrize("name", AGREED)
def test_ranks_that_differ_in_what_must_agree_never_begin(name):
    epochs = Epochs(2, FIRST)
    epochs.hello(hello(0))
    other = {"graph_sizes": (1, 2), "model": "n", "attention": "none"}.get(name, 7)
    epochs.hello(hello(1, **{name: other}))
    assert epochs.begin(0.0) is None
    assert epochs.reason.startswith(f"ranks 0 and 1 disagree on {name}: ")
    assert epochs.reason.endswith(f" and {other!r}")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, f"(pipeinfer 0.1) speaks protocol {PROTOCOL + 1}, the sched"),
        ({"rank": 2}, "rank 2 does not belong to a group of 2"),
        ({"rank": -1}, "rank -1 does not belong to a group of 2"),
    ],
)
def test_a_hello_that_cannot_be_meant_is_named(wrong, reason):
    epochs = Epochs(2, FIRST)
    assert not epochs.hello(hello(**wrong))
    assert reason in epochs.reason
    epochs.hello(hello(1))
    assert epochs.begin(0.0) == BeginEpoch(FIRST, ()), "it is none of the ranks"


def test_a_rank_is_lost_when_that_process_or_an_older_one_said_hello():
    epochs = begun()
    assert epochs.has_joined(1, 102)
    assert epochs.has_joined(1, 101)
    assert not epochs.has_joined(1, 100), "of the process before"
    assert not epochs.has_joined(2, 500)


def test_ranks_that_were_given_up_are_not_heard_and_complained_of_while_they_stay():
    epochs = running()
    epochs.restart_ranks("no result", 10.0)
    assert not epochs.running and epochs.reason == "no result"
    condemned = epochs.fenced
    assert condemned.to_kill == (100, 101)
    assert not condemned.take_due(10.0 + KILL_RETRY_SECONDS - 0.01)
    assert condemned.take_due(10.0 + KILL_RETRY_SECONDS)
    assert not condemned.take_due(10.0 + KILL_RETRY_SECONDS), "only just now"
    assert not epochs.hello(hello(0))
    assert epochs.begin(11.0) == BeginEpoch(FIRST + 1, ()), "all of them must say hello again"
    epochs.hello(hello(0, 500))
    assert condemned.to_kill == (101,), "another process is in its place"
    condemned.on_ended(1, 100)
    assert condemned.to_kill == (101,)
    condemned.on_ended(1, 101)
    assert condemned.to_kill == () and not condemned.take_due(99.0)
    epochs.hello(hello(1, 500))
    assert epochs.begin(11.0) == BeginEpoch(FIRST + 2, (500, 501))


def test_processes_that_began_after_a_death_or_said_nothing_yet():
    epochs = Epochs(2, FIRST)
    epochs.hello(hello(0, 700))
    epochs.restart_ranks("rank 1 has ended", 1.0, alive=[(1, 650)], until=600)
    assert epochs.fenced.to_kill == ()
    epochs.hello(hello(1, 700))
    assert epochs.begin(1.0) == BeginEpoch(FIRST + 1, (700, 701)), "both have begun since"
    epochs.restart_ranks("no result", 2.0, alive=[(1, 701)])
    assert epochs.fenced.to_kill == (700, 701)


def test_a_single_rank_that_was_only_slow_goes_on():
    epochs = running(1)
    epochs.restart_ranks("no result", 1.0)
    assert epochs.fenced.to_kill == (100,)
    epochs.hello(hello())
    assert epochs.fenced.to_kill == ()
    assert epochs.begin(1.0) == BeginEpoch(FIRST + 2, (100,))


def test_a_hello_of_an_older_recording_stores_keys_and_values_as_its_model_has_them():
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(hello()))
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(said[:-1]), type=Hello)
    assert older == hello() and older.kv_dtype == "auto"
