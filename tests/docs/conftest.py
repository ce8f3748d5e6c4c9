"""Tests of the documents reach tools/docs, which makes some of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
