"""The best of two on Hopper: FlashAttention-3 for prefill rows, a kernel of our own for decodes.

Both read the same pages within one forward pass; everything but attention sees all tokens at once.
"""

from __future__ import annotations

from pipeinfer.attention.fa3_backend import Fa3Kernel
from pipeinfer.attention.interface import Traits
from pipeinfer.attention.paged import PAGE_SIZES, PREFERRED, PagedKind
from pipeinfer.attention.triton_decode import TritonDecodeKernel

# All head sizes of this backend (registry.py) are powers of two.
HYBRID = PagedKind(
    TritonDecodeKernel,
    Fa3Kernel,
    Traits(
        PAGE_SIZES,
        PREFERRED,
        captures_decode=True,
        captures_prefill=True,
        block_table="prefills",
        shares=True,
    ),
    at_once=True,
)
