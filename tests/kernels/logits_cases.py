"""Log-probs by Triton are what they are by torch on the host: in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.triton_cases import DEVICE, randn
from pipeinfer.kernels import by_triton, host

WORDS = 2  # of a log-prob record before its alternatives


def differences(found: torch.Tensor, expected: torch.Tensor, most: int) -> float:
    """The largest of log-probs, where ranks and ids are the same."""
    found = found.cpu()
    assert found.shape == expected.shape
    assert torch.equal(found[:, 1 : WORDS + most], expected[:, 1 : WORDS + most])
    places = [0, *range(WORDS + most, WORDS + 2 * most)]
    one, other = (each[:, places].contiguous().view(torch.float32) for each in (found, expected))
    same = one == other  # also infinities
    return float(torch.where(same, 0.0, one - other).abs().max())


def in_turn(logits, ids, most, ranks):
    """By so many ranks, each with an equal run of the vocabulary, the last ones with less."""
    share = -(-logits.shape[1] // ranks)
    firsts = [min(rank * share, logits.shape[1]) for rank in range(ranks)]
    parts = [(logits[:, first : first + share], first) for first in firsts]
    own = torch.stack([by_triton.logit_keys(part, ids, first) for part, first in parts]).amax(0)
    said = [by_triton.local_topk(part, own, most, first) for part, first in parts]
    return by_triton.merge_topk(torch.stack(said), own)


@pytest.mark.parametrize("most", [0, 1, 20])
@pytest.mark.parametrize(
    ("vocab", "ranks", "dtype"),
    [(5, 1, torch.float32), (300, 1, torch.bfloat16), (500, 3, torch.float32),
     (7, 4, torch.bfloat16)],
)  # fmt: skip
def test_log_probs_are_the_hosts_whatever_the_blocks_and_ranks(
    vocab, ranks, dtype, most, monkeypatch
):
    """bfloat16 has many equal logits; a rank of four has no id at all."""
    monkeypatch.setattr(by_triton, "BLOCK", 64)
    logits = randn(vocab, 6, vocab, dtype=dtype) * 3
    logits[1, : vocab // 2] = float("-inf")
    logits[2] = 1.5
    ids = torch.tensor([0, vocab - 1, vocab // 2, 3, 1, 4], device=DEVICE)
    expected = host.logprobs(logits.cpu(), ids.cpu(), most)
    assert differences(in_turn(logits, ids, most, ranks), expected, most) < 1e-5
    assert differences(by_triton.logprobs(logits, ids, most), expected, most) < 1e-5


def test_a_row_has_the_same_log_probs_in_any_batch_and_any_stride():
    wide = randn(3, 5, 9000)
    logits, ids = wide[:, 7:8000], torch.tensor([3, 4000, 7992, 0, 4096], device=DEVICE)
    whole = by_triton.logprobs(logits, ids, 5)
    assert torch.equal(by_triton.logprobs(logits[2:3], ids[2:3], 5), whole[2:3])
    expected = host.logprobs(logits.cpu(), ids.cpu(), 5)
    assert differences(whole, expected, 5) < 1e-5
    drawn = torch.stack((torch.ones_like(ids), ids), dim=1)  # as tokens lie behind their counts
    assert torch.equal(by_triton.logprobs(logits, drawn[:, 1], 5), whole)


def test_no_rows_have_no_log_probs():
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert by_triton.logprobs(randn(1, 0, 40), none, 3).shape == (0, 8)
