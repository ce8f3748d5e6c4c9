"""Starts the tokenizer stage alone; see tokenizer.md beside this file."""

import sys

from pipeinfer.runtime.entry import main

sys.exit(main(stage="tokenizer"))
