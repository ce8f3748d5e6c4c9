"""Requests become work for one scheduler, or a refusal that says what was wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import CHATML, make_tokenizer, write_json
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pipeinfer.core import GIVE_UP_FACTOR, LATE_WORK_SECONDS, LOCAL, Drain, Leave, Send, Tick
from pipeinfer.messages import (
    Abort,
    Accepted,
    AdapterChanges,
    AdapterState,
    Adopt,
    Delivered,
    Done,
    GroupStatus,
    HandOver,
    Message,
    Reattached,
    Recover,
    Recovered,
    Refused,
    Retention,
    StopHit,
    Submit,
    TokenizedRequest,
)
from pipeinfer.params import SEED_MASK, RequestParams, choice_ids
from pipeinfer.runtime.stage import StageContext
from pipeinfer.settings import Settings
from pipeinfer.text import HARMONY_TOKENS
from pipeinfer.tokenizer.chat_templates import ChatTemplates
from pipeinfer.tokenizer.core import Encoded, TokenizerCore
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.routing import (
    MAX_ORIGIN_BYTES,
    GroupMonitor,
    GroupRouter,
    PendingPrompt,
    PendingPrompts,
    first_choice,
)
from pipeinfer.tokenizer.stage import build, make_core
from pipeinfer.topology import Identity, Topology
from pipeinfer.wire import pack, unpack

Make = Callable[..., Path]
HELLO = {"role": "user", "content": "Hi 🙂"}


def submit(name: str = "r", max_tokens: int | None = 8, **fields: Any) -> Submit:
    params = fields.pop("params", {})
    return Submit(name, 3, 1, RequestParams(max_tokens=max_tokens, **params), 11, **fields)


def refused(core: TokenizerCore, event: Submit) -> Refused:
    (send,) = core.handle(event, 0.0)
    assert (send.channel, send.to) == ("text", "gateway-1")
    assert isinstance(send.message, Refused)
    assert (send.message.request_id, send.message.attempt) == ("r", 3)
    return send.message


def work(core: TokenizerCore, event: Submit) -> TokenizedRequest:
    first, second = core.handle(event, 0.0)
    assert (first.channel, first.to) == ("text", "gateway-1")
    assert (second.channel, second.to) == ("work", "scheduler-0")
    assert isinstance(second.message, TokenizedRequest)
    raw = second.message.prompt_ids
    back = raw if event.return_prompt_ids else b""
    assert first.message == Accepted("r", 3, 0, len(raw) // 4, back)
    core.handle(Done(("r",)), 0.0)  # so that the name is free for the next one
    return second.message


def ids(event: TokenizedRequest) -> list[int]:
    return unpack(event.prompt_ids).tolist()


@pytest.fixture
def folder(checkpoint: Make) -> Path:
    return checkpoint(chat_template=CHATML)


@pytest.fixture
def core(folder: Path) -> TokenizerCore:
    return make_core(folder, Settings())


def test_a_gateway_that_asks_for_the_ids_of_the_prompt_gets_them(core: TokenizerCore) -> None:
    work(core, submit(text="Hi", return_prompt_ids=True))
    work(core, submit(text="Hi"))


def test_text_is_encoded_as_transformers_encodes_it(core: TokenizerCore, folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    assert ids(work(core, submit(text="Hi 🙂"))) == reference.encode("Hi 🙂")
    plain = work(core, submit(text="Hi 🙂", add_special_tokens=False))
    assert ids(plain) == reference.encode("Hi 🙂", add_special_tokens=False)


def test_chat_gets_the_templates_special_tokens_and_no_others(
    core: TokenizerCore, folder: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template([HELLO], add_generation_prompt=True)
    assert ids(work(core, submit(chat=[HELLO]))) == expected["input_ids"]


def test_work_carries_all_that_the_request_said(core: TokenizerCore) -> None:
    event = submit(
        prompt_ids=pack([1, 2, 3]), priority=5, timeout=2.5, cache_salt="salt", trace="00-ab"
    )
    assert work(core, event) == TokenizedRequest(
        request_id="r",
        attempt=3,
        gateway=1,
        detokenizer=0,
        prompt_ids=pack([1, 2, 3]),
        params=event.params,
        seed=11,
        eos_ids=(257,),
        priority=5,
        timeout=2.5,
        cache_salt="salt",
        trace="00-ab",
    )


def test_eos_ids_come_from_all_three_files_unless_eos_is_ignored(
    checkpoint: Make,
) -> None:
    folder = checkpoint(eos_token="<|im_end|>")
    write_json(folder / "generation_config.json", {"eos_token_id": [258, 257]})
    core = make_core(folder, Settings())
    assert set(work(core, submit(text="a")).eos_ids) == {257, 258, 259}
    assert work(core, submit(text="a", params={"ignore_eos": True})).eos_ids == ()


def test_harmony_answers_end_with_a_call_also_where_no_file_says_so(checkpoint: Make) -> None:
    """Only as special tokens; <|end|> ends a message, and no answer."""
    folder, tokenizer = checkpoint(), make_tokenizer()
    texts = [text for text in sorted(HARMONY_TOKENS) if tokenizer.token_to_id(text) is None]
    tokenizer.add_tokens(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    (named,) = work(make_core(folder, Settings()), submit(text="a")).eos_ids
    tokenizer.add_special_tokens(sorted(HARMONY_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    found = work(make_core(folder, Settings()), submit(text="a")).eos_ids
    assert found == (named, *map(tokenizer.token_to_id, ("<|return|>", "<|call|>")))


@pytest.mark.parametrize("token", [-1, 264, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(core: TokenizerCore, token: int) -> None:
    refusal = refused(core, submit(prompt_ids=pack([1, token])))
    assert (refusal.status, refusal.param) == (400, "prompt")
    assert str(token) in refusal.message
    if token > 0:
        for param, value in (("stop_token_ids", (1, token)), ("logit_bias", {1: 1.0, token: 1.0})):
            refusal = refused(core, submit(text="a", params={param: value}))
            assert (refusal.status, refusal.param) == (400, param)
            assert str(token) in refusal.message
    assert ids(work(core, submit(prompt_ids=pack([0, 263])))) == [0, 263]


BAD = ["cat", "dog house"]
A, B = 64, 65  # the ids of these letters


def test_bad_words_are_spelled_at_the_beginning_and_behind_a_space(checkpoint: Make) -> None:
    folder = checkpoint()
    core = make_core(folder, Settings())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    banned = work(
        core, submit(text="a", params={"bad_words": ("cat", " cat", "dog house")})
    ).bad_word_ids
    spelled = [tokenizer.encode(word, add_special_tokens=False).ids for word in BAD]
    # Of these bytes a leading space is a token by itself, so that " cat" ends with "cat".
    assert [list(ids) for ids in banned] == spelled
    assert work(core, submit(text="a")).bad_word_ids == ()
    event = submit(text="a", choices=(0, 1), params={"bad_words": ("cat",)})
    sent = [
        send.message
        for send in core.handle(event, 0.0)
        if isinstance(send.message, TokenizedRequest)
    ]
    assert [one.bad_word_ids for one in sent] == [(tuple(spelled[0]),)] * 2


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": (1, 264)}, "allowed_token_ids"),
        ({"allowed_token_ids": (A,), "bad_words": ("a",)}, "bad_words"),
        ({"allowed_token_ids": (257,), "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": (A, B), "min_tokens": 1, "stop_token_ids": (A, B)}, "min_tokens"),
        (
            {"allowed_token_ids": (A, B), "min_tokens": 1, "stop_token_ids": (A,),
             "bad_words": ("b",)},
            "min_tokens",
        ),
        ({"bad_words": ("x" * 65,)}, "bad_words"),
        ({"bad_words": tuple(f"{'y' * 50}{n}" for n in range(50))}, "bad_words"),
    ],
)  # fmt: skip
def test_what_leaves_nothing_to_sample_is_refused(core: TokenizerCore, params, param) -> None:
    refusal = refused(core, submit(text="a", params=params))
    assert (refusal.status, refusal.param) == (400, param)


@pytest.mark.parametrize(
    ("kept", "most", "left"),
    [(5, 4, 5), (60, 4, 60), (100, 4, 100), (-1, 4, 60), (-1, None, 63), (1, None, 1)],
)
def test_a_prompt_keeps_its_last_tokens_and_may_then_be_longer(
    core: TokenizerCore, kept: int, most: int | None, left: int
) -> None:
    params = {"truncate_prompt_tokens": kept}
    long, text = list(range(200)), "abc" * 60
    if left + (most or 1) > 64:
        refusal = refused(core, submit(max_tokens=most, prompt_ids=pack(long), params=params))
        assert refusal.code == "context_length_exceeded"
        return
    found = ids(work(core, submit(max_tokens=most, prompt_ids=pack(long), params=params)))
    assert found == long[-left:]
    of_text = ids(work(core, submit(max_tokens=most, text=text, params=params)))
    assert of_text == ([A, B, B + 1] * 60)[-left:]
    chat = [{"role": "user", "content": text}]
    assert len(ids(work(core, submit(max_tokens=most, chat=chat, params=params)))) == left
    params = {**params, "truncation_side": "right"}
    found = ids(work(core, submit(max_tokens=most, prompt_ids=pack(long), params=params)))
    assert found == long[:left]


def test_ends_may_be_the_only_ids_that_are_allowed(core: TokenizerCore) -> None:
    some = {"allowed_token_ids": (97, 257), "min_tokens": 1}
    assert work(core, submit(text="a", params=some)).params.allowed_token_ids == (97, 257)
    assert work(core, submit(text="a", params={"allowed_token_ids": (257,)}))


def test_an_empty_prompt_is_refused(core: TokenizerCore) -> None:
    assert refused(core, submit(prompt_ids=b"")).param == "prompt"
    assert refused(core, submit(text="", add_special_tokens=False)).param == "prompt"
    assert refused(core, submit(chat=[])).param == "messages"
    assert refused(core, submit()).status == 400
    assert ids(work(core, submit(text=""))) == [256]  # BOS alone is a prompt


def test_a_request_fits_the_context_exactly_or_is_refused(core: TokenizerCore) -> None:
    sixty = pack([7] * 60)
    assert work(core, submit(max_tokens=4, prompt_ids=sixty))
    refusal = refused(core, submit(max_tokens=5, prompt_ids=sixty))
    assert (refusal.status, refusal.param) == (400, "max_tokens")
    assert refusal.code == "context_length_exceeded"
    for number in ("64 tokens", "65", "60 in the prompt", "5 in the completion"):
        assert number in refusal.message
    assert work(core, submit(max_tokens=None, prompt_ids=pack([7] * 63)))
    refusal = refused(core, submit(max_tokens=None, prompt_ids=pack([7] * 64)))
    assert (refusal.param, refusal.code) == ("prompt", "context_length_exceeded")
    refusal = refused(core, submit(chat=[{"role": "user", "content": "x" * 64}]))
    assert (refusal.param, refusal.code) == ("messages", "context_length_exceeded")


def test_a_shorter_context_can_be_set(folder: Path) -> None:
    core = make_core(folder, Settings(max_model_len=10))
    assert "10 tokens" in refused(core, submit(prompt_ids=pack([7] * 3))).message


def test_a_chat_that_the_template_refuses_is_the_clients_error(checkpoint: Make) -> None:
    core = make_core(checkpoint(chat_template="{{ raise_exception('no users') }}"), Settings())
    refusal = refused(core, submit(chat=[HELLO]))
    assert (refusal.status, refusal.param) == (400, "messages")
    assert "no users" in refusal.message
    core = make_core(checkpoint(), Settings())
    assert "no chat template" in refused(core, submit(chat=[HELLO])).message


def test_without_a_tokenizer_ids_still_work(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    core = make_core(folder, Settings())
    assert ids(work(core, submit(prompt_ids=pack([4, 5])))) == [4, 5]
    refusal = refused(core, submit(text="a"))
    assert (refusal.status, refusal.param) == (400, "prompt")
    assert "tokenizer.json" in refusal.message
    assert refused(core, submit(chat=[HELLO])).param == "messages"


def test_what_drains_refuses_what_is_new_once_gateways_know(core: TokenizerCore) -> None:
    assert core.handle(Tick(), 0.0) == []
    assert core.state() == ("ready", "")
    core.handle(Drain(), -LATE_WORK_SECONDS / 2)
    assert core.state()[0] == "draining"
    assert all(
        not isinstance(s.message, Refused) for s in core.handle(submit(prompt_ids=pack([1])), 0.0)
    )
    core.handle(Drain(), 0.0)
    [send] = core.handle(submit("late", prompt_ids=pack([1])), LATE_WORK_SECONDS / 2)
    assert isinstance(send.message, Refused) and send.message.status == 503


def test_a_message_of_another_stage_is_an_error(core: TokenizerCore) -> None:
    with pytest.raises(TypeError, match="StopHit"):
        core.handle(StopHit("r", 1, 1), 0.0)


def two_groups(gateways: tuple[str, ...] = (), host_loss: float = inf) -> TokenizerCore:
    encoder = PromptEncoder(None, ChatTemplates({}, {}, str), vocab_size=10, max_model_len=100)
    return TokenizerCore(
        encoder,
        GroupRouter("round-robin", 2),
        GroupMonitor(2, host_loss),
        (),
        "tokenizer-0",
        7,
        gateways,
    )


def goes_to(core: TokenizerCore, event: Message) -> list[str]:
    return [send.to for send in core.handle(event, 0.0) if send.channel == "work"]


def recovered(core: TokenizerCore, group: int) -> list[TokenizedRequest]:
    """What a scheduler that was started again is told, without the brackets around it."""
    stage = f"scheduler-{group}"
    first, *told, last = core.handle(Recover(stage, 9), 0.0)
    assert first == Send("recovery", stage, Recovered("tokenizer-0", 9, opening=True))
    assert last == Send("recovery", stage, Recovered("tokenizer-0", 9))
    assert all((send.channel, send.to) == ("work", stage) for send in told)
    return [send.message for send in told]  # type: ignore


@pytest.mark.parametrize("end", [lambda name: Abort(name, 3), lambda name: Done((name,))])
def test_the_end_of_a_request_takes_its_way(end: Callable[[str], Message]) -> None:
    core = two_groups()
    for name, group in (("a", 0), ("b", 1), ("c", 0)):
        event = submit(name, prompt_ids=pack([1]))
        assert goes_to(core, event) == [f"scheduler-{group}"]
    for name, group in (("b", 1), ("a", 0), ("c", 0)):
        assert goes_to(core, end(name)) == [f"scheduler-{group}"]
    assert core.stats()["ledger"] == 0


def test_what_has_ended_and_nobody_took_is_aborted_wherever_it_may_be() -> None:
    core = two_groups()
    core.handle(submit("a", prompt_ids=pack([1])), 0.0)
    gone = Abort("a", 3, "nobody has taken its end")
    for groups in ((0,), (0, 1)):  # also what only an earlier tokenizer knew
        sends = core.handle(Delivered("a", 3, b"", ended=True), 0.0)
        assert sends == [Send("work", f"scheduler-{group}", gone) for group in groups]
        assert core.stats()["ledger"] == 0


def test_ends_of_one_message_are_sorted_by_group() -> None:
    core = two_groups()
    for name in "abc":
        core.handle(submit(name, prompt_ids=pack([1])), 0.0)
    assert core.handle(Done(("a", "b", "c", "refused here")), 0.0) == [
        Send("work", "scheduler-0", Done(("a", "c"))),
        Send("work", "scheduler-1", Done(("b",))),
    ]


def test_an_abort_of_an_unknown_request_goes_everywhere() -> None:
    assert goes_to(two_groups(), Abort("r", 3)) == ["scheduler-0", "scheduler-1"]


def test_a_restarted_scheduler_is_told_the_unfinished_works_of_its_group() -> None:
    core = two_groups()
    works = {}
    for name in "abcde":
        sends = core.handle(submit(name, prompt_ids=pack([1, 2]), timeout=3.0), 0.0)
        works[name] = sends[1].message
    core.handle(Done(("c",)), 0.0)
    assert recovered(core, 0) == [works["a"], works["e"]], "as they were, in their order"
    assert recovered(core, 1) == [works["b"], works["d"]]
    core.handle(Abort("e", 3), 0.0)
    assert recovered(core, 0) == [works["a"]]


def test_a_new_tokenizer_asks_the_gateways_until_each_has_told_all() -> None:
    core = two_groups(gateways=("gateway-0", "gateway-1"))
    question = Recover("tokenizer-0", 7)
    assert core.handle(Tick(), 0.0) == [
        Send("recovery", "gateway-0", question), Send("recovery", "gateway-1", question)
    ]  # fmt: skip
    assert core.handle(Tick(), 0.5) == []
    for told in (
        Recovered("gateway-0", 7, opening=True),
        Recovered("gateway-0", 7),
        Recovered("gateway-1", 6, opening=True),  # for the process before this one
        Recovered("gateway-1", 7),  # its beginning was lost with that process
    ):
        core.handle(told, 0.6)
    assert core.handle(Tick(), 1.5) == [Send("recovery", "gateway-1", question)]
    core.handle(Recovered("gateway-1", 7, opening=True), 1.6)
    core.handle(Recovered("gateway-1", 7), 1.6)
    assert core.handle(Tick(), 9.0) == []


def test_a_request_that_ran_before_goes_to_its_group_again() -> None:
    core = two_groups(gateways=("gateway-0",))
    again = submit("a", prompt_ids=pack([1]), group=1)
    assert goes_to(core, again) == ["scheduler-1"]
    assert core.handle(again, 0.0) == [], "told twice"
    assert recovered(core, 0) == []
    assert goes_to(core, Done(("a",))) == ["scheduler-0", "scheduler-1"], "it may have had two"


def test_the_end_of_a_request_whose_group_nobody_remembers_goes_everywhere() -> None:
    core = two_groups(gateways=("gateway-0",))
    core.handle(submit("a", prompt_ids=pack([1])), 0.0)
    assert goes_to(core, Done(("a",))) == ["scheduler-0", "scheduler-1"]
    assert goes_to(core, Done(("b",))) == ["scheduler-0", "scheduler-1"], "the last one's"
    for opening in (True, False):
        core.handle(Recovered("gateway-0", 7, opening), 0.0)
    assert goes_to(core, Done(("b",))) == [], "it was refused here"
    core.handle(submit("c", prompt_ids=pack([1])), 0.0)
    assert len(goes_to(core, Done(("c",)))) == 1


def test_every_scheduler_is_told_of_a_request_whose_group_nobody_remembers() -> None:
    """One that has delivered something of it would have it aborted as an orphan."""
    core = two_groups(gateways=("gateway-0",))
    sent = core.handle(submit("a", prompt_ids=pack([1])), 0.0)[1].message
    assert recovered(core, 0) == recovered(core, 1) == [sent]


def test_requests_of_a_gateway_that_was_restarted_are_aborted() -> None:
    core = two_groups()
    for name in "abc":
        event = submit(name, prompt_ids=pack([1]))
        core.handle(event if name != "b" else msgspec.structs.replace(event, gateway=0), 0.0)
    *sends, opening, end = core.handle(Recover("gateway-1", 9), 0.0)
    assert [(send.to, send.message.request_id) for send in sends] == [  # type: ignore
        ("scheduler-0", "a"),
        ("scheduler-0", "c"),
    ]
    assert all(isinstance(send.message, Abort) for send in sends)
    assert core.stats()["ledger"] == 1
    assert opening == Send("recovery", "gateway-1", Recovered("tokenizer-0", 9, opening=True))
    assert end == Send("recovery", "gateway-1", Recovered("tokenizer-0", 9))


def test_kept_requests_are_told_to_their_new_gateway_and_since_when_they_wait() -> None:
    """Asked again, what the new gateway has sent meanwhile is no remainder of the one before."""
    core = two_groups()
    retention = Retention(stream="s", owner="o", seconds=5.0, format=b"format")
    both = submit("a", prompt_ids=pack([1]), retention=retention, choices=(0, 1))
    [accepted, *works] = core.handle(both, 0.0)
    assert [send.message.retention.format for send in works] == [b"", b""]  # type: ignore[union-attr]
    changes = AdapterChanges((AdapterState("x", 1, 1),))
    core.handle(changes, 0.0)

    def told(now: float, again: bool = False) -> list[Message]:
        sends = core.handle(Recover("gateway-1", 9, again), now)
        assert {(send.channel, send.to) for send in sends} == {("recovery", "gateway-1")}
        return [send.message for send in sends[1:-1]]

    group = accepted.message.group  # type: ignore[union-attr]
    adopt = Adopt(
        stage="tokenizer-0",
        submit=msgspec.structs.replace(both, group=group),
        accepted=accepted.message,  # type: ignore[arg-type]
    )
    assert told(10.0) == [changes, adopt]
    origins = [send.message.retention.origin for send in works]  # type: ignore[union-attr]
    assert msgspec.msgpack.decode(origins[0], type=Adopt) == msgspec.structs.replace(
        adopt, submit=both
    )
    assert origins[1] == b"", "one of them is enough"
    kept = [send.message.retention.kept_bytes for send in works]  # type: ignore[union-attr]
    assert 4 <= kept[0] == kept[1] < 1000, "each has a prompt of one token, and parameters"
    core.handle(submit("new", prompt_ids=pack([1])), 11.0)
    waited = msgspec.structs.replace(adopt, waited=2.0)
    assert told(12.0, again=True) == [changes, waited] and core.stats()["ledger"] == 3
    core.handle(Reattached(("a", "a/1")), 12.0)
    assert told(20.0, again=True) == [changes, adopt], "a client came back meanwhile"
    core.handle(Done(("a",)), 21.0)
    [_, rest] = told(22.0, again=True)
    assert isinstance(rest, Adopt) and rest.submit.choices == (1,)
    core.handle(Abort("a/1", 1), 23.0)
    assert told(24.0, again=True) == [changes] and core.stats()["ledger"] == 1


def test_a_large_request_does_not_burden_scheduler_and_detokenizer() -> None:
    retention = Retention(stream="s", owner="o", seconds=5.0, format=bytes(MAX_ORIGIN_BYTES))
    """But counts where it ends: gateways and tokenizers keep it as long as the answer is kept."""
    [_, work] = two_groups().handle(submit("a", prompt_ids=pack([1]), retention=retention), 0.0)
    kept = work.message.retention.kept_bytes  # type: ignore[union-attr]
    assert MAX_ORIGIN_BYTES < kept < MAX_ORIGIN_BYTES + 1000
    assert work.message.retention == msgspec.structs.replace(  # type: ignore[union-attr]
        retention, format=b"", kept_bytes=kept
    )


def test_a_tokenizer_that_leaves_leaves_new_requests_to_its_successor() -> None:
    core = two_groups()
    core.handle(submit("a", prompt_ids=pack([1])), 0.0)
    core.handle(Leave(), 0.0)
    assert core.idle() and core.state()[0] == "draining"
    assert core.handle(submit("b", prompt_ids=pack([1])), 0.0) == []
    assert goes_to(core, Abort("a", 3)) == ["scheduler-0"]


def test_the_stage_serves_the_folder_that_the_settings_name(folder: Path) -> None:
    context = StageContext(
        Settings(model=str(folder)), Topology(()), Identity("tokenizer"), 1, lambda *_: None
    )
    stage = build(context)
    assert isinstance(stage.core, TokenizerCore)
    assert work(stage.core, submit(text="a")).prompt_ids == pack([256, 64])


def test_the_stages_import_neither_torch_nor_transformers(folder: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "import pipeinfer.detokenizer.stage, pipeinfer.tokenizer.stage as stage\n"
        "from pipeinfer.settings import Settings\n"
        "stage.make_core(pathlib.Path(sys.argv[1]), Settings())\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("extra", [{}, {"min_tokens": 0}, {"ignore_eos": True}])
def test_min_tokens_needs_a_token_that_does_not_end_the_answer(
    core: TokenizerCore, extra: dict[str, Any]
) -> None:
    """All 264 of the configuration count, also those that the tokenizer does not have."""
    most = tuple(token for token in range(264) if token != 257)  # 257 is the model's own end
    params = {"min_tokens": 1, "stop_token_ids": most, **extra}
    if extra:
        assert work(core, submit(text="a", params=params))
        params["stop_token_ids"] = tuple(range(264))
        if "min_tokens" in extra:
            return
    refusal = refused(core, submit(text="a", params=params))
    assert (refusal.status, refusal.param) == (400, "min_tokens")
    assert "264" in refusal.message
    # Named twice they are not more, and one that is left is enough.
    assert work(core, submit(text="a", params=params | {"stop_token_ids": most[1:] * 2}))


def test_what_is_only_to_be_encoded_goes_to_no_group_and_is_not_remembered(
    core: TokenizerCore,
) -> None:
    asked = submit("s", text="Hi", return_prompt_ids=True, only_encode=True)
    [told] = core.handle(asked, 0.0)
    assert told.to == "gateway-1" and isinstance(told.message, Accepted)
    assert told.message.group == -1 and told.message.prompt_text == ""
    assert told.message.prompt_ids == work(core, submit(text="Hi")).prompt_ids
    assert core.handle(asked, 0.0) == [told], "asked again, it is answered again"
    assert core.handle(Done(("s",)), 0.0) == []
    assert core.stats()["ledger"] == 0 and core.stats()["encoded_total"] == 2


def test_ids_are_only_decoded(core: TokenizerCore) -> None:
    known = work(core, submit(text="Hi 🙂")).prompt_ids
    asked = submit(prompt_ids=known, return_prompt_text=True, only_encode=True)
    [told] = core.handle(asked, 0.0)
    assert isinstance(told.message, Accepted)
    assert (told.message.prompt_text, told.message.prompt_ids) == ("Hi 🙂", b"")


class Hosts:
    """A tokenizer with two groups, of which those in `up` are heard, and the time in seconds."""

    def __init__(self) -> None:
        self.core, self.now, self.up = two_groups(host_loss=5.0), 0.0, {0, 1}
        self.at = 0.0

    def wait(self, seconds: float) -> list[Send]:
        said, until = [], self.now + seconds
        while self.now < until:
            self.now += 0.5
            for group in self.up:
                self.core.handle(GroupStatus(group, 1, "serves"), self.now)
            said += self.core.handle(Tick(), self.now)
        return said

    def submit(self, *names: str) -> None:
        for name in names:
            self.core.handle(submit(name, prompt_ids=pack([1])), self.now)


def test_requests_of_a_host_that_is_lost_go_on_at_another_group_as_the_next_attempt() -> None:
    hosts = Hosts()
    assert hosts.wait(1.0) == []
    hosts.submit("a", "b")
    hosts.up = {1}
    assert hosts.wait(5.0) == []
    asked = HandOver("a", 3, "tokenizer-0")
    assert hosts.wait(1.0) == [Send("recovery", "gateway-1", asked)]
    told = Delivered("a", 4, pack([7]))
    sends = hosts.core.handle(told, hosts.now)
    assert [(send.channel, send.to) for send in sends] == [
        ("work", "scheduler-0"), ("work", "scheduler-1"),
        ("recovery", "scheduler-1"), ("work", "scheduler-1"), ("text", "gateway-1"),
    ]  # fmt: skip
    *aborts, delivered, work, accepted = (send.message for send in sends)
    assert aborts == [Abort("a", 3, "another group goes on with it")] * 2 and delivered == told
    assert isinstance(work, TokenizedRequest) and isinstance(accepted, Accepted)
    assert (work.attempt, accepted.attempt, accepted.group) == (4, 4, 1)
    assert hosts.core.handle(told, hosts.now)[0] == sends[2], "told twice, nothing is aborted"
    assert hosts.wait(3.0) == [], "nothing of it is left there"
    sends = hosts.core.handle(Abort("a", 3), hosts.now)
    assert {send.message.attempt for send in sends} == {4}, "its client hung up meanwhile"
    assert {send.to for send in sends} == {"scheduler-0", "scheduler-1"}


def test_requests_that_nobody_can_take_fail_when_their_host_does_not_come_back() -> None:
    hosts = Hosts()
    hosts.wait(1.0)
    hosts.submit("a", "b")
    hosts.up = set()
    assert hosts.wait(GIVE_UP_FACTOR * 5.0) == []
    refused = hosts.wait(1.0)
    assert {(send.message.request_id, send.message.code) for send in refused} == {
        ("a", "host_lost"), ("b", "host_lost")
    }  # fmt: skip
    assert {send.message.status for send in refused} == {503}


def test_a_group_that_never_spoke_is_waited_for_as_long_as_one_that_was_lost() -> None:
    hosts = Hosts()
    hosts.up = {1}
    hosts.submit("a", "b")
    assert hosts.wait(5.0) == [] and hosts.core.stats()["groups_up"] == 2
    assert [type(send.message) for send in hosts.wait(1.0)] == [HandOver]
    assert hosts.core.stats()["groups_up"] == 1


def test_a_tokenizer_that_was_stopped_finds_nobody_lost() -> None:
    hosts = Hosts()
    hosts.wait(1.0)
    hosts.submit("a")
    hosts.now += 3600.0
    assert hosts.core.handle(Tick(), hosts.now) == [] and hosts.wait(3.0) == []


def make(groups: int = 1, routing: str = "round-robin") -> TokenizerCore:
    encoder = PromptEncoder(None, ChatTemplates({}, {}, str), 100, 1_000)
    return TokenizerCore(encoder, GroupRouter(routing, groups), GroupMonitor(groups), ())


def submit_choices(choices: tuple[int, ...] = (0, 1, 2), **fields: Any) -> Submit:
    prompt = fields.pop("prompt_ids", pack([5, 6, 7]))
    return Submit(
        "r", 1, 0, RequestParams(max_tokens=4), SEED_MASK - 1, prompt_ids=prompt, choices=choices,
        **fields,
    )  # fmt: skip


def works(core: TokenizerCore, event: Submit) -> list[TokenizedRequest]:
    return [s.message for s in core.handle(event, 0.0) if isinstance(s.message, TokenizedRequest)]


def test_each_choice_is_a_work_that_names_its_leader():
    core = make()
    accepted, *sends = core.handle(submit_choices(), 0.0)
    assert accepted.message == Accepted("r", 1, 0, 3, choices=(0, 1, 2))
    made = [send.message for send in sends if isinstance(send.message, TokenizedRequest)]
    assert [(request.request_id, request.seed, request.sampling_group) for request in made] == [
        ("r", SEED_MASK - 1, "r"), ("r/1", SEED_MASK, "r"), ("r/2", 0, "r"),
    ]  # fmt: skip
    assert core.stats()["prompt_tokens_total"] == 3 and core.stats()["ledger"] == 3
    (alone,) = works(make(), submit_choices((0,)))
    assert alone.sampling_group == ""


def test_a_choice_that_is_known_is_not_passed_on_again():
    core = make()
    works(core, submit_choices((0, 2)))
    assert core.handle(submit_choices((2,)), 0.0) == []
    assert [work.request_id for work in works(core, submit_choices((0, 1, 2)))] == ["r/1"]


def test_choices_go_to_one_group_and_end_one_by_one():
    core = make(groups=2, routing="least-loaded")
    sends = core.handle(submit_choices((0, 1, 2)), 0.0)
    (to,) = {send.to for send in sends if send.channel == "work"}
    assert core._router.loads()[int(to[-1])] == 3 + 3 * 4, "a prompt, and outputs of all"
    for name in ("r/1", "r"):
        (ended,) = core.handle(Abort(name, 1), 0.0)
        assert (ended.to, ended.message) == (to, Abort(name, 1))
    assert [w.request_id for w in told(core, to)] == ["r/2"]
    assert core.handle(Done(("r/2",)), 0.0)[0].to == to
    assert core._router.loads() == [0, 0] and core.stats()["ledger"] == 0


def told(core: TokenizerCore, scheduler: str) -> list[TokenizedRequest]:
    sends = core.handle(Recover(scheduler, 9), 0.0)
    return [send.message for send in sends if isinstance(send.message, TokenizedRequest)]


@pytest.mark.parametrize("drains", [False, True])
def test_a_refusal_is_told_of_every_choice(drains):
    core, event = make(), submit_choices(prompt_ids=pack([5, 1000]))
    if drains:
        core.handle(Drain(), -LATE_WORK_SECONDS)
    refusals = [send.message for send in core.handle(event, 0.0)]
    assert all(isinstance(one, Refused) for one in refusals)
    assert [one.request_id for one in refusals] == ["r", "r/1", "r/2"]  # type: ignore[union-attr]
    assert core.stats()["refused_total"] == 3


@given(st.lists(st.integers(0, 4), unique=True, min_size=1), st.lists(st.integers(0, 4)))
def test_while_a_long_prompt_is_encoded_choices_may_end(choices, ends):
    encoding, event = PendingPrompts(), submit_choices(tuple(choices))
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
    event = msgspec.structs.replace(submit_choices((1, 2, 4)), prompt_ids=None, text="x" * 20_000)
    (asked,) = core.handle(event, 0.0)
    assert asked.channel == LOCAL
    core.handle(Abort("r/1", 1), 0.0)
    name = asked.message.request_id  # type: ignore[attr-defined]
    found = core.submit_to_encode(name, 1)
    assert found is not None and (found.request_id, found.choices) == (name, (0,))
    sends = core.handle(Encoded(name, 1, pack([1, 2])), 0.0)
    passed = [send.message for send in sends if isinstance(send.message, TokenizedRequest)]
    assert [(work.request_id, work.sampling_group) for work in passed] == [
        ("r/2", "r"),
        ("r/4", "r"),
    ]
    assert sends[0].message == Accepted("r", 1, 0, 2, choices=(2, 4))
    assert core.idle()
