"""QK norm, RoPE and the store into pages: cases for interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from draws import seeded
from hadamard_matrix import matrix
from kernels.triton_cases import DEVICE, TOLERANCE, randn, relative_error
from pipeinfer.attention.interface import KVPool
from pipeinfer.checkpoint.config import RopeConfig
from pipeinfer.engine.kv_store import FusedStore, TorchStore
from pipeinfer.kernels.formats import E4M3, E4M3_MAX, KVScales, dequantize_e4m3, quantize_e4m3
from pipeinfer.kernels.rotate_and_store import rotate_and_store, rotate_and_store_reference
from pipeinfer.layers.attention import CosSin, MergedQKV, Rope, rotate
from pipeinfer.layers.elementwise import rms_normalize
from pipeinfer.step import AttentionShape

PAGE_SIZE = 4


def inputs(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """(qkv, cos, sin, places, k_cache, v_cache); the caches hold values that must survive."""
    qkv = randn(0, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = randn(1, tokens, dim // 2) * 100
    pages = tokens // PAGE_SIZE + 3
    order = torch.randperm((pages - 1) * PAGE_SIZE, generator=seeded(2))
    places = (order[:tokens] + PAGE_SIZE).to(DEVICE)
    caches = randn(3, 2, pages, PAGE_SIZE, kv_heads, dim, dtype=dtype)
    return qkv, angles.cos(), angles.sin(), places, caches[0], caches[1]


def both(qkv, cos, sin, places, k_cache, v_cache, heads, **options):
    """((q, k_cache, v_cache) of the kernel, the same of the reference)."""
    mine, theirs = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    out = torch.full(
        (len(qkv), heads, k_cache.shape[3]), float("nan"), dtype=qkv.dtype, device=qkv.device
    )
    q = rotate_and_store(qkv, cos, sin, places, *mine, heads, out=out, **options)
    assert q is out
    return (q, *mine), (
        rotate_and_store_reference(qkv, cos, sin, places, *theirs, heads, **options),
        *theirs,
    )


def assert_same(got, expected, dtype):
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 2, 64), (5, 1, 128), (16, 8, 128), (3, 3, 80), (2, 1, 8), (4, 1, 256)],
)
def test_queries_and_pages_are_those_of_the_reference(heads, kv_heads, dim, norm, dtype):
    options = {}
    if norm is not None:
        weights = {"q_norm": randn(4, dim, dtype=dtype), "k_norm": randn(5, dim, dtype=dtype)}
        options = weights | {"offset": norm}
    got, expected = both(*inputs(7, heads, kv_heads, dim, dtype), heads, **options)
    assert_same(got, expected, dtype)


def test_only_the_places_of_stored_tokens_change():
    qkv, cos, sin, places, k_cache, v_cache = inputs(6, 2, 1, 64, torch.bfloat16)
    places[[1, 4]] = -1
    got, expected = both(qkv, cos, sin, places.int(), k_cache, v_cache, 2)
    assert_same(got, expected, torch.bfloat16)
    untouched = torch.ones(k_cache.shape[0] * PAGE_SIZE, dtype=torch.bool, device=DEVICE)
    untouched[places[places >= 0]] = False
    for after, before in ((got[1], k_cache), (got[2], v_cache)):
        assert torch.equal(after.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
        assert not torch.equal(after, before)


def test_values_are_stored_bit_for_bit():
    qkv, cos, sin, places, k_cache, v_cache = inputs(5, 2, 2, 64, torch.bfloat16)
    rotate_and_store(qkv, cos, sin, places, k_cache, v_cache, 2)
    assert torch.equal(v_cache.flatten(0, 1)[places].flatten(1), qkv[:, 4 * 64 :])


def test_a_table_of_angles_is_read_at_the_positions():
    qkv, cos, sin, places, k_cache, v_cache = inputs(6, 4, 2, 64, torch.float32)
    positions = torch.tensor([5, 0, 0, 3, 2, 4], device=DEVICE)
    by_table, _ = both(qkv, cos, sin, places, k_cache, v_cache, 4, positions=positions)
    by_token, _ = both(qkv, cos[positions], sin[positions], places, k_cache, v_cache, 4)
    assert all(torch.equal(a, b) for a, b in zip(by_table, by_token, strict=True))


def test_strided_rows_and_a_view_of_a_larger_pool_are_accepted():
    qkv, cos, sin, places, k_cache, v_cache = inputs(6, 4, 2, 64, torch.bfloat16)
    wide = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]]
    pool = torch.stack((k_cache, v_cache), dim=2)  # K and V of a token side by side
    expected, _ = both(qkv, cos, sin, places, k_cache, v_cache, 4)
    q = rotate_and_store(wide, cos[:, None], sin[:, None], places, pool[:, :, 0], pool[:, :, 1], 4)
    for mine, theirs in zip((q, pool[:, :, 0], pool[:, :, 1]), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_cache_without_a_uniform_token_stride_is_refused():
    qkv, cos, sin, places, k_cache, v_cache = inputs(6, 4, 2, 64, torch.bfloat16)
    swapped = k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="token stride"):
        rotate_and_store(qkv, cos, sin, places, swapped, v_cache, 4)
    with pytest.raises(ValueError, match="qkv"):
        rotate_and_store(qkv, cos, sin, places, k_cache, v_cache, 5)


def test_an_offset_is_added_to_the_weights_in_float32():
    qkv, cos, sin, places, k_cache, v_cache = inputs(6, 4, 1, 256, torch.bfloat16)
    weight = randn(4, 256, dtype=torch.bfloat16) * 1e-3  # lost if one were added to it in bfloat16
    options = {"q_norm": weight, "k_norm": weight, "offset": 1.0}
    exact = {"q_norm": 1 + weight.float(), "k_norm": 1 + weight.float()}
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)  # so that nothing else rounds
    got, _ = both(qkv, cos, sin, places, k_cache, v_cache, 4, **options)
    expected, _ = both(qkv, cos, sin, places, k_cache, v_cache, 4, **exact)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    plain, _ = both(qkv, cos, sin, places, k_cache, v_cache, 4, q_norm=weight * 0 + 1,
                    k_norm=weight * 0 + 1)  # fmt: skip
    assert not torch.equal(got[0], plain[0])


@pytest.mark.parametrize("norm", [False, True])
def test_half_precision_is_near_the_layers_that_it_replaces_and_nearer_to_exact(norm):
    heads, kv_heads, dim = 4, 2, 128
    qkv, cos, sin, places, k_cache, v_cache = inputs(9, heads, kv_heads, dim, torch.float16)
    weight = randn(6, dim, dtype=torch.float16)
    options = {"q_norm": weight, "k_norm": weight} if norm else {}
    rotated = qkv.unflatten(-1, (-1, dim))[:, : heads + kv_heads]
    exact_k, exact_v = k_cache.float(), v_cache.float()
    exact = rotate_and_store_reference(
        qkv.float(), cos, sin, places, exact_k, exact_v, heads, **options
    )
    if norm:
        rotated = rms_normalize(rotated, 1e-6).mul_(weight)
    angles = CosSin(*(torch.cat(part, -1)[:, None].half() for part in ((cos, cos), (-sin, sin))))
    layered = rotate(rotated, angles)[:, :heads]
    q = rotate_and_store(qkv, cos, sin, places, k_cache, v_cache, heads, **options)
    assert relative_error(q, layered) < 1e-3
    assert relative_error(q, exact) < relative_error(layered, exact)


def in_8_bits(*given):
    """Inputs whose caches hold e4m3."""
    *others, k_cache, v_cache = inputs(*given)
    return *others, k_cache.to(E4M3), v_cache.to(E4M3)


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 80), (4, 1, 128), (2, 1, 256), (40, 8, 8)]
)
def test_pages_of_8_bits_are_those_of_the_reference(heads, kv_heads, dim, shifted, dtype):
    options = {"q_norm": randn(4, dim, dtype=dtype), "k_norm": randn(5, dim, dtype=dtype),
               "k_scale": 0.07, "v_scale": 0.3}  # fmt: skip
    if shifted:
        options["key_center"] = randn(6, kv_heads, dim)
    got, expected = both(*in_8_bits(7, heads, kv_heads, dim, dtype), heads, **options)
    assert relative_error(got[0], expected[0]) < TOLERANCE[dtype]
    # Values are copied, so they round alike; of keys, a few of which stand between two numbers,
    # sums were made in another order.
    assert torch.equal(bits(got[2]), bits(expected[2]))
    assert (bits(got[1]) != bits(expected[1])).float().mean() < 0.01
    assert relative_error(got[1].float(), expected[1].float()) < 0.01


@pytest.mark.parametrize("dim", [64, 80, 96])
def test_queries_and_keys_of_8_bits_are_turned_alike_and_keys_shifted_before(dim):
    """As the matrix says, and so that scores are those of plain ones, less what all have alike."""
    qkv, cos, sin, places, k_cache, v_cache = in_8_bits(9, 2, 1, dim, torch.float32)
    k_plain, v_plain = k_cache.float(), v_cache.float()
    shift = 3 * randn(8, 1, dim)
    plain = rotate_and_store(qkv, cos, sin, places, k_plain, v_plain, 2)
    queries = rotate_and_store(qkv, cos, sin, places, k_cache, v_cache, 2, key_center=shift)
    turn = matrix(dim).to(DEVICE)
    assert relative_error(queries, (plain.double() @ turn).float()) < 1e-5
    exact = ((k_plain.flatten(0, 1)[places] - shift).double() @ turn).float()
    keys = bits(k_cache).flatten(0, 1)[places].view(E4M3).float()
    assert relative_error(keys, exact) < 2**-4
    scores = torch.einsum("qhd,kd->hqk", queries, exact[:, 0])
    wanted = torch.einsum("qhd,kd->hqk", plain, k_plain.flatten(0, 1)[places][:, 0])
    common = (plain * shift).sum(-1).t()[..., None]
    assert relative_error(scores + common, wanted) < 1e-5
    assert relative_error(scores, wanted) > 0.1


def test_a_shift_is_nothing_to_pages_of_16_bits():
    given = inputs(5, 4, 2, 64, torch.bfloat16)
    one, _ = both(*given, 4)
    other, _ = both(*given, 4, key_center=randn(8, 2, 64))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_every_kind_of_number_becomes_the_nearest_of_8_bits():
    """Ties, the smallest, those beyond the largest, infinities and NaN."""
    scale = 0.25
    edges = torch.arange(0, 256, dtype=torch.uint8).view(E4M3).float()
    edges = edges[edges.isfinite()].sort().values
    between = (edges[1:] + edges[:-1]) / 2
    near = torch.cat([between * (1 + 1e-6), between * (1 - 1e-6)])
    far = torch.tensor([449.0, 464, 465, 1e4, -460, -1e30, float("inf"), float("-inf")])
    zero = torch.zeros(1).neg()
    values = torch.cat([edges, between, near, far, zero, torch.tensor([float("nan")])]) * scale
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).to(DEVICE).view(-1, 64)
    qkv = torch.cat([torch.zeros(len(values), 128, device=DEVICE), values], dim=1)
    _, cos, sin, places, k_cache, v_cache = in_8_bits(len(values), 1, 1, 64, torch.float32)
    rotate_and_store(qkv, cos, sin, places, k_cache, v_cache, 1, k_scale=0.5, v_scale=scale)
    stored = v_cache.flatten(0, 1).view(torch.uint8)[places].flatten(1)
    assert torch.equal(stored, bits(quantize_e4m3(values, scale)))
    wide = dequantize_e4m3(stored.view(E4M3), scale, torch.float32)
    assert wide[values.isfinite()].abs().max() == E4M3_MAX * scale
    assert torch.equal(wide.isnan(), values.isnan())


def test_keys_beyond_the_largest_are_clamped_and_a_nan_stays_one():
    qkv, cos, sin, places, k_cache, v_cache = in_8_bits(3, 1, 1, 64, torch.float32)
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    # What stands alone in a head is spread over all of it.
    qkv[:, 64:128] = 0
    qkv[:, 64] = torch.tensor([1e4, -1e4, float("nan")], device=DEVICE)
    rotate_and_store(qkv, cos, sin, places, k_cache, v_cache, 1, k_scale=2.0)
    keys = k_cache.view(torch.uint8).flatten(0, 1)[places].view(E4M3).float()
    assert (keys[0] == E4M3_MAX).all() and (keys[1] == -E4M3_MAX).all() and keys[2].isnan().all()


def test_both_stores_of_an_engine_take_each_layers_scales_and_shift():
    device, scales = torch.device(DEVICE), [KVScales(0.5, 0.1), KVScales(0.03, 4.0)]
    shapes, shifts = [AttentionShape(4, 2, 32, 1.0)] * 2, [randn(7, 2, 32), None]
    rope = Rope(RopeConfig(theta=10_000.0), 32, torch.float32, device, 40)
    positions, places = torch.tensor([5, 0, 30]).to(device), torch.tensor([9, 4, 14]).to(device)
    heads = MergedQKV(randn(0, 3, 8 * 32), 4, 2, None, rope(positions))
    pools = [KVPool(shapes, 4, PAGE_SIZE, torch.float32, device, scales, shifts) for _ in range(2)]
    for layer in range(2):
        stores = FusedStore(pools[0]), TorchStore(pools[1])
        one, other = (store(layer, heads, places)[0] for store in stores)
        assert relative_error(one, other) < 1e-5
        for part in ("k", "v"):
            one, other = (getattr(pool, part)[layer].float() for pool in pools)
            assert one.any() and relative_error(one, other) < 0.01
    assert relative_error(pools[0].v[0].float() * 0.1, pools[0].v[1].float() * 4.0) < 0.1
