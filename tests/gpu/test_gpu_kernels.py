"""The cases of the Triton kernels on a GPU: the same as in the interpreter, compiled."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kernels.all_reduce_norm_cases",
    "kernels.store_cases",
    "kernels.decode_attention_cases",
    "kernels.expand_cases",
    "kernels.gumbel_cases",
    "kernels.moe_cases",
    "kernels.offers_cases",
    "kernels.norm_cases",
    "kernels.skinny_cases",
    "kernels.triton_cases",
)

from kernels.all_reduce_norm_cases import *  # noqa: E402, F403
from kernels.decode_attention_cases import *  # noqa: E402, F403
from kernels.expand_cases import *  # noqa: E402, F403
from kernels.gumbel_cases import *  # noqa: E402, F403
from kernels.moe_cases import *  # noqa: E402, F403
from kernels.norm_cases import *  # noqa: E402, F403
from kernels.offers_cases import *  # noqa: E402, F403
from kernels.skinny_cases import *  # noqa: E402, F403
from kernels.store_cases import *  # noqa: E402, F403

pytestmark = pytest.mark.gpu
