"""Grammars in the tokenizer: tried once, beside everything else; a verdict is an event like others,
so that a recording of it replays without a compiler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from child_processes import children_with
from pipeinfer.demo import demo_path
from pipeinfer.messages import Abort, Accepted, Message, Refused, Submit, TokenizedRequest
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.settings import Settings
from pipeinfer.text import grammar_setup
from pipeinfer.tokenizer import routing
from pipeinfer.tokenizer.core import (
    ENCODE_AT_ONCE_BYTES,
    ENCODE_HERE_BYTES,
    Encode,
    EncodeNext,
    GrammarVerdict,
    TokenizerCore,
    ValidateGrammar,
)
from pipeinfer.tokenizer.routing import MAX_REFUSAL_LETTERS, grammar_digest
from pipeinfer.tokenizer.stage import make_core
from pipeinfer.tokenizer.workers import FAST_PROCESSES, GrammarValidation


def slow(number: int = 0) -> StructuredOutputs:
    """What nobody has asked for before, and what takes 9 s."""
    return StructuredOutputs(json=json.dumps({"multipleOf": 999_983 - number}))


def asking(name: str, regex: str = "a", **fields: Any) -> Submit:
    spec = StructuredOutputs(regex=regex)
    params = RequestParams(max_tokens=4, structured_outputs=spec)
    return Submit(name, 1, 0, params, 0, **({"text": "Hello"} | fields))


@pytest.fixture
def core() -> TokenizerCore:
    return make_core(demo_path(), Settings())


def tried(name: str, regex: str = "a", status: int = 0, message: str = "") -> GrammarVerdict:
    return GrammarVerdict(name, 1, status, message, grammar_digest(StructuredOutputs(regex=regex)))


def sent(core: TokenizerCore, event: Message) -> list[Message]:
    return [send.message for send in core.handle(event, 0.0)]


def test_a_grammar_is_tried_before_the_request_goes_on_and_then_never_again(core) -> None:
    assert sent(core, asking("one", client="c")) == [ValidateGrammar("one", 1, "c")]
    assert not core.idle()
    assert sent(core, asking("one")) == [], "the gateway says it again"
    passed = sent(core, tried("one"))
    assert [type(message) for message in passed] == [Accepted, TokenizedRequest]
    assert [type(message) for message in sent(core, asking("two"))] == [Accepted, TokenizedRequest]
    assert core.idle()


def test_engines_are_told_what_takes_long_to_compile_also_of_later_requests(core) -> None:
    sent(core, asking("one", client="c"))
    sent(core, asking("quick", "b"))
    slow = msgspec.structs.replace(tried("one"), slow=True)
    works = [
        m
        for m in (*sent(core, slow), *sent(core, asking("two")))
        if isinstance(m, TokenizedRequest)
    ]
    assert [(w.request_id, w.client, w.slow_grammar) for w in works] == [
        ("one", "c", True),
        ("two", "", True),
    ]
    [quick] = [m for m in sent(core, tried("quick", "b")) if isinstance(m, TokenizedRequest)]
    assert not quick.slow_grammar


def test_what_does_not_compile_is_refused_and_so_is_whoever_asks_for_it_later(core) -> None:
    assert sent(core, asking("one", "(a", choices=(0, 1)))[0] == ValidateGrammar("one", 1)
    refused = sent(core, tried("one", "(a", 400, "unclosed group"))
    assert [(r.request_id, r.status, r.param) for r in refused if isinstance(r, Refused)] == [
        ("one", 400, "structured_outputs"),
        ("one/1", 400, "structured_outputs"),
    ]
    again = sent(core, asking("two", "(a"))
    assert [m.message for m in again if isinstance(m, Refused)] == ["unclosed group"]


def test_where_the_first_grammar_is_refused_the_other_one_is_tried_and_the_answer_says_why(core):
    """All that wait for the refused one, choices and long prompts included, and those that come
    later; a grammar that is served is not replaced."""
    other = StructuredOutputs(regex="b")
    long = "x" * (ENCODE_HERE_BYTES + 1)
    sent(core, asking("one", "(a", client="c", choices=(0, 1), fallback_grammar=other))
    sent(core, asking("long", "(a", text=long, fallback_grammar=other))
    sent(core, asking("without", "(a"))
    assert core.submit_to_validate("one", 1).params.structured_outputs.regex == "(a"
    out = sent(core, tried("one", "(a", 400, "unclosed group"))
    assert [m for m in out if isinstance(m, ValidateGrammar)] == [
        ValidateGrammar("one", 1, "c"),
        ValidateGrammar("long", 1),
    ]
    assert [m.request_id for m in out if isinstance(m, Refused)] == ["without"]
    assert core.submit_to_validate("one", 1).params.structured_outputs == other
    passed = sent(core, tried("one", "b"))
    assert [m.refusal for m in passed if isinstance(m, Accepted)] == ["unclosed group"]
    works = [m for m in passed if isinstance(m, TokenizedRequest)]
    assert [w.request_id for w in works] == ["one", "one/1"]
    assert [w.params.structured_outputs for w in works] == [other] * 2
    assert [type(m) for m in passed[3:]] == [Encode]
    later = sent(core, asking("later", "(a", fallback_grammar=other))
    assert (later[0].refusal, later[1].params.structured_outputs) == ("unclosed group", other)
    served = sent(core, asking("served", "b", fallback_grammar=StructuredOutputs(regex="c")))
    assert (served[0].refusal, served[1].params.structured_outputs) == ("", other)
    sent(core, asking("none", "(a", fallback_grammar=StructuredOutputs(regex="(b")))
    [refused] = sent(core, tried("none", "(b", 400, "neither"))
    assert (refused.request_id, refused.message) == ("none", "neither")


def test_a_trial_that_could_not_be_made_says_nothing_of_the_grammar(core) -> None:
    sent(core, asking("one"))
    sent(core, asking("beside"))
    [refused] = sent(core, GrammarVerdict("one", 1, 500, "no process"))
    assert isinstance(refused, Refused) and (refused.request_id, refused.status) == ("one", 500)
    assert core.submit_to_validate("beside", 1) is not None
    assert sent(core, asking("two")) == [ValidateGrammar("two", 1)]


def test_a_long_prompt_is_encoded_when_its_grammar_has_passed(core) -> None:
    long = "x" * (ENCODE_HERE_BYTES + 1)
    assert sent(core, asking("one", text=long, client="c")) == [ValidateGrammar("one", 1, "c")]
    [encode] = sent(core, tried("one"))
    assert isinstance(encode, Encode) and (encode.request_id, encode.client) == ("one", "c")
    assert core.submit_to_encode("one", 1) is not None and core.submit_to_validate("one", 1) is None


def test_whoever_left_meanwhile_is_not_passed_on_and_the_verdict_is_remembered(core) -> None:
    sent(core, asking("one", "(a"))
    sent(core, Abort("one", 1))
    assert core.submit_to_validate("one", 1) is None
    assert sent(core, tried("one", "(a", 400, "unclosed group")) == []
    [refused] = sent(core, asking("two", "(a"))
    assert isinstance(refused, Refused)


def test_one_verdict_is_for_all_that_wait_for_it_and_their_turns_are_dropped(core) -> None:
    for name in ("one", "two", "three"):
        sent(core, asking(name))
    sent(core, asking("other", "b"))
    passed = sent(core, tried("two"))
    assert [m.request_id for m in passed if isinstance(m, TokenizedRequest)] == [
        "one",
        "two",
        "three",
    ]
    assert [core.submit_to_validate(name, 1) for name in ("one", "two", "three")] == [None] * 3
    assert core.submit_to_validate("other", 1) is not None
    assert sent(core, tried("one")) == [], "two processes tried it at the same time"


def test_many_prompts_that_waited_for_one_grammar_hold_the_stage_up_no_longer_than_a_few(
    core,
) -> None:
    text = "x " * (ENCODE_AT_ONCE_BYTES // 3)
    many = 3 * ENCODE_HERE_BYTES // len(text)
    for n in range(many):
        sent(core, asking(f"{n}", text=text))
    passed = sent(core, tried("0"))
    here = [m for m in passed if isinstance(m, TokenizedRequest)]
    assert 1 < len(here) <= ENCODE_HERE_BYTES // len(text)
    assert passed.count(EncodeNext()) == many - len(here)
    for _ in range(many - len(here)):
        here += [m for m in sent(core, EncodeNext()) if isinstance(m, TokenizedRequest)]
    assert [m.request_id for m in here] == [f"{n}" for n in range(many)]


def test_a_thousand_new_grammars_push_no_verdict_out(core) -> None:
    sent(core, asking("one", "(a"))
    sent(core, tried("one", "(a", 400, "unclosed group"))
    for n in range(1000):
        sent(core, asking("other", f"b{n}"))
        sent(core, tried("other", f"b{n}", 400, "it takes longer than 5 s to compile"))
    [refused] = sent(core, asking("again", "(a"))
    assert isinstance(refused, Refused) and refused.message == "unclosed group"


def test_verdicts_are_remembered_up_to_a_number_and_a_length(core, monkeypatch) -> None:
    monkeypatch.setattr(routing, "MAX_VERDICTS", 2)
    for regex in ("a", "b", "c"):
        sent(core, asking(regex, regex))
        sent(core, tried(regex, regex))
    found = [type(sent(core, asking("x" + regex, regex))[0]) for regex in ("c", "b", "a")]
    assert found == [Accepted, Accepted, ValidateGrammar]
    sent(core, asking("long", "l"))
    sent(core, tried("long", "l", 400, "quoted " * 1000))
    [refused] = sent(core, asking("longer", "l"))
    assert isinstance(refused, Refused) and len(refused.message) == MAX_REFUSAL_LETTERS


class Harness:
    """Trials, what waits for them, and what they fed."""

    def __init__(self, seconds: float = 30.0, none: str = "") -> None:
        self.submits: dict[str, Submit] = {}
        self.fed: list[GrammarVerdict] = []
        setup = None if none else grammar_setup(demo_path())
        self.trials = GrammarValidation(
            setup, lambda name, _: self.submits.get(name), none, seconds
        )

    def ask(self, name: str, spec: StructuredOutputs, client: str = "") -> None:
        params = RequestParams(structured_outputs=spec)
        self.submits[name] = Submit(name, 1, 0, params, 0, client=client)
        self.trials.deliver(ValidateGrammar(name, 1, client))

    def feed(self, event: Message) -> None:
        assert isinstance(event, GrammarVerdict)
        self.fed.append(event)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):  # slow ones get what the others on a machine leave
            while not done():
                await asyncio.sleep(0.005)


async def test_what_takes_long_holds_nobody_up_whoever_sends_it() -> None:
    """Each on a connection of its own, as if all were new."""
    harness = Harness()
    await harness.trials.start(harness.feed)
    for n in range(6):
        harness.ask(f"slow{n}", slow(n), f"host/x{n}")
    harness.ask("good", StructuredOutputs(regex="a{3}"), "host/honest")
    harness.ask("bad", StructuredOutputs(regex="(a"), "other/honest")
    for n in range(6, 8):
        harness.ask(f"slow{n}", slow(n), f"host/x{n}")
    await harness.until(lambda: len(harness.fed) >= 2)
    verdicts = {one.request_id: one for one in harness.fed[:2]}
    assert set(verdicts) == {"good", "bad"}, "before any that takes long has its verdict"
    assert (verdicts["good"].status, verdicts["bad"].status) == (0, 400)
    assert not verdicts["good"].slow
    assert harness.trials.stats()["trials_ended_total"] > 1
    await harness.trials.stop()


async def test_what_takes_too_long_is_refused_with_the_time_that_it_had() -> None:
    harness = Harness(seconds=0.5)
    await harness.trials.start(harness.feed)
    harness.ask("slow", slow())
    await harness.until(lambda: len(harness.fed) == 1)
    [late] = harness.fed
    assert (late.status, late.slow) == (400, True) and "longer than 0.5 s" in late.message
    assert late.grammar == grammar_digest(slow())
    assert harness.trials.stats()["trials_ended_total"] == 2, "quickly at first, then slowly"
    await harness.trials.stop()


async def test_what_nobody_wants_any_more_is_not_tried_and_the_end_waits_for_nothing() -> None:
    harness = Harness()
    await harness.trials.start(harness.feed)
    for n in range(FAST_PROCESSES):
        harness.ask(f"slow{n}", slow(n))
    harness.ask("gone", StructuredOutputs(regex="a"))
    del harness.submits["gone"]
    processes = partial(children_with, "pipeinfer.grammars.validation")
    await harness.until(lambda: any(process.children() for process in processes()))  # it compiles
    for process in processes():
        process.suspend()  # who waits for its verdict waits for ever
    async with asyncio.timeout(60):
        await harness.trials.stop()
    assert harness.fed == []


async def test_a_model_without_a_vocabulary_for_it_says_so() -> None:
    harness = Harness(none="there is no tokenizer")
    await harness.trials.start(harness.feed)
    harness.ask("r", StructuredOutputs(regex="a"))
    await harness.until(lambda: bool(harness.fed))
    assert harness.fed == [GrammarVerdict("r", 1, 400, "there is no tokenizer")]
    await harness.trials.stop()
