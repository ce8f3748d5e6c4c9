"""The best of both on Hopper: FlashAttention-3 for prefill rows, FlashInfer for decode rows.

Both read the same pages within one forward pass; everything but attention sees all tokens at once.
"""

from __future__ import annotations

from pipeinfer.attention.fa3_backend import Fa3Part
from pipeinfer.attention.flashinfer_backend import decode_part
from pipeinfer.attention.paged import PagedKind

HYBRID = PagedKind(
    decode_part, Fa3Part, page_sizes=(1, 16, 32, 64, 128, 256), preferred_page_size=64,
    captures_prefill=True,
)  # fmt: skip
