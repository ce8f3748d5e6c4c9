"""Requests become work for one scheduler, or a refusal that says what was wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_folders import CHATML, write_json
from transformers import AutoTokenizer

from pipeinfer.messages import (
    Abort,
    Accepted,
    Drain,
    Refused,
    StopHit,
    Submit,
    Tick,
    Work,
    pack,
    unpack,
)
from pipeinfer.params import SamplingParams
from pipeinfer.runtime.stage import StageContext
from pipeinfer.runtime.topology import Identity, Topology
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.tokenizer.core import TokenizerCore
from pipeinfer.tokenizer.prompts import PromptEncoder
from pipeinfer.tokenizer.routing import RoundRobin, make_router
from pipeinfer.tokenizer.stage import build, make_core
from pipeinfer.tokenizer.templates import ChatTemplates

Make = Callable[..., Path]
HELLO = {"role": "user", "content": "Hi 🙂"}


def submit(name: str = "r", max_tokens: int | None = 8, **fields: Any) -> Submit:
    params = fields.pop("params", {})
    return Submit(name, 3, 1, SamplingParams(max_tokens=max_tokens, **params), 11, **fields)


def refused(core: TokenizerCore, event: Submit) -> Refused:
    (send,) = core.handle(event, 0.0)
    assert (send.channel, send.to) == ("text", "gateway-1")
    assert isinstance(send.message, Refused)
    assert (send.message.request_id, send.message.attempt) == ("r", 3)
    return send.message


def work(core: TokenizerCore, event: Submit) -> Work:
    first, second = core.handle(event, 0.0)
    assert (first.channel, first.to) == ("text", "gateway-1")
    assert (second.channel, second.to) == ("work", "scheduler-0")
    assert isinstance(second.message, Work)
    assert first.message == Accepted("r", 3, 0, second.message.prompt_ids)
    return second.message


def ids(event: Work) -> list[int]:
    return unpack(event.prompt_ids).tolist()


@pytest.fixture
def folder(checkpoint: Make) -> Path:
    return checkpoint(chat_template=CHATML)


@pytest.fixture
def core(folder: Path) -> TokenizerCore:
    return make_core(folder, Settings())


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
    assert work(core, event) == Work(
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


@pytest.mark.parametrize("token", [-1, 264, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(core: TokenizerCore, token: int) -> None:
    refusal = refused(core, submit(prompt_ids=pack([1, token])))
    assert (refusal.status, refusal.param) == (400, "prompt")
    assert str(token) in refusal.message
    if token > 0:
        refusal = refused(core, submit(text="a", params={"stop_token_ids": (1, token)}))
        assert (refusal.status, refusal.param) == (400, "stop_token_ids")
    assert ids(work(core, submit(prompt_ids=pack([0, 263])))) == [0, 263]


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


def test_what_drains_refuses_what_is_new(core: TokenizerCore) -> None:
    assert core.handle(Tick(), 0.0) == []
    assert core.state() == ("ready", "")
    core.handle(Drain(), 0.0)
    assert core.state()[0] == "draining"
    assert refused(core, submit(text="a")).status == 503


def test_a_message_of_another_stage_is_an_error(core: TokenizerCore) -> None:
    with pytest.raises(TypeError, match="StopHit"):
        core.handle(StopHit("r", 1, 1), 0.0)


def two_groups(ledger: int) -> TokenizerCore:
    encoder = PromptEncoder(None, ChatTemplates({}, {}, str), vocab_size=10, max_model_len=100)
    return TokenizerCore(encoder, RoundRobin(2), 2, (), ledger)


def goes_to(core: TokenizerCore, event: Submit | Abort) -> list[str]:
    return [send.to for send in core.handle(event, 0.0) if send.channel == "work"]


def test_an_abort_takes_its_requests_way() -> None:
    core = two_groups(ledger=100)
    for name, group in (("a", 0), ("b", 1), ("c", 0)):
        event = submit(name, prompt_ids=pack([1]))
        assert goes_to(core, event) == [f"scheduler-{group}"]
    for name, group in (("b", 1), ("a", 0), ("c", 0)):
        assert goes_to(core, Abort(name, 3)) == [f"scheduler-{group}"]
    assert core.stats()["ledger"] == 0


def test_the_ledger_is_bounded_and_aborts_of_forgotten_requests_go_everywhere() -> None:
    core = two_groups(ledger=2)
    for name in ("a", "b", "a", "c"):  # the second attempt makes "a" the younger one
        core.handle(submit(name, prompt_ids=pack([1])), 0.0)
    assert core.stats()["ledger"] == 2
    assert goes_to(core, Abort("b", 3)) == ["scheduler-0", "scheduler-1"]
    assert goes_to(core, Abort("a", 3)) == ["scheduler-0"]


def test_one_group_needs_no_policy_and_an_unknown_policy_is_named() -> None:
    assert make_router("prefix", 1).choose(np.zeros(3, np.int32), "") == 0
    router = make_router("round-robin", 2)
    assert [router.choose(np.zeros(1, np.int32), "") for _ in range(3)] == [0, 1, 0]
    with pytest.raises(ConfigurationError, match="'sideways' is unknown"):
        make_router("sideways", 2)


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
