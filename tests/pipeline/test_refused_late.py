"""What can never fit is refused alike, whether its group has engines or waits for them."""

from __future__ import annotations

from random import Random

import pytest
from simulated import Simulation
from simulated_engine import PAGE_SIZE, PAGES

TOO_LONG = PAGES * PAGE_SIZE + 5


@pytest.mark.parametrize("prompt", [TOO_LONG, 20])
def test_a_request_that_cannot_fit_gets_the_same_400_while_engines_are_away(prompt):
    failures = []
    for away in (False, True):
        s = Simulation(Random(4))
        if away:
            s.kill("engine-0-0", down=True)
        good = s.submit([1, 2, 3], max_tokens=8)
        bad = s.submit([5] * prompt, max_tokens=TOO_LONG)
        for _ in range(500):
            s.deliver()
        assert (s.clients[bad].failed is None) == away, "it waits with the others"
        s.start_all()
        s.run()
        failures.append(s.clients.pop(bad).failed)
        assert s.clients[good].finish is not None
        s.check()
        s.tick(61.0)
        s.run()
        s.check_ledgers()
    now, later = failures
    assert later == now and now.status == 400 and now.param == "max_tokens"
