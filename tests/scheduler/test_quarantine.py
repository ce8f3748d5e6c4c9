"""Suspects are tried one at a time; a token clears, three lone crashes condemn."""

from __future__ import annotations

from test_memory_runs_short import work
from test_scheduler_core import pipeline

from pipeinfer.messages import Plan
from pipeinfer.scheduler.recovery import CRASHES_ALONE, Quarantine
from pipeinfer.scheduler.request import Request, request_of


def lost(name: str) -> Request:
    """It was in flight when an engine was lost before, and has had no token since."""
    request = request_of(work(name, 3), 1, 0.0)
    request.phase, request.lost_in_flight = "lost", True
    return request


def crash(quarantine: Quarantine, *flying: Request) -> Request | None:
    for request in flying:
        request.phase = "lost"
    return quarantine.on_epoch_lost(list(flying))


def test_a_request_that_crashes_engines_alone_is_guilty_and_no_earlier():
    quarantine, request = Quarantine(), lost("r")
    assert crash(quarantine, request) is None
    for crashes in range(1, CRASHES_ALONE):
        assert quarantine.next() is request
        assert crash(quarantine, request) is None
        assert quarantine.crashes_alone(request) == crashes
    assert quarantine.next() is request
    assert crash(quarantine, request) is request
    assert len(quarantine) == 0 and quarantine.next() is None


def test_after_a_first_loss_nobody_is_a_suspect_and_after_a_second_who_had_no_token_between():
    quarantine, silent, spoke = Quarantine(), lost("silent"), lost("spoke")
    silent.lost_in_flight = spoke.lost_in_flight = False
    assert crash(quarantine, silent, spoke) is None
    assert (silent.phase, spoke.phase, len(quarantine)) == ("lost", "lost", 0)
    assert quarantine.crashes_alone(silent) == 0, "another group is careful of it at once"
    silent.phase = spoke.phase = "running"
    quarantine.clear(spoke)
    assert quarantine.crashes_alone(spoke) == -1
    assert crash(quarantine, silent, spoke) is None
    assert (silent.phase, spoke.phase, len(quarantine)) == ("quarantined", "lost", 1)
    assert quarantine.next() is silent


def test_a_token_clears_and_crashes_count_from_the_beginning():
    quarantine, request = Quarantine(), lost("r")
    crash(quarantine, request)
    for _ in range(CRASHES_ALONE - 1):
        assert quarantine.next() is request
        crash(quarantine, request)
    assert quarantine.next() is request
    request.phase = "running"
    quarantine.clear(request)
    assert (quarantine.under_test, len(quarantine)) == (None, 0)
    assert quarantine.crashes_alone(request) == -1
    assert crash(quarantine, request) is None, "with others it was one of several"
    assert quarantine.crashes_alone(request) == 0


def test_a_token_of_another_clears_nobody():
    quarantine, suspect, other = Quarantine(), lost("suspect"), lost("other")
    crash(quarantine, suspect)
    assert quarantine.next() is suspect
    quarantine.clear(other)
    assert quarantine.under_test is suspect


def test_who_is_tried_and_had_no_step_in_flight_is_tried_first_again_and_blamed_for_nothing():
    quarantine, first, second, other = Quarantine(), lost("first"), lost("second"), lost("other")
    crash(quarantine, first, second)
    assert quarantine.next() is first
    first.phase = "lost"
    assert crash(quarantine, other) is None
    assert first.phase == other.phase == "quarantined"
    assert len(quarantine) == 3 and quarantine.crashes_alone(first) == 0
    assert quarantine.next() is first


def test_suspects_that_end_are_nobodys_business():
    quarantine, first, second = Quarantine(), lost("first"), lost("second")
    crash(quarantine, first, second)
    assert quarantine.next() is first
    first.phase = "finished"
    assert quarantine.next() is second
    second.phase = "finished"
    assert quarantine.next() is None and len(quarantine) == 0
    crash(quarantine, third := lost("third"))
    quarantine.remove(third)
    assert len(quarantine) == 0 and quarantine.next() is None


def test_a_suspect_from_elsewhere_brings_its_crashes():
    quarantine, request = Quarantine(), request_of(work("r", 3), 1, 0.0)
    quarantine.add(request, CRASHES_ALONE - 1)
    assert (len(quarantine), quarantine.crashes_alone(request)) == (1, CRASHES_ALONE - 1)
    assert quarantine.next() is request
    assert crash(quarantine, request) is request


def test_who_had_no_step_in_flight_is_resumed_before_any_suspect():
    """Prompts are computed alone here, so the stream had no part in the step that was lost."""
    p, plans = pipeline("prefill-first", depth=1, pages=200), []
    receive = p.engine.receive

    def hear(message) -> None:
        plans.extend([message] if isinstance(message, Plan) else [])
        receive(message)

    p.engine.receive = hear
    p.submit([5], 20)
    for _ in range(6):
        p.deliver()
    p.submit([6] * 60, 5)
    p.deliver()
    p.deliver()
    stream, prompt = p.clients
    p.core._live[prompt].lost_in_flight = True
    assert [a.request_id for plan in plans for a in plan.admits] == [stream, prompt]
    p.engine.crash()
    plans.clear()
    p.settle()
    assert [a.request_id for plan in plans for a in plan.admits] == [stream, prompt]
    begun = [plan for plan in plans if plan.admits]
    assert all(len(plan.slots) == 4 for plan in begun), "each begins alone"


def test_a_suspect_does_not_wait_for_all_who_come_later():
    p, admitted = pipeline(depth=1, pages=200, slots=2), []
    receive = p.engine.receive

    def hear(message) -> None:
        if isinstance(message, Plan):
            admitted.extend(admit.request_id for admit in message.admits)
        receive(message)

    p.engine.receive = hear
    suspect = p.submit([5, 6], 4)
    p.deliver()
    p.deliver()
    assert admitted == [suspect]
    p.core._live[suspect].lost_in_flight = True
    p.engine.crash()
    p.deliver()
    others = [p.submit([20 + n] * 3, 12) for n in range(8)]
    admitted.clear()
    p.settle()
    assert admitted.index(suspect) < admitted.index(others[4])
