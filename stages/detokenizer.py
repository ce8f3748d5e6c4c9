"""Starts the detokenizer stage alone; see detokenizer.md beside this file."""

import sys

from pipeinfer.runtime.entry import main

sys.exit(main(stage="detokenizer"))
