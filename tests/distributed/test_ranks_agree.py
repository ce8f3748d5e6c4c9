"""Ranks decide alike or their group starts anew: digests, step counts, faults, silence."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import numpy as np
import pytest

from hash_device import HashDevice
from pipeinfer.core import LOCAL, NewEpoch, Tick
from pipeinfer.engine.core import DIGESTS, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import (
    PROTOCOL,
    BeginEpoch,
    Digests,
    Ended,
    Fault,
    GroupFault,
    Hello,
    Message,
    Plan,
    RankStatus,
    Ready,
    TokenizedRequest,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.engine_state import MAX_UNCOMPARED, DigestAgreement, RanksDisagree
from pipeinfer.scheduler.epochs import KILL_RETRY_SECONDS
from pipeinfer.step import Sampled, Step
from pipeinfer.wire import pack, unpack

PAGES, SIZE, SLOTS, LIMIT = 40, 4, 6, 400
WATCHDOG = 30.0


class Rank:
    """A real engine core, with a device whose steps wait for `compute`."""

    def __init__(self, rank: int, tp: int) -> None:
        hello = Hello(
            PROTOCOL, "0", rank, tp, 100 + rank, "m", SIZE, PAGES - 1, SLOTS, LIMIT, "torch"
        )
        self.core = EngineCore(hello, "scheduler-0", MemoryManager(PAGES, SIZE, SLOTS, LIMIT))
        self.device = HashDevice(PAGES, SIZE, SLOTS)
        self.steps: deque[Step] = deque()

    def take(self, event: Message) -> list[Message]:
        """What it has to say to the scheduler."""
        said: list[Message] = []
        for channel, _, message in self.core.handle(event, 0.0):
            if channel == LOCAL:
                self.steps.append(message.step)  # type: ignore
            else:
                said.append(message)
        return said

    def compute(self) -> list[Message]:
        step = self.steps.popleft()
        return self.take(step_done(step, Sampled.one_each(self.device.run(step))))


class Group:
    """A scheduler core and `tp` engine cores; every rank hears every plan."""

    def __init__(self, tp: int = 2) -> None:
        options = SchedulerOptions(max_running=SLOTS, max_step_tokens=32, tp=tp, watchdog=WATCHDOG)
        self.scheduler = SchedulerCore(options)
        self.ranks = [Rank(rank, tp) for rank in range(tp)]
        self.now = 0.0
        self.plans: list[Plan] = []
        self.faults: list[GroupFault] = []
        self.rows: list[TokenRow] = []
        self.deaf: set[int] = set()  # ranks that hear nothing
        self.tick()

    def feed(self, event: Message) -> None:
        for send in self.scheduler.handle(event, self.now):
            if isinstance(send.message, GroupFault):
                self.faults.append(send.message)
            elif isinstance(send.message, Tokens):
                self.rows += send.message.rows
            elif isinstance(send.message, BeginEpoch | Plan):
                self.plans += [send.message] if isinstance(send.message, Plan) else []
                for number, rank in enumerate(self.ranks):
                    if number not in self.deaf:
                        self.hear(rank.take(send.message))

    def hear(self, said: list[Message]) -> None:
        for message in said:
            self.feed(message)

    def tick(self) -> None:
        self.now += 0.1
        self.feed(Tick())
        for number, rank in enumerate(self.ranks):
            if number not in self.deaf:
                self.hear(rank.take(Tick()))

    def wait(self, seconds: float) -> None:
        """So long, with all the ticks in it: without any, the scheduler was stopped."""
        for _ in range(round(10 * seconds)):
            self.tick()

    def work(self, name: str, prompt: list[int], tokens: int) -> None:
        params = RequestParams(max_tokens=tokens, ignore_eos=True)
        self.feed(TokenizedRequest(name, 1, 0, 0, pack(prompt), params, 0))

    def run(self, steps: int = 10_000) -> None:
        """Until nothing is left to compute, or so many steps of every rank."""
        for _ in range(steps):
            busy = [rank for rank in self.ranks if rank.steps]
            if len(busy) < len(self.ranks):
                return
            for rank in reversed(busy):  # rank 0 is the last: its results need no other's words
                self.hear(rank.compute())

    def state(self) -> tuple[str, str]:
        return self.scheduler.state()


def busy_group(tp: int = 2) -> Group:
    """With more requests than pages, so that memory decides much: evictions, preemptions."""
    group, rng = Group(tp), random.Random(3)
    shared = [rng.randrange(50) for _ in range(20)]
    for number in range(14):
        tail = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
        group.work(f"r{number}", (shared if number % 2 else []) + tail, rng.randint(5, 60))
    return group


@pytest.mark.parametrize("tp", [2, 4])
def test_every_plan_of_agreeing_ranks_is_compared(tp):
    group = busy_group(tp)
    group.run()
    group.tick()  # what is less than a whole message is told when nothing runs
    assert group.faults == [] and group.scheduler.idle()
    assert group.scheduler.stats()["preemptions_total"] > 0
    assert len(group.plans) > 3 * DIGESTS
    assert group.scheduler.stats()["agreed_plans"] == len(group.plans)


def test_the_first_plan_that_ranks_decide_differently_ends_the_epoch():
    group = busy_group()
    rank, spoilt = group.ranks[1], []
    take = rank.take

    def forgetful(event: Message) -> list[Message]:
        """From plan 25 on, the first release that should keep a prefix keeps none."""
        if isinstance(event, Plan) and event.number >= 25 and event.releases and not spoilt:
            spoilt.append(event.number)
            releases = tuple(msgspec.structs.replace(r, cache_prefix=False) for r in event.releases)
            event = msgspec.structs.replace(event, releases=releases)
        return take(event)

    rank.take = forgetful
    group.run()
    assert len(spoilt) == 1
    reason = f"ranks 0 and 1 differ in their memory from plan {spoilt[0]} on"
    assert group.faults == [GroupFault(0, reason, (100, 101))]
    assert group.plans[-1].number - spoilt[0] <= DIGESTS + 2, "it is noticed within some plans"
    assert group.state() == ("waiting", reason)


def test_a_fault_of_one_of_several_ranks_restarts_all_of_them():
    group = busy_group()
    group.run(5)
    group.feed(Fault(group.plans[-1].epoch, 1, "plan 7 came where 6 was expected"))
    assert group.faults == [GroupFault(0, "rank 1: plan 7 came where 6 was expected", (100, 101))]
    assert group.state()[0] == "waiting"
    plans = len(group.plans)
    group.tick()  # the old processes are still there, and say nothing new
    assert len(group.plans) == plans and len(group.faults) == 1
    group.wait(KILL_RETRY_SECONDS)  # and if nobody hears that they should end, it is said again
    assert len(group.plans) == plans and len(group.faults) == 2


def test_requests_go_on_with_the_same_tokens_on_restarted_ranks():
    def outputs(group: Group) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row in group.rows:
            found.setdefault(row.request_id, []).extend(unpack(row.ids).tolist())
        return found

    quiet = busy_group()
    quiet.run()
    group = busy_group()
    group.run(30)
    group.feed(Fault(group.plans[-1].epoch, 0, "it is lost"))
    group.ranks = [Rank(rank, 2) for rank in range(2)]
    for rank in group.ranks:
        hello = rank.core.hello
        rank.core.hello = msgspec.structs.replace(hello, incarnation=hello.incarnation + 100)
    group.tick()
    group.tick()
    group.run()
    assert outputs(group) == outputs(quiet)


def test_a_rank_that_ended_is_known_at_once_and_is_restarted_by_who_said_so():
    group = busy_group()
    group.run(5)
    word = Ended("engine-0-1", 101, 500, "its process ended")
    foreign = msgspec.structs.replace(word, stage="engine-1-1")
    late = msgspec.structs.replace(word, incarnation=100)  # of the process before
    for one in (foreign, late):
        group.feed(one)
        assert group.state() == ("ready", "")
    group.feed(word)
    assert group.state() == ("waiting", "engine rank 1: its process ended")
    group.tick()  # rank 0 is still there, and is not begun with
    assert group.state()[0] == "waiting"
    assert group.faults == [], "ranks that are being started are not killed once more"


def test_a_rank_that_hears_a_new_scheduler_later_than_the_others_is_asked_too():
    """It subscribes a moment later, and believes in the epoch of the scheduler before."""
    group = Group()
    group.scheduler = SchedulerCore(group.scheduler.options, incarnation=1000)
    group.deaf = {1}
    group.tick()
    group.tick()
    assert group.ranks[0].core.state()[0] == "waiting"
    assert group.ranks[1].core.state() == ("ready", "")
    group.deaf = set()
    group.tick()
    group.tick()
    assert group.state() == ("ready", "")


def test_an_epoch_in_good_order_begins_anew_without_a_restart():
    """Every rank computes all plans before the next BeginEpoch, so none waits for another."""
    group = busy_group()
    group.run(5)
    group.hear(group.ranks[1].take(NewEpoch()))
    assert group.faults == []
    group.run()
    group.tick()
    group.run()
    assert group.faults == [] and group.scheduler.stats()["epochs_total"] == 2
    assert group.scheduler.idle()


def test_ranks_that_have_computed_different_numbers_of_steps_are_restarted():
    """Their collectives would never meet: one waits for what another computed long ago."""
    group = Group()
    group.feed(Fault(1, 1, "asked for", orderly=True))
    assert group.faults == []
    epoch = group.scheduler._epochs.epoch
    group.deaf = {0, 1}
    group.feed(Tick())
    group.feed(Ready(epoch + 1, 0, 100, steps=7))
    assert group.faults == []
    group.feed(Ready(epoch + 1, 1, 101, steps=8))
    reason = "ranks have computed different numbers of steps: rank 0 7, rank 1 8"
    assert group.faults == [GroupFault(0, reason, (100, 101))]


def test_a_rank_that_does_not_answer_to_an_epoch_is_not_waited_for_for_ever():
    group = Group()
    group.deaf = {1}
    group.feed(Fault(1, 0, "asked for", orderly=True))
    group.tick()
    assert group.state()[0] == "waiting" and "asked for" in group.state()[1]
    group.wait(WATCHDOG - 1)
    assert group.faults == []
    group.wait(2)
    assert {fault.reason for fault in group.faults} == {"rank 1 gave no answer to epoch 2"}


def test_who_must_end_is_said_again_until_all_have_ended():
    group = busy_group()
    group.run(5)
    reason = "rank 1: it is lost"
    group.feed(Fault(group.plans[-1].epoch, 1, "it is lost"))
    assert group.faults == [GroupFault(0, reason, (100, 101))]
    group.wait(3)
    assert len(group.faults) >= 3 and set(group.faults) == {group.faults[0]}
    group.feed(Ended("engine-0-0", 100, 500, "its process ended"))
    group.faults.clear()
    group.wait(2)
    assert {fault.incarnations for fault in group.faults} == {(101,)}
    group.feed(RankStatus(0, 1, 200, "starting"))
    group.faults.clear()
    group.wait(3)
    assert group.faults == []


def test_ranks_on_another_host_are_told_when_one_has_ended():
    """Who starts the dead one knows nothing of them, and they wait for it inside a collective."""
    group = busy_group()
    group.run(5)
    group.feed(Ended("engine-0-1", 101, 500, "its process ended"))
    assert group.faults == [], "those of its own host are being started"
    group.wait(2)
    assert {fault.incarnations for fault in group.faults} == {(100,)}


def test_late_word_of_a_death_condemns_no_rank_that_began_after_it():
    group = busy_group()
    group.run(5)
    group.feed(Fault(group.plans[-1].epoch, 1, "it is lost"))
    group.ranks = [Rank(rank, 2) for rank in range(2)]
    for rank in group.ranks:
        hello = rank.core.hello
        rank.core.hello = msgspec.structs.replace(hello, incarnation=hello.incarnation + 500)
    group.feed(group.ranks[0].core.hello)
    for number in range(2):
        group.feed(Ended(f"engine-0-{number}", 100 + number, 300, "its process ended"))
    group.tick()
    group.tick()
    assert group.state() == ("ready", "")
    assert len(group.faults) == 1


def test_digests_that_leave_plans_out_are_no_agreement():
    agreement = DigestAgreement(2)
    agreement.on_result(5)
    with pytest.raises(RanksDisagree, match="rank 1 sent digests from plan 1 on, but plan 0"):
        agreement.on_digests(Digests(1, 1, 1, np.array([5], dtype="<u8").tobytes()))


def test_a_rank_that_says_nothing_is_noticed():
    agreement = DigestAgreement(2)
    with pytest.raises(RanksDisagree, match=f"sent no digests of {MAX_UNCOMPARED + 1} plans"):
        for _ in range(MAX_UNCOMPARED + 1):
            agreement.on_result(1)


def test_plans_of_a_rank_that_has_nobody_to_agree_with_are_not_compared():
    agreement = DigestAgreement(1)
    agreement.on_result(5)
    assert agreement.compared == 0
    with pytest.raises(RanksDisagree, match="digests came from rank 1, but"):
        agreement.on_digests(Digests(1, 1, 0, np.array([5], dtype="<u8").tobytes()))
