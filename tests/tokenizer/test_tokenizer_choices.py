"""Several choices of a prompt: encoded and routed once, then each a request of its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core import LOCAL, Drain
from pipeinfer.messages import Abort, Accepted, Done, Recover, Refused, Submit, Work
from pipeinfer.params import SEED_MASK, SamplingParams, choice_ids
from pipeinfer.tokenizer.chat_templates import ChatTemplates
from pipeinfer.tokenizer.core import Encoded, TokenizerCore
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.requests import PendingPrompt, PendingPrompts, first_choice
from pipeinfer.tokenizer.routing import GroupMonitor, GroupRouter
from pipeinfer.wire import pack


def make(groups: int = 1, routing: str = "round-robin") -> TokenizerCore:
    encoder = PromptEncoder(None, ChatTemplates({}, {}, str), 100, 1_000)
    return TokenizerCore(encoder, GroupRouter(routing, groups), GroupMonitor(groups), ())


def submit(choices: tuple[int, ...] = (0, 1, 2), **fields: Any) -> Submit:
    prompt = fields.pop("prompt_ids", pack([5, 6, 7]))
    return Submit(
        "r", 1, 0, SamplingParams(max_tokens=4), SEED_MASK - 1, prompt_ids=prompt, choices=choices,
        **fields,
    )  # fmt: skip


def works(core: TokenizerCore, event: Submit) -> list[Work]:
    return [s.message for s in core.handle(event, 0.0) if isinstance(s.message, Work)]


def test_each_choice_is_a_work_that_names_its_leader():
    core = make()
    accepted, *sends = core.handle(submit(), 0.0)
    assert accepted.message == Accepted("r", 1, 0, 3, choices=(0, 1, 2))
    made = [send.message for send in sends]
    assert [(w.request_id, w.seed, w.group_leader) for w in made if isinstance(w, Work)] == [
        ("r", SEED_MASK - 1, "r"), ("r/1", SEED_MASK, "r"), ("r/2", 0, "r"),
    ]  # fmt: skip
    assert core.stats()["prompt_tokens_total"] == 3 and core.stats()["ledger"] == 3
    (alone,) = works(make(), submit((0,)))
    assert alone.group_leader == ""


def test_a_choice_that_is_known_is_not_passed_on_again():
    core = make()
    works(core, submit((0, 2)))
    assert core.handle(submit((2,)), 0.0) == []
    assert [work.request_id for work in works(core, submit((0, 1, 2)))] == ["r/1"]


def test_choices_go_to_one_group_and_end_one_by_one():
    core = make(groups=2, routing="least-loaded")
    sends = core.handle(submit((0, 1, 2)), 0.0)
    (to,) = {send.to for send in sends if send.channel == "work"}
    assert core._router.loads()[int(to[-1])] == 3 + 3 * 4, "a prompt, and outputs of all"
    for name in ("r/1", "r"):
        (ended,) = core.handle(Abort(name, 1), 0.0)
        assert (ended.to, ended.message) == (to, Abort(name, 1))
    assert [w.request_id for w in told(core, to)] == ["r/2"]
    assert core.handle(Done(("r/2",)), 0.0)[0].to == to
    assert core._router.loads() == [0, 0] and core.stats()["ledger"] == 0


def told(core: TokenizerCore, scheduler: str) -> list[Work]:
    sends = core.handle(Recover(scheduler, 9), 0.0)
    return [send.message for send in sends if isinstance(send.message, Work)]


@pytest.mark.parametrize("drains", [False, True])
def test_a_refusal_is_told_of_every_choice(drains):
    core, event = make(), submit(prompt_ids=pack([5, 1000]))
    if drains:
        core.handle(Drain(), 0.0)
    refusals = [send.message for send in core.handle(event, 0.0)]
    assert all(isinstance(one, Refused) for one in refusals)
    assert [one.request_id for one in refusals] == ["r", "r/1", "r/2"]  # type: ignore[union-attr]
    assert core.stats()["refused_total"] == 3


@given(st.lists(st.integers(0, 4), unique=True, min_size=1), st.lists(st.integers(0, 4)))
def test_while_a_long_prompt_is_encoded_choices_may_end(choices, ends):
    encoding, event = PendingPrompts(), submit(tuple(choices))
    encoding.put(PendingPrompt(event, True))
    name = first_choice(event)
    for number in ends:
        encoding.discard(choice_ids("r", [number])[0])
    left = tuple(number for number in choices if number not in ends)
    found = encoding.get(name, 1)
    assert (None if found is None else found.submit) == (
        msgspec.structs.replace(event, choices=left) if left else None
    )
    assert encoding.abandoned == len(choices) - len(left)
    for number in range(5):
        assert encoding.has(choice_ids("r", [number])[0], 1) == (number in left)
    if left:
        encoding.pop(name)
    assert len(encoding) == 0 and not any(encoding.has(n, 1) for n in choice_ids("r", range(5)))


def test_a_long_prompt_is_encoded_once_for_the_choices_that_are_left():
    core = make()
    event = msgspec.structs.replace(submit((1, 2, 4)), prompt_ids=None, text="x" * 20_000)
    (asked,) = core.handle(event, 0.0)
    assert asked.channel == LOCAL
    core.handle(Abort("r/1", 1), 0.0)
    name = asked.message.request_id  # type: ignore[attr-defined]
    found = core.submit_to_encode(name, 1)
    assert found is not None and (found.request_id, found.choices) == (name, (0,))
    sends = core.handle(Encoded(name, 1, pack([1, 2])), 0.0)
    passed = [send.message for send in sends if isinstance(send.message, Work)]
    assert [(work.request_id, work.group_leader) for work in passed] == [("r/2", "r"), ("r/4", "r")]
    assert sends[0].message == Accepted("r", 1, 0, 2, choices=(2, 4))
    assert core.idle()
