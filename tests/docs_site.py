"""The site of the documents, built for tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from servers import environment

ROOT = Path(__file__).parents[1]


def built(folder: Path) -> Path:
    """Builds it in `folder`, with strict links."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=ROOT,
        env={**environment(), "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder
