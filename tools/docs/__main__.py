"""`python tools/docs COMMAND ...`: makes the package importable from a checkout, then runs it."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

sys.exit(importlib.import_module("docs.cli").main())
