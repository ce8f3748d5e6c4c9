"""An engine on a CPU does not keep a kernel for every number of rows that it has ever computed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from pipeinfer.engine.onednn import KEPT, NAME, keep_few_kernels

SHOW = """
import os
from pipeinfer.engine.onednn import KEPT, keep_few_kernels
keep_few_kernels(os.environ)
import torch
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 8)
for rows in (*range(1, KEPT + 2), 1, KEPT + 1):
    print("rows", rows, flush=True)
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), weight, None, "none", [], "")
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednn_keeps_the_latest_kernels_only():
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={name: value for name, value in os.environ.items() if name != NAME}
        | {"ONEDNN_VERBOSE": "2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *_, first, last = done.stdout.split("rows ")
    assert re.findall(r"create:(cache_\w+)", first)[0] == "cache_miss"
    assert set(re.findall(r"create:(cache_\w+)", last)) == {"cache_hit"}


def test_what_the_user_says_stays():
    environ = {NAME: "7"}
    keep_few_kernels(environ)
    assert environ == {NAME: "7"}
    environ = {}
    keep_few_kernels(environ)
    assert environ == {NAME: str(KEPT)}
