"""`python -m pipeinfer COMMAND ...` is the same as `pipeinfer COMMAND ...`."""

import sys

from pipeinfer.cli.main import main

sys.exit(main())
