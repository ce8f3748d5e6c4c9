"""The cases of the Triton kernels on a GPU: the same as in the interpreter, compiled."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kernels.elementwise_cases",
    "kernels.exact_cases",
    "kernels.store_cases",
    "kernels.decode_attention_cases",
    "kernels.draft_cases",
    "kernels.prepare_inputs_cases",
    "kernels.sampling_cases",
    "kernels.moe_cases",
    "kernels.moe_fp8_cases",
    "kernels.logits_cases",
    "kernels.gemm_cases",
    "kernels.triton_cases",
)

import torch  # noqa: E402

from kernels import decode_attention_cases as attention  # noqa: E402
from kernels.decode_attention_cases import *  # noqa: E402, F403
from kernels.draft_cases import *  # noqa: E402, F403
from kernels.elementwise_cases import *  # noqa: E402, F403
from kernels.exact_cases import *  # noqa: E402, F403
from kernels.gemm_cases import *  # noqa: E402, F403
from kernels.logits_cases import *  # noqa: E402, F403
from kernels.moe_cases import *  # noqa: E402, F403
from kernels.moe_fp8_cases import *  # noqa: E402, F403
from kernels.prepare_inputs_cases import *  # noqa: E402, F403
from kernels.sampling_cases import *  # noqa: E402, F403
from kernels.store_cases import *  # noqa: E402, F403
from kernels.triton_cases import TOLERANCE, relative_error  # noqa: E402
from pipeinfer.attention.triton_backend import tile_config  # noqa: E402
from pipeinfer.kernels.decode_attention import empty_splits, max_total_splits  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 40, 100, 300, 600])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("narrow", [False, True])
def test_every_cut_of_decode_rows_finds_shared_memory_and_is_right(narrow, dim, rows):
    lengths = [(37 * row) % 900 + 1 for row in range(rows)]
    case = attention.Case(lengths, torch.bfloat16, heads=4, kv_heads=1, dim=dim, page=64)
    if narrow:
        case.in_8_bits(attention.UNIT_KV_SCALES)
    how = tile_config(rows, 1, dim, narrow)
    case.pieces = empty_splits(max_total_splits(rows, how), case.q.device)
    case.scratch = attention.DecodeWorkspace(rows, len(case.pieces), (4, 1, dim), case.q.device)
    for window in (None, 512):
        expected = case.expected(window)
        assert relative_error(case.run(how, window), expected) < 3 * TOLERANCE[torch.bfloat16]


def test_kernels_that_start_early_read_nothing_too_early():
    lengths = [300, 20, 1000, 64] * 8
    case = attention.Case(lengths, torch.bfloat16, heads=16, kv_heads=8, dim=128)
    expected, cut = case.run(attention.SPLITS), attention.SPLITS
    out = torch.empty_like(case.q)
    for _ in range(50):
        query = torch.zeros_like(case.q)
        query.copy_(case.q)  # the kernel before
        attention.decode_attention(
            query, case.k, case.v, case.rows(), case.scale, out, case.scratch, cut, use_pdl=True
        )
        assert torch.equal(out, expected)


@pytest.mark.parametrize("groups", [[(range(32), 640)], [(range(0, 32, 2), 320)], []])
def test_two_launches_that_start_early_wait_for_what_they_need(groups):
    """And what comes behind them waits for both: here they come again, with what they gave."""
    lengths, kinds = [700, 720, 1000, 664] * 8, {"heads": 16, "kv_heads": 8, "dim": 128, "page": 64}
    groups = [(list(rows), tokens) for rows, tokens in groups]
    case = attention.SharedCase(lengths, groups, attention.APART, dtype=torch.bfloat16, **kinds)
    expected = case.run_shared()
    again = case.attend(torch.empty_like(expected), q=expected)
    out, last = torch.empty_like(case.q), torch.empty_like(case.q)
    for _ in range(50):
        out.zero_()
        query = torch.zeros_like(case.q)
        query.copy_(case.q)  # the kernel before
        case.attend(out, q=query, use_pdl=True)
        case.attend(last, q=out, use_pdl=True)
        assert torch.equal(out, expected)
        assert torch.equal(last, again)
