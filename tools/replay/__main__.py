"""`python tools/replay COMMAND ...` is the same as `pipeinfer replay COMMAND ...`."""

import sys

from pipeinfer.cli.main import main

sys.exit(main(["replay", *sys.argv[1:]]))
