"""`python tools/harness MODULE:FUNCTION OPTIONS`: what runs in a process of its own beside a tool.

OPTIONS is a JSON object, the function's keywords; see harness/processes.py.
"""

import importlib
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

module, _, function = sys.argv[1].partition(":")
getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
