"""Starts the engine stage alone; see engine.md beside this file."""

import sys

from pipeinfer.runtime.entry import main

sys.exit(main(stage="engine"))
