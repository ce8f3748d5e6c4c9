"""Any stage may die at any time: no request is lost, nothing is shown twice, nothing stays behind.

All cores with queues between them, killed at random places of a random order of events.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated import HOST_LOSS, Simulation
from simulated_engine import POISON
from simulated_grammars import spec_of

from pipeinfer.core import FORGET_FACTOR
from pipeinfer.wire import unpack

MANY_SEEDS = st.integers(0, 2**32 - 1)
STOPS = st.lists(st.sampled_from(["a", "th", "é", "你", "q.", "\ufffd"]), max_size=2)


class Machine(RuleBasedStateMachine):
    @initialize(
        seed=MANY_SEEDS,
        policy=st.sampled_from(["mixed", "throughput", "prefill-first", "decode-first"]),
        depth=st.sampled_from([1, 2]),
        groups=st.sampled_from([1, 1, 2]),
        gateway_deaths=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def start(self, seed, policy, depth, groups, gateway_deaths):
        self.s = Simulation(Random(seed), policy, depth, groups)
        self.gateway_deaths = self.left = gateway_deaths
        self.poisons = 1

    @rule(
        length=st.integers(1, 20),
        salt=st.integers(0, 40),
        max_tokens=st.integers(1, 25),
        min_tokens=st.integers(0, 6),
        stop=STOPS,
        timeout=st.sampled_from([0.0, 0.0, 0.0, 0.1, 2.0]),
        logprobs=st.sampled_from([(None, None), (None, None), (0, None), (2, 1), (None, 3)]),
        choices=st.sampled_from([1, 1, 3]),
        grammar=st.sampled_from([None, None, None, "w", "dead", "odd", "huge", "wrong"]),
        kept=st.sampled_from([0.0, 0.0, 30.0]),
    )
    def submit(
        self, length, salt, max_tokens, min_tokens, stop, timeout, logprobs, choices, grammar, kept
    ):
        prompt = [(salt + i) % 50 for i in range(length)]
        self.s.submit(
            prompt,
            timeout,
            kept,
            max_tokens=max_tokens,
            min_tokens=0 if grammar else min(min_tokens, max_tokens),
            structured_outputs=spec_of(grammar, length) if grammar else None,
            stop=tuple(stop),
            logprobs=logprobs[0],
            prompt_logprobs=logprobs[1],
            n=choices,
            seed=None if choices == 1 else length,
        )

    @precondition(lambda self: self.poisons)
    @rule(length=st.integers(1, 20))
    def submit_poison(self, length):
        self.poisons -= 1
        self.s.submit([POISON, *range(1, length)], max_tokens=5)

    @rule(many=st.integers(1, 60))
    def deliver(self, many):
        for _ in range(many):
            self.s.deliver()

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.1]))
    def tick(self, seconds):
        self.s.tick(seconds)

    @precondition(lambda self: self.s.clients)
    @rule(data=st.data())
    def hang_up(self, data):
        self.s.hang_up(data.draw(st.sampled_from(sorted(self.s.clients))))

    @rule(data=st.data(), down=st.sampled_from([False, False, True]))
    def kill(self, data, down):
        """Some of all stages but the gateway, mostly one."""
        some = st.sets(st.sampled_from(self.s.stages[1:]), min_size=1, max_size=4)
        self.s.kill(*sorted(data.draw(some)), down=down)

    @rule(data=st.data())
    def lose_plans(self, data):
        engines = [stage for stage in self.s.stages if stage.startswith("engine")]
        self.s.lose_plans(data.draw(st.sampled_from(engines)))

    @rule()
    def start_what_is_down(self):
        self.s.start_all()

    @rule(data=st.data())
    def hand_over(self, data):
        self.s.leave(data.draw(st.sampled_from(self.s.stages[1:])))

    @precondition(lambda self: self.left)
    @rule()
    def kill_gateway(self):
        self.left -= 1
        self.s.kill("gateway-0")

    @rule()
    def release(self):
        self.s.release()

    def teardown(self):
        if not hasattr(self, "s"):
            return
        self.s.run()
        self.s.check()
        self.s.release()
        self.s.run()
        self.s.tick(61.0)  # what was delivered of requests that nobody asks for
        self.s.run()
        if self.gateway_deaths:  # a gateway's Done may have died with it
            for _ in range(2):
                self.s.tick(3_700.0)
        self.s.run()
        self.s.check_ledgers()


Machine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestKillsInAnyOrder = Machine.TestCase


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("deaths", [1, 2])
def test_what_was_sent_stays_where_no_two_engines_agree(seed, groups, deaths):
    """Text and tokens of one request fit together, although logits are not repeatable; also where
    all who knew its tokens die together, and where two groups run it."""
    random = Random(seed)
    s = Simulation(random, groups=groups, moody=True)
    for n in range(5):
        s.submit([n, n + 1], max_tokens=25, ignore_eos=True)
    for _ in range(20):
        s.kill(*random.sample(s.stages[1:], deaths))
        if deaths == 1 or random.random() < 0.5:
            s.run_until_recovered()
        for _ in range(random.randint(1, 60)):
            s.deliver()
    s.run()
    for client in s.clients.values():
        outputs = unpack(client.ids).tolist()
        assert client.failed is None and len(outputs) == 25
        assert (client.text, client.ids, "length") == client.shown(outputs, client.params)


def test_a_request_that_two_groups_run_outlives_the_group_that_opened_it_last():
    """Two tokenizers in turn chose them; then the scheduler of one group leaves, and its successor
    has never heard of the request."""
    for seed in range(20):
        random = Random(seed)
        s = Simulation(random, groups=2)
        s.kill("detokenizer-0", "tokenizer-0", "scheduler-1", "engine-0-0")
        for n in range(3):
            s.submit([n, n + 1], max_tokens=6)
        for _ in range(random.randint(5, 50)):
            s.deliver()
        s.leave("scheduler-1")
        s.leave("tokenizer-0")
        s.run()
        s.check()
        s.tick(61.0)
        s.run()
        s.check_ledgers()


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_plans_that_are_lost_cost_no_epoch(tp):
    again = 0.0
    for seed in range(6):
        s = Simulation(Random(seed), tp=tp)
        for n in range(6):
            s.submit([n, n + 1], max_tokens=25)
        for _ in range(12):
            s.lose_plans(f"engine-0-{s.random.randrange(tp)}")
            for _ in range(s.random.randint(1, 30)):
                s.deliver()
        s.run()
        s.check()
        stats = s.stats()["scheduler-0"]
        assert stats["epochs_total"] == 1, "all is mended within the epoch"
        again += stats["repeated_plans_total"]
    assert again > 20, "few plans were lost; the seeds show nothing"


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_kept_for_a_gateway_that_never_comes_back_is_forgotten(groups):
    kept = 0.0
    for seed in range(6):
        s = Simulation(Random(seed), groups=groups)
        for n in range(8):
            s.submit([n, n + 1], max_tokens=20, n=1 + n % 2, seed=n)
        for _ in range(Random(seed).randint(10, 200)):
            s.deliver()
        if seed % 2:
            s.kill("engine-0-0", down=groups > 1)  # so that some of it is moved
        s.kill("gateway-0", down=True)
        for _ in range(3):
            while s.deliver():
                pass
            s.tick(1.1)
        kept += s.stats()["tokenizer-0"]["ledger"]
        for _ in range(3):
            s.tick(FORGET_FACTOR * HOST_LOSS + 1.0)
            while s.deliver():
                pass
        assert "gateway-0" not in s.processes
        s.check_ledgers()
    assert kept > 20, "few requests were under way; the seeds show nothing"


@pytest.mark.parametrize("stage", ["tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0"])
@pytest.mark.parametrize("again", [False, True])
def test_a_death_amid_several_choices_changes_none_of_them(stage, again):
    running = held = 0
    for seed in range(8):
        s = Simulation(Random(seed))
        for n in range(3):
            s.submit([n, *range(2, 30)], max_tokens=20, min_tokens=8, n=4, seed=7 * n)
        for _ in range(Random(seed).randint(10, 120)):
            s.deliver()
        stats = s.stats()["scheduler-0"]
        running, held = running + stats["running"], held + stats["held"]
        s.kill(stage)
        if again:
            for _ in range(Random(seed).randint(0, 60)):
                s.deliver()
            s.kill(stage)
        s.run()
        s.check()
        s.tick(61.0)
        s.run()
        s.check_ledgers()
        texts = {name: client.text for name, client in s.clients.items()}
        assert len(texts) == 12 and len(set(texts.values())) > 6, "choices differ"
    assert running > 8 and held > 8, "it is hit in all of its states"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("beside", ["", "detokenizer-0", "scheduler-0", "engine-0-0"])
def test_kept_answers_outlive_gateways_in_the_same_pieces(groups, beside):
    """Whatever else dies with the gateway, but the tokenizer: each delta comes as it came before,
    however many tokens were under way together, and other requests are forgotten."""
    adopted = resumed = 0
    for seed in range(10):
        random = Random(seed)
        s = Simulation(random, groups=groups)
        for n in range(4):
            stop = ["a", "q."] if n == 2 else []
            logprobs = {"logprobs": 2, "prompt_logprobs": 1} if n == 1 else {}
            s.submit(
                [n, n + 1], kept=30.0, max_tokens=20, n=1 + n % 2, seed=n, stop=stop, **logprobs
            )
        s.submit([7, 8], max_tokens=20)
        for _ in range(3):
            for _ in range(random.randint(1, 120)):
                s.deliver()
            known = s.processes["tokenizer-0"].core._routed  # type: ignore[attr-defined]
            names = [name for name, client in s.clients.items() if client.kept]
            expected = {name for name in names if known.has(name, 0)}
            s.adopted = False
            s.kill("gateway-0", *filter(None, [beside]))
            resumed += sum(bool(client.deltas) for client in s.clients.values())
            s.run_until_recovered()
            while not s.adopted:
                assert s.deliver() or s.tick(1.1)
            assert expected <= {name for name in names if not s.clients[name].lost}
            adopted += len(expected)
        s.run()
        s.check()
        assert s.stats()["gateway-0"]["kept"] == sum(
            client.kept and not client.lost for client in s.clients.values()
        )
        s.release()
        s.run()
        s.tick(61.0)
        s.run()
        s.check_ledgers()
    assert adopted > 60 and resumed > 20
