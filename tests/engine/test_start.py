"""The start of an engine: seconds by phase, libraries that load beside Python, and the variables
that oneDNN and OpenMP read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch

import servers
from pipeinfer import topology as topologies
from pipeinfer.engine.start import (
    MAX_CACHED_KERNELS,
    NAMES,
    PHASES,
    SPINS,
    Start,
    limit_kernel_cache,
    process_age,
    spin_briefly,
)
from pipeinfer.settings import Settings


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


def test_what_a_standby_waits_is_no_part_of_its_start():
    times = iter([0.0, 1.0, 3601.0, 3603.0])
    start = Start(clock=lambda: next(times))
    with start.phase("pool"), start.waiting():
        pass
    assert start.seconds["pool"] == 3.0


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
from pipeinfer.engine.start import preload_torch
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
from pipeinfer.engine.start import hashing
making = hashing()
making.join()
assert hashing() is making and "torch" not in sys.modules
from triton.runtime.cache import triton_key
assert triton_key.cache_info().currsize == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


SHOW_CACHE = """
import os, sys
from pipeinfer.engine.start import MAX_CACHED_KERNELS, limit_kernel_cache
if sys.argv[1] == "few":
    limit_kernel_cache(os.environ)
import torch
torch.set_num_threads(1)
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(512, 64), 8)
for rows in (*range(1, 3 * MAX_CACHED_KERNELS), 1, 3 * MAX_CACHED_KERNELS - 1):
    print("rows", rows, flush=True)
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), weight, None, "none", [], "")
print(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def shown(kept: str) -> str:
    """What a process says that has computed all numbers of rows; keeps "few" kernels, or "all"."""
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_CACHE, kept], env=environ | {"ONEDNN_VERBOSE": "2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def resident(told: str) -> int:
    """KiB."""
    return int(re.findall(r"RssAnon:\s+(\d+) kB", told)[0])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_the_latest_kernels_only_are_kept():
    few, every = shown("few"), shown("all")
    *_, first, last = few.split("rows ")
    assert re.findall(r"create:(cache_\w+)", first)[0] == "cache_miss"
    assert set(re.findall(r"create:(cache_\w+)", last)) == {"cache_hit"}
    # A kernel takes 200 to 600 KiB: 128 instead of 384 of them.
    assert resident(every) - resident(few) > 2 * MAX_CACHED_KERNELS * 100


def test_what_the_user_says_stays():
    oneself = dict.fromkeys(NAMES, "7")
    environ = dict(oneself)
    limit_kernel_cache(environ)
    assert environ == oneself
    environ = {}
    limit_kernel_cache(environ)
    assert environ == dict.fromkeys(NAMES, str(MAX_CACHED_KERNELS))


def test_what_the_user_says_about_waiting_stays():
    for given in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environ = dict(given)
        spin_briefly(environ)
        assert environ == given


# An engine's process, whose start ends once its libraries are loaded.
ENGINE = """
import runpy, sys
from pipeinfer.engine import stage

def enough(*_):
    raise RuntimeError("enough")

stage._masks = enough
sys.argv = ["pipeinfer.runtime", "engine", "--device", "cpu", "--topology", sys.argv[1]]
runpy.run_module("pipeinfer.runtime", run_name="__main__")
"""


def test_an_engines_process_loads_torch_whose_openmp_takes_the_spin_count(tmp_path, short_path):
    file = tmp_path / "pipeinfer.toml"
    file.write_text(topologies.local(Settings(), f"ipc://{short_path}/").to_toml())
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    kept = {name: value for name, value in servers.environment().items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(file)], env=kept | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "enough" in done.stderr
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr
