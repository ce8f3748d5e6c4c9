"""How many of the kernels that oneDNN makes are kept, on a CPU.

Knows the environment that oneDNN and torch read when torch first computes with them; no torch.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# oneDNN makes a kernel for each number of rows of each shape of weights, up to half a MB, and keeps
# the last 1,024; so does torch, which holds them with all they need. With 128 an engine is as fast
# and some 200 MiB smaller; see docs/benchmarks.md.
KEPT = 128
NAMES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"  # oneDNN's, and torch's


def keep_few_kernels(environ: MutableMapping[str, str]) -> None:
    """To be called before torch is imported; what the user has set stays."""
    for name in NAMES:
        environ.setdefault(name, str(KEPT))
