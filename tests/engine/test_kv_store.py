"""What a model calls for attention: what is stored where, and what the backend is handed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadamard_matrix import matrix
from pipeinfer.attention.interface import KVPool
from pipeinfer.checkpoint.config import RopeConfig
from pipeinfer.engine.kv_store import StepAttention, TorchStore, store_valid
from pipeinfer.kernels.formats import E4M3, KVScales, hadamard_transform
from pipeinfer.layers.attention import MergedQKV, Rope, RotatedQKV
from pipeinfer.layers.elementwise import GEMMA_RMS_NORM, RMS_NORM, HeadNorm
from pipeinfer.layers.placement import Placement, Shard
from pipeinfer.step import AttentionShape

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
CPU = torch.device("cpu")
PLACES = torch.tensor([9, 4, 22, 23, 7])
POSITIONS = torch.tensor([5, 0, 30, 31, 3])


def pool() -> KVPool:
    made = KVPool([AttentionShape(HEADS, KV_HEADS, DIM, 0.25)] * 2, 6, PAGE, torch.float32)
    for part in (*made.k, *made.v):
        part.fill_(7)
    return made


def inputs(kind):
    torch.manual_seed(0)
    norm = None
    if kind is not None:
        norm = HeadNorm(
            HEADS, KV_HEADS, DIM, 1e-6, Placement(Shard(), torch.float32, CPU), kind
        )  # fmt: skip
        norm.weight[:HEADS], norm.weight[HEADS:] = torch.randn(DIM), torch.randn(DIM)
    qkv = torch.randn(len(PLACES), (HEADS + 2 * KV_HEADS) * DIM)
    rope = Rope(RopeConfig(theta=10_000.0), DIM, torch.float32, CPU, 40)
    return MergedQKV(qkv, HEADS, KV_HEADS, norm, rope(POSITIONS))


@pytest.mark.parametrize("kind", [None, RMS_NORM, GEMMA_RMS_NORM])
@torch.inference_mode()
def test_torch_operations_store_what_the_fused_kernel_is_to_store(kind):
    reference = pytest.importorskip("pipeinfer.kernels.rotate_and_store").rotate_and_store_reference
    heads = inputs(kind)
    mine, theirs = pool(), pool()
    queries, *_ = TorchStore(mine)(1, heads, PLACES)
    norm, rotation, options = heads.norm, heads.rotation, {}
    if norm is not None:
        options = {"q_norm": norm.query_weight, "k_norm": norm.key_weight, "eps": norm.eps,
                   "offset": norm.weight_offset}  # fmt: skip
    expected = reference(
        heads.product, *rotation.rope.cos_sin_table, PLACES, theirs.k[1], theirs.v[1], HEADS,
        positions=POSITIONS, **options,
    )  # fmt: skip
    torch.testing.assert_close(queries, expected, rtol=1e-5, atol=1e-5)
    for part, other in zip((*mine.k, *mine.v), (*theirs.k, *theirs.v), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_keys_and_values_are_stored_at_their_places_and_nowhere_else():
    heads = inputs(RMS_NORM)
    made = pool()
    _, k, v = TorchStore(made)(1, heads, PLACES)
    others = np.setdiff1d(np.arange(6 * PAGE), PLACES)
    for part, new in ((made.k, k), (made.v, v)):
        assert torch.equal(part[1].flatten(0, 1)[PLACES], new)
        assert (part[1].flatten(0, 1)[others] == 7).all()
        assert (part[0] == 7).all(), "another layer's"


@torch.inference_mode()
def test_ready_heads_are_stored_but_for_tokens_without_a_place_which_leave_zeros_on_the_dummy():
    q, k, v = inputs(RMS_NORM).split_and_rotate()
    k[1], v[1] = float("nan"), float("inf")  # of a token that is padding
    made, places = pool(), PLACES.clone().int()
    places[1] = -1
    queries, *others = store_valid(made, 1, RotatedQKV(q, k, v), places)
    assert queries is q and others == [None, None]
    kept = torch.tensor([0, 2, 3, 4])
    untouched = np.setdiff1d(np.arange(1, 6 * PAGE), PLACES[kept])
    for part, new in ((made.k, k), (made.v, v)):
        flat = part[1].flatten(0, 1)
        assert torch.equal(flat[PLACES[kept]], new[kept])
        assert (flat[0] == 0).all()
        assert (flat[untouched] == 7).all()
        assert (part[0] == 7).all(), "another layer's"


@torch.inference_mode()
def test_in_8_bits_what_is_handed_on_is_what_is_read_again():
    """Else a prompt in one chunk would see other keys than in two."""
    shapes, scales = [AttentionShape(HEADS, KV_HEADS, DIM, 0.25)] * 2, KVScales(0.125, 0.01)
    centers = [None, torch.randn(KV_HEADS, DIM)]
    made = KVPool(shapes, 6, PAGE, torch.float32, scales=[KVScales(), scales], key_centers=centers)
    heads = inputs(RMS_NORM)
    heads.product[1, -1], heads.product[2, -1] = 1e9, float("nan")
    queries, k, v = TorchStore(made)(1, heads, PLACES)
    exact_q, exact_k, exact_v = heads.split_and_rotate()
    torch.testing.assert_close(queries.double(), exact_q.double() @ matrix(DIM))
    exact_k = hadamard_transform(exact_k - centers[1])
    for part, new, exact, scale in (
        (made.k[1], k, exact_k, scales.k), (made.v[1], v, exact_v, scales.v),
    ):  # fmt: skip
        stored = (exact / scale).clamp(-448, 448).to(E4M3).float()
        read = part.view(torch.uint8).flatten(0, 1)[PLACES].view(E4M3).float()
        torch.testing.assert_close(read, stored, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(new, stored * scale, rtol=0, atol=0, equal_nan=True)
    assert v[1, -1, -1] == pytest.approx(448 * scales.v) and v[2, -1, -1].isnan()
    assert not made.k[0].view(torch.uint8).any(), "another layer's"


@torch.inference_mode()
def test_ready_heads_of_8_bits_are_stored_alike_by_both_stores():
    """In bfloat16, of a layer with a shift and of one without."""
    shapes = [AttentionShape(HEADS, KV_HEADS, DIM, 0.25)] * 2
    centers = [None, torch.randn(KV_HEADS, DIM)]
    ready = RotatedQKV(*(part.bfloat16() for part in inputs(RMS_NORM).split_and_rotate()))
    for layer in range(2):
        one, two = (
            KVPool(shapes, 6, PAGE, torch.bfloat16, scales=[KVScales()] * 2, key_centers=centers)
            for _ in range(2)
        )
        q, k, v = TorchStore(one)(layer, ready, PLACES)
        queries, *_ = store_valid(two, layer, ready, PLACES)
        assert torch.equal(q, queries) and {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        for part, other in ((one.k, two.k), (one.v, two.v)):
            bits, others = (x[layer].view(torch.uint8) for x in (part, other))
            assert bits.any() and torch.equal(bits, others)


class Backend:
    """Says what it was handed, and what its pool held then."""

    def __init__(self, pool) -> None:
        self._pool = pool

    def attend(self, layer, q, k, v, plan):
        self.handed = layer, q, k, v, plan
        self.held = self._pool.k[layer].flatten(0, 1)[PLACES]
        return q


@torch.inference_mode()
def test_a_backend_attends_after_the_steps_own_keys_are_stored():
    heads = inputs(RMS_NORM)
    made = pool()
    backend, plan = Backend(made), object()
    attend = StepAttention(backend, plan, TorchStore(made), PLACES)
    out = attend(1, heads)
    layer, *given, seen = backend.handed
    expected = heads.split_and_rotate()
    assert (layer, seen) == (1, plan) and out is given[0]
    assert all(torch.equal(mine, other) for mine, other in zip(given, expected, strict=True))
    assert torch.equal(backend.held, given[1])
