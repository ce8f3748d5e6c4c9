"""A new scheduler goes on where the one before it was, from what its neighbours tell it."""

from __future__ import annotations

from math import inf

import pytest
from model_engine import ModelEngine, expected_outputs
from msgspec.structs import replace

from pipeinfer.core import LATE_WORK_SECONDS, Drain, Leave, Send, Tick
from pipeinfer.messages import (
    Abort,
    BeginEpoch,
    Delivered,
    Done,
    Ended,
    Message,
    OpenStream,
    Plan,
    PromptTokens,
    Recover,
    Recovered,
    Refused,
    Result,
    StopHit,
    TokenizedRequest,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.recovery import (
    CONTEXT_TOKENS,
    MAX_REMEMBERED,
    MAX_RETENTION_SECONDS,
    ORPHANED_SECONDS,
    REMEMBERED_SECONDS,
    RecoveryRecords,
    last_row,
)
from pipeinfer.scheduler.request import request_of
from pipeinfer.wire import pack, unpack

TOKENIZER, DETOKENIZER = "tokenizer-0", "detokenizer-0"
PROMPT = [5, 6, 7]
ME = 40  # this scheduler's incarnation


def work(name: str, max_tokens: int = 20, **fields) -> TokenizedRequest:
    """Without stop tokens, so that it runs to its length."""
    return TokenizedRequest(
        name, 1, 0, 0, pack(PROMPT), RequestParams(max_tokens=max_tokens), 0, **fields
    )


def outputs(count: int = 20) -> list[int]:
    return expected_outputs(PROMPT, count, frozenset())


class Bench:
    """A new scheduler, a model engine, and all that the detokenizer was sent."""

    def __init__(self, peers: bool = True, host_loss: float = inf) -> None:
        names = ([TOKENIZER], [DETOKENIZER]) if peers else ()
        options = SchedulerOptions("mixed", 2, 8, 16, host_loss=host_loss)
        self.core = SchedulerCore(options, 0, ME, *names)
        self.engine = ModelEngine(100, 4, 8, 16, caching=True)
        self.now = 0.0
        self.told: list[Message] = []  # on the channel tokens
        self.plans = 0

    def feed(self, event: Message) -> list[Send]:
        sends = self.core.handle(event, self.now)
        for send in sends:
            if isinstance(send.message, Plan | BeginEpoch):
                self.plans += isinstance(send.message, Plan)
                self.engine.receive(send.message)
            elif send.channel == "tokens":
                assert send.to == DETOKENIZER
                self.told.append(send.message)
        return sends

    def run(self) -> None:
        """Until the engine has nothing to say."""
        self.feed(Tick())
        while self.engine.outbox:
            self.feed(self.engine.outbox.popleft())

    def hear(self, stage: str, *told: Message) -> None:
        """A whole answer of a neighbour."""
        for message in (Recovered(stage, ME, opening=True), *told, Recovered(stage, ME)):
            self.feed(message)

    def rows(self, name: str = "r") -> list[TokenRow]:
        rows = [row for m in self.told if isinstance(m, Tokens) for row in m.rows]
        return [row for row in rows if row.request_id == name]

    def resent(self) -> list[Message]:
        """What a detokenizer that was started again is told, without the brackets around it."""
        first, *told, last = self.core.handle(Recover(DETOKENIZER, 9), self.now)
        assert first == Send("recovery", DETOKENIZER, Recovered("scheduler-0", 9, opening=True))
        assert last == Send("recovery", DETOKENIZER, Recovered("scheduler-0", 9))
        assert all((send.channel, send.to) == ("tokens", DETOKENIZER) for send in told)
        return [send.message for send in told]


def recovered(*delivered: Delivered, works: tuple[TokenizedRequest, ...] = ()) -> Bench:
    bench = Bench()
    bench.run()
    bench.hear(TOKENIZER, *works)
    bench.hear(DETOKENIZER, *delivered)
    return bench


def test_a_new_scheduler_plans_nothing_before_all_neighbours_have_told_what_they_know() -> None:
    bench = Bench()
    question = Recover("scheduler-0", ME)
    asked = [send for send in bench.feed(Tick()) if send.channel == "recovery"]
    assert asked == [Send("recovery", peer, question) for peer in (TOKENIZER, DETOKENIZER)]
    bench.run()
    bench.feed(work("r"))
    bench.hear(TOKENIZER)
    assert bench.plans == 0
    assert bench.core.state() == ("waiting", f"for what {DETOKENIZER} will tell")
    bench.now = 1.1
    assert Send("recovery", DETOKENIZER, question) in bench.feed(Tick()), "asked again"
    bench.hear(DETOKENIZER)
    assert bench.plans > 0 and bench.core.state() == ("ready", "")
    bench.now = 9.0
    assert not any(send.channel == "recovery" for send in bench.feed(Tick()))


def test_an_answer_without_its_beginning_does_not_count() -> None:
    bench = Bench()
    bench.hear(TOKENIZER)
    bench.feed(Recovered(DETOKENIZER, ME))
    bench.feed(Recovered(DETOKENIZER, ME - 1, opening=True))
    bench.feed(Recovered(DETOKENIZER, ME))
    assert bench.core.state()[0] == "waiting" and DETOKENIZER in bench.core.state()[1]


def test_a_request_goes_on_after_what_was_delivered() -> None:
    bench = recovered(Delivered("r", 1, pack(outputs()[:7])), works=(work("r"),))
    bench.run()
    rows = bench.rows()
    assert rows[0].offset == 7, "nothing is computed twice"
    assert [t for row in rows for t in unpack(row.ids).tolist()] == outputs()[7:]
    assert rows[-1].finish == "length"
    assert all(row.cached_tokens == 0 for row in rows), "not known any more"


def test_the_order_in_which_work_and_output_are_told_does_not_matter() -> None:
    bench = Bench()
    bench.run()
    bench.hear(DETOKENIZER, Delivered("r", 1, pack(outputs()[:7])))
    assert bench.core.stats()["orphans"] == 1
    bench.hear(TOKENIZER)
    bench.feed(work("r"))  # from a tokenizer that was started again itself
    assert isinstance(bench.told[0], OpenStream)
    assert bench.rows()[0] == TokenRow("r", 0, pack(outputs()[:7])), "the detokenizer may be new"
    bench.run()
    assert [row.offset for row in bench.rows()[1:]] == list(range(7, 20))
    assert bench.core.stats()["orphans"] == 0


def test_a_request_that_ran_elsewhere_comes_before_those_that_waited_whichever_message_came_first():
    bench = Bench()
    bench.feed(work("waits"))
    bench.feed(work("ran"))
    for _ in range(2):  # told twice, it moves forward once
        bench.hear(DETOKENIZER, Delivered("ran", 1, pack(outputs()[:7])))
    queue = bench.core._planner._queue
    assert [request.id for request in queue.first(9)] == ["ran", "waits"]
    assert queue.tokens == sum(request.length for request in queue.first(9))
    arrival = bench.core._live.get("ran").arrival
    bench.hear(DETOKENIZER, Delivered("ran", 1, pack(outputs()[:7])))
    assert bench.core._live.get("ran").arrival == arrival


def test_what_ended_is_forgotten_up_to_the_attempt_that_ended_and_no_later_one() -> None:
    records = RecoveryRecords(("tokenizer-0",), ("detokenizer-0", "detokenizer-1"))
    second = request_of(replace(work("r"), attempt=2, detokenizer=1), 1, 0.0)
    records.add_finished(second, last_row(second, "stop"))
    assert records.on_ended("r", 0.0, 1) == () and "r" in records.finished
    assert records.on_ended("r", 0.0, 2) == ("detokenizer-1",) and not records.finished
    assert records.on_ended("r", 0.0, 1) == ()
    assert records.has_ended("r", 2), "a late word of an earlier attempt takes nothing back"


def test_a_request_that_had_ended_does_not_run_again() -> None:
    ends = (
        Delivered("stop", 1, pack([1, 2, 9]), True, "stop"),
        Delivered("length", 1, pack([1, 2]), True, "length"),
        Delivered("string", 1, pack([1, 2]), True),
    )
    bench = recovered(*ends, works=tuple(work(end.request_id) for end in ends))
    bench.run()
    assert bench.plans == 0 and bench.core.idle() and bench.core.stats()["kept"] == 3
    rows = {m.rows[0].request_id: m.rows[0] for m in bench.resent() if isinstance(m, Tokens)}
    assert rows["stop"] == TokenRow("stop", 0, pack([1, 2, 9]), "stop", 9)
    assert rows["length"] == TokenRow("length", 0, pack([1, 2]), "length")
    assert rows["string"].finish == "error"
    assert "the detokenizer that ended this request was lost" in rows["string"].error


def test_a_request_that_is_as_long_as_it_may_be_ends() -> None:
    bench = recovered(Delivered("r", 1, pack(outputs(20))), works=(work("r"),))
    bench.run()
    assert bench.rows()[-1].finish == "length" and bench.core.idle()


def test_a_stop_hit_of_rows_from_the_scheduler_before_waits_for_what_was_delivered() -> None:
    bench = Bench()
    bench.run()
    bench.feed(work("r"))
    bench.feed(StopHit("r", 1, 4))
    assert bench.core.stats()["waiting"] == 1
    bench.hear(TOKENIZER)
    bench.hear(DETOKENIZER, Delivered("r", 1, pack(outputs()[:4]), True))
    assert bench.core.idle() and bench.core.stats()["kept"] == 1


def test_a_repeated_answer_changes_nothing_of_what_runs() -> None:
    bench = recovered(works=(work("r"),))
    bench.hear(TOKENIZER, work("r"))
    bench.hear(DETOKENIZER, Delivered("r", 1, b""))
    bench.run()
    assert [row.offset for row in bench.rows()] == list(range(20))


def test_output_of_a_request_that_nobody_asks_for_is_dropped_after_a_minute() -> None:
    bench = recovered(Delivered("r", 1, pack([1, 2])))
    bench.now = ORPHANED_SECONDS - 1
    bench.feed(Tick())
    assert bench.told == []
    bench.now = ORPHANED_SECONDS + 1
    bench.feed(Tick())
    assert bench.told == [Abort("r", 1, "nobody asked for it", group=0)]
    bench.feed(work("r"))
    bench.run()
    assert [row.offset for row in bench.rows()] == list(range(20)), "later, it starts over"


def test_what_is_not_asked_for_counts_from_when_all_have_told() -> None:
    bench = Bench()
    bench.hear(DETOKENIZER, Delivered("r", 1, pack([1, 2])))
    bench.now = ORPHANED_SECONDS - 1
    bench.hear(TOKENIZER)
    for now, told in ((ORPHANED_SECONDS + 1, 0), (2 * ORPHANED_SECONDS, 1)):
        bench.now = now
        bench.feed(Recovered(TOKENIZER, ME))  # once more: nothing begins anew
        bench.feed(Tick())
        assert len(bench.told) == told, now


def test_the_detokenizer_hears_what_the_prompt_ended_with() -> None:
    bench = Bench(peers=False)
    prompt = list(range(3 * CONTEXT_TOKENS + 1))
    bench.feed(TokenizedRequest("r", 1, 0, 0, pack(prompt), RequestParams(max_tokens=1), 0))
    [opened] = [message for message in bench.told if isinstance(message, OpenStream)]
    assert unpack(opened.context_ids).tolist() == prompt[-CONTEXT_TOKENS:]


def test_a_result_out_of_order_ends_the_epoch_and_no_request() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r"))
    first = bench.engine.outbox.popleft()
    while not isinstance(first, Result):
        first = bench.engine.outbox.popleft()
    bench.feed(replace(first, number=first.number + 1))
    state, reason = bench.core.state()
    assert state == "waiting" and "1 came, 0 was expected" in reason
    bench.run()
    assert bench.core.stats()["epochs_total"] == 2
    assert [t for row in bench.rows() for t in unpack(row.ids).tolist()] == outputs()


def test_only_the_end_of_an_engine_of_its_own_group_ends_an_epoch() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r"))
    its = bench.engine.incarnation
    for stage in ("scheduler-0", "detokenizer-0", "engine-1-0"):
        bench.feed(Ended(stage, its, its, "it ended"))
        assert bench.core.state()[0] == "ready", stage
    bench.feed(Ended("engine-0-0", its, its, "it ended"))
    assert bench.core.state() == ("waiting", "engine rank 0: it ended")


def test_what_was_aborted_meanwhile_is_dropped_when_it_is_told() -> None:
    bench = Bench()
    bench.feed(Abort("r", 1))
    bench.hear(DETOKENIZER, Delivered("r", 1, pack([1, 2])))
    assert bench.told == [Abort("r", 1, "it has ended")]
    bench.hear(TOKENIZER, work("r"))
    bench.run()
    assert bench.plans == 0 and bench.core.idle()


def test_a_finished_request_is_kept_until_done_and_never_runs_again() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r", 3))
    bench.run()
    assert bench.core.idle() and bench.core.stats()["kept"] == 1
    opened, tokens = bench.resent()
    assert isinstance(opened, OpenStream)
    assert tokens == Tokens((TokenRow("r", 0, pack(outputs(3)), "length"),), 0)
    plans = bench.plans
    bench.feed(work("r", 3))
    assert bench.plans == plans, "its work was told again"
    bench.feed(Done(("r", "unknown")))
    assert bench.told[-1] == Done(("r",)) and bench.core.stats()["kept"] == 0
    bench.feed(work("r", 3))
    assert bench.plans == plans, "it is over, and remembered"
    assert bench.resent() == []


def test_ids_of_requests_that_are_over_are_remembered_for_a_minute() -> None:
    ledger = RecoveryRecords((), ())
    for number in range(1_000):
        ledger.on_ended(str(number), number * 1e-3)
    assert all(ledger.has_ended(str(number), 1) for number in range(1_000))
    for number in range(1_000, 1_000 + MAX_REMEMBERED):
        ledger.on_ended(str(number), 1.0)
    assert not ledger.has_ended("0", 1) and ledger.has_ended(str(999 + MAX_REMEMBERED), 1)
    ledger.on_ended("later", 1.0 + REMEMBERED_SECONDS)
    assert ledger.has_ended("later", 1) and not ledger.has_ended(str(999 + MAX_REMEMBERED), 1)


def test_a_request_that_a_stop_string_ended_is_kept_up_to_its_cut() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r"))
    while len(bench.rows()) < 5:
        bench.feed(bench.engine.outbox.popleft())
    bench.feed(StopHit("r", 1, 3))
    bench.run()
    assert not bench.engine.slots
    tokens = bench.resent()[1]
    assert isinstance(tokens, Tokens)
    assert tokens.rows[0].ids == pack(outputs()[:3]) and tokens.rows[0].finish == "error"


def test_a_new_detokenizer_gets_all_output_of_what_runs() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r"))
    while len(bench.rows()) < 5:
        bench.feed(bench.engine.outbox.popleft())
    bench.feed(work("new"))
    opened, tokens, other = bench.resent()
    assert isinstance(opened, OpenStream) and opened.request_id == "r"
    assert tokens == Tokens((TokenRow("r", 0, pack(outputs()[:5])),), 0)
    assert isinstance(other, OpenStream) and other.request_id == "new"
    bench.run()
    assert [row.offset for row in bench.rows()] == list(range(20)), "and rows go on"


def test_a_detokenizer_hears_which_group_speaks() -> None:
    """With the first words, and when it is told all of it."""
    bench = Bench(peers=False)
    bench.core = SchedulerCore(SchedulerOptions("mixed", 2, 8, 16), 3)
    bench.run()
    params = RequestParams(max_tokens=2, prompt_logprobs=0)
    bench.feed(TokenizedRequest("r", 1, 0, 0, pack(PROMPT), params, 0))
    bench.run()
    _, *again, _ = bench.core.handle(Recover(DETOKENIZER, 9), bench.now)
    for told in (bench.told, [send.message for send in again]):
        assert {type(message) for message in told} == {OpenStream, PromptTokens, Tokens}
        assert {message.group for message in told} == {3}  # type: ignore[attr-defined]


def test_a_refusal_is_repeated_to_a_new_detokenizer_until_done() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("big", 5_000))
    [refused] = bench.told
    assert isinstance(refused, Refused)
    assert bench.resent() == [refused]
    bench.feed(Done(("big",)))
    assert bench.resent() == []


def test_done_ends_a_request_whose_stop_hit_was_lost() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r"))
    bench.feed(Done(("r",)))
    bench.run()
    assert bench.core.idle() and not bench.engine.slots
    assert bench.told[-1] == Done(("r",))


@pytest.mark.parametrize(("host_loss", "patience"), [(2.0, 40.0), (1e9, MAX_RETENTION_SECONDS)])
def test_a_finished_request_whose_done_never_comes_is_aborted_everywhere_some_day(
    host_loss: float, patience: float
) -> None:
    """Its gateway is on a host that does not come back."""
    bench = Bench(host_loss=host_loss)
    bench.run()
    bench.hear(TOKENIZER)
    bench.hear(DETOKENIZER)
    bench.feed(work("r", 3))
    bench.run()
    ended = Delivered("r", 1, b"", ended=True)
    for now, asked in ((0.9, 0), (1.0, 0), (1.9, 0), (2.0, 1), (2.1, 0), (3.1, 1)):
        bench.now = 0.1 + now * patience
        sends = [s for s in bench.feed(Tick()) if s.message == ended]
        assert [(s.channel, s.to) for s in sends] == [("recovery", "tokenizer-0")] * asked, now
    bench.feed(Abort("r", 1))
    assert bench.core.stats()["kept"] == 0 and bench.told[-1] == Abort("r", 1)


def test_a_scheduler_that_leaves_lands_its_steps_and_publishes_no_more() -> None:
    bench = Bench(peers=False)
    bench.run()
    bench.feed(work("r"))
    assert bench.core.stats()["in_flight"] == 2
    bench.feed(Leave())
    assert not bench.core.idle() and bench.core.state()[0] == "draining"
    plans = bench.plans
    bench.feed(work("late"))
    while bench.engine.outbox:
        bench.feed(bench.engine.outbox.popleft())
    assert bench.plans == plans and bench.core.idle()
    assert [row.offset for row in bench.rows()] == [0, 1], "what had been computed is sent"
    assert not any(isinstance(m, OpenStream) and m.request_id == "late" for m in bench.told)


def test_one_that_drains_ends_what_it_has_and_takes_nothing_new() -> None:
    """Once tokenizers know; until then they send requests, of which none is lost."""
    bench = recovered()
    bench.feed(work("r"))
    bench.feed(Drain())
    bench.feed(work("on its way"))
    for _ in range(20):
        bench.now += LATE_WORK_SECONDS / 20
        bench.feed(Tick())
    bench.feed(work("late"))
    bench.run()
    assert bench.core.state()[0] == "draining"
    for name in ("r", "on its way"):
        rows = bench.rows(name)
        assert [i for row in rows for i in unpack(row.ids).tolist()] == outputs()
    (refused,) = [m for m in bench.told if isinstance(m, Refused)]
    assert (refused.request_id, refused.status) == ("late", 503)
    assert bench.core.stats()["running"] == 0
