"""The engine's threads leave their cores to whoever they wait for."""

from __future__ import annotations

import os
import subprocess
import sys

import servers
from pipeinfer import topology as topologies
from pipeinfer.engine.preload import SPINS, spin_briefly
from pipeinfer.settings import Settings

SHOW = """
import os
from pipeinfer.engine.preload import spin_briefly
spin_briefly(os.environ)
import torch
"""


def test_openmp_runtime_of_torch_takes_the_spin_count():
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env=kept | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr


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


def test_an_engines_process_loads_torch_with_it(tmp_path, short_path):
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
