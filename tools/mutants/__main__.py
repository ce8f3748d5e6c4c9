"""`python tools/mutants COMMAND ...`, from a checkout."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

sys.exit(importlib.import_module("mutants").TOOL.main())
