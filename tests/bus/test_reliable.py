"""Links between stages: whatever connections take along, each frame passes once and in order."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeinfer.bus.frames import (
    REPORT_BYTES,
    REPORT_FRAMES,
    RETRY_SECONDS,
    IncomingLink,
    OutgoingLink,
    Received,
    ReliableLinks,
)
from pipeinfer.messages import Message

A, B = "gateway-0", "tokenizer-0"


class Wire:
    """One direction between two processes: a queue that a reset robs of what was on its way."""

    def __init__(self) -> None:
        self.queue: deque[tuple[str, int, object]] = deque()

    def reset(self, lost: int) -> None:
        for _ in range(min(lost, len(self.queue))):
            self.queue.popleft()


class End:
    """A process of A or B with its links. came: the frames that passed, by who sent them."""

    def __init__(self, name: str, other: str, incarnation: int, out: Wire) -> None:
        self.name, self.other, self.incarnation, self.out = name, other, incarnation, out
        both = frozenset((A, B))
        self.links = ReliableLinks(
            incarnation, both, frozenset((other,)), self._say, self._push, print
        )
        self.came: dict[int, list[int]] = {}

    def _say(self, _stage: str, message: Message) -> None:
        self.out.queue.append((self.name, self.incarnation, message))

    def _push(self, _stage: str, parts: list[bytes]) -> None:
        self.out.queue.append((self.name, self.incarnation, parts))

    def send(self) -> None:
        link = self.links.outgoing(self.other)
        assert link is not None
        parts = [b"%d" % link.next]
        self._push(self.other, parts)
        link.append(parts)

    def take(self, sender: str, incarnation: int, what: object, now: float) -> None:
        if isinstance(what, Message):
            self.links.on_message(sender, incarnation, what, now)
        else:
            assert isinstance(what, list)
            number = int(what[0])
            if self.links.accepts(sender, incarnation, number, REPORT_BYTES // 9, now):
                self.came.setdefault(incarnation, []).append(number)


class TwoProcesses(RuleBasedStateMachine):
    """Two processes that send to each other, die, and are cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.born = 0.0, 2
        self.wires = {A: Wire(), B: Wire()}  # by who sends
        self.ends = {A: End(A, B, 1, self.wires[A]), B: End(B, A, 2, self.wires[B])}

    @rule(who=st.sampled_from((A, B)), count=st.integers(1, 2 * REPORT_FRAMES))
    def sends(self, who: str, count: int) -> None:
        for _ in range(count):
            self.ends[who].send()

    @rule(who=st.sampled_from((A, B)), count=st.integers(1, 3 * REPORT_FRAMES))
    def arrives(self, who: str, count: int) -> None:
        wire, end = self.wires[who], self.ends[self.ends[who].other]
        for _ in range(min(count, len(wire.queue))):
            self.now += 0.001
            end.take(*wire.queue.popleft(), self.now)

    @rule(who=st.sampled_from((A, B)), lost=st.integers(1, 2 * REPORT_FRAMES))
    def is_reset(self, who: str, lost: int) -> None:
        self.wires[who].reset(lost)

    @rule(who=st.sampled_from((A, B)), lost=st.integers(0, 10))
    def dies(self, who: str, lost: int) -> None:
        """What it sent may still arrive; what was sent to it, behind what is lost, its successor
        gets."""
        self.born += 1
        other = self.ends[who].other
        self.wires[other].reset(lost)
        self.ends[who] = End(who, other, self.born, self.wires[who])

    @rule(who=st.sampled_from((A, B)))
    def reminds(self, who: str) -> None:
        self.now += 1.0
        self.ends[who].links.on_timer()

    @precondition(lambda self: any(wire.queue for wire in self.wires.values()))
    @rule()
    def comes_to_rest(self) -> None:
        """When nothing is lost any more, all that was sent to a process that lives has come."""
        for end in self.ends.values():
            end.send()
        for _ in range(12):
            for who in (A, B):
                while self.wires[who].queue:
                    self.arrives(who, 1)
            self.now += RETRY_SECONDS
            for who in (A, B):
                self.reminds(who)
        for who in (A, B):
            end = self.ends[self.ends[who].other]
            link = self.ends[who].links.outgoing(end.name)
            assert link is not None
            assert link.first == link.next, "what has come is kept no longer"
            assert end.came[self.ends[who].incarnation][-1] == link.next - 1

    @invariant()
    def each_frame_passes_once_and_in_order(self) -> None:
        for end in self.ends.values():
            for numbers in end.came.values():
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


TestTwoProcesses = TwoProcesses.TestCase
TestTwoProcesses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_new_receiver_gets_all_that_its_predecessor_did_not_confirm():
    out, new = OutgoingLink(), IncomingLink()
    for number in range(1, 9):
        out.append([b"%d" % number])
    out.on_received(4)
    assert new.is_current(1)
    assert not new.accepts(8, 0)  # the others were lost with the process before
    asked = new.report_due(8, 0.0)
    assert asked == Received(incarnation=1, next=0, missing=True)
    told = new.on_retained(out.status(), 0.0)
    assert told == Received(incarnation=1, next=4, missing=True)
    assert out.frames() == [[b"%d" % number] for number in range(4, 9)]
    assert [new.accepts(number, 0) for number in range(4, 9)] == [True] * 5


def test_the_sender_hears_at_the_latest_after_so_many_frames_or_bytes():
    few, large = IncomingLink(), IncomingLink()
    words = []
    assert few.is_current(1) and large.is_current(1)
    for number in range(1, REPORT_FRAMES + 1):
        assert few.accepts(number, 10)
        words.append(few.report_due(number, 0.0))
    assert words == [None] * (REPORT_FRAMES - 1) + [Received(1, REPORT_FRAMES + 1, False)]
    assert large.accepts(1, REPORT_BYTES)
    assert large.report_due(1, 0.0) == Received(1, 2, False)


def test_frames_of_an_older_process_are_left_to_the_fence_and_of_a_stranger_to_the_stage():
    said: list[object] = []
    links = ReliableLinks(
        1, frozenset((A, B)), frozenset((A,)), lambda *one: said.append(one), print, print
    )
    assert links.accepts(A, 7, 1, 0, 0.0)
    assert links.accepts(A, 6, 12, 0, 0.0)
    assert links.accepts("nobody-9", 1, 5, 0, 0.0)
    assert links.accepts(A, 7, 2, 0, 0.0)
    assert not said


def test_what_no_host_takes_is_kept_for_a_time_and_a_late_one_goes_on_behind_it():
    pushed: list[list[bytes]] = []
    dropped: list[str] = []
    links = ReliableLinks(
        1, frozenset((A, B)), frozenset((A,)), lambda *_: None,
        lambda _, parts: pushed.append(parts), dropped.append, resend_seconds=3,
    )  # fmt: skip
    out = links.outgoing(A)
    assert out is not None
    for number in range(1, 6):
        out.append([b"%d" % number])
    links.on_timer()
    out.append([b"6"])
    for _ in range(2):
        links.on_timer()
        assert out.first == 1 and not dropped
    links.on_timer()
    assert dropped == [A] and out.frames() == [[b"6"]], "the younger one is kept as long"
    late = IncomingLink()
    assert late.is_current(1) and not late.accepts(6, 0)
    asked = late.report_due(6, 0.0)
    assert asked == Received(1, 0, True)
    word = late.on_retained(out.status(), 0.0)
    links.on_message(A, 9, word, 0.0)
    assert pushed == [[b"6"]] and late.accepts(6, 0)
    links.on_message(A, 9, Received(1, 7, False), 0.0)
    for _ in range(9):
        links.on_timer()
    assert dropped == [A], "nothing is kept"
