"""A few hundred steps of the soak that tests/gpu/soak.py runs on a GPU, here on the CPU."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

from pipeinfer.memory.pages import IntegrityError


@pytest.fixture(scope="module")
def soak():
    """Under a name of its own: tools/ has a package of that name, too, which tests that come later
    find only where tests/gpu does not stay in front of it."""
    path = Path(__file__).parents[1] / "gpu/soak.py"
    spec = importlib.util.spec_from_file_location("gpu_soak", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_soak"] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path.copy())
        spec.loader.exec_module(module)
    return module


def test_random_traffic_ends_as_asked_and_leaves_every_page_accounted_for(soak):
    found = soak.soak(seconds=300, seed=random.randrange(10**6), steps=500)
    assert found["requests"] > 20 and found["idle_moments"] > 0
    assert found["preemptions"] > 0 and found["aborted"] > 0 and found["cached_tokens"] > 0
    assert 10 * len(found["flipped"]) <= found["sample"], found  # float32: ties are rare


def test_a_page_that_is_lost_does_not_stay_unnoticed(soak, monkeypatch):
    from pipeinfer.memory.pages import PageAllocator

    give = PageAllocator.free

    def forgets(self, pages):
        give(self, pages[:-1] if len(pages) > 2 else pages)

    monkeypatch.setattr(PageAllocator, "free", forgets)
    with pytest.raises((IntegrityError, AssertionError)):
        soak.soak(seconds=300, seed=0, steps=200)
