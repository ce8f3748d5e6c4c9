"""Starts the engine stage alone; see engine.md beside this file."""

import sys

from pipeinfer.engine.preload import begin_early

begin_early()  # before the modules that all stages have

from pipeinfer.runtime.entry import main  # noqa: E402

sys.exit(main(stage="engine"))
