"""The engine's threads leave their cores to whoever they wait for."""

from __future__ import annotations

import os
import subprocess
import sys

from pipeinfer.engine.openmp import SPINS, spin_briefly

SHOW = """
import os
from pipeinfer.engine.openmp import spin_briefly
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
