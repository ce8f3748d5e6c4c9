"""Where a prompt leaves the thoughts of its answer: told of each, by what its template wrote last,
and the same for its gateway, its engine and whoever goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizer_folders import CHATML
from tokenizers import AddedToken, Tokenizer
from vocabularies import byte_level

from pipeinfer.messages import Accepted, Delivered, Submit, TokenizedRequest
from pipeinfer.params import ReasoningContext, RequestParams, StructuredOutputs
from pipeinfer.settings import Settings
from pipeinfer.text import ReasoningTags
from pipeinfer.tokenizer.chat_templates import ChatTemplates
from pipeinfer.tokenizer.prompts import PromptEncoder, Rejected
from pipeinfer.tokenizer.stage import make_core
from pipeinfer.tokenizer.workers import encode_submit
from pipeinfer.wire import pack
from thinking_models import TAILS, TURNS

THINK, SEED = ReasoningTags("<think>", "</think>"), ReasoningTags("<seed:think>", "</seed:think>")
LEFT = {  # with thinking as it is by default, and switched off
    "opens or closes": ("open", "over"),
    "opens or empties": ("open", "over"),
    "opens or is silent": ("open", "before"),
    "empties or is silent": ("before", "over"),
    "history alone": ("before", "before"),
}
USER: dict[str, Any] = {"role": "user", "content": "Is it?"}
FORM = StructuredOutputs(regex="a+")


def tokenizer(tags: ReasoningTags | None = THINK, special: bool = False) -> Tokenizer:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_tokens([AddedToken(tag, special=special) for tag in (tags.pair if tags else ())])
    return made


def encoder(
    tail: str, made: Tokenizer | None = None, tags: ReasoningTags | None = THINK
) -> PromptEncoder:
    source = TURNS + tail + "{% endif %}"
    if tags is not None:
        source = source.replace("<think>", tags[0]).replace("</think>", tags[1])
    templates = ChatTemplates({"default": source}, {}, str)
    return PromptEncoder(made or tokenizer(), templates, 10_000, 100_000, tags=tags)


def asked(chat: list[dict[str, Any]] | None = None, **fields: Any) -> Submit:
    submit = Submit("r", 1, 0, RequestParams(), 1)
    arguments = fields.pop("arguments", {})
    params = msgspec.structs.replace(submit.params, **fields.pop("params", {}))
    if chat is not None:
        fields |= {"chat": chat, "template_arguments": arguments}
    return msgspec.structs.replace(submit, params=params, **fields)


@pytest.mark.parametrize("shape", TAILS)
@pytest.mark.parametrize("tags", [THINK, SEED])
def test_what_the_template_wrote_last_decides_for_each_request(
    shape: str, tags: ReasoningTags
) -> None:
    made = encoder(TAILS[shape], tags=tags)
    before = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    for chat in ([USER], [USER, before, USER]):
        for off, left in zip(({}, {"enable_thinking": False}), LEFT[shape], strict=True):
            prompt = made.prompt(asked(chat, arguments=off, params={"structured_outputs": FORM}))
            assert (prompt.reasoning_state, prompt.reasoning) == (
                left,
                ReasoningContext(*tags.pair, left),
            )
            assert made.prompt(asked(chat, arguments=off)).reasoning is None, "nobody asks"


@pytest.mark.parametrize("shape", TAILS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "said", ["<think>", "</think>", "a <think> b", "What is </think>\n<think>"]
)
def test_tags_that_clients_write_decide_nothing(shape: str, special: bool, said: str) -> None:
    made = encoder(TAILS[shape], tokenizer(special=special))
    others = [{"role": "system", "content": said}, {**USER, "content": said}]
    thought = {"role": "assistant", "content": said, "reasoning_content": said}
    for chat in (others, [USER, thought, {**USER, "content": said}]):
        for off, left in zip(({}, {"enable_thinking": False}), LEFT[shape], strict=True):
            assert made.prompt(asked(chat, arguments=off)).reasoning_state == left
    bare = {"add_generation_prompt": False}
    assert made.prompt(asked(others, arguments=bare)).reasoning_state == "before"


def test_what_a_template_says_of_its_tags_decides_nothing() -> None:
    """Its own instructions are no thoughts; what it writes behind the opening tag may be."""
    told = ChatTemplates({"default": "Begin with <think>.\n" + TURNS + "{% endif %}"}, {}, str)
    made = PromptEncoder(tokenizer(), told, 10_000, 100_000, tags=THINK)
    assert made.prompt(asked([USER])).reasoning_state == "before"
    begun = encoder("<think>\nI have 9 tokens.\n")
    assert begun.prompt(asked([USER])).reasoning_state == "open"


@pytest.mark.parametrize(
    ("said", "left"),
    [("So", "over"), ("<think> hm", "open"), ("<think>hm</think>", "over"), ("</think>", "over")],
)
def test_an_answer_that_goes_on_is_where_it_was(said: str, left: str) -> None:
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    chat = [{**USER, "content": "<think>"}, {"role": "assistant", "content": said}]
    for tail in TAILS.values():
        assert encoder(tail).prompt(asked(chat, arguments=arguments)).reasoning_state == left


def test_what_is_cut_off_at_the_end_is_not_there() -> None:
    made = encoder(TAILS["opens or closes"])
    whole = len(made.encode(asked([USER])))
    for side, left in (("left", "open"), ("right", "before")):
        cut = {"truncate_prompt_tokens": whole - 1, "truncation_side": side}
        assert made.prompt(asked([USER], params=cut)).reasoning_state == left


def test_a_completion_is_its_form_unless_its_prompt_has_begun_to_think() -> None:
    made = encoder("")
    for tags, name in ((tokenizer(), "one token"), (tokenizer(None), "several")):
        made = encoder("", tags)
        for text, left in (("So:", None), ("<think>\n", "open"), ("<think> So", None),
                           ("a <think>", "open"), ("<think></think>\n", None)):  # fmt: skip
            prompt = made.prompt(asked(text=text, params={"structured_outputs": FORM}))
            assert prompt.reasoning == (left and ReasoningContext(*THINK.pair, left)), (name, text)
            ids = made.prompt(asked(prompt_ids=pack(prompt.ids.tolist()),
                                    params={"structured_outputs": FORM}))  # fmt: skip
            assert ids.reasoning == prompt.reasoning
            assert made.prompt(asked(text=text)).reasoning is None


def test_a_budget_counts_from_where_the_prompt_of_a_completion_leaves_off() -> None:
    for tags in (tokenizer(), tokenizer(None)):
        made = encoder("", tags)
        for text, left in (("So:", "before"), ("<think> So" + " far" * 50, "open"),
                           ("<think>hm</think>", "over")):  # fmt: skip
            params = {"thinking_token_budget": 3}
            assert made.prompt(asked(text=text, params=params)).reasoning == ReasoningContext(
                *THINK.pair, left
            )


def test_a_budget_needs_thoughts_to_count() -> None:
    params = {"thinking_token_budget": 3}
    counted = encoder("", tokenizer(), None).prompt(asked([USER], params=params)).reasoning
    assert counted == ReasoningContext(*THINK.pair, "before"), (
        "by its tokens, though none are told apart"
    )
    for tags, counts in ((None, True), (THINK, False)):
        made = encoder("", tokenizer(None), tags)
        made.reasoning_budgets = counts
        with pytest.raises(Rejected) as refusal:
            made.prompt(asked([USER], params=params))
        assert refusal.value.param == "thinking_token_budget"


@pytest.mark.parametrize("after", ["</think>", "Answer:", "."])
def test_a_form_waits_for_what_its_client_names(after: str) -> None:
    spec = {"structured_outputs": StructuredOutputs(regex="a+", after=after)}
    made = encoder("", tags=None)
    for prompt in (asked(text="So"), asked([USER])):
        prompt = msgspec.structs.replace(prompt, params=asked(params=spec).params)
        assert made.prompt(prompt).reasoning == ReasoningContext("", after, "open")
    ended = made.prompt(asked(text=f"So {after}\n", params=spec))
    assert ended.reasoning == ReasoningContext("", after, "over")
    chat = encoder("").prompt(asked([USER], params=spec)).reasoning
    thinks = after == THINK.closing
    assert chat == (
        ReasoningContext(*THINK.pair, "before") if thinks else ReasoningContext("", after, "open")
    )


def test_long_prompts_are_told_apart_as_short_ones() -> None:
    made = encoder(TAILS["opens or closes"])
    submit = asked([USER], params={"structured_outputs": FORM})
    told, prompt = encode_submit(made, submit), made.prompt(submit)
    assert (
        (told.reasoning_state, told.reasoning)
        == (prompt.reasoning_state, prompt.reasoning)
        == ("open", told.reasoning)
    )


def test_a_request_that_moves_thinks_on_where_it_was(checkpoint: Callable[..., Path]) -> None:
    """Its gateway is told with the prompt's length, each of its engines with its work."""
    core = make_core(checkpoint(chat_template=CHATML + "<think>\n"), Settings())
    budget = {"thinking_token_budget": 5, "n": 2}
    submit = msgspec.structs.replace(asked([USER], params=budget), choices=(0, 1))
    accepted, *works = (send.message for send in core.handle(submit, 0.0))
    assert isinstance(accepted, Accepted) and accepted.reasoning == "open"
    reasoning = [work.reasoning for work in works if isinstance(work, TokenizedRequest)]
    assert reasoning == [ReasoningContext(*THINK.pair, "open")] * 2
    again = [send.message for send in core.handle(Delivered("r", 2, pack([7])), 1.0)]
    [moved] = (message for message in again if isinstance(message, TokenizedRequest))
    assert (moved.attempt, moved.reasoning) == (2, reasoning[0])
