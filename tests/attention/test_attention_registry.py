"""Choosing an attention backend by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeinfer.attention import registry
from pipeinfer.attention.interface import BackendCapabilities
from pipeinfer.settings import ConfigurationError


def test_auto_is_torch_on_the_cpu():
    assert registry.resolve("auto", "cpu") == "torch"


def test_unknown_backend_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigurationError, match=r"'flash'.*known: auto, torch"):
        registry.resolve("flash", "cpu")


def test_every_registered_backend_can_be_loaded_and_states_its_page_sizes():
    for name in registry.BACKENDS:
        traits = registry.load(name).traits
        assert traits.page_sizes is None or traits.preferred_page_size in traits.page_sizes


def test_page_size_zero_becomes_what_the_backend_prefers():
    assert registry.resolve_page_size("torch", 0) == 16
    assert registry.resolve_page_size("torch", 64) == 64


class Picky:
    traits = BackendCapabilities(page_sizes=(1, 128), preferred_page_size=128)


def test_page_size_that_a_backend_does_not_take_is_refused_with_those_it_takes(monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "picky", f"{__name__}:Picky")
    assert registry.resolve_page_size("picky", 1) == 1
    with pytest.raises(ConfigurationError, match=r"'picky' takes 1, 128, not 16"):
        registry.resolve_page_size("picky", 16)


def test_a_backend_that_needs_no_package_runs_on_any_device(monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "picky", f"{__name__}:Picky")
    assert registry.resolve("picky", "cpu") == registry.resolve("picky", "cuda", gpu()) == "picky"
    with pytest.raises(ConfigurationError, match=r"no backend 'hybrid' for cpu"):
        registry.resolve("hybrid", "cpu")


def test_the_registry_costs_no_backend_until_one_is_chosen():
    code = "import sys, pipeinfer.attention.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def gpu(**changes):
    facts = {
        "capability": (9, 0), "dtype": "bfloat16", "head_dim": 128,
        "installed": frozenset({"flashinfer", "sgl_kernel"}),
    } | changes  # fmt: skip
    return registry.Gpu(**facts)


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "hybrid"),
        ({"dtype": "float16", "head_dim": 64}, "hybrid"),
        ({"capability": (8, 9)}, "flashinfer"),
        ({"capability": (10, 0)}, "flashinfer"),
        ({"installed": frozenset({"flashinfer"})}, "flashinfer"),
        ({"installed": frozenset({"sgl_kernel"})}, "hybrid"),
        ({"installed": frozenset()}, "torch"),
        ({"dtype": "float32"}, "torch"),
        ({"head_dim": 80}, "torch"),
        ({"sinks": True}, "hybrid"),
        ({"sinks": True, "dtype": "float16"}, "torch"),
        ({"sinks": True, "capability": (8, 9)}, "torch"),
        ({"soft_cap": True}, "torch"),
        ({"head_dim": 256}, "flashinfer"),
        ({"head_dim": 256, "installed": frozenset({"sgl_kernel"})}, "torch"),
        ({"e4m3": True}, "hybrid"),
        ({"e4m3": True, "dtype": "float16"}, "flashinfer"),
        ({"e4m3": True, "capability": (8, 9)}, "flashinfer"),
        ({"e4m3": True, "capability": (8, 6)}, "torch"),
        ({"e4m3": True, "head_dim": 256}, "flashinfer"),
        ({"e4m3": True, "sinks": True}, "torch"),
    ],
)
def test_auto_is_the_fastest_backend_that_the_gpu_can_run(changes, backend):
    assert registry.resolve("auto", "cuda", gpu(**changes)) == backend


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hybrid", {"installed": frozenset({"flashinfer"})}, "sgl_kernel is not installed.*flashi"),
        ("flashinfer", {"installed": frozenset()}, "flashinfer is not installed.*torch works"),
        ("fa3", {"capability": (8, 0)}, "capability 9.0, this one has 8.*flashinfer works"),
        ("fa3", {"dtype": "float32"}, "not float32; --attention torch works"),
        ("flashinfer", {"sinks": True}, "no attention sinks, .*--attention hybrid works"),
        ("fa3", {"sinks": True, "dtype": "float16"}, "sinks in bfloat16, not float16; .*torch"),
        ("fa3", {"soft_cap": True}, "no soft cap of scores, .*--attention torch works"),
        ("hybrid", {"head_dim": 80}, "no kernel for heads of 80.*--attention torch works"),
        (
            "flashinfer",
            {"e4m3": True, "capability": (8, 0)},
            "with --kv-cache-dtype fp8_e4m3 it needs a GPU of capability 8.9, this one has 8.0; "
            "--attention torch works",
        ),
        (
            "fa3",
            {"e4m3": True, "head_dim": 96},
            "with --kv-cache-dtype fp8_e4m3 FlashAttention-3 takes heads of 64 and 128, not 96",
        ),
        ("hybrid", {"e4m3": True, "dtype": "float16"}, "gives bfloat16, not float16; .*flashinfer"),
        ("hybrid", {"e4m3": True, "sinks": True}, "3 takes no attention sinks.*torch works"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_one_that_can(name, changes, message):
    with pytest.raises(ConfigurationError, match=f"--attention {name}: .*{message}"):
        registry.resolve(name, "cuda", gpu(**changes))


@pytest.mark.parametrize(
    ("head_dim", "backend", "padded"),
    [
        (16, "", 64), (64, "", 64), (80, "", 128), (96, "fa3", 128), (129, "", 256),
        (256, "flashinfer", 256), (320, "", 320), (80, "torch", 80),
    ],
)  # fmt: skip
def test_heads_are_padded_to_the_next_size_that_every_gpu_backend_has(head_dim, backend, padded):
    assert registry.padded_head_dim(head_dim, backend) == padded
    every = [sizes for name, sizes in registry.HEAD_DIMS.items() if name != "hybrid"]
    assert backend == "torch" or padded > 256 or all(padded in sizes for sizes in every)


@pytest.mark.parametrize("name", ["fa3", "hybrid"])
def test_a_backend_that_is_not_chosen_for_large_heads_may_be_asked_for(name):
    assert registry.resolve(name, "cuda", gpu(head_dim=256)) == name


def test_backends_of_a_gpu_are_refused_on_the_cpu():
    with pytest.raises(ConfigurationError, match="no backend 'hybrid' for cpu; known: auto, torch"):
        registry.resolve("hybrid", "cpu")


def test_packages_are_imported_beside_and_one_that_cannot_be_is_left_to_the_backend(
    monkeypatch, tmp_path
):
    (tmp_path / "kernels_that_load.py").write_text("there = True")
    (tmp_path / "kernels_that_fail.py").write_text("raise OSError('another driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("kernels_that_fail", "kernels_that_load")
    monkeypatch.setitem(registry.IMPORTED, "fa3", names)
    registry.import_packages("fa3").join(60)
    assert sys.modules.pop("kernels_that_load").there
    assert "kernels_that_fail" not in sys.modules
    registry.import_packages("torch").join(60)


def test_a_package_that_a_backend_does_without_is_not_imported_for_it(monkeypatch, tmp_path):
    (tmp_path / "norms_of_others.py").write_text("")
    (tmp_path / "kernels_with_norms.py").write_text(
        "try:\n    import norms_of_others\n    own = False\nexcept ImportError:\n    own = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.IMPORTED, "fa3", ("kernels_with_norms",))
    for without, own in (("norms_of_others", True), ("", False), ("norms_of_others", False)):
        monkeypatch.setitem(registry.WITHOUT, "fa3", without)
        registry.import_packages("fa3").join(60)
        assert sys.modules.pop("kernels_with_norms").own == own
        # Whoever asks for it later finds it; and one that was there before is not taken away.
        assert ("norms_of_others" in sys.modules) == (not own)
    del sys.modules["norms_of_others"]


def test_what_is_imported_beforehand_is_of_the_packages_that_a_backend_needs():
    assert registry.IMPORTED.keys() == registry.PACKAGES.keys()
    for name, modules in registry.IMPORTED.items():
        assert {module.partition(".")[0] for module in modules} <= set(registry.PACKAGES[name])
