"""Whether Triton kernels run in its interpreter.

It knows no instruction of a GPU, so kernels that name one have another way there.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # decided when triton is imported
