"""Which tokenizer and which detokenizer a gateway gives a request, where there are several."""

from __future__ import annotations

from collections import Counter

import pytest
from gateway_pipeline import STAGES, heartbeat
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.core import GIVE_UP_FACTOR, Tick, highest_random_weight
from pipeinfer.gateway.core import GatewayCore, own_detokenizers
from pipeinfer.gateway.health import ExpectedStage
from pipeinfer.gateway.ledger import BEGINNING_BYTES, Call, Failed, prompt_beginning
from pipeinfer.messages import Abort, ResetCache, SetSleep, Submit
from pipeinfer.params import RequestParams
from pipeinfer.wire import pack

PARAMS = RequestParams()
MORE = [f"{name}-{index}" for name in ("tokenizer", "detokenizer") for index in (1, 2, 3)]
EXPECTED = [ExpectedStage(stage, stage.split("-")[0]) for stage in (*STAGES, *MORE)]
FOUR = [f"tokenizer-{index}" for index in range(4)]
LONG = st.text(min_size=BEGINNING_BYTES, max_size=300)


def ready_core(**options) -> GatewayCore:
    core = GatewayCore(EXPECTED, **options)
    for stage in (*STAGES, *MORE):
        core.handle(heartbeat(stage), 0.0)
    return core


def sent(core: GatewayCore, call: Call, now: float = 0.0) -> tuple[str, Submit]:
    [send] = core.handle(call, now)
    assert isinstance(send.message, Submit)
    return send.to, send.message


@given(LONG, st.text(), st.text())
def test_prompts_that_begin_alike_have_the_same_tokenizer(shared, one, other):
    for make in (
        lambda end: {"text": shared + end},
        lambda end: {"prompt_ids": pack([*shared.encode("utf-8", "replace"), len(end)])},
        lambda end: {
            "chat": [
                {"role": "system", "content": shared},
                {"role": "user", "content": [{"type": "text", "text": end}]},
            ]
        },
    ):
        first, second = (prompt_beginning(Call("r", PARAMS, **make(end))) for end in (one, other))
        assert first == second


def test_salts_and_beginnings_are_told_apart():
    calls = [
        Call("r", PARAMS, text="a"),
        Call("r", PARAMS, text="b"),
        Call("r", PARAMS, text="a", cache_salt="s"),
        Call("r", PARAMS, prompt_ids=pack([1])),
        Call("r", PARAMS, chat=[{"role": "user", "content": "a"}]),
    ]
    assert len({prompt_beginning(call) for call in calls}) == len(calls)


@given(st.lists(st.binary(max_size=20), max_size=50), st.sampled_from(FOUR))
def test_without_one_of_them_only_its_own_keys_go_to_others(keys, missing):
    others = [stage for stage in FOUR if stage != missing]
    for key in keys:
        chosen = highest_random_weight(FOUR, key)
        assert chosen == highest_random_weight(FOUR[::-1], key)
        assert chosen in (missing, highest_random_weight(others, key))


def test_requests_are_spread_evenly_over_all_of_them():
    core = ready_core()
    of = [sent(core, Call(f"r{n}", PARAMS, text=f"{n} bottles")) for n in range(2_000)]
    for parts in (
        Counter(tokenizer for tokenizer, _ in of),
        Counter(submit.detokenizer for _, submit in of),
    ):
        assert len(parts) == 4 and min(parts.values()) > 400


@pytest.mark.parametrize("gateways", range(1, 7))
@pytest.mark.parametrize("detokenizers", range(1, 7))
def test_all_gateways_together_use_all_detokenizers_alike(gateways, detokenizers):
    """And as few messages as possible carry a step's text, where the numbers allow that."""
    stages = [f"detokenizer-{index}" for index in range(detokenizers)]
    own = [own_detokenizers(stages, index, gateways) for index in range(gateways)]
    part = Counter[str]()
    for mine in own:
        for stage in mine:
            part[stage] += 1 / len(mine)  # of what one gateway has
    assert list(part.values()) == pytest.approx([gateways / detokenizers] * detokenizers)
    if gateways % detokenizers == 0 or detokenizers % gateways == 0:
        assert sum(map(len, own)) == max(gateways, detokenizers)


def test_a_gateway_without_its_own_detokenizer_uses_the_others():
    expected = [*EXPECTED, *(ExpectedStage(f"gateway-{n}", "gateway") for n in range(4))]
    core = GatewayCore(expected, index=2)
    for stage in (*STAGES, *MORE):
        core.handle(heartbeat(stage), 0.0)
    assert sent(core, Call("a", PARAMS, text="x"))[1].detokenizer == 2
    core.handle(heartbeat("detokenizer-2", "starting"), 0.0)
    assert sent(core, Call("b", PARAMS, text="x"))[1].detokenizer != 2


def test_what_a_stage_would_get_that_is_not_ready_goes_to_others():
    core = ready_core()
    before = [sent(core, Call(f"r{n}", PARAMS, text=str(n))) for n in range(100)]
    core.handle(heartbeat("tokenizer-2", "starting"), 0.0)
    core.handle(heartbeat("detokenizer-1", "starting"), 0.0)
    assert core.can_serve() and core.status == "degraded"
    after = [sent(core, Call(f"s{n}", PARAMS, text=str(n))) for n in range(100)]
    for (was, _), (now, _) in zip(before, after, strict=True):
        assert now == was or was == "tokenizer-2"
    assert {to for to, _ in after} == {"tokenizer-0", "tokenizer-1", "tokenizer-3"}
    assert {submit.detokenizer for _, submit in after} == {0, 2, 3}
    for message in (ResetCache("reset"), SetSleep(1)):
        for stage in FOUR[:3]:
            core.handle(heartbeat(stage, "starting"), 0.0)
        [send] = core.handle(message, 0.0)
        assert send.to == "tokenizer-3"
    core.handle(heartbeat("tokenizer-3", "starting"), 0.0)
    assert not core.can_serve()
    assert sent(core, Call("waits", PARAMS, text="x"))[0] in FOUR


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer"])
def test_the_loss_of_one_for_good_fails_its_own_requests_alone(kind):
    core, own = ready_core(host_loss=2.0), dict[str, str]()
    for number in range(40):
        name = f"r{number}"
        tokenizer, submit = sent(core, Call(name, PARAMS, text=name))
        own[name] = tokenizer if kind == "tokenizer" else f"detokenizer-{submit.detokenizer}"
    lost, now, failed, aborted = f"{kind}-1", 0.0, set[str](), set[str]()
    while now < 7.0 + GIVE_UP_FACTOR * 2.0:
        now += 0.5
        for stage in (*STAGES, *MORE):
            if stage != lost:
                core.handle(heartbeat(stage), now)
        for send in core.handle(Tick(), now):
            failed |= {send.message.request_id} if isinstance(send.message, Failed) else set()
            aborted |= {send.message.request_id} if isinstance(send.message, Abort) else set()
    assert failed == aborted == {name for name, stage in own.items() if stage == lost}
    assert failed
