"""A group that lost its engine hands its requests to another group, which goes on with them.

All cores with queues between them; the engine stays away, so that nobody else could end them.
"""

from __future__ import annotations

from random import Random

import pytest
from simulated import HOST_LOSS, Simulation
from simulated_engine import POISON

from pipeinfer.wire import unpack


def begun(random: Random, moody: bool = False) -> Simulation:
    """Two groups with requests under way in both, some of which end by a stop string."""
    s = Simulation(random, groups=2, moody=moody)
    for n in range(10):
        stop = ("a", "th") if n % 3 == 0 else ()
        s.submit([n, *range(random.randint(1, 12))], max_tokens=30, stop=stop)
    for _ in range(random.randint(50, 400)):
        s.deliver()
    return s


def run_without_the_engine(s: Simulation) -> None:
    """Until all clients have their ends, or nothing moves any more."""
    for _ in range(12):
        while s.deliver():
            pass
        s.tick(1.1)


def check_all(s: Simulation) -> None:
    s.check()
    s.start_all()
    s.run()
    s.tick(61.0)
    s.run()
    s.check_ledgers()


def moved(s: Simulation) -> float:
    return s.stats()["tokenizer-0"]["moved_total"]


def test_another_group_ends_what_a_group_without_an_engine_has_begun():
    total = 0.0
    for seed in range(20):
        s = begun(Random(seed))
        s.kill("engine-0-0", down=True)
        run_without_the_engine(s)
        total += moved(s)
        check_all(s)
    assert total > 20, "few requests were under way; the seeds show nothing"


@pytest.mark.parametrize("stage", ["scheduler-0", "scheduler-1", "tokenizer-0", "detokenizer-0"])
def test_a_stage_may_die_while_requests_are_handed_over(stage):
    for seed in range(8):
        random = Random(seed)
        s = begun(random)
        s.kill("engine-0-0", down=True)
        for _ in range(random.randint(1, 40)):
            s.deliver()
        s.kill(stage)
        s.run_until_recovered()
        s.start_all()  # a new tokenizer never heard of an engine that died before
        s.run()
        check_all(s)


def test_clients_that_leave_while_requests_are_handed_over_leave_nothing_behind():
    for seed in range(12):
        random = Random(seed)
        s = begun(random)
        s.kill("engine-0-0", down=True)
        for name in random.sample(sorted(s.clients), 6):
            for _ in range(random.randint(0, 8)):
                s.deliver()
            s.hang_up(name)
        run_without_the_engine(s)
        check_all(s)


def test_what_crashes_every_engine_fails_alone_although_it_is_handed_over():
    for seed in range(6):
        random = Random(seed)
        s = begun(random)
        s.submit([POISON, 1, 2], max_tokens=5)
        for _ in range(12):  # an engine that it crashed is away for a while
            for _ in range(200):
                s.deliver()
            s.kill(random.choice(["engine-0-0", "engine-1-0"]), down=True)
            for _ in range(100):
                s.deliver()
            s.start_all()
        s.run()
        check_all(s)


def test_a_group_with_an_engine_hands_nothing_over():
    s = begun(Random(1))
    s.kill("scheduler-0")
    s.run_until_recovered()
    s.run()
    assert moved(s) == 0
    check_all(s)


def test_what_was_sent_stays_where_the_other_group_would_sample_other_tokens():
    for seed in range(6):
        s = begun(Random(seed), moody=True)
        s.kill("engine-0-0", down=True)
        run_without_the_engine(s)
        for client in s.clients.values():
            assert client.failed is None and client.finish is not None
            if client.finish == "length":
                outputs = unpack(client.ids).tolist()
                shown = client.shown(outputs, client.params)
                assert (client.text, client.ids, client.finish) == shown


def test_what_a_client_has_stays_where_its_host_is_lost_with_the_detokenizer():
    """No two engines sample the same tokens, so that nobody could compute it again."""
    total = 0.0
    for seed in range(6):
        s = begun(Random(seed), moody=True)
        s.cut = "group-0"
        s.kill("detokenizer-0")
        for _ in range(int(HOST_LOSS) + 5):
            while s.deliver():
                pass
            s.tick(1.0)
        total += moved(s)
        for client in s.clients.values():
            assert client.failed is None and client.finish is not None
            if client.finish == "length":
                outputs = unpack(client.ids).tolist()
                shown = client.shown(outputs, client.params)
                assert (client.text, client.ids, client.finish) == shown
    assert total > 6, "few requests were under way; the seeds show nothing"


def test_choices_of_a_prompt_go_to_one_group_and_find_it_there():
    for seed in range(8):
        s = Simulation(Random(seed), groups=3)
        s.submit([5] * 33, max_tokens=40, min_tokens=40, n=5, seed=1)
        for _ in range(Random(seed).randint(20, 90)):
            s.deliver()
        s.kill("engine-0-0", down=True)
        run_without_the_engine(s)
        assert moved(s) == 5
        computed = [s.stats()[f"engine-{group}-0"]["computed_tokens_total"] for group in (1, 2)]
        assert min(computed) == 0, "all in one of them"
        assert max(computed) < 2 * 33 + 5 * 40, "the prompt is computed once, or begun twice"
        check_all(s)
