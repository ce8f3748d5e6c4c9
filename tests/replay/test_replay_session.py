"""A recorded session of mixed requests replays without a difference; a planted bug does not."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from preemptions import preempting_plans
from replay_tool import tool

from pipeinfer.detokenizer.text import StopStrings
from pipeinfer.engine.core import EngineCore
from pipeinfer.gateway.ledger import RequestRecord
from pipeinfer.kernels import host
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import Plan
from pipeinfer.replay.run import rebuild
from pipeinfer.replay.traces import Difference, LoadedTrace, load
from pipeinfer.scheduler.policies import StepComposer
from pipeinfer.tokenizer.prompts import PromptEncoder

STAGES = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")


def kinds(recording: LoadedTrace) -> Counter:
    return Counter((e.direction, e.kind) for e in recording.entries)


def test_session_has_every_kind_of_request(session):
    gateway, scheduler = kinds(load(session["gateway"])), load(session["scheduler"])
    assert (
        gateway["in", "ClientDisconnected"] and gateway["in", "Refused"] and gateway["out", "Abort"]
    )
    assert scheduler.header.settings["overlap_depth"] == 2
    assert scheduler.header.settings["policy"] == "mixed"
    assert kinds(scheduler)["in", "StopHit"]
    assert preempting_plans(scheduler)
    calls = [e.message for e in load(session["gateway"]).entries if e.kind == "Call"]
    assert any(call.params.seed is not None for call in calls)
    assert any(call.timeout > 0 for call in calls)
    assert {call.chat is None for call in calls} == {True, False}


@pytest.mark.parametrize("stage", STAGES)
def test_stage_replays_without_a_difference(session, stage):
    done = tool("run", stage, session[stage], "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    recording = load(session[stage])
    inputs = sum(1 for e in recording.entries if e.direction == "in")
    outputs = sum(1 for e in recording.entries if e.direction == "out")
    assert inputs > 100 and outputs > 100
    assert f"equal to the end: {inputs} inputs, {outputs} outputs, 0 differences" in done.stderr
    assert done.stdout == ""
    if stage == "engine":
        steps = sum(1 for e in recording.entries if e.kind == "StepDone")
        assert f"the device computed {steps:,} steps" in done.stderr


def test_engine_replays_without_weights(session, tmp_path):
    done = tool("run", "engine", session["engine"], "--core-only", "--model", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences" in done.stdout


# ------------------------------------------------------------------------------------ planted bugs


@pytest.fixture
def planted(monkeypatch, session):
    """Replays `stage` with a bug for a function of its code; gives the first difference."""

    def replay(stage: str, whose: Any, name: str, bug: Any, *options: str) -> Difference:
        with monkeypatch.context() as patch:
            patch.setattr(whose, name, bug)
            done = tool("run", stage, session[stage], "--json", *options)
        assert done.returncode == 1, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert set(found) == {"seq", "channel", "field", "recorded", "replayed"}
        assert f"first difference: message {found['seq']}" in done.stderr
        return Difference(**found, cause=entry(load(session[stage]), found["seq"]))

    return replay


def entry(recording: LoadedTrace, seq: int):
    return next(e for e in recording.entries if e.seq == seq)


def test_wrong_victim_is_found_at_the_plan_that_preempts_it(planted, session):
    def victim(self):
        stay = [r for r in self._running if r not in self.preempted]
        if len(stay) < 2:
            return None
        exempt = next((r for r in stay if r.prefilling), None)
        choice = [r for r in stay if r is not exempt]
        return min(choice, key=lambda r: (r.work.priority, r.arrival))

    found = planted("scheduler", StepComposer, "_victim", victim)
    assert found.channel == "plan"
    assert found.field.startswith("releases[")
    assert found.seq in preempting_plans(load(session["scheduler"]))


def test_wrong_special_token_flag_is_found_at_the_first_chat(planted, session):
    right = PromptEncoder._tokenize

    def tokenize(self, text, _flag, param):
        return right(self, text, True, param)

    found = planted("tokenizer", PromptEncoder, "_tokenize", tokenize)
    chats = {
        e.message.request_id
        for e in load(session["tokenizer"]).entries
        if e.kind == "Submit" and e.message.chat is not None
    }
    first = next(
        e
        for e in load(session["tokenizer"]).entries
        if e.direction == "out" and getattr(e.message, "request_id", None) in chats
    )
    assert found.seq == first.seq
    if first.kind == "Accepted":
        assert (found.field, found.replayed) == ("prompt_tokens", first.message.prompt_tokens + 1)


def test_off_by_one_in_a_stop_string_is_found_where_it_stops(planted, session):
    right = StopStrings.feed

    def feed(self, piece, armed=True):
        text, hit = right(self, piece, armed)
        return (text[:-1], hit) if hit else (text, hit)

    found = planted("detokenizer", StopStrings, "feed", feed)
    rows = [
        (e.seq, row)
        for e in load(session["detokenizer"]).entries
        if e.kind == "Text"
        for row in e.message.rows
    ]
    stopped = [seq for seq, row in rows if isinstance(row.stop_reason, str) and row.text]
    assert found.seq == stopped[0]
    assert found.field.endswith(".text")
    assert found.recorded[:-1] == found.replayed


def free_the_wrong_pages(self, slot, tokens, clock):
    """In place of MemoryManager._cache_full_pages."""
    count = len(tokens) // self.page_size
    if count == 0:
        return
    before = self.table.pages_of(slot)[:count]
    tokens = tokens[: count * self.page_size]
    node, pages = self.cache.insert(tokens, before, self.slots.salt[slot], clock)
    if node is None:
        return
    self.table.set_prefix(slot, pages)
    self.cache.lock(node)
    self.cache.unlock(self.slots.locked_node[slot])
    self.slots.locked_node[slot] = node
    self._free(pages[before != pages])


def test_wrong_page_freed_is_found_at_the_plan_that_frees_it(planted, session):
    recording = load(session["engine"])
    found = planted(
        "engine", MemoryManager, "_cache_full_pages", free_the_wrong_pages, "--core-only"
    )
    step = first_plan_with_duplicates(recording)
    message = entry(recording, found.seq).message
    # What is said of the next plan's pages goes out before the step of this one has ended.
    assert (message.epoch, message.number) in (step, (step[0], step[1] + 1))
    assert found.channel == "result"


def first_plan_with_duplicates(recording: LoadedTrace) -> tuple[int, int]:
    """(epoch, number) of the first plan in which a request had pages that the tree has too."""
    core = rebuild(recording, "", {}, core_only=True).stage.core
    assert isinstance(core, EngineCore)
    memory, right, gifts = core.memory, core.memory._cache_full_pages, []
    give = memory._free

    def share(*arguments):
        memory._free = lambda pages: (gifts.append(len(pages)), give(pages))
        right(*arguments)
        memory._free = give

    memory._cache_full_pages = share
    for e in recording.entries:
        if e.direction == "in":
            core.handle(e.message, e.time)
            if any(gifts):
                return e.message.epoch, e.message.number
    raise AssertionError("no prompt was computed twice in this session")


def test_wrong_noise_is_found_at_the_first_step_that_draws(planted, session):
    right = host.philox_words
    found = planted(
        "engine", host, "philox_words", lambda seeds, at, counters: right(seeds, at + 1, counters)
    )
    recording = load(session["engine"])
    assert found.channel == "local" and found.field.startswith("token_ids[")
    step = entry(recording, found.seq).message
    drawing: set[int] = set()
    slots: dict[int, float] = {}
    for e in recording.entries:
        if isinstance(e.message, Plan) and e.message.number <= step.number:
            slots |= {admit.slot: admit.params.temperature for admit in e.message.admits}
            if any(slots.values()):
                drawing.add(e.message.number)
    # Other noise need not mean another token: the demo model is mostly sure of itself.
    assert min(drawing) <= step.number < min(drawing) + 60
    assert found.recorded != found.replayed


def test_text_delivered_twice_is_found_in_the_gateway(planted, session):
    right = RequestRecord.advance

    def advance(self, row):
        text, ids = right(self, row)
        self.tokens -= row.finish is None and self.tokens > 0
        return text, ids

    found = planted("gateway", RequestRecord, "advance", advance)
    assert found.channel == "local"
    later = [
        e.seq
        for e in load(session["gateway"]).entries
        if e.kind == "OutputDelta" and e.message.token_offset > 0
    ]
    assert found.seq >= later[0] and found.seq <= later[40]
