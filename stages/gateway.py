"""Starts the gateway stage alone; see gateway.md beside this file."""

import sys

from pipeinfer.runtime.entry import main

sys.exit(main(stage="gateway"))
