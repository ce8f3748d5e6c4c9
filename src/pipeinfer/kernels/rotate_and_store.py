"""Kernel from the merged QKV product to attention's inputs: QK norm, RoPE, and K and V into the KV
cache.

One launch reads the product once and writes queries and pages. Needs triton. Knows the slot mapping
(page * page_size + offset); no request and no page table.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels import formats
from pipeinfer.kernels.formats import hadamard_half_block, hadamard_transform
from pipeinfer.kernels.triton_support import as_kernel_arg, pdl_options, scale_to_e4m3

# Everything between the product and what is stored is float32 here, rounded once. Layer by layer in
# bfloat16, the norm, its weight and each half of the rotation round too: the two differ by at most
# about three units in the last place of bfloat16, and this one is the nearer to exact.

# Of one program; each of its threads reads 16 bytes of either half of a head.
ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _butterfly(values, GROUP: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Sums and differences of `values` [GROUP, BLOCK] that stand SPAN apart."""
    pairs = tl.reshape(values, [GROUP, BLOCK // (2 * SPAN), 2, SPAN])
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    both = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [GROUP, BLOCK])


@triton.jit
def _hadamard_transform(
    low, high, GROUP: tl.constexpr, BLOCK: tl.constexpr, HADAMARD_HALF: tl.constexpr,
):  # fmt: skip
    """`hadamard_transform` of formats.py, of the halves [GROUP, BLOCK] of heads.

    - HADAMARD_HALF: values of a block in each half
    """
    scale: tl.constexpr = (2 * HADAMARD_HALF) ** -0.5
    low, high = (low + high) * scale, (low - high) * scale
    for power in tl.static_range(HADAMARD_HALF.bit_length() - 1):
        low = _butterfly(low, GROUP, BLOCK, 1 << power)
        high = _butterfly(high, GROUP, BLOCK, 1 << power)
    return low, high


@triton.jit
def _store_rotated(
    source, target, first, angles, cos, sin, norm, eps, key_center, to_scale, HEADS: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, CENTER_KEYS: tl.constexpr, HADAMARD_HALF: tl.constexpr,
    E4M3_PAGES: tl.constexpr,
):  # fmt: skip
    """Norms (if NORM), rotates and stores heads first .. first + GROUP - 1 of one token.

    - CENTER_KEYS: key_center is subtracted
    - HADAMARD_HALF: see _hadamard_transform; 0: none
    - E4M3_PAGES: target is e4m3
    """
    half: tl.constexpr = DIM // 2
    heads = first + tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (heads < HEADS) & (column < half)
    at = heads * DIM + column
    left = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + at + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        weight = tl.load(norm + column, mask=column < half, other=0.0).to(tl.float32)
        if OFFSET != 0:
            weight += OFFSET
        left *= scale * weight
        weight = tl.load(norm + half + column, mask=column < half, other=0.0).to(tl.float32)
        if OFFSET != 0:
            weight += OFFSET
        right *= scale * weight
    c = tl.load(cos + angles + column, mask=column < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angles + column, mask=column < half, other=0.0).to(tl.float32)
    low, high = left * c - right * s, right * c + left * s
    if CENTER_KEYS:
        low -= tl.load(key_center + at, mask=inside, other=0.0)
        high -= tl.load(key_center + at + half, mask=inside, other=0.0)
    if HADAMARD_HALF:
        low, high = _hadamard_transform(low, high, GROUP, BLOCK, HADAMARD_HALF)
    if E4M3_PAGES:
        low = scale_to_e4m3(low, to_scale, target.dtype.element_ty)
        high = scale_to_e4m3(high, to_scale, target.dtype.element_ty)
    tl.store(target + at, low, mask=inside)
    tl.store(target + at + half, high, mask=inside)


@triton.jit
def _store_copied(
    source, target, first, to_scale, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, E4M3_PAGES: tl.constexpr,
):  # fmt: skip
    heads = first + tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, 2 * BLOCK)[None, :]
    inside = (heads < HEADS) & (column < DIM)
    at = heads * DIM + column
    values = tl.load(source + at, mask=inside, other=0.0)
    if E4M3_PAGES:
        values = scale_to_e4m3(values.to(tl.float32), to_scale, target.dtype.element_ty)
    tl.store(target + at, values, mask=inside)


@triton.jit
def _rotate_and_store_kernel(
    qkv, queries, k_cache, v_cache, cos, sin, positions, slot_mapping, q_norm, k_norm, eps,
    key_center, k_scale, v_scale, qkv_stride, angle_stride, k_stride, v_stride, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ANGLE_TABLE: tl.constexpr, CENTER_KEYS: tl.constexpr,
    HADAMARD_HALF: tl.constexpr, E4M3_PAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, group): computes groups of query heads, then of key heads, then of value
    heads.

    - ANGLE_TABLE: cos and sin are a table that `positions` index
    - E4M3_PAGES: pages hold e4m3
    - CENTER_KEYS, HADAMARD_HALF: see _store_rotated
    """
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    q_groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    kv_groups: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    source = qkv + token * qkv_stride
    angles = token * angle_stride
    if ANGLE_TABLE:
        angles = tl.load(positions + token).to(tl.int64) * angle_stride
    if group < q_groups:
        _store_rotated(
            source, queries + token * (HEADS * DIM), group * GROUP, angles, cos, sin, q_norm, eps,
            key_center, 1.0, HEADS, DIM, GROUP, BLOCK, NORM, OFFSET, False, HADAMARD_HALF, False,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            if group < q_groups + kv_groups:
                first = (group - q_groups) * GROUP
                _store_rotated(source + HEADS * DIM, k_cache + slot * k_stride, first, angles, cos,
                               sin, k_norm, eps, key_center, k_scale, KV_HEADS, DIM, GROUP, BLOCK,
                               NORM, OFFSET, CENTER_KEYS, HADAMARD_HALF, E4M3_PAGES)  # fmt: skip
            else:
                first = (group - q_groups - kv_groups) * GROUP
                _store_copied(source + (HEADS + KV_HEADS) * DIM, v_cache + slot * v_stride, first,
                        v_scale, KV_HEADS, DIM, GROUP, BLOCK, E4M3_PAGES)  # fmt: skip


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    positions: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_center: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [T, num_heads, head_dim], normed and rotated; keys and values go into their pages.

    - qkv: [T, (num_heads + 2 kv_heads) * head_dim]: queries, keys, values; rows may be strided
    - cos, sin: any float dtype: [T, head_dim / 2] of the tokens (or [T, 1, ..]); with `positions` a
      table [max_positions, head_dim / 2]
    - slot_mapping: int [T], where in the caches; negative: nowhere
    - k_cache, v_cache: [pages, page_size, kv_heads, head_dim]
    - positions: [T], rows of the table of angles
    - q_norm, k_norm: [head_dim], weights of RMSNorm of each head, to which `offset` is added
    - out: [T, num_heads, head_dim], contiguous, the result if given
    - k_scale, v_scale: of caches in e4m3. Queries and keys are Hadamard-transformed then
    - key_center: float32 [kv_heads, head_dim], subtracted from keys before, for caches in e4m3

    Raises ValueError for a layout that the kernel cannot write.
    """
    kv_heads, dim = k_cache.shape[2:]
    _check(qkv, k_cache, v_cache, num_heads)
    tokens, is_e4m3 = qkv.shape[0], k_cache.dtype == formats.E4M3
    queries = qkv.new_empty(tokens, num_heads, dim) if out is None else out
    block = triton.next_power_of_2(dim // 2)
    group = max(min(ELEMENTS_PER_PROGRAM // (2 * block), triton.next_power_of_2(num_heads)), 1)
    if tokens:
        groups = triton.cdiv(num_heads, group) + 2 * triton.cdiv(kv_heads, group)
        _rotate_and_store_kernel[(tokens, groups)](
            qkv, queries, as_kernel_arg(k_cache), as_kernel_arg(v_cache), cos, sin, positions,
            slot_mapping, q_norm, k_norm, eps, key_center, k_scale, v_scale, qkv.stride(0),
            cos.stride(0), k_cache.stride(1), v_cache.stride(1), HEADS=num_heads, KV_HEADS=kv_heads,
            DIM=dim, GROUP=group, BLOCK=block, NORM=q_norm is not None, OFFSET=offset,
            ANGLE_TABLE=positions is not None, CENTER_KEYS=is_e4m3 and key_center is not None,
            HADAMARD_HALF=hadamard_half_block(dim) if is_e4m3 else 0, E4M3_PAGES=is_e4m3,
            num_warps=max(group * block // 256, 1), **pdl_options(qkv.device),
        )  # fmt: skip
    return queries


def _check(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, num_heads: int) -> None:
    _, page_size, kv_heads, dim = k_cache.shape
    width = (num_heads + 2 * kv_heads) * dim
    if qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)} is not rows of {width} contiguous values")
    for cache in (k_cache, v_cache):
        page, token, head, one = cache.stride()
        if (page, head, one) != (page_size * token, dim, 1):
            raise ValueError(f"a cache with strides {cache.stride()} has no uniform token stride")


def rotate_and_store_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    positions: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_center: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rotate_and_store` in plain torch, float32 throughout, rounded at the end."""
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.unflatten(-1, (-1, dim))
    q, k, v = heads.float().split([num_heads, kv_heads, kv_heads], dim=1)
    cos, sin = (t.reshape(t.shape[0], 1, dim // 2).float() for t in (cos, sin))
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    if q_norm is not None and k_norm is not None:
        q = torch.nn.functional.rms_norm(q, (dim,), q_norm.float() + offset, eps)
        k = torch.nn.functional.rms_norm(k, (dim,), k_norm.float() + offset, eps)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    q, k = rotate(q), rotate(k)
    if k_cache.dtype == formats.E4M3:
        q, k = (
            hadamard_transform(q),
            hadamard_transform(k if key_center is None else k - key_center),
        )
    stored = slot_mapping >= 0
    at = slot_mapping[stored].long()
    for cache, values, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.dtype == formats.E4M3:
            quantized = formats.quantize_e4m3(values[stored], scale).view(torch.uint8)
            cache.view(torch.uint8).flatten(0, 1)[at] = quantized
        else:
            cache.flatten(0, 1)[at] = values[stored].to(cache.dtype)
    return q.to(qkv.dtype)
