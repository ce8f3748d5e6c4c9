"""The experts of a mixture as two grouped matrix products, SwiGLU and weights fused into them.

Needs triton. Knows tokens, chosen experts and stacked weights; no router and no layer.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.moe_align import Alignment, align

# [tokens] -gate and up, SwiGLU-> [pairs, intermediate] -down, times weight-> [pairs, hidden]
# -sum over a token's pairs-> [tokens, hidden]
# Products and SwiGLU are float32; the two intermediates are rounded to the tokens' dtype, and the
# sum is float32 again, in the router's order. No atomics: a token's result is always the same.


@dataclass(frozen=True)
class Tiles:
    """Block sizes: rows (pairs), columns and depth of a tile; how many rows share columns in L2."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8


def tiles(pairs: int, num_experts: int) -> Tiles:
    """By the mean number of pairs an expert gets: weights bound small steps, arithmetic large."""
    mean = pairs / num_experts
    if mean <= 8:
        return Tiles(rows=16, columns=64, depth=128, warps=4, stages=4)
    if mean <= 48:
        return Tiles(rows=32, columns=64, depth=128, warps=4, stages=3)
    if mean <= 128:
        return Tiles(rows=64, columns=64, depth=64, warps=4, stages=4)
    return Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)


@triton.jit
def _tile(row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of this program; GROUP row blocks share columns in the L2 cache."""
    program = tl.program_id(0)
    band = program // (GROUP * column_blocks)
    height = tl.minimum(row_blocks - band * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    return band * GROUP + within % height, within // height


@triton.jit
def _gate_up(
    x, weight, out, pairs, experts, used, size, x_stride, row_blocks, TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[pair] = silu(x[token] @ gate.T) * (x[token] @ up.T) for one tile of pairs and columns."""
    block, column = _tile(row_blocks, tl.cdiv(INTER, COLUMNS), GROUP)
    if block * ROWS >= tl.load(used):
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    real = (pair < size)[:, None]
    columns = column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    depth = tl.arange(0, DEPTH)
    left = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + depth[None, :]
    base = weight + tl.load(experts + block).to(tl.int64) * (2 * INTER * HIDDEN)
    right = base + columns * HIDDEN + depth[:, None]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, HIDDEN, DEPTH):
        deep = begin + depth < HIDDEN
        a = tl.load(left + begin, mask=real & deep[None, :], other=0.0)
        inside = (columns < INTER) & deep[:, None]
        b = tl.load(right + begin, mask=inside, other=0.0)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        b = tl.load(right + begin + INTER * HIDDEN, mask=inside, other=0.0)
        up = tl.dot(a, b, up, input_precision="ieee")
    value = gate * tl.sigmoid(gate) * up
    target = out + pair.to(tl.int64)[:, None] * INTER + columns
    tl.store(target, value, mask=real & (columns < INTER))


@triton.jit
def _down(
    hidden, weight, scale, out, pairs, experts, used, size, row_blocks,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[pair] = scale[pair] * (hidden[pair] @ weight.T) for one tile of pairs and columns."""
    block, column = _tile(row_blocks, tl.cdiv(HIDDEN, COLUMNS), GROUP)
    if block * ROWS >= tl.load(used):
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    real = (pair < size)[:, None]
    columns = column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    depth = tl.arange(0, DEPTH)
    left = hidden + pair.to(tl.int64)[:, None] * INTER + depth[None, :]
    base = weight + tl.load(experts + block).to(tl.int64) * (HIDDEN * INTER)
    right = base + columns * INTER + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, INTER, DEPTH):
        deep = begin + depth < INTER
        a = tl.load(left + begin, mask=real & deep[None, :], other=0.0)
        b = tl.load(right + begin, mask=(columns < HIDDEN) & deep[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    total *= tl.load(scale + pair, mask=pair < size, other=0.0).to(tl.float32)[:, None]
    target = out + pair.to(tl.int64)[:, None] * HIDDEN + columns
    tl.store(target, total, mask=real & (columns < HIDDEN))


@triton.jit
def _combine(
    by_pair, chosen, out, first, held, TOP_K: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Sums the rows of one token's pairs; SOME: those of experts first .. first + held - 1 only."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        width = HIDDEN
        if SOME:  # nobody has written the others
            expert = tl.load(chosen + pair)
            width = tl.where((expert >= first) & (expert < first + held), HIDDEN, 0)
        at = by_pair + pair * HIDDEN + lane
        total += tl.load(at, mask=lane < width, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + lane, total, mask=lane < HIDDEN)


def experts_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shape: Tiles | None = None,
    first: int = 0,
    of: int = 0,
) -> torch.Tensor:
    """[T, hidden]: the weighted sum of each token's experts.

    x [T, hidden], rows may be strided; gate_up [experts, 2 n, hidden], gate first; down [experts,
    hidden, n]; both contiguous. weights, any float dtype, and chosen int, [T, top_k]. The weights
    given are those of experts `first` and following, out of `of` (0: these are all); the choices
    of others count nothing.
    """
    (tokens, hidden), (num_experts, _, inter) = x.shape, down.shape
    top_k, size = chosen.shape[1], chosen.numel()
    if tokens == 0:
        return torch.empty_like(x)
    tile = shape or tiles(size, of or num_experts)
    chosen = chosen.contiguous()
    plan = align(chosen, num_experts, tile.rows, first)
    middle = x.new_empty(size, inter)
    by_pair = x.new_empty(size, hidden)
    shared, options = _launch(plan, tile)
    blocks = plan.experts.shape[0]
    _gate_up[(blocks * triton.cdiv(inter, tile.columns),)](
        x, gate_up, middle, *shared, size, x.stride(0), blocks, TOP_K=top_k, HIDDEN=hidden,
        INTER=inter, **options,
    )  # fmt: skip
    _down[(blocks * triton.cdiv(hidden, tile.columns),)](
        middle, down, weights.contiguous(), by_pair, *shared, size, blocks, HIDDEN=hidden,
        INTER=inter, **options,
    )  # fmt: skip
    return _sums(by_pair, chosen, first if num_experts < of else None, num_experts)


def _sums(
    by_pair: torch.Tensor, chosen: torch.Tensor, first: int | None, held: int
) -> torch.Tensor:
    """[T, hidden] of `by_pair` [T * top_k, hidden]; with `first`, of the held experts only."""
    (tokens, top_k), hidden = chosen.shape, by_pair.shape[1]
    out = by_pair.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        by_pair, chosen, out, first or 0, held, TOP_K=top_k, HIDDEN=hidden, BLOCK=block,
        SOME=first is not None, num_warps=4,
    )  # fmt: skip
    return out


def _launch(plan: Alignment, tile: Tiles) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """The arguments that both products share, by position and by name."""
    options = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    options |= {"GROUP": tile.group, "num_warps": tile.warps, "num_stages": tile.stages}
    return (plan.pairs, plan.experts, plan.used), options


def experts_mlp_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """The same in float32, expert by expert, rounded at the end."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        token, choice = torch.nonzero(chosen == expert, as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, dim=-1)
        one = (torch.nn.functional.silu(gate) * up) @ down[expert].float().T
        out.index_add_(0, token, one * weights[token, choice, None].float())
    return out.to(x.dtype)
