"""Where the time of a start goes is said in its order, and libraries are loaded beside Python."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pipeinfer.engine.start import PHASES, Start, process_age


def test_phases_are_said_in_order_with_the_graphs_beside_theirs():
    times, shown = iter([0.0, 1.0, 1.0, 3.5, 4.0, 4.25, 5.0, 5.001]), []
    start = Start(shown.append, clock=lambda: next(times))
    start.took("process", 0.5)
    with start.phase("weights"):
        start.read(3 << 28, 5 << 30)
    with start.phase("graphs"):
        start.captured(1, 60)
        start.captured(24, 60)
    with start.phase("weights"):
        pass
    with start.phase("pool"):
        pass
    assert str(start) == "process 0.50 s, weights 1.25 s, graphs 2.50 s (24 of 60)"
    assert shown == [
        "reading weights",
        "reading weights, 0.75 of 5.00 GiB",
        "capturing CUDA graphs, 1 of 60",
        "capturing CUDA graphs, 24 of 60",
        "reading weights",
        "reserving memory for tokens",
    ]
    found = start.statistics()
    assert found["start_seconds"] == pytest.approx(4.251)
    assert list(found) == [*(f"start_{name}_seconds" for name in PHASES), "start_seconds"]


def test_a_phase_that_raises_took_its_time_too():
    times = iter([0.0, 2.0])
    start = Start(clock=lambda: next(times))
    with pytest.raises(ValueError, match="wrong"), start.phase("checks"):
        raise ValueError("wrong")
    assert start.seconds["checks"] == 2.0


def test_a_process_is_as_old_as_it_is(tmp_path):
    began = time.monotonic()
    program = "import time; from pipeinfer.engine.start import process_age as age; print(age())"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0 < float(found.stdout) < time.monotonic() - began + 0.02
    assert process_age(tmp_path / "none") == 0.0


def test_torch_is_there_before_it_is_imported_and_can_be_imported_then():
    program = """
from pipeinfer.engine.preload import preload_torch
preload_torch(0).join()
maps = open("/proc/self/maps").read()
assert "libtorch_cpu.so" in maps and "libtorch_python.so" not in maps
import sys
assert "torch" not in sys.modules
import torch
assert torch.ones(2, 2).mm(torch.ones(2, 2)).sum() == 8
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_tritons_hash_is_made_once_and_without_torch():
    program = """
import sys
from pipeinfer.engine.preload import hashing
making = hashing()
making.join()
assert hashing() is making and "torch" not in sys.modules
from triton.runtime.cache import triton_key
assert triton_key.cache_info().currsize == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
