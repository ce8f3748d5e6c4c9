"""The experts of a token by a softmax over a router's scores, in one launch.

Needs triton. Knows scores, no router and no expert. A token's choice depends on its own scores
alone. Source: https://arxiv.org/abs/2101.03961.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.early import pdl_options

TOKENS_PER_PROGRAM = 4  # tokens of a program, each by a warp of its own
LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _ranked(score, expert):
    """int64 that are ordered as float32 scores are, then by the lower expert."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score != score, 0x7FC00000, bits)  # before all numbers, whatever its sign
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - expert)


@triton.jit(do_not_specialize=["rows", "partial_stride"])
def _choose(
    scores, weights, chosen, rows, stride, partial_stride, PARTIALS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i has the tokens from i * ROWS on. PARTIALS: to be summed, 0 if that is done."""
    if EARLY:
        gdc_wait()  # for the scores
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    expert, choice = tl.arange(0, BLOCK)[None, :], tl.arange(0, CHOICES)[None, :]
    here, real = expert < EXPERTS, row < rows
    at = scores + row.to(tl.int64) * stride + expert
    score = tl.load(at, mask=here & real, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        score += tl.load(at + partial * partial_stride, mask=here & real, other=0.0)
    if PARTIALS > 0:
        score = score.to(weights.dtype.element_ty).to(tl.float32)  # as a product would be rounded
    ranked = tl.where(here, _ranked(score, expert), LEAST)
    best = tl.zeros((ROWS, CHOICES), tl.int64)
    for index in tl.static_range(TOP_K):
        first = tl.max(ranked, axis=1)[:, None]
        best = tl.where(choice == index, first, best)
        ranked = tl.where(ranked == first, LEAST, ranked)
    most = tl.max(tl.where(here, score, float("-inf")), axis=1)[:, None]
    bits = (best >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    part = tl.where(choice < TOP_K, tl.exp(value - most), 0.0)
    if NORMALIZE:
        whole = tl.sum(part, axis=1)[:, None]
    else:
        whole = tl.sum(tl.where(here, tl.exp(score - most), 0.0), axis=1)[:, None]
    at = row.to(tl.int64) * TOP_K + choice
    kept = real & (choice < TOP_K)
    tl.store(weights + at, tl.math.div_rn(part, whole), mask=kept)
    tl.store(chosen + at, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), mask=kept)


def topk_softmax(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights of `dtype`, experts int32), both [T, top_k], the best first.

    scores [T, experts], any float dtype, rows may be strided; or float32 [P, T, experts], whose sum
    over P they are, rounded to `dtype`. Softmax over all experts in float32; of equal scores the
    lower expert's comes first. normalize: the weights add up to one, in float32. Scores that are no
    numbers give weights that are none, of experts that there are.
    """
    rows, experts = router_logits.shape[-2:]
    weights = torch.empty(rows, top_k, dtype=dtype, device=router_logits.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=router_logits.device)
    if rows:
        _choose[(triton.cdiv(rows, TOKENS_PER_PROGRAM),)](
            router_logits, weights, chosen, rows, router_logits.stride(-2), router_logits.stride(0),
            PARTIALS=router_logits.shape[0] if router_logits.dim() == 3 else 0, EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts), TOP_K=top_k,
            CHOICES=triton.next_power_of_2(top_k), NORMALIZE=renormalize, ROWS=TOKENS_PER_PROGRAM, num_warps=TOKENS_PER_PROGRAM,
            **pdl_options(router_logits.device),
        )  # fmt: skip
    return weights, chosen


def topk_softmax_reference(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    wide = (
        router_logits.float()
        if router_logits.dim() == 2
        else router_logits.sum(0).to(dtype).float()
    )
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), chosen.int()
