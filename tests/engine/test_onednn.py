"""An engine on a CPU does not keep a kernel for every number of rows that it has ever computed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from pipeinfer.engine.preload import MAX_CACHED_KERNELS, NAMES, limit_kernel_cache

SHOW = """
import os, sys
from pipeinfer.engine.preload import MAX_CACHED_KERNELS, limit_kernel_cache
if sys.argv[1] == "few":
    limit_kernel_cache(os.environ)
import torch
torch.set_num_threads(1)
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(512, 64), 8)
for rows in (*range(1, 4 * MAX_CACHED_KERNELS), 1, 4 * MAX_CACHED_KERNELS - 1):
    print("rows", rows, flush=True)
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), weight, None, "none", [], "")
print(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def shown(kept: str) -> str:
    """What a process says that has computed all numbers of rows; keeps "few" kernels, or "all"."""
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, kept], env=environ | {"ONEDNN_VERBOSE": "2"},
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
    # A kernel takes 200 to 600 KiB: 128 instead of 512 of them.
    assert resident(every) - resident(few) > 2 * MAX_CACHED_KERNELS * 100


def test_what_the_user_says_stays():
    oneself = dict.fromkeys(NAMES, "7")
    environ = dict(oneself)
    limit_kernel_cache(environ)
    assert environ == oneself
    environ = {}
    limit_kernel_cache(environ)
    assert environ == dict.fromkeys(NAMES, str(MAX_CACHED_KERNELS))
