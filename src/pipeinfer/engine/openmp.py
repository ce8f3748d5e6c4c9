"""How OpenMP's threads wait for each other on a CPU that they do not have for themselves.

Knows the environment that the OpenMP runtime reads when torch loads it; no torch.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# GNU OpenMP spins for milliseconds at every barrier. Where the other thread has lost its core to
# another process, and the other stages are such processes, each of a step's hundreds of barriers
# then costs a time slice, and a step ten times its time. This many spins, some 50 us, outlast most
# gaps within a step; then a thread sleeps and leaves its core to whoever keeps it waiting. Measured
# in docs/benchmarks.md.
SPINS = 3_000


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """To be called before torch is imported; what the user has set stays."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
