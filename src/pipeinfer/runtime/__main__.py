"""`python -m pipeinfer.runtime STAGE ...`: see entry.py."""

import sys

from pipeinfer.runtime.entry import main

sys.exit(main())
