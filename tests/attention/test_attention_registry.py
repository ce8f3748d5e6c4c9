"""Choosing an attention backend by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeinfer.attention import registry
from pipeinfer.settings import ConfigurationError


def test_auto_is_torch_on_the_cpu():
    assert registry.resolve("auto", "cpu") == "torch"


def test_unknown_backend_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigurationError, match=r"'flash'.*known: auto, torch"):
        registry.resolve("flash", "cpu")


def test_every_registered_backend_can_be_loaded_and_states_its_page_sizes():
    for name in registry.BACKENDS:
        backend = registry.load(name)
        assert backend.page_sizes is None or backend.preferred_page_size in backend.page_sizes


def test_page_size_zero_becomes_what_the_backend_prefers():
    assert registry.resolve_page_size("torch", 0) == 16
    assert registry.resolve_page_size("torch", 64) == 64


class Picky:
    page_sizes = (1, 128)
    preferred_page_size = 128


def test_page_size_that_a_backend_does_not_take_is_refused_with_those_it_takes(monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "picky", f"{__name__}:Picky")
    assert registry.resolve_page_size("picky", 1) == 1
    with pytest.raises(ConfigurationError, match=r"'picky' takes 1, 128, not 16"):
        registry.resolve_page_size("picky", 16)


def test_the_registry_costs_no_backend_until_one_is_chosen():
    code = "import sys, pipeinfer.attention.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
