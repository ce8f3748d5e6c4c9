"""Asks for memory that will be read soon, so that it is in the L2 cache then.

For kernels that may start early (early.py), on GPUs only: the interpreter has no such instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_LINE_ELEMENTS = tl.constexpr(64)  # elements of 2 bytes in a line of the L2 cache


@triton.jit
def prefetch_l2(at):
    """The lines of the L2 cache that the addresses `at` lie in."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
