"""The cases of the Triton kernels, in Triton's interpreter, in a process of their own.

The interpreter is chosen when triton is imported, so it must not be this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
SECONDS = 400  # generous, for a loaded machine: a minute of one processor
AREAS = (
    "store",
    "prepare_inputs",
    "draft",
    "sampling",
    "logits",
    "moe",
    "moe_fp8",
    "elementwise",
    "gemm",
    "exact",
    "decode_attention",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    """Of each area, a line per case: its name, and what went wrong if anything did."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(HERE / f"{area}_cases.py") for area in AREAS]
    command = [sys.executable, "-m", "pytest", *files, f"--junitxml={report}", "-p", "no:xdist"]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = {area: [] for area in AREAS}
    for case in ElementTree.parse(report).iter("testcase"):
        area = case.attrib["classname"].rsplit(".", 1)[-1].removesuffix("_cases")
        wrong = [str(child.text) for child in case if child.tag in ("failure", "error", "skipped")]
        found[area].append("\n".join([case.attrib["name"], *wrong]))
    return found


@pytest.mark.parametrize("area", AREAS)
def test_kernels_compute_what_their_references_do(area, outcomes):
    assert outcomes[area], "no case ran"
    assert [case for case in outcomes[area] if "\n" in case] == []
