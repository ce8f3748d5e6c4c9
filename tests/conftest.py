"""For every test: torch computes with one thread.

The tests run several at a time on few cores, and torch's threads wait for each other by spinning:
two of them on one busy core are tens of times slower than one.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
