"""The engine's core: epochs, the order of plans and results, faults instead of crashes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from edits_by_slot import Edited

from hash_device import HashDevice, continuation
from pipeinfer.core import LOCAL, Drain, Leave, Send, StepDone, Tick
from pipeinfer.engine.core import (
    Compute,
    EngineCore,
    FillPages,
    FindPages,
    FoundPages,
    InvalidatePages,
    MarkPagesUnusable,
)
from pipeinfer.engine.executor import step_done
from pipeinfer.engine.step_builder import FIELDS
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.page_directory import ChainTracker, PageDirectory, directory_bytes
from pipeinfer.messages import (
    PROTOCOL,
    Adapter,
    Admit,
    Admitted,
    BeginEpoch,
    Fault,
    Hello,
    LoadAdapter,
    MissedPlan,
    Plan,
    PromptLogprobs,
    Ready,
    Release,
    Result,
    Submit,
)
from pipeinfer.params import RequestParams
from pipeinfer.step import Sampled, Step
from pipeinfer.wire import logprob_bytes, pack, unpack
from sampling_rows import sampling_of

PAGES, SIZE, SLOTS, LIMIT = 33, 4, 8, 64
ME = 77


def make_core(rank: int = 0) -> EngineCore:
    hello = Hello(PROTOCOL, "0", rank, 1, ME, "m", SIZE, PAGES - 1, SLOTS, LIMIT, "torch")
    return EngineCore(hello, "scheduler-0", MemoryManager(PAGES, SIZE, SLOTS, LIMIT))


class Engine:
    """A core in epoch 1 with a device that works when the test says so."""

    def __init__(self) -> None:
        self.core = make_core()
        self.device = HashDevice(PAGES, SIZE, SLOTS)
        self.queue: list[Step] = []
        self.number = 0
        self.sent: list = []  # messages to the scheduler
        self.handle(BeginEpoch(1, (ME,)))
        self.sent.clear()

    def handle(self, event) -> list:
        new = []
        for channel, to, message in self.core.handle(event, 0.0):
            if channel == LOCAL:
                assert isinstance(message, Compute)
                self.queue.append(message.step)
            else:
                assert (channel, to) == ("result", "scheduler-0")
                new.append(message)
        self.sent += new
        return new

    def plan(
        self, rows: dict[int, int], admits=(), releases=(), epoch: int = 1, reset: bool = False
    ) -> list:
        slots, counts = pack(list(rows)), pack(list(rows.values()))
        plan = Plan(epoch, self.number, tuple(releases), tuple(admits), slots, counts, reset)
        self.number += 1
        return self.handle(plan)

    def work(self) -> list:
        step = self.queue.pop(0)
        return self.handle(step_done(step, Sampled.one_each(self.device.run(step))))


def admit(slot: int, tokens: list[int], prompt_len: int = 0, **params) -> Admit:
    suppress = params.pop("suppress", ())
    seed = params.pop("seed", slot)
    return Admit(
        slot,
        f"request {slot}",
        pack(tokens),
        prompt_len or len(tokens),
        LIMIT,
        RequestParams(**params),
        seed,
        suppress,
    )


def fields(result: Result) -> dict[str, list[int]]:
    names = ("slots", "starts", "counts", "produced", "token_ids", "deferred")
    return {name: unpack(getattr(result, name)).tolist() for name in names}


# ----------------------------------------------------------------- pages that outlive their engine


class KeptEngine(Engine):
    """Its steps' pages are told to a directory, as a driver does."""

    def __init__(self, buffer: memoryview, device: HashDevice) -> None:
        self.directory = PageDirectory(buffer, PAGES, SIZE)
        hello = make_core().hello
        chains = ChainTracker(PAGES, SIZE, SLOTS)
        memory = MemoryManager(PAGES, SIZE, SLOTS, LIMIT, chains=chains)
        self.core = EngineCore(hello, "scheduler-0", memory)
        self.device, self.queue, self.number, self.sent = device, [], 0, []
        for _ in range(2):  # a scheduler says it again where it hears no answer
            self.handle(BeginEpoch(1, (ME,)))
        self.sent.clear()

    def handle(self, event) -> list:
        new = []
        for channel, _, message in self.core.handle(event, 0.0):
            match message:
                case InvalidatePages():
                    self.directory.invalidate(message.pages)
                case Compute():
                    self.queue.append(message.step)
                case FillPages():
                    self.directory.validate(message.chains)
                case MarkPagesUnusable():
                    self.directory.make_unusable()
                case FindPages():
                    if not self.directory.belongs_to(b"model"):
                        self.directory.begin(b"model")
                    new += self.handle(FoundPages.of(self.directory.read().verified()))
                case _:
                    assert channel == "result"
                    new.append(message)
        self.sent += new
        return new


def test_a_successor_computes_again_what_fills_no_page_and_nothing_else():
    buffer, device = (
        memoryview(bytearray(directory_bytes(PAGES, SIZE))),
        HashDevice(PAGES, SIZE, SLOTS),
    )
    engine = KeptEngine(buffer, device)
    prompt = [1, 2, 3, 0, 1, 2, 3, 0, 1]
    engine.plan({0: 9}, [admit(0, prompt)])
    engine.work()
    for _ in range(5):
        engine.plan({0: 1})
        engine.work()
    engine.plan({0: 1})  # under way when the engine dies
    device.run(engine.queue.pop())
    tokens = prompt + continuation(prompt, 0, 6)  # as the scheduler knows them
    device.slots = HashDevice(PAGES, SIZE, SLOTS).slots
    successor = KeptEngine(buffer, device)
    successor.plan({0: 99}, [admit(0, tokens, len(prompt))])
    [told] = [one for one in successor.sent if type(one) is Admitted]
    assert unpack(told.cached).tolist() == [12]  # of 15 known tokens, 14 were computed
    [result] = successor.work()
    assert unpack(result.token_ids).tolist() == continuation(prompt, 0, 7)[-1:]


def kept_engine() -> tuple[KeptEngine, memoryview, HashDevice]:
    """One that has filled the two pages of the prompt 1, 2, 3, 0, 1, 2, 3, 0, and has one token
    more of it."""
    buffer, device = (
        memoryview(bytearray(directory_bytes(PAGES, SIZE))),
        HashDevice(PAGES, SIZE, SLOTS),
    )
    engine = KeptEngine(buffer, device)
    engine.plan({0: 9}, [admit(0, KEPT)])
    engine.work()
    return engine, buffer, device


KEPT = [1, 2, 3, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("refused", [False, True])
def test_a_page_that_a_row_fills_behind_a_token_that_it_did_not_sample_is_not_told(refused):
    """The next step was under way: what it computed there, only the device knows."""
    engine, _, _ = kept_engine()
    for _ in range(2):
        engine.plan({0: 1})
        engine.work()
    engine.plan({0: 1})
    engine.plan({0: 1})  # fills the third page
    for step in (engine.queue.pop(0), engine.queue.pop(0)):
        sampled = Sampled.one_each(engine.device.run(step))
        if refused:
            sampled = Sampled(np.zeros(1, np.int32), sampled.ids[:0], refused={0: "no token"})
        refused = False
        engine.handle(step_done(step, sampled))
    told = engine.directory.read()
    assert len(told) == (2 if engine.core.stats()["refused_rows_total"] else 3)


def test_the_same_process_finds_its_pages_in_its_next_epoch_and_computes_them_with_no_step():
    engine, _, _ = kept_engine()
    assert engine.handle(BeginEpoch(2, (ME,))) == [Ready(2, 0, ME, 1, kept_pages=2)]
    assert engine.handle(BeginEpoch(2, (ME,))) == [Ready(2, 0, ME, 1, kept_pages=2)]
    engine.number = 0
    engine.sent.clear()
    tokens = KEPT + continuation(KEPT, 0, 1)
    engine.plan({0: 99}, [admit(0, tokens, len(KEPT))], epoch=2)
    [told] = [one for one in engine.sent if type(one) is Admitted]
    assert unpack(told.cached).tolist() == [8]
    [result] = engine.work()
    assert unpack(result.token_ids).tolist() == continuation(KEPT, 0, 2)[-1:]


def test_an_epoch_that_is_called_off_while_it_looks_for_pages_does_not_begin():
    core = kept_engine()[0].core
    [asked] = core.handle(BeginEpoch(2, (ME,)), 0.0)
    assert isinstance(asked.message, FindPages)
    assert core.handle(BeginEpoch(3, ()), 0.0) == [], "a scheduler that asks who is there"
    nothing = PageDirectory(memoryview(bytearray(directory_bytes(PAGES, SIZE))), PAGES, SIZE)
    assert core.handle(FoundPages.of(nothing.read()), 0.0) == []
    assert core.state()[0] == "waiting"


@pytest.mark.parametrize("how", ["reset", "forget"])
def test_what_an_idle_engine_forgets_its_successor_does_not_find(how):
    engine, buffer, device = kept_engine()
    release = Release(0, how == "reset", b"", how == "forget")
    engine.plan({}, releases=(release,), reset=how == "reset")
    assert not engine.queue, "no step says it"
    successor = KeptEngine(buffer, device)
    assert successor.core.memory.num_evictable == 0


def test_an_engine_that_finds_an_error_of_its_own_leaves_nothing_that_is_believed():
    engine, buffer, device = kept_engine()
    [fault] = engine.plan({}, releases=(Release(5, True),))  # of an empty slot
    assert isinstance(fault, Fault)
    assert not engine.directory.belongs_to(b"model")
    assert KeptEngine(buffer, device).core.memory.num_evictable == 0


def test_pages_of_a_request_with_bad_logits_are_never_believed():
    buffer = memoryview(bytearray(directory_bytes(PAGES, SIZE)))
    engine = KeptEngine(buffer, HashDevice(PAGES, SIZE, SLOTS))
    engine.plan({0: 9, 1: 9}, [admit(0, list(range(9))), admit(1, list(range(9, 18)))])
    step = engine.queue.pop()
    done = step_done(step, Sampled.one_each(engine.device.run(step)))
    engine.handle(msgspec.structs.replace(done, bad=pack([0])))
    assert engine.directory.read().ids.ravel().tolist() == list(range(9, 17))


# ------------------------------------------------------------------------------------------- epochs


def test_hello_is_repeated_until_begin_lists_this_incarnation():
    core = make_core()
    assert core.state()[0] == "waiting"
    hello = [Send("result", "scheduler-0", core.hello)]
    assert core.handle(Tick(), 0.0) == hello
    assert core.handle(BeginEpoch(4, (ME + 1,)), 0.1) == []
    assert core.handle(Tick(), 0.2) == hello
    assert core.handle(BeginEpoch(5, (ME + 1, ME)), 0.3) == [
        Send("result", "scheduler-0", Ready(5, 0, ME))
    ]
    assert core.handle(Tick(), 0.4) == []
    assert core.state() == ("ready", "")


def test_begin_said_twice_before_the_first_plan_is_answered_twice():
    engine = Engine()
    assert engine.handle(BeginEpoch(1, (ME,))) == [Ready(1, 0, ME)]
    engine.plan({0: 9}, [admit(0, [1, 2])])
    assert isinstance(engine.work()[0], Result)


def test_new_epoch_forgets_slots_and_prefixes_and_drops_late_steps():
    engine = Engine()
    prompt = list(range(12))
    engine.plan({0: 99}, [admit(0, prompt)])
    engine.work()
    engine.plan({0: 1})
    engine.handle(BeginEpoch(2, (ME,)))
    assert engine.work() == [], "the step of the old epoch"
    engine.number = 0
    admitted = engine.plan({0: 99}, [admit(0, prompt)], epoch=2)[0]
    assert unpack(admitted.cached).tolist() == [0]
    result = engine.work()[0]
    assert (result.epoch, result.number) == (2, 0)
    assert fields(result)["token_ids"] == continuation(prompt, 0, 1)


def test_plans_of_another_epoch_are_dropped_and_counted():
    engine = Engine()
    assert engine.plan({0: 1}, [admit(0, [1])], epoch=9) == []
    assert engine.queue == [] and engine.core.stats()["plans_dropped_total"] == 1
    engine.number = 0
    engine.plan({0: 1}, [admit(0, [1])])
    assert len(engine.queue) == 1


def test_epoch_without_this_engine_makes_it_wait():
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1, 2])])
    assert engine.handle(BeginEpoch(2, (ME + 1,))) == []
    assert engine.core.state()[0] == "waiting"
    assert engine.handle(Tick()) == [engine.core.hello]
    assert engine.work() == []


def test_a_plan_that_was_missed_is_asked_for_and_each_counts_once():
    engine = Engine()
    plans = [Plan(1, 0, (), (admit(0, [1, 2]),), pack([0]), pack([2]))]
    plans += [Plan(1, number, (), (), pack([0]), pack([1])) for number in range(1, 4)]
    engine.handle(plans[0])
    for late in plans[2:]:
        assert engine.handle(late) == [MissedPlan(1, 0, 1)]
    for plan in (*plans, *plans):
        assert engine.handle(plan) == []
    assert [step.number for step in engine.queue] == [0, 1, 2, 3]
    results = [engine.work()[-1] for _ in plans]
    assert [fields(one)["token_ids"][0] for one in results] == continuation([1, 2], 0, 4)
    assert engine.core.state() == ("ready", "")


def test_an_adapter_is_loaded_behind_all_plans_before_it_also_where_one_was_missed():
    core = make_core()
    load = LoadAdapter(1, 1, 1, Adapter("a", "a", "d"), next_plan=2)
    core.handle(BeginEpoch(1, (ME,)), 0.0)
    core.handle(Plan(1, 0, (), (), b"", b""), 0.0)
    assert [s.message for s in core.handle(load, 0.0)] == [MissedPlan(1, 0, 1)]
    core.handle(Plan(1, 1, (), (), b"", b""), 0.0)
    assert core.handle(load, 0.0) == [Send(LOCAL, "", load)]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"admits": [admit(0, [1])]}, "slot 0, which is used"),
        ({"releases": [Release(5, False)]}, "release of slot 5, which is empty"),
        ({"admits": [admit(1, list(range(64)))]}, "64 tokens"),
        ({"rows": {99: 1}}, "slots 99..99 of 8"),
    ],
)
def test_contradictory_plan_is_a_fault_and_the_next_epoch_works(plan: dict, reason: str):
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1, 2])])
    fault = engine.plan(**{"rows": {}, **plan})[0]
    assert isinstance(fault, Fault) and reason in fault.reason and "plan 1" in fault.reason
    assert engine.work() == []
    engine.handle(BeginEpoch(2, (ME,)))
    engine.number = 0
    engine.plan({0: 9}, [admit(0, [1, 2])], epoch=2)
    assert fields(engine.work()[0])["token_ids"] == continuation([1, 2], 0, 1)


def test_broken_memory_is_a_fault_and_the_next_epoch_works():
    engine = Engine()
    engine.core.memory.allocator.allocate(3)
    fault = engine.plan({})[0]
    assert isinstance(fault, Fault) and "29 free" in fault.reason
    engine.handle(BeginEpoch(2, (ME,)))
    engine.number = 0
    assert isinstance(engine.plan({}, epoch=2)[0], Result)


def test_memory_is_checked_in_full_when_the_engine_is_idle():
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1, 2])])
    engine.work()
    engine.core.memory.slots.num_known[5] = 3  # the counters that each plan checks still agree
    assert engine.handle(Tick()) == [], "not while a request runs"
    engine.plan({}, releases=[Release(0, True)])
    fault = engine.handle(Tick())[0]
    assert isinstance(fault, Fault) and "empty slots [5]" in fault.reason


def test_event_of_another_stage_is_an_error():
    with pytest.raises(TypeError, match="Submit"):
        make_core().handle(Submit("r", 0, 0, RequestParams(), 0), 0.0)


def test_hello_must_describe_the_memory():
    hello = Hello(PROTOCOL, "0", 0, 1, ME, "m", SIZE, PAGES, SLOTS, LIMIT, "torch")
    with pytest.raises(ValueError, match=r"\(33, 4, 8, 64\)"):
        EngineCore(hello, "scheduler-0", MemoryManager(PAGES, SIZE, SLOTS, LIMIT))


def test_only_rank_zero_reports_results():
    core = make_core(rank=1)
    core.handle(BeginEpoch(1, (ME - 1, ME)), 0.0)
    plan = Plan(1, 0, (), (admit(0, [1, 2]),), pack([0]), pack([9]))
    sends = core.handle(plan, 0.0)
    assert [send.channel for send in sends] == [LOCAL]
    assert core.handle(StepDone(1, 0, pack([1]), pack([3])), 0.0) == []
    assert core.handle(Plan(1, 7, (), (), b"", b""), 0.0)[0].message == MissedPlan(1, 1, 1)


# -------------------------------------------------------------------------------- steps and results


def test_admitted_is_said_before_the_step_with_the_cached_tokens():
    engine = Engine()
    prompt = list(range(12))
    first = engine.plan({0: 99}, [admit(0, prompt)])
    assert first == [Admitted(1, 0, pack([0]), pack([0]), free=29, evictable=0)]
    engine.plan({})
    second = engine.plan({}, [admit(3, [*prompt, 5])])[0]
    assert (unpack(second.slots).tolist(), unpack(second.cached).tolist()) == ([3], [12])


def test_result_rows_stand_in_plan_order_whatever_the_steps_order():
    engine = Engine()
    prompts = {5: [1] * 6, 2: [2], 7: [3] * 9, 0: [0] * 4}
    engine.plan({}, [admit(slot, prompt) for slot, prompt in prompts.items()])
    engine.plan({5: 99, 2: 99, 7: 4, 3: 1, 0: 99})
    assert engine.queue[0].slots.tolist() == [2, 5, 7, 0] and engine.queue[0].num_decodes == 1
    result = fields(engine.work()[0])
    assert result["slots"] == [5, 2, 7, 3, 0]
    assert result["starts"] == [0, 0, 0, 0, 0] and result["counts"] == [6, 1, 4, 0, 4]
    assert result["produced"] == [1, 1, 0, 0, 1] and result["deferred"] == []
    tokens = [continuation(prompts[slot], slot, 1)[0] for slot in (5, 2, 0)]
    assert result["token_ids"] == tokens


def test_decodes_take_the_token_that_lies_on_the_device():
    engine = Engine()
    engine.plan({0: 99}, [admit(0, [1, 2, 3])])
    for _ in range(5):
        engine.plan({0: 1})  # none of the outcomes is known
    assert len(engine.queue) == 6 and engine.queue[1].tokens.tolist() == [-1]
    got = [fields(engine.work()[0])["token_ids"][0] for _ in range(6)]
    assert got == continuation([1, 2, 3], 0, 6)


@pytest.mark.parametrize("bad", [[0], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("decodes", [False, True])
def test_rows_of_bad_logits_have_produced_nothing_and_are_named_by_their_slots(bad, decodes):
    engine = Engine()
    prompts = {5: [1] * 6, 2: [2], 7: [3] * 9}
    engine.plan(dict.fromkeys(prompts, 99), [admit(slot, ids) for slot, ids in prompts.items()])
    for _ in range(4 * decodes):
        engine.plan(dict.fromkeys(prompts, 1))
    while len(engine.queue) > 1:
        engine.work()
    step = engine.queue.pop()
    ids = engine.device.run(step)
    good = [row not in bad for row in range(len(ids))]
    [result] = engine.handle(step_done(step, Sampled.of(np.stack((good, ids * good), axis=1))))
    slots = step.slots[step.samples].tolist()
    wrong = {slots[row] for row in bad}
    assert set(unpack(result.bad).tolist()) == wrong and len(result.bad) == 4 * len(bad)
    expected = {slot: int(token) for slot, token in zip(slots, ids, strict=True)}
    assert fields(result)["produced"] == [int(slot not in wrong) for slot in prompts]
    assert fields(result)["token_ids"] == [expected[s] for s in prompts if s not in wrong]
    stats = engine.core.stats()
    assert stats["bad_rows_total"] == len(bad)
    assert stats["sampled_tokens_total"] == 3 * (1 + 4 * decodes) - len(bad)


def test_plan_with_nothing_to_compute_answers_in_its_turn():
    engine = Engine()
    assert [type(message) for message in engine.plan({})] == [Result]
    engine.plan({0: 99}, [admit(0, [1, 2])])
    assert engine.plan({5: 1}) == [], "waits for the plan before"
    results = engine.work()
    assert [result.number for result in results] == [1, 2]
    assert fields(results[1])["counts"] == [0] and results[1].token_ids == b""
    assert engine.core.stats()["steps_total"] == 1


def test_deferred_rows_are_named_in_the_result():
    engine = Engine()
    engine.plan({0: 99}, [admit(0, [1] * 60)])
    engine.plan({1: 99}, [admit(1, [2] * 63)])
    engine.plan({2: 99, 0: 1}, [admit(2, [3] * 60)])
    engine.work()
    engine.work()
    result = engine.work()[0]
    assert fields(result)["deferred"] == [2] and fields(result)["counts"] == [0, 1]
    assert (result.free, result.evictable) == (0, 0)
    assert engine.core.stats()["rows_deferred_total"] == 1


def test_steps_that_end_out_of_order_or_with_wrong_counts_are_faults():
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1])])
    engine.plan({0: 1})
    [fault] = engine.handle(StepDone(1, 1, pack([1]), pack([1])))
    assert "step 1 ended where 0 was expected" in fault.reason
    for counts, ids, said in (
        ([1, 1], [1, 2], "sampled 2 ids and said it of 2 rows, where 1 sample"),
        ([1], [1, 2], "sampled 2 ids and said it of 1 rows"),
        ([2], [1], "sampled 1 ids and said it of 1 rows"),
    ):
        engine = Engine()
        engine.plan({0: 9}, [admit(0, [1])])
        assert said in engine.handle(StepDone(1, 0, pack(counts), pack(ids)))[0].reason
    engine = Engine()
    assert "where none was expected" in engine.handle(StepDone(1, 0, b"", b""))[0].reason


def test_rows_may_give_several_tokens_which_stand_in_the_plans_order():
    engine = Engine()
    prompts = {5: [1] * 6, 2: [2], 7: [3] * 9}
    engine.plan(dict.fromkeys(prompts, 99), [admit(slot, ids) for slot, ids in prompts.items()])
    step = engine.queue.pop()
    assert step.slots.tolist() == [2, 5, 7], "rows with one token come first"
    counts, ids, bad = (np.array(n, np.int32) for n in ([2, 3, 0], [20, 21, 50, 51, 52], [2]))
    sampled = Sampled(counts, ids, bad)
    [result] = engine.handle(step_done(step, sampled))
    assert fields(result)["produced"] == [3, 2, 0]
    assert fields(result)["token_ids"] == [50, 51, 52, 20, 21]
    assert unpack(result.bad).tolist() == [7]


def test_log_probs_stand_in_the_plans_order_whatever_each_row_asks_for():
    engine = Engine()
    prompts = {5: [1] * 6, 2: [2], 7: [3] * 9}
    wishes = {5: 2, 2: None, 7: 0}
    engine.plan(
        dict.fromkeys(prompts, 99),
        [admit(slot, ids, logprobs=wishes[slot]) for slot, ids in prompts.items()],
    )
    step = engine.queue.pop()
    assert step.slots.tolist() == [2, 5, 7]
    assert step.logprobs is not None
    assert step.logprobs.rows.tolist() == [1, 2] and step.logprobs.num_alternatives.tolist() == [
        2,
        0,
    ]
    of_five, of_seven = b"5" * logprob_bytes(2), b"7" * logprob_bytes(0)
    sampled = replace(Sampled.one_each([20, 50, 70]), logprobs=of_five + of_seven)
    [result] = engine.handle(step_done(step, sampled))
    assert fields(result)["token_ids"] == [50, 20, 70]
    assert result.logprobs == of_five + of_seven
    engine.plan({7: 1, 2: 1, 5: 1})
    sampled = replace(Sampled.one_each([71, 21, 51]), logprobs=of_seven + of_five)
    [result] = engine.handle(step_done(engine.queue.pop(), sampled))
    assert result.logprobs == of_seven + of_five


def test_log_probs_of_a_bad_row_are_not_there():
    engine = Engine()
    engine.plan({0: 9, 1: 9}, [admit(0, [1], logprobs=1), admit(1, [2], logprobs=1)])
    sampled = replace(Sampled.of(np.array([[0, 0], [1, 5]])), logprobs=b"x" * logprob_bytes(1))
    [result] = engine.handle(step_done(engine.queue.pop(), sampled))
    assert unpack(result.bad).tolist() == [0] and result.logprobs == b"x" * logprob_bytes(1)


def test_log_probs_of_prompts_are_made_where_they_are_computed_and_told_before_their_result():
    engine = Engine()
    ids = [*range(10, 22)]
    admitted = msgspec.structs.replace(admit(3, ids, prompt_logprobs=1), prompt_logprobs_from=4)
    engine.plan({3: 5}, [admitted])
    engine.plan({3: 99})
    first, second = (step.prompt_logprob_chunks for step in engine.queue)
    assert [(c.slot, c.first, c.at, c.num_alternatives) for c in (*first, *second)] == [
        (3, 4, 3, 1),
        (3, 6, 0, 1),
    ]
    assert first[0].ids.tolist() == ids[4:6] and second[0].ids.tolist() == ids[6:]
    for chunk, samples in ((first[0], 0), (second[0], 1)):
        raw = b"s" * logprob_bytes(1) * len(chunk.ids)
        sampled = replace(Sampled.one_each([1] * samples), prompt_logprobs=(raw,))
        logprobs, result = engine.handle(step_done(engine.queue.pop(0), sampled))
        assert isinstance(result, Result)
        assert logprobs == PromptLogprobs(1, result.number, 3, chunk.first, raw)
    engine.plan({3: 1})
    assert engine.queue.pop().prompt_logprob_chunks == ()


@pytest.mark.parametrize("logprobs", [b"", b"x" * 7, b"x" * logprob_bytes(2)])
def test_log_probs_of_another_size_are_a_fault(logprobs):
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1], logprobs=1)])
    sampled = replace(Sampled.one_each([4]), logprobs=logprobs)
    [fault] = engine.handle(step_done(engine.queue.pop(), sampled))
    assert (
        f"{len(logprobs)} bytes of log-probs, where {logprob_bytes(1)} were expected"
        in fault.reason
    )


def test_ids_that_are_held_back_are_told_while_they_are():
    """Such a step takes log-probs from elsewhere than a graph."""
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1, 2], logprobs=0, min_tokens=2, suppress=(9,))])
    told = []
    for number in range(3):
        step = engine.queue.pop()
        told.append(step.logprobs is not None and step.logprobs.suppressed)
        engine.handle(
            step_done(step, replace(Sampled.one_each([4]), logprobs=b"x" * logprob_bytes(0)))
        )
        if number < 2:
            engine.plan({0: 1})
    assert told == [True, True, False]


def test_sampling_parameters_follow_their_rows():
    engine = Engine()
    engine.plan({}, [admit(4, [1], temperature=0.5, top_k=-1, top_p=0.25, min_p=0.125, seed=-1)])
    engine.plan({}, [admit(1, [1, 2, 3], temperature=0.0, top_k=7, seed=2**64 - 2)])
    engine.plan({1: 9, 4: 9})
    step = engine.queue[0]
    assert step.slots.tolist() == [4, 1]
    assert {name: values.tolist() for name, values in sampling_of(step).fields.items()} == {
        "temperature": [0.5, 0.0],
        "top_k": [0, 7],
        "top_p": [0.25, 1.0],
        "min_p": [0.125, 0.0],
        "seed": [2**64 - 1, 2**64 - 2],
    }
    assert all(sampling_of(step).fields[field.name].dtype == field.dtype for field in FIELDS)
    positions = sampling_of(step).positions
    assert positions.tolist() == [1, 3] and positions.dtype == np.int64


def test_rows_that_do_not_sample_have_no_sampling_parameters():
    engine = Engine()
    engine.plan({0: 2, 1: 9}, [admit(0, [1] * 9), admit(1, [2], seed=5)])
    step = engine.queue[0]
    assert step.samples.tolist() == [True, False] and sampling_of(step).fields["seed"].tolist() == [
        5
    ]


def suppressed(steps) -> list[list[list[int]]]:
    """Of each step the rows that sample, with an id that they must not."""
    state, found = Edited(8, pages=64), []
    for step in steps:
        state.apply(step.delta)
        logits = np.zeros((int(step.samples.sum()), 12), dtype=np.float32)
        slots = step.slots[step.samples].tolist()
        edited = state.logits(logits, slots, sampling_of(step).positions.tolist())
        found.append(np.argwhere(np.isinf(edited)).tolist())
        assert not logits.any(), "what the model gave stays as it was"
    return found


def test_stop_tokens_are_suppressed_until_min_tokens_outputs():
    engine = Engine()
    short = admit(0, [1, 2, 3], suppress=(8, 9), min_tokens=2)
    engine.plan({1: 9, 0: 9}, [short, admit(1, [1, 2])])
    for _ in range(2):
        engine.plan({1: 1, 0: 1})
    assert suppressed(engine.queue) == [[[1, 8], [1, 9]], [[1, 8], [1, 9]], []]


def test_preempted_request_counts_its_outputs_towards_min_tokens():
    engine = Engine()
    again = admit(0, [1, 2, 3, 4], prompt_len=3, suppress=(8,), min_tokens=2)
    engine.plan({0: 9}, [again])
    engine.plan({0: 1})
    assert list(map(len, suppressed(engine.queue))) == [1, 0]


def test_preempted_request_resumes_with_the_same_tokens():
    engine = Engine()
    prompt = [3, 1, 2, 0, 1]
    engine.plan({0: 99}, [admit(0, prompt, seed=9)])
    for _ in range(6):
        engine.plan({0: 1})
    outputs = [fields(engine.work()[0])["token_ids"][0] for _ in range(7)]
    tokens = prompt + outputs
    again = admit(6, tokens, prompt_len=5, seed=9)
    admitted = engine.plan({6: 99}, [again], [Release(0, True, pack(outputs))])[0]
    assert unpack(admitted.cached).tolist() == [8]
    outputs += fields(engine.work()[0])["token_ids"]
    for _ in range(4):
        engine.plan({6: 1})
        outputs += fields(engine.work()[0])["token_ids"]
    assert outputs == continuation(prompt, 9, 12)


def test_statistics_count_prompts_and_hits_but_not_resumptions():
    engine = Engine()
    prompt = list(range(12))
    engine.plan({0: 99}, [admit(0, prompt)])
    engine.plan({})
    engine.plan({1: 99}, [admit(1, prompt)])
    engine.plan({2: 99}, [admit(2, [*prompt, 1, 2], prompt_len=12)])
    stats = engine.core.stats()
    assert (stats["prompt_tokens_total"], stats["cached_tokens_total"]) == (24, 8)
    assert (stats["slots_used"], stats["steps_in_flight"]) == (3, 4)
    assert stats["pages_total"] == PAGES - 1
    assert stats["pages_free"] + stats["pages_evictable"] < PAGES - 1
    assert stats["computed_tokens_total"] == 12 + 4 + 2
    steps = [stats[f"step_tokens_{end}"] for end in ("count", "sum", "le_1", "le_8", "le_16")]
    assert steps == [3, 12 + 4 + 2, 0, 2, 3]  # the plan without rows is no step


def test_draining_engine_is_idle_when_nothing_runs():
    engine = Engine()
    engine.plan({0: 9}, [admit(0, [1, 2])])
    engine.handle(Drain())
    assert engine.core.state()[0] == "draining" and not engine.core.idle()
    engine.work()
    assert not engine.core.idle(), "the request is still admitted"
    engine.plan({}, releases=[Release(0, False)])
    assert engine.core.idle()


def test_engine_that_leaves_reports_its_steps_and_then_ends_the_epoch_in_good_order():
    engine = Engine()
    engine.plan({0: 99}, [admit(0, [1, 2, 3])])
    engine.plan({0: 1})
    assert engine.handle(Leave()) == [] and not engine.core.idle()
    assert engine.core.state()[0] == "draining"
    assert engine.plan({0: 1}) == [], "it takes no more"
    assert isinstance(engine.work()[0], Result)
    result, fault = engine.work()
    assert result.number == 1
    assert (fault.epoch, fault.orderly) == (1, True)
    assert engine.core.idle()
    assert engine.handle(Tick()) == [], "it does not offer itself again"
    assert engine.handle(BeginEpoch(2, (ME,))) == []


def test_engine_that_leaves_with_nothing_to_do_is_idle_at_once():
    engine = Engine()
    assert [fault.orderly for fault in engine.handle(Leave())] == [True]
    assert engine.core.idle()
    waiting = make_core()
    assert waiting.handle(Leave(), 0.0) == [] and waiting.idle()
