"""How many of the kernels that it makes oneDNN keeps, on a CPU.

Knows the environment that oneDNN reads when torch first computes with it; no torch.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# oneDNN makes a kernel for each number of rows of each shape of weights, up to half a MB, and keeps
# the last 1,024. With 128 an engine is as fast and some 100 MiB smaller; see docs/benchmarks.md.
KEPT = 128
NAME = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def keep_few_kernels(environ: MutableMapping[str, str]) -> None:
    """To be called before torch is imported; what the user has set stays."""
    environ.setdefault(NAME, str(KEPT))
