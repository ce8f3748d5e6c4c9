"""Grammars in the tokenizer: tried once, beside everything else; a verdict is an event like others,
so that a recording of it replays without a compiler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeinfer.demo import demo_path
from pipeinfer.messages import Abort, Accepted, Message, Refused, Submit, Work
from pipeinfer.params import SamplingParams, StructuredOutputs
from pipeinfer.settings import Settings
from pipeinfer.text.ends import grammar_setup
from pipeinfer.tokenizer import encoding
from pipeinfer.tokenizer.core import AT_ONCE, TokenizerCore
from pipeinfer.tokenizer.events import Encode, Tried, Try
from pipeinfer.tokenizer.stage import make_core
from pipeinfer.tokenizer.trials import PROCESSES, Trials

SLOW = StructuredOutputs(json=json.dumps({"type": "integer", "multipleOf": 999983}))


def asking(name: str, regex: str = "a", **fields: Any) -> Submit:
    spec = StructuredOutputs(regex=regex)
    params = SamplingParams(max_tokens=4, structured_outputs=spec)
    return Submit(name, 1, 0, params, 0, **({"text": "Hello"} | fields))


@pytest.fixture
def core() -> TokenizerCore:
    return make_core(demo_path(), Settings())


def sent(core: TokenizerCore, event: Message) -> list[Message]:
    return [send.message for send in core.handle(event, 0.0)]


def test_a_grammar_is_tried_before_the_request_goes_on_and_then_never_again(core) -> None:
    assert sent(core, asking("one")) == [Try("one", 1, 1)]
    assert not core.idle()
    assert sent(core, asking("one")) == [], "the gateway says it again"
    passed = sent(core, Tried("one", 1))
    assert [type(message) for message in passed] == [Accepted, Work]
    assert [type(message) for message in sent(core, asking("two"))] == [Accepted, Work]
    assert core.idle()


def test_what_does_not_compile_is_refused_and_so_is_whoever_asks_for_it_later(core) -> None:
    assert sent(core, asking("one", "(a", choices=(0, 1)))[0] == Try("one", 1, 2)
    refused = sent(core, Tried("one", 1, 400, "unclosed group"))
    assert [(r.request_id, r.status, r.param) for r in refused if isinstance(r, Refused)] == [
        ("one", 400, "structured_outputs"),
        ("one/1", 400, "structured_outputs"),
    ]
    again = sent(core, asking("two", "(a"))
    assert [m.message for m in again if isinstance(m, Refused)] == ["unclosed group"]


def test_a_trial_that_could_not_be_made_says_nothing_of_the_grammar(core) -> None:
    sent(core, asking("one"))
    [refused] = sent(core, Tried("one", 1, 500, "no process"))
    assert isinstance(refused, Refused) and refused.status == 500
    assert sent(core, asking("two")) == [Try("two", 1, 1)]


def test_a_long_prompt_is_encoded_when_its_grammar_has_passed(core) -> None:
    long = "x" * (AT_ONCE + 1)
    assert sent(core, asking("one", text=long)) == [Try("one", 1, 1)]
    [encode] = sent(core, Tried("one", 1))
    assert isinstance(encode, Encode) and encode.request_id == "one"


def test_whoever_left_meanwhile_is_not_passed_on(core) -> None:
    sent(core, asking("one"))
    sent(core, Abort("one", 1))
    assert core.encoding("one", 1) is None
    assert sent(core, Tried("one", 1)) == []
    assert sent(core, asking("two")) == [Try("two", 1, 1)], "nobody was there to remember it for"


def test_verdicts_are_remembered_up_to_a_number(core, monkeypatch) -> None:
    monkeypatch.setattr(encoding, "REMEMBERED", 2)
    for regex in ("a", "b", "c"):
        sent(core, asking(regex, regex))
        sent(core, Tried(regex, 1))
    found = [type(sent(core, asking("x" + regex, regex))[0]) for regex in ("c", "b", "a")]
    assert found == [Accepted, Accepted, Try]


class Harness:
    """Trials, what waits for them, and what they fed."""

    def __init__(self, seconds: float = 30.0, none: str = "") -> None:
        self.submits: dict[str, Submit] = {}
        self.fed: list[Tried] = []
        setup = None if none else grammar_setup(demo_path())
        self.trials = Trials(setup, lambda name, _: self.submits.get(name), none, seconds)

    def ask(self, name: str, spec: StructuredOutputs) -> None:
        params = SamplingParams(structured_outputs=spec)
        self.submits[name] = Submit(name, 1, 0, params, 0)
        self.trials.deliver(Try(name, 1, len(name)))

    def feed(self, event: Message) -> None:
        assert isinstance(event, Tried)
        self.fed.append(event)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not done():
                await asyncio.sleep(0.005)


async def test_one_that_takes_long_holds_nobody_up() -> None:
    harness = Harness(seconds=2.0)
    await harness.trials.start(harness.feed)
    for n in range(PROCESSES - 1):
        harness.ask(f"slow{n}", SLOW)
    for n in range(5):
        harness.ask(f"{n}", StructuredOutputs(regex=f"a{{{n + 1}}}"))
    harness.ask("bad", StructuredOutputs(regex="(a"))
    await harness.until(lambda: len(harness.fed) == PROCESSES + 5)
    await harness.trials.stop()
    order = [one.request_id for one in harness.fed]
    assert set(order[:6]) == {"0", "1", "2", "3", "4", "bad"}
    verdicts = {one.request_id: (one.status, one.message) for one in harness.fed}
    assert verdicts["3"] == (0, "") and verdicts["bad"][0] == 400
    assert verdicts["slow0"][0] == 400 and "longer than 2 s" in verdicts["slow0"][1]
    assert harness.trials.stats()["trials_ended_total"] == PROCESSES - 1


async def test_what_nobody_wants_any_more_is_not_tried_and_the_end_waits_for_nothing() -> None:
    harness = Harness()
    await harness.trials.start(harness.feed)
    for n in range(PROCESSES):
        harness.ask(f"slow{n}", SLOW)
    harness.ask("gone", StructuredOutputs(regex="a"))
    del harness.submits["gone"]
    async with asyncio.timeout(5):
        await harness.trials.stop()
    assert harness.fed == []


async def test_a_model_without_a_vocabulary_for_it_says_so() -> None:
    harness = Harness(none="there is no tokenizer")
    await harness.trials.start(harness.feed)
    harness.ask("r", StructuredOutputs(regex="a"))
    await harness.until(lambda: bool(harness.fed))
    assert harness.fed == [Tried("r", 1, 400, "there is no tokenizer")]
    await harness.trials.stop()
