"""Rows with a grammar in the steps of a real model: what they give is what the grammar allows of
the model's own logits, however the steps were cut, and nobody beside them notices."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLExecutor

import pipeinfer.demo
from grammars.costly_grammars import LATE
from parity.cores import Cores
from pipeinfer.engine.masks import GrammarMasks
from pipeinfer.grammars.compiling import Grammar, GrammarStore, GrammarVocabulary
from pipeinfer.grammars.masks import fill_masks, make_source
from pipeinfer.messages import Result
from pipeinfer.params import ReasoningContext, RequestParams, StructuredOutputs
from pipeinfer.scheduler.queue import UNITS_PER_STEP
from pipeinfer.settings import Settings
from pipeinfer.text import grammar_setup
from pipeinfer.wire import unpack_logprobs

FOLDER = Path(pipeinfer.demo.__file__).parent
SETUP = grammar_setup(FOLDER)
VOCABULARY = GrammarVocabulary(SETUP.tokenizer, SETUP.width, SETUP.end_ids, SETUP.known_ids)
PROMPT = list(b"Tell me something about yourself.")
SPECS = {
    "object": StructuredOutputs(
        json=json.dumps(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 8},
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        )
    ),
    "choice": StructuredOutputs(choice=("apples", "apricots", "pears")),
    "regex": StructuredOutputs(regex="[a-f]{14,20}-[0-9]{2}"),
}


@pytest.fixture(scope="module")
def masks():
    masks = GrammarMasks(GrammarStore(lambda: SETUP), threads=2)
    yield masks
    masks.close()


@pytest.fixture(scope="module")
def loaded():
    return Cores(FOLDER, Settings(model=str(FOLDER), device="cpu", dtype="float32")).loaded


def cores(loaded, masks, **options) -> Cores:
    settings = {"max_running": 8, "device": "cpu", "overlap_depth": options.pop("depth", 2)}
    return Cores(FOLDER, Settings(**settings), loaded=loaded, masks=masks, **options)


def params(name: str, temperature: float, **more) -> RequestParams:
    spec = SPECS.get(name)
    return RequestParams(temperature=temperature, max_tokens=60, structured_outputs=spec, **more)


def submitted(made: Cores, temperature: float) -> Cores:
    """One of each, and two that are free; they all stop at an end."""
    for seed, name in enumerate((*SPECS, "free", "free too")):
        prompt = [*PROMPT, *name.encode()]
        made.submit(name, prompt, params(name, temperature), seed=seed, eos_ids=SETUP.end_ids)
    made.run()
    return made


def text(made: Cores, name: str) -> str:
    ids = [i for i in made.outputs[name] if i not in SETUP.end_ids]
    return VOCABULARY.tokens.decode_str(ids)


def test_outputs_are_what_the_grammar_says(loaded, masks):
    made = submitted(cores(loaded, masks), temperature=1.5)
    assert {made.finished[name] for name in SPECS} == {"stop"}
    person = json.loads(text(made, "object"))
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 130
    assert text(made, "choice") in SPECS["choice"].choice
    assert len(text(made, "regex").split("-")[1]) == 2


def test_greedy_rows_take_the_likeliest_token_that_is_allowed(loaded, masks):
    """Against masks that are made anew from the ids, one token at a time."""
    made = submitted(cores(loaded, masks), 0.0)
    checked = jumped = 0
    for name, spec in SPECS.items():
        grammar, ids = Grammar(VOCABULARY, spec), made.outputs[name]
        for n, token in enumerate(ids):
            words = np.zeros((1, VOCABULARY.words), dtype=np.int32)
            assert fill_masks(LLExecutor(1), [make_source(grammar, ids[:n], None)], words) == [""]
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: SETUP.width] > 0
            logits = made.logits.get((name, len(PROMPT) + len(name) + n))
            if logits is None:  # nobody had to sample it
                assert np.flatnonzero(allowed).tolist() == [token]
                jumped += 1
                continue
            assert token == int(np.where(allowed, logits, -np.inf).argmax())
            checked += int(logits.argmax()) != token
    assert checked > 10, "the grammar has hardly changed anything"
    assert jumped > 10, "hardly anything was forced"


def test_whoever_is_free_samples_what_he_would_alone(loaded, masks):
    temperature = 0.9
    beside = submitted(cores(loaded, masks), temperature)
    for seed, name in ((3, "free"), (4, "free too")):
        alone = cores(loaded, masks)
        prompt = [*PROMPT, *name.encode()]
        alone.submit(name, prompt, params(name, temperature), seed=seed, eos_ids=SETUP.end_ids)
        alone.run()
        assert alone.outputs[name] == beside.outputs[name]


def test_steps_may_be_cut_and_rows_taken_back(loaded, masks):
    temperature = 0.9
    usual = submitted(cores(loaded, masks), temperature).outputs
    assert submitted(cores(loaded, masks, depth=1, budget=16), temperature).outputs == usual
    disturbed = submitted(cores(loaded, masks, policy="parity.cores:Nuisance"), temperature)
    assert disturbed.outputs == usual
    assert disturbed.scheduler.stats()["preemptions_total"] > 2


FORM = StructuredOutputs(
    json=json.dumps(
        {
            "type": "object",
            "properties": {
                "whether the customer has agreed": {"type": "boolean"},
                "the kind of the contract": {"enum": ["limited", "unlimited"]},
                "open invoices": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["whether the customer has agreed", "the kind of the contract"],
            "additionalProperties": False,
        }
    )
)


def filled(made: Cores, **more) -> Cores:
    """Three forms, which end by themselves or at 150 tokens, and somebody beside them; one of the
    forms is greedy."""
    for seed in range(3):
        given = RequestParams(
            temperature=0.6 * seed, max_tokens=150, structured_outputs=FORM, **more
        )
        made.submit(f"form {seed}", PROMPT, given, seed=seed, eos_ids=SETUP.end_ids)
    made.submit("free", PROMPT, params("free", 1.2), seed=3, eos_ids=SETUP.end_ids)
    made.run()
    return made


def test_a_row_that_jumps_over_forced_tokens_says_what_it_would_sample(loaded, masks):
    """Rows with log-probs do not jump; whoever else is there samples what he did."""
    usual = filled(cores(loaded, masks), logprobs=0)
    taken_back = {"policy": "parity.cores:Nuisance", "depth": 3}
    for how in ({}, {"depth": 1, "budget": 5}, taken_back):
        made = filled(cores(loaded, masks, **how))
        assert made.outputs == usual.outputs and made.finished == usual.finished, how
        steps = [one.engine.stats()["plans_total"] for one in (made, usual)]
        jumped = made.scheduler.stats()["jumped_tokens_total"]
        assert jumped > 60, how
        if not how:
            assert steps[0] < 0.75 * steps[1], how
        assert made.memory.num_free + made.memory.num_evictable == made.memory.allocator.num_pages
    assert usual.scheduler.stats()["jumped_tokens_total"] == 0
    assert [len(usual.logprobs[f"form {n}"]) for n in range(3)] == [
        8 * len(usual.outputs[f"form {n}"]) for n in range(3)
    ]


def test_rows_whose_tokens_are_counted_or_banned_do_not_jump(loaded, masks):
    made = cores(loaded, masks)
    for more in ({"frequency_penalty": 0.1}, {"min_tokens": 3}, {"repetition_penalty": 1.1}):
        given = RequestParams(temperature=0.0, max_tokens=150, structured_outputs=FORM, **more)
        made.submit(str(more), PROMPT, given, eos_ids=SETUP.end_ids)
    made.run()
    for name in made.outputs:
        assert set(json.loads(text(made, name))) >= {"whether the customer has agreed"}
    assert made.scheduler.stats()["jumped_tokens_total"] == 0


def test_what_is_cached_of_a_row_that_jumped_is_what_it_computed(loaded, masks):
    """Its whole text is asked for again: most of it is found, and goes on in the same way."""
    made = cores(loaded, masks)
    given = RequestParams(temperature=0.0, max_tokens=100, structured_outputs=FORM)
    made.submit("form", PROMPT, given, eos_ids=SETUP.end_ids)
    made.run()
    assert made.scheduler.stats()["jumped_tokens_total"] > 20
    prompt = [*PROMPT, *made.outputs["form"][:-1]]
    going_on = RequestParams(temperature=0.0, max_tokens=12)
    made.submit("warm", prompt, going_on)
    made.run()
    cold = cores(loaded, masks)
    cold.submit("cold", prompt, going_on)
    cold.run()
    assert made.outputs["warm"] == cold.outputs["cold"]
    assert made.cached["warm"] > len(PROMPT) + 20


def test_penalties_count_what_was_sampled_behind_the_mask(loaded, masks):
    """A penalty that is never so high as to matter alone forbids a repetition here."""
    made = cores(loaded, masks)
    spec = StructuredOutputs(regex="[ab]{12}")
    given = RequestParams(
        temperature=0.0, max_tokens=60, structured_outputs=spec, frequency_penalty=2.0
    )
    made.submit("r", PROMPT, given, eos_ids=SETUP.end_ids)
    made.run()
    ids = made.outputs["r"][:12]
    logits = [made.logits["r", len(PROMPT) + n] for n in range(12)]
    for n, row in enumerate(logits):
        counts = {i: ids[:n].count(i) for i in (ord("a"), ord("b"))}
        best = max(counts, key=lambda i: row[i] - 2.0 * counts[i])
        assert ids[n] == best


def test_log_probs_are_those_of_the_model_before_the_mask(loaded, masks):
    made = cores(loaded, masks)
    made.submit("choice", PROMPT, params("choice", 0.0, logprobs=2), eos_ids=SETUP.end_ids)
    made.run()
    for n, entry in enumerate(unpack_logprobs(made.logprobs["choice"], 2)):
        row = made.logits["choice", len(PROMPT) + n].astype(np.float64)
        expected = row - (np.log(np.exp(row - row.max()).sum()) + row.max())
        assert abs(entry.logprob - expected[made.outputs["choice"][n]]) < 1e-4
        assert entry.ids == np.argsort(-expected, kind="stable")[:2].tolist()


def test_a_row_that_may_sample_nothing_fails_alone(loaded, masks):
    made = cores(loaded, masks)
    broken = StructuredOutputs(regex="(a")
    made.submit("broken", PROMPT, RequestParams(structured_outputs=broken), eos_ids=SETUP.end_ids)
    made.submit("free", PROMPT, RequestParams(max_tokens=9, temperature=0), eos_ids=SETUP.end_ids)
    made.run()
    assert (made.finished["broken"], made.outputs["broken"]) == ("error", [])
    assert made.finished["free"] in ("length", "stop")
    assert made.engine.stats()["refused_rows_total"] >= 1
    assert made.engine.stats()["bad_rows_total"] == 0
    assert made.scheduler.stats()["bad_logits_total"] == 0


@pytest.mark.parametrize(
    ("spec", "amid"), [(None, False), (StructuredOutputs(regex="[0-9]{4}"), True)]
)
def test_thoughts_have_a_budget(loaded, masks, spec, amid):
    """Between a letter that this model says at once, or the prompt has said, and a full stop."""
    free = cores(loaded, masks)
    prompt = list(b"Tell me what you think about thi")
    free.submit("r", prompt, RequestParams(temperature=0.0, max_tokens=60), eos_ids=SETUP.end_ids)
    free.run()
    said = text(free, "r")
    opening = said[0] if not amid else chr(prompt[-1])
    reasoning = ReasoningContext(opening, "`", "open" if amid else "before")
    made = cores(loaded, masks)
    for budget in (0, 3, 200):
        given = RequestParams(
            temperature=0.0, max_tokens=60, thinking_token_budget=budget, structured_outputs=spec
        )
        made.submit(f"r{budget}", prompt, given, eos_ids=SETUP.end_ids, reasoning=reasoning)
    made.run()
    for budget in (0, 3):
        before, mark, after = text(made, f"r{budget}").partition("`")
        assert mark and before == said[: budget + (not amid)]
        assert spec is None or (len(after) == 4 and after.isdigit())
    if spec is None:
        assert text(made, "r200") == said


def test_a_grammar_begins_behind_the_text_that_it_waits_for(loaded, masks):
    """Here one letter, which is one token of this vocabulary."""
    made = cores(loaded, masks)
    spec = StructuredOutputs(regex="[0-9]{4}")
    given = RequestParams(temperature=0.0, max_tokens=200, structured_outputs=spec)
    open_, over = ReasoningContext("", ".", "open"), ReasoningContext("", ".", "over")
    made.submit("later", PROMPT[:-1], given, eos_ids=SETUP.end_ids, reasoning=open_)
    made.submit("at once", PROMPT, given, eos_ids=SETUP.end_ids, reasoning=over)
    made.run()
    before, _, after = text(made, "later").partition(".")
    assert before and len(after) == 4 and after.isdigit()
    assert len(text(made, "at once")) == 4 and text(made, "at once").isdigit()


def test_a_grammar_that_has_worn_out_is_compiled_anew(loaded, masks):
    """What the lexer finds out is shared by all who use the grammar, and there is a limit to it."""
    spec = StructuredOutputs(regex="(" * 30 + "a" + "{1,30})" * 30)
    given = RequestParams(temperature=0.0, max_tokens=20, structured_outputs=spec)
    grammar = masks._store.grammar(spec)
    made = cores(loaded, masks)
    made.submit("worn", PROMPT, given, eos_ids=SETUP.end_ids)
    made.run()
    assert made.finished["worn"] == "error" and len(made.outputs["worn"]) > 0
    deadline = time.monotonic() + 60
    while not grammar.generation:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    made.submit("next", PROMPT, given, eos_ids=SETUP.end_ids)
    made.run()
    assert made.outputs["next"] == made.outputs["worn"]


def test_results_tell_rows_whose_masks_cost_much(loaded, masks):
    """By counts; nobody else is told of."""
    made, told = cores(loaded, masks), []
    handle = made.scheduler.handle

    def watch(message, now):
        if isinstance(message, Result):
            told.extend(message.mask_units.values())
        return handle(message, now)

    made.scheduler.handle = watch
    spec = StructuredOutputs(grammar=LATE)
    costly = RequestParams(max_tokens=9, logit_bias={90: 100.0}, structured_outputs=spec)
    made.submit("costly", PROMPT, costly, eos_ids=SETUP.end_ids)
    made.submit("free", PROMPT, params("free", 0.0, ignore_eos=True), eos_ids=SETUP.end_ids)
    made.run()
    assert max(told) > 3 * UNITS_PER_STEP, told
    assert len(made.outputs["costly"]) >= 5
