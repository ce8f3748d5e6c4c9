"""`python tools/same_tokens COMMAND ...`: makes the package importable, then runs it."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

sys.exit(importlib.import_module("same_tokens.cli").main())
