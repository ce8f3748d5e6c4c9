"""Limits that several gateways hold together: never more than the whole, and none is lost."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pipeinfer.control import GatewayState, ShareState
from pipeinfer.gateway.api_keys import LIMIT_NAMES, KeyLimits, KeyUsage
from pipeinfer.gateway.peers import LimitName, LimitShare, SharedLimits, StateExchange, first_share

LIMIT = LimitName("alice", "concurrent")
TOKENS = LimitName("alice", "tokens")


class Gateway:
    """One gateway's accounts of a key."""

    def __init__(self, index: int, gateways: int, limits: KeyLimits, now: float = 0.0) -> None:
        self.shares = SharedLimits(index, gateways)
        self.usage = KeyUsage(limits, now)
        self.shares.add("alice", self.usage, LIMIT_NAMES, now)


class Sharing(RuleBasedStateMachine):
    """States travel late, twice, in any order or never; one gateway at a time is started again."""

    @initialize(gateways=st.integers(2, 4), limit=st.integers(0, 9))
    def begin(self, gateways: int, limit: int) -> None:
        self.limits = KeyLimits(concurrent=limit + 1)
        self.all = [Gateway(index, gateways, self.limits) for index in range(gateways)]
        self.sent: list[tuple[int, ShareState]] = []
        self.running = [0] * gateways

    def _index(self, number: int) -> int:
        return number % len(self.all)

    @rule(number=st.integers(0, 3))
    def ask(self, number: int) -> None:
        index = self._index(number)
        if self.all[index].usage.start_request(0.0) is None:
            self.running[index] += 1

    @rule(number=st.integers(0, 3))
    def end(self, number: int) -> None:
        index = self._index(number)
        if self.running[index]:
            self.running[index] -= 1
            self.all[index].usage.release()

    @rule(number=st.integers(0, 3), wanted=st.integers(0, 4))
    def say(self, number: int, wanted: int) -> None:
        index = self._index(number)
        self.all[index].shares.lacks(LIMIT, wanted)
        self.sent.append((index, self.all[index].shares.state(LIMIT, 0.0)))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1_000), number=st.integers(0, 3))
    def hear(self, which: int, number: int) -> None:
        sender, state = self.sent[which % len(self.sent)]
        self.all[self._index(number)].shares.on_state(sender, state, 0.0)

    @rule(number=st.integers(0, 3))
    def start_again(self, number: int) -> None:
        """It hears all others before it lets anybody in, or gives; and they have heard all that it
        said."""
        index = self._index(number)
        for receiver, one in enumerate(self.all):
            for sender, state in self.sent:
                if index in (sender, receiver):
                    one.shares.on_state(sender, state, 0.0)
        last = self.all[index].shares.state(LIMIT, 0.0)
        for one in self.all:
            one.shares.on_state(index, last, 0.0)
        self.sent.clear()
        self.running[index] = 0
        self.all[index] = Gateway(index, len(self.all), self.limits)
        for sender, one in enumerate(self.all):
            if sender != index:
                state = one.shares.state(LIMIT, 0.0)
                self.all[index].shares.on_state(sender, state, 0.0, gives=False)

    @invariant()
    def never_more_than_the_whole(self) -> None:
        if hasattr(self, "all"):
            sizes = sum(one.shares._shares[LIMIT].size for one in self.all)
            assert sizes <= self.limits.concurrent and sum(self.running) <= self.limits.concurrent

    def teardown(self) -> None:
        """Once all have heard all, nothing is missing."""
        if not hasattr(self, "all"):
            return
        for _ in range(2):
            for sender, one in enumerate(self.all):
                one.shares.lacks(LIMIT, 0)
                state = one.shares.state(LIMIT, 0.0)
                for other in self.all:
                    other.shares.on_state(sender, state, 0.0)
        assert sum(one.shares._shares[LIMIT].size for one in self.all) == self.limits.concurrent


TestSharing = Sharing.TestCase


@given(st.integers(1, 9), st.integers(0, 1_000))
def test_the_first_shares_are_the_whole_and_nearly_equal(gateways, limit):
    sizes = [first_share(index, gateways, limit) for index in range(gateways)]
    assert sum(sizes) == limit and max(sizes) - min(sizes) <= 1


def tell(sender: int, all_gateways: list[Gateway], limit: LimitName, now: float) -> None:
    """What one says reaches all, and what they answer reaches it."""
    state = all_gateways[sender].shares.state(limit, now)
    for index, one in enumerate(all_gateways):
        if index != sender:
            one.shares.on_state(sender, state, now)
            all_gateways[sender].shares.on_state(index, one.shares.state(limit, now), now)


@given(st.integers(2, 4), st.integers(1, 12), st.integers(0, 100))
def test_whoever_asks_is_let_in_while_the_whole_has_room(gateways, limit, seed):
    """Wherever requests come, as many run as with one gateway."""
    all_gateways = [Gateway(n, gateways, KeyLimits(concurrent=limit)) for n in range(gateways)]
    rng, running = random.Random(seed), list[int]()
    for _ in range(60):
        index = rng.randrange(gateways)
        one = all_gateways[index]
        if rng.random() < 0.3 and running:
            all_gateways[running.pop(rng.randrange(len(running)))].usage.release()
            continue
        excess = one.usage.start_request(0.0)
        if excess is not None:
            kind, units = excess.lacking
            assert kind == "concurrent"
            one.shares.lacks(LIMIT, units)
            tell(index, all_gateways, LIMIT, 0.0)
            one.shares.lacks(LIMIT, 0)
            excess = one.usage.start_request(0.0)
        if excess is None:
            running.append(index)
        assert (excess is not None) == (len(running) == limit and excess is not None)
        assert len(running) <= limit
        if excess is not None:
            assert len(running) == limit


def test_tokens_of_a_minute_move_to_where_they_are_used_and_refill_there():
    limits = KeyLimits(tokens=600)
    one, other = both = [Gateway(index, 2, limits) for index in range(2)]
    assert one.usage.free("tokens", 0.0) == other.usage.free("tokens", 0.0) == 300
    one.usage.use_tokens(350, 0.0)
    excess = one.usage.start_request(0.0)
    assert excess is not None and excess.lacking == ("tokens", 51) and excess.wait == 5.1
    one.shares.lacks(TOKENS, 51)
    tell(0, both, TOKENS, 0.0)
    assert (one.usage.free("tokens", 0.0), other.usage.free("tokens", 0.0)) == (100, 150)
    assert one.shares.free_elsewhere(TOKENS) == 150
    # The whole refills as that of one gateway: ten a second, now mostly here.
    assert one.usage.free("tokens", 6.0) == 100 + 45
    assert other.usage.free("tokens", 6.0) == 150
    other.usage.use_tokens(150, 6.0)
    assert other.usage.free("tokens", 12.0) == 15


def test_a_limit_that_is_changed_keeps_what_was_given_and_used():
    one, other = both = [Gateway(index, 2, KeyLimits(concurrent=4)) for index in range(2)]
    one.shares.lacks(LIMIT, 1)
    tell(0, both, LIMIT, 0.0)
    assert (one.usage.free("concurrent", 0.0), other.usage.free("concurrent", 0.0)) == (3, 1)
    for gateway in both:
        gateway.usage.set_limits(KeyLimits(concurrent=8), 0.0)
        gateway.shares.add("alice", gateway.usage, LIMIT_NAMES, 0.0)
    assert (one.usage.free("concurrent", 0.0), other.usage.free("concurrent", 0.0)) == (5, 3)
    for gateway in both:
        gateway.usage.set_limits(KeyLimits(), 0.0)
        gateway.shares.add("alice", gateway.usage, LIMIT_NAMES, 0.0)
    assert one.usage.start_request(0.0) is None is other.usage.start_request(0.0)


def test_what_no_gateway_could_have_said_changes_nothing():
    one = Gateway(0, 2, KeyLimits(concurrent=4))
    for sender, given_units in ((0, (9, 9)), (7, (9, 9)), (1, (9, 9, 9)), (1, ())):
        state = ShareState("alice", "concurrent", given_units, given_units, 5, 0)
        assert not one.shares.on_state(sender, state, 0.0)
    assert one.usage.free("concurrent", 0.0) == 2


def test_a_share_is_given_by_halves_so_that_few_questions_suffice():
    share = LimitShare(0, 2, 200)
    assert [share.give(1, 1, share.size) for _ in range(4)] == [50, 25, 13, 6]
    assert share.give(1, 100, 6) == 6 and share.size == 0
    assert share.give(1, 1, 0) == 0


def heard(sender: StateExchange, of: str, receiver: StateExchange, who: str) -> bool:
    """`sender`, called `of`, tells `receiver`, called `who`."""
    incarnation, number = sender.heard_of(who)
    return receiver.hear(
        GatewayState(
            stage=of,
            incarnation=sender.incarnation,
            number=sender.number,
            since=sender.seen_by(who),
            heard_incarnation=incarnation,
            heard=number,
        )
    )


def test_changes_are_told_until_they_are_heard_and_a_new_process_is_told_all():
    a, b = StateExchange(1, ["b"]), StateExchange(1, ["a"])
    number = a.change(("adapter", "x"))
    assert list(a.news_for("b")) == [("adapter", "x")] and not a.has_heard("b", number)
    assert heard(a, "a", b, "b") and heard(b, "b", a, "a")
    assert a.has_heard("b", number) and not list(a.news_for("b"))
    assert not heard(a, "a", b, "b"), "nothing new"
    a.change(("adapter", "y"))
    a.change(("adapter", "x"))
    assert list(a.news_for("b")) == [("adapter", "x"), ("adapter", "y")]
    again = StateExchange(2, ["a"])
    a.change(("adapter", "z"))
    assert not heard(a, "a", again, "b"), "it was told only what the one before had not heard"
    assert again.heard_of("a") == (1, 0)
    assert heard(again, "b", a, "a"), "a new process has something to say"
    assert [name for _, name in a.news_for("b")] == ["z", "x", "y"] and not a.has_heard("b", 1)
    assert heard(a, "a", again, "b") and again.heard_of("a") == (1, a.number)
    assert not heard(b, "b", a, "a"), "a process that was replaced is not heard"
