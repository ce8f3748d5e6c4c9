"""Grammars are tried before their work goes out, beside everybody else; a hostile one costs only
its own request."""

import asyncio
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from tokenizer_folders import MODEL, make_tokenizer, write_json

from pipeinfer.core import LOCAL
from pipeinfer.messages import Abort, Refused, Submit, Work
from pipeinfer.packing import pack
from pipeinfer.params import SamplingParams, StructuredOutputs
from pipeinfer.settings import Settings
from pipeinfer.tokenizer.events import Encode, Tried, Try
from pipeinfer.tokenizer.stage import make_core
from pipeinfer.tokenizer.trials import Trials

SMALL = StructuredOutputs(json='{"type": "integer"}')


def chain(length):
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{length}": {"type": "integer"}}}


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "slow number": {"json": '{"type": "integer", "multipleOf": 999983}'},
    "slow numbers": {"json": json.dumps({"enum": [1], "allOf": [{"multipleOf": 999979}] * 3})},
    "long chain": {"json": json.dumps(chain(6000))},
    "deep objects": {"json": json.dumps(nested(63))},
    "deep text": {"json": '{"a":' * 400 + "1" + "}" * 400},
    "huge choice": {"choice": tuple(f"{i:08}" for i in range(9000))},
    "exploding regex": {"regex": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "wide regex": {"regex": "(" + "|".join(f"a{{0,{i}}}b" for i in range(5000)) + ")x" * 9000},
    "deep regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "endless reference": {"json": '{"$ref": "#"}'},
    "no schema": {"json": '{"type": "object", "additionalProperties": {"type": "nothing"}}'},
    "remote": {"json": '{"$ref": "http://example.com/schema.json"}'},
    "left recursion": {"grammar": "start: start start start nobody"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = make_tokenizer()
    write_json(path / "config.json", MODEL)
    tokenizer.save(str(path / "tokenizer.json"))
    end = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)[0]
    write_json(path / "tokenizer_config.json", {"eos_token": end})
    return path


def submit(name="r", spec=SMALL, **more):
    params = SamplingParams(structured_outputs=spec, max_tokens=4)
    return Submit(
        request_id=name, attempt=1, gateway=0, params=params, seed=1,
        **{"prompt_ids": pack([1, 2]), **more},
    )  # fmt: skip


@pytest.fixture
def core(folder):
    return make_core(folder, Settings())


def test_a_request_leaves_when_its_grammar_was_tried(core):
    [asked] = core.handle(submit(choices=(0, 1)), 0.0)
    assert (asked.channel, asked.message) == (LOCAL, Try("r", 1))
    assert core.encoding("r", 1).params.structured_outputs == SMALL
    assert not core.idle() and core.handle(submit(choices=(0, 1)), 0.0) == []
    sent = [send.message for send in core.handle(Tried("r", 1), 0.0)]
    works = [message for message in sent if isinstance(message, Work)]
    assert len(works) == 2 and all(w.params.structured_outputs == SMALL for w in works)
    assert core.idle() and core.handle(Tried("r", 1), 0.0) == []


def test_every_choice_is_refused_with_what_is_wrong(core):
    core.handle(submit(choices=(0, 1)), 0.0)
    refused = [send.message for send in core.handle(Tried("r", 1, 400, "not so"), 0.0)]
    assert [(r.status, r.message, r.param) for r in refused] == [
        (400, "not so", "structured_outputs")
    ] * 2
    assert all(isinstance(message, Refused) for message in refused)


def test_what_ended_meanwhile_goes_nowhere(core):
    core.handle(submit(), 0.0)
    core.handle(Abort("r", 1, "gone"), 0.0)
    assert core.encoding("r", 1) is None and core.handle(Tried("r", 1), 0.0) == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (StructuredOutputs(), "exactly one"),
        (StructuredOutputs(json="{}", regex="a"), "exactly one"),
        (StructuredOutputs(regex="a" * 70_000), "at most"),
        (StructuredOutputs(regex="a", after="</nobody>"), "no token"),
    ],
)
def test_what_needs_no_compiler_is_refused_at_once(core, spec, says):
    [send] = core.handle(submit(spec=spec), 0.0)
    assert send.message.status == 400 and says in send.message.message


class Harness:
    def __init__(self, folder, seconds):
        self.submits, self.told = {}, asyncio.Queue()
        self.trials = Trials(folder, lambda name, _: self.submits.get(name), seconds)

    def ask(self, name, spec):
        self.submits[name] = submit(name, spec)
        self.trials.deliver(Try(name, 1))

    async def next(self):
        return await asyncio.wait_for(self.told.get(), 60)


async def test_hostile_grammars_cost_their_own_requests_a_400(folder):
    one = Harness(folder, seconds=1.0)
    await one.trials.start(one.told.put_nowait)
    longest, before = 0.0, time.monotonic()

    async def beat():
        nonlocal longest, before
        while True:
            await asyncio.sleep(0.01)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()

    beats = asyncio.create_task(beat())
    try:
        one.ask("small", SMALL)
        assert await one.next() == Tried("small", 1)
        for name, spec in HOSTILE.items():
            one.ask(name, StructuredOutputs(**spec))
        one.ask("known", SMALL)
        assert await one.next() == Tried("known", 1), "it waits for nobody"
        told = {(said := await one.next()).request_id: said for _ in HOSTILE}
        # What an end of the process, a limit or the compiler refuses; some it can do.
        easy = {name for name, said in told.items() if said.status == 0}
        assert easy <= {"huge choice", "exploding regex", "endless reference", "wide regex"}
        assert {said.status for said in told.values()} <= {0, 400}
        assert "longer than 1 s" in told["slow number"].message
        one.ask("again", msgspec.structs.replace(SMALL, json='{"type": "string"}'))
        assert await one.next() == Tried("again", 1)
        assert longest < 1.0, "the loop went on"
    finally:
        beats.cancel()
        await one.trials.stop()


async def test_stopping_ends_a_process_that_compiles(folder):
    one = Harness(folder, seconds=60.0)
    await one.trials.start(one.told.put_nowait)
    one.ask("small", SMALL)
    assert await one.next() == Tried("small", 1)
    process = one.trials._benches[0].trial._process
    one.ask("slow", StructuredOutputs(**HOSTILE["slow number"]))
    await asyncio.sleep(0)
    started = time.monotonic()
    await one.trials.stop()
    assert time.monotonic() - started < 5
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_long_prompt_is_encoded_when_its_grammar_was_tried(folder):
    core = make_core(folder, Settings(max_model_len=1_000_000))
    [first] = core.handle(submit(prompt_ids=None, text="a " * 10_000), 0.0)
    [then] = core.handle(Tried("r", 1), 0.0)
    assert isinstance(first.message, Try) and isinstance(then.message, Encode)
