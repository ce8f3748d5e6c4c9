"""The cases of the Triton kernels on a GPU: the same as in the interpreter, compiled."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kernels.all_reduce_norm_cases",
    "kernels.store_cases",
    "kernels.formats_cases",
    "kernels.decode_attention_cases",
    "kernels.expand_cases",
    "kernels.gumbel_cases",
    "kernels.moe_cases",
    "kernels.moe_e4m3_cases",
    "kernels.offers_cases",
    "kernels.scores_cases",
    "kernels.norm_cases",
    "kernels.skinny_cases",
    "kernels.softmax_choice_cases",
    "kernels.triton_cases",
)

import torch  # noqa: E402

from kernels import decode_attention_cases as attention  # noqa: E402
from kernels.all_reduce_norm_cases import *  # noqa: E402, F403
from kernels.decode_attention_cases import *  # noqa: E402, F403
from kernels.expand_cases import *  # noqa: E402, F403
from kernels.formats_cases import *  # noqa: E402, F403
from kernels.gumbel_cases import *  # noqa: E402, F403
from kernels.moe_cases import *  # noqa: E402, F403
from kernels.moe_e4m3_cases import *  # noqa: E402, F403
from kernels.norm_cases import *  # noqa: E402, F403
from kernels.offers_cases import *  # noqa: E402, F403
from kernels.scores_cases import *  # noqa: E402, F403
from kernels.skinny_cases import *  # noqa: E402, F403
from kernels.softmax_choice_cases import *  # noqa: E402, F403
from kernels.store_cases import *  # noqa: E402, F403
from kernels.triton_cases import TOLERANCE, relative_error  # noqa: E402
from pipeinfer.attention.hybrid import tile_config  # noqa: E402
from pipeinfer.kernels.decode_pieces import most_pieces, room_for  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 40, 100, 300, 600])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("narrow", [False, True])
def test_every_cut_of_decode_rows_finds_shared_memory_and_is_right(narrow, dim, rows):
    lengths = [(37 * row) % 900 + 1 for row in range(rows)]
    case = attention.Case(lengths, torch.bfloat16, heads=4, kv_heads=1, dim=dim, page=64)
    if narrow:
        case.in_8_bits(attention.ONES)
    how = tile_config(rows, 1, dim, narrow)
    case.pieces = room_for(most_pieces(rows, how), case.q.device)
    case.scratch = attention.Scratch(rows, len(case.pieces), (4, 1, dim), case.q.device)
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
            query, case.k, case.v, case.rows(), case.scale, out, case.scratch, cut, early=True
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
        case.attend(out, q=query, early=True)
        case.attend(last, q=out, early=True)
        assert torch.equal(out, expected)
        assert torch.equal(last, again)
