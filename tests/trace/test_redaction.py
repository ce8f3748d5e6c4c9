"""A redacted trace has neither texts nor ids, and the scheduler still replays it exactly."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilt import events, fresh, outputs

from pipeinfer import core as local
from pipeinfer.engine.core import StepFailed
from pipeinfer.gateway import ledger as gateway
from pipeinfer.grammars.bounds import GRAMMAR_ERROR, NO_GRAMMAR_MEMORY
from pipeinfer.messages import (
    CHANNELS,
    AppendTokens,
    GrammarCompiled,
    Message,
    Plan,
    PromptLogprobs,
    Result,
    Submit,
    TokenizedRequest,
    TokenRow,
)
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.tokenizer import core as tokenizer
from pipeinfer.trace import format as trace_format
from pipeinfer.trace.format import Trace
from pipeinfer.trace.recorder import Quota, Recording
from pipeinfer.trace.redact import (
    IDS,
    NUMBERS,
    REDACTED_FIELDS,
    UNCHANGED_MESSAGES,
    ZEROED,
    Redactor,
    TokenPermutation,
    redactor,
)
from pipeinfer.trace.snapshot import restore, snapshot
from pipeinfer.wire import pack, unpack
from servers import STAGES

KEY = "5a" * 32


@given(st.binary(min_size=16, max_size=64), st.integers(1, 600), st.data())
def test_renaming_is_a_bijection_that_keeps_fixed_ids(key, size, data):
    fixed = data.draw(st.sets(st.integers(0, size + 3)))
    names = TokenPermutation(key, size, fixed)
    everything = np.arange(size, dtype=np.int32)
    renamed = names.array(everything)
    assert sorted(renamed.tolist()) == everything.tolist()
    assert all(names.one(token) == token for token in fixed)
    assert [names.one(token) for token in range(size)] == renamed.tolist()
    assert unpack(names.ids(pack([size, -1, size + 7]))).tolist() == [size, -1, size + 7]


def test_other_keys_rename_otherwise():
    ids = np.arange(1_000, dtype=np.int32)
    first, second = (TokenPermutation(bytes([n]) * 32, 1_000, ()) for n in (1, 2))
    assert (first.array(ids) != ids).mean() > 0.9
    assert (first.array(ids) != second.array(ids)).mean() > 0.9


@pytest.mark.parametrize("name, attribute", sorted(IDS | NUMBERS | ZEROED))
def test_attributes_that_redaction_knows_exist(name, attribute):
    """An attribute under a name that it no longer has would be taken for token ids."""
    assert f"{attribute}:" in inspect.getsource(resolve_name(name))


def structs_in(hint) -> Iterator[type[msgspec.Struct]]:
    """The structs that a value of this type may hold."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        yield from structs_in(argument)


def all_messages() -> dict[str, type[msgspec.Struct]]:
    """Every message and what it holds, by name; what redaction drops or rewrites whole aside."""
    waiting = [kind for channel in CHANNELS.values() for kind in structs_in(channel)]
    for module in (local, gateway, tokenizer, trace_format):
        waiting += [
            v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Message)
        ]
    found = {StepFailed.__name__: StepFailed}
    while waiting:
        kind = waiting.pop()
        if kind is Message or kind.__name__ in found:
            continue
        found[kind.__name__] = kind
        hints, how = get_type_hints(kind), REDACTED_FIELDS.get(kind.__name__, {})
        for field in kind.__struct_fields__:
            if how.get(field) not in ("params", "none"):
                waiting += structs_in(hints[field])
    return found


def test_every_message_and_what_it_holds_is_either_rewritten_or_known_to_tell_nothing():
    assert set(all_messages()) <= set(REDACTED_FIELDS) | UNCHANGED_MESSAGES
    assert set(REDACTED_FIELDS) & UNCHANGED_MESSAGES == set()


def test_what_is_rewritten_is_rewritten_also_where_another_message_holds_it():
    for name, kind in all_messages().items():
        hints, how = get_type_hints(kind), REDACTED_FIELDS.get(name, {})
        for field in kind.__struct_fields__:
            inside = {one.__name__ for one in structs_in(hints[field])}
            assert field in how or not inside & set(REDACTED_FIELDS), (name, field)


def test_forced_ids_are_renamed_and_what_compilers_quote_is_gone(tmp_path):
    redacted = Redactor("scheduler", bytes.fromhex(KEY), TokenPermutation(b"x" * 32, 500, ()))
    plan = Plan(1, 0, (), (), b"", b"", appends=(AppendTokens(0, pack([7, 8])),))
    assert redacted.message(plan).appends[0].ids == redacted.permutation.ids(pack([7, 8]))
    assert redacted.message(plan).appends[0].ids != pack([7, 8])
    prepared = redacted.message(GrammarCompiled(0, 1, "r", "no rule 'secret'"))
    row = TokenRow("r", 0, b"", "error", error=GRAMMAR_ERROR + "no rule 'secret'")
    assert prepared.error and "secret" not in prepared.error
    assert redacted.message(row).error == GRAMMAR_ERROR + prepared.error, "as a core would say"
    known = (
        GrammarCompiled(0, 1, "r", NO_GRAMMAR_MEMORY),
        TokenRow("r", 0, b"", "error", error="30 pages"),
    )
    assert tuple(map(redacted.message, known)) == known


def rewrite(trace: Trace, folder: Path, state: bytes | None = None) -> Trace:
    """The recording that --redact would have made of the same records."""
    outcomes = []
    header = msgspec.structs.replace(trace.header, snapshot=state)
    model = trace.header.settings["model"]
    name = trace.header.name
    recording = Recording("r", folder, Quota(), outcomes.append, lambda: redactor(KEY, name, model))
    recording.begin(name, header)
    rows = [msgspec.structs.astuple(record)[:7] for record in trace]
    for at in range(0, len(rows), 50):
        recording.take(rows[at : at + 50], None)
    recording.end("test")
    assert [outcome.state for outcome in outcomes] == ["recording", "done"], outcomes
    return Trace(outcomes[-1].path)


@pytest.mark.parametrize("stage", STAGES)
def test_no_text_and_no_ids_are_left(recorded, stage, tmp_path):
    redacted = rewrite(recorded[stage], tmp_path)
    assert redacted.header.redacted
    raw = b"\n".join(record.body for record in redacted)
    submits = [e for (_, e), _ in events(recorded["tokenizer"]) if isinstance(e, Submit)]
    works = [e for (_, e), _ in events(recorded["scheduler"]) if isinstance(e, TokenizedRequest)]
    assert submits and works
    if stage == "scheduler":  # the search finds what was not redacted
        plain = b"\n".join(record.body for record in recorded[stage])
        assert any(work.prompt_ids in plain for work in works)
    for submit in submits:
        for text in (submit.text, *submit.params.stop):
            assert text is None or len(text) < 6 or text.encode() not in raw
    for word in (b"pipeinfer ", b"count from", b"what is"):
        assert word not in raw
    for work in works:
        assert work.prompt_ids not in raw
        # Not even a piece of it: five ids in a row.
        for at in range(0, len(work.prompt_ids) - 20, 20):
            assert work.prompt_ids[at : at + 20] not in raw


def same(trace: Trace, start: int = 0) -> None:
    core = fresh(trace)
    if trace.header.snapshot is not None:
        restore(core, trace.header.snapshot)
    for number, (event, expected) in enumerate(events(trace)[start:]):
        assert outputs(core, event) == expected, (number, event)


def test_nothing_of_log_probs_is_left_but_how_many_there_were(recorded, tmp_path):
    """They name ids, and how likely a text is says much about it."""
    plain = [e for (_, e), _ in events(recorded["scheduler"])]
    told = [e for (_, e), _ in events(rewrite(recorded["scheduler"], tmp_path))]
    for kind in (Result, PromptLogprobs):
        before = [e.logprobs for e in plain if isinstance(e, kind)]
        after = [e.logprobs for e in told if isinstance(e, kind)]
        assert any(map(any, before)), "some ask for log-probs"
        assert after == [bytes(len(raw)) for raw in before]


def test_a_redacted_trace_replays_the_scheduler_exactly(recorded, tmp_path):
    same(rewrite(recorded["scheduler"], tmp_path))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_redacted_trace_from_mid_life_replays_the_scheduler_exactly(
    recorded, tmp_path_factory, data
):
    trace = recorded["scheduler"]
    everything = events(trace)
    point = data.draw(st.integers(0, len(everything) - 1))
    core = fresh(trace)
    for event, _ in everything[:point]:
        outputs(core, event)
    state = snapshot(core)
    redacted = rewrite(trace, tmp_path_factory.mktemp("redacted"), state)
    works = [e for (_, e), _ in everything[:point] if isinstance(e, TokenizedRequest)]
    assert all(work.prompt_ids not in redacted.header.snapshot for work in works)
    same(redacted, point)


def test_ids_that_a_request_names_are_renamed_like_its_tokens(recorded):
    model = recorded["scheduler"].header.settings["model"]
    how = redactor(KEY, "scheduler", model)
    params = RequestParams(
        stop_token_ids=(40, 50), stop=("secret",), seed=3, logit_bias={40: 1.0, 50: -2.0},
        allowed_token_ids=(40, 50), bad_words=("secret",),
    )  # fmt: skip
    work = how.message(
        TokenizedRequest(
            "r",
            1,
            0,
            0,
            pack([40, 41]),
            params,
            3,
            (0,),
            cache_salt="tenant",
            bad_word_ids=((41, 40),),
        )
    )
    assert work.params.allowed_token_ids == (how.permutation.one(40), how.permutation.one(50))
    assert work.bad_word_ids == ((how.permutation.one(41), how.permutation.one(40)),)
    assert (
        how.message(TokenizedRequest("r", 1, 0, 0, b"", RequestParams(), 3)).params
        == RequestParams()
    )
    assert work.params.stop_token_ids == (how.permutation.one(40), how.permutation.one(50))
    assert work.params.logit_bias == {how.permutation.one(40): 1.0, how.permutation.one(50): -2.0}
    assert unpack(work.prompt_ids)[0] == how.permutation.one(40) != 40
    assert "secret" not in str(work) and "tenant" not in str(work)
    assert work.seed == work.params.seed == 3


def test_end_of_sequence_keeps_its_id(recorded):
    works = [e for (_, e), _ in events(recorded["scheduler"]) if isinstance(e, TokenizedRequest)]
    eos = {token for work in works for token in work.eos_ids}
    model = recorded["scheduler"].header.settings["model"]
    for key in (KEY, secrets.token_hex(32)):
        how = redactor(key, "scheduler", model)
        assert eos and all(how.permutation.one(token) == token for token in eos)


def test_turns_of_clients_whose_grammars_take_long_are_no_ids(recorded):
    trace = recorded["scheduler"]
    core = fresh(trace)
    for n in range(3):
        params = RequestParams(structured_outputs=StructuredOutputs(regex="a" * n))
        work = TokenizedRequest(
            f"r{n}", 1, 0, 0, pack([1]), params, 0, client="c", slow_grammar=True
        )
        outputs(core, (0.0, work))
    how = redactor(KEY, "scheduler", trace.header.settings["model"])
    redacted = how.header(msgspec.structs.replace(trace.header, snapshot=snapshot(core)))
    other = fresh(trace)
    restore(other, redacted.snapshot)
    assert other.stats()["preparing"] == 3


def test_a_state_with_unknown_ids_is_refused(recorded):
    trace = recorded["scheduler"]
    core = fresh(trace)
    core._draft = [17, 4]  # type: ignore[attr-defined]
    how = redactor(KEY, "scheduler", trace.header.settings["model"])
    with pytest.raises(ValueError, match="_draft may hold token ids"):
        how.header(msgspec.structs.replace(trace.header, snapshot=snapshot(core)))
