"""Starts the scheduler stage alone; see scheduler.md beside this file."""

import sys

from pipeinfer.runtime.entry import main

sys.exit(main(stage="scheduler"))
