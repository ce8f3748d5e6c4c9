"""Kernels with an offset compile for a GPU, which takes none: the interpreter accepts more.

Large heads are read with no more shared memory than those for which the cuts were measured.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeinfer.attention.hybrid import tile_config
from pipeinfer.engine.step_buffers import SEQUENCES
from pipeinfer.kernels import (
    decode_attention,
    edits,
    fp8_blocks,
    geglu,
    int4,
    moe,
    moe_align,
    moe_e4m3,
    norm,
    rounding,
    scores,
    skinny,
    softmax_choice,
    store,
)
from pipeinfer.kernels.moe_tiles import EIGHT_BITS, FOUR_BITS, PLAIN, ROUNDED, MoeTiles
from pipeinfer.params import LONGEST_BAD

HOPPER = GPUTarget("cuda", 90, 32)
HALF = "*bf16"
EIGHTH = "*fp8e4nv"
CONVERTED = "cvt.rn.satfinite.e4m3x2"  # the GPU's own conversion


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """As a launch would compile it, with pointers and strides that are multiples of 16."""
    names = kernel.arg_names
    assert set(names) == types.keys() | constants.keys()
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if types.get(name, "").startswith("*") or name.endswith("stride")
        },
    )
    return triton.compile(source, target=HOPPER, options=options)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(offset):
    types = dict.fromkeys(("x", "residual", "weight", "out"), HALF)
    types |= {"eps": "fp32", "x_stride": "i32", "partial_stride": "i32"}
    constants = {"SIZE": 640, "BLOCK": 1024, "PARTIALS": 1, "ADD": True, "EARLY": True}
    constants |= {"OFFSET": offset, "MOST": 448.0, "LEAST_SCALE": 1e-12}
    alone = {"plain": None, "KEEPS": False}
    usual = constants | alone | {"PART": 0, "out_scale": None}
    assert compiled(norm._norm, types, usual, num_warps=8).asm["ptx"]
    types |= {"out": EIGHTH, "out_scale": "*fp32"}
    for part in (640, 128):
        made = compiled(norm._norm, types, constants | alone | {"PART": part}, num_warps=8)
        assert CONVERTED in made.asm["ptx"]
    kept = constants | {"KEEPS": True, "PART": 128}
    made = compiled(norm._norm, types | {"plain": HALF}, kept, num_warps=8)
    assert CONVERTED in made.asm["ptx"]


@pytest.mark.parametrize("values", [False, True])
def test_edits(values):
    types = dict.fromkeys(("slots", "positions", "last_token"), "*i64")
    types |= dict.fromkeys(("counts", "words", "bans"), "*i32")
    types |= dict.fromkeys(("slot_count", "most", "first_id", "width", "ban_words"), "i32")
    types |= {"logits": "*fp32" if values else HALF, "stride": "i32"}
    constants = {
        "VALUES": values, "BLOCK": edits.BLOCK, "LISTED": edits.MOST_ALLOWED,
        "FILLED": edits.FILLED, "RECENT": LONGEST_BAD, "SEQUENCES": SEQUENCES,
    }  # fmt: skip
    assert compiled(edits._edit, types, constants, num_warps=1).asm["ptx"]


@pytest.mark.parametrize("pages", [HALF, EIGHTH])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_store_of_large_heads(offset, pages):
    halves = ("qkv", "queries", "k_cache", "v_cache", "q_norm", "k_norm")
    strides = ("qkv_stride", "angle_stride", "k_stride", "v_stride")
    types = dict.fromkeys(halves, HALF) | dict.fromkeys(strides, "i32")
    types |= {"cos": "*fp32", "sin": "*fp32", "positions": "*i32", "places": "*i32", "eps": "fp32"}
    types |= {"k_cache": pages, "v_cache": pages, "k_scale": "fp32", "v_scale": "fp32"}
    narrow = pages == EIGHTH
    types |= {"shift": "*fp32"} if narrow else {}
    constants = {
        "HEADS": 4, "KV_HEADS": 1, "DIM": 256, "GROUP": 4, "BLOCK": 128, "NORM": True,
        "OFFSET": offset, "TABLE": True, "NARROW": narrow, "EARLY": True, "SHIFT": narrow,
        "RUN": 128 if narrow else 0,
    }  # fmt: skip
    constants |= {} if narrow else {"shift": None}
    ptx = compiled(store._store, types, constants, num_warps=2).asm["ptx"]
    assert ("e4m3x2.f32" in ptx) == (pages == EIGHTH), "the GPU's own conversion, or none"


def test_the_gate():
    types = {"merged": HALF, "out": HALF, "stride": "i32"}
    constants = {"SIZE": 2048, "BLOCK": 1024, "SLOPE": geglu.SLOPE}
    assert compiled(geglu._geglu, types, constants, num_warps=4).asm["ptx"]


def test_scores():
    whole = dict.fromkeys(("own", "parts", "records", "ids", "keys"), "*i64") | {"logits": HALF}
    whole |= dict.fromkeys(("stride", "width", "first_id", "count", "most"), "i32")
    whole |= dict.fromkeys(("of_row", "of_part"), "i32")
    whole["found"] = "*i32"
    constants = {"BLOCK": scores.BLOCK, "MOST": scores.MOST, "PARTS": 64, "WHOLE": True}
    for kernel in (scores._own, scores._scan, scores._fold, scores._tell):
        names = kernel.arg_names
        types = {name: whole[name] for name in names if name in whole}
        given = {name: constants[name] for name in names if name in constants}
        assert compiled(kernel, types, given).asm["ptx"]


def decode(
    rows: int,
    dim: int,
    pages: str = HALF,
    shared: bool = False,
    group: int = 4,
    which: int = 0,
    kv_heads: int = 1,
) -> Any:
    """The kernel of so many decodes; shared: where they have beginnings in common, the launch for
    those (1), for the rest (2) or for both (0)."""
    types = dict.fromkeys(("q", "out", "sinks"), HALF)
    types |= dict.fromkeys(("k", "v"), "*i16" if pages == EIGHTH else pages) | {"v_scale": "fp32"}
    types |= dict.fromkeys(("arrived", "lengths", "indptr", "indices", "pieces"), "*i32")
    types |= {"scratch": "*fp32", "scales": "*fp32", "scale": "fp32", "window": "i32"}
    types |= dict.fromkeys(("q_stride", "page_stride", "token_stride"), "i32")
    types |= dict.fromkeys(("shared", "shared_scales"), "*fp32")
    types |= dict.fromkeys(("members", "merges"), "*i32")
    how = tile_config(rows, kv_heads, dim, pages == EIGHTH)
    tile, reads = how.tile if shared else 0, how.of_runs if which == 1 else how.reads
    assert reads is not None
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "PAGE": 64, "BLOCK": reads.block,
        "SPLITS": how.splits, "TILE": 16, "WINDOWED": not shared, "SINKS": True, "EARLY": True,
        "NARROW": pages == EIGHTH, "SHARED": tile, "PIECES": which,
    }  # fmt: skip
    return compiled(
        decode_attention._attend,
        types,
        constants,
        num_warps=reads.warps,
        num_stages=reads.stages,
    )


@pytest.mark.parametrize("rows", [1, 50, 300, 1000])
def test_decodes_with_large_heads_find_shared_memory(rows):
    large, usual = (decode(rows, dim).metadata.shared for dim in (256, 128))
    assert large < 1.25 * usual < 100_000


@pytest.mark.parametrize("rows", [1, 50, 300])
def test_decodes_over_pages_of_8_bits_convert_them_as_the_gpu_does_and_read_no_single_bytes(rows):
    narrow, usual = decode(rows, 128, EIGHTH), decode(rows, 128)
    assert "f16x2.e4m3x2" in narrow.asm["ptx"] and "e4m3" not in usual.asm["ptx"]
    assert "ldmatrix" in narrow.asm["ptx"] and "ld.shared.b8" not in narrow.asm["ptx"]
    assert narrow.metadata.shared < 1.1 * usual.metadata.shared


@pytest.mark.parametrize(("pages", "group"), [(HALF, 2), (HALF, 5), (EIGHTH, 2)])
def test_decodes_with_a_common_beginning_leave_room_for_others_beside_them(pages, group):
    """Four programs on a multiprocessor, as without."""
    how = tile_config(300, 1, 128, pages == EIGHTH)
    assert how.tile and how.of_runs is None
    assert decode(300, 128, pages, shared=True, group=group).metadata.shared < 227 * 1024 // 4


@pytest.mark.parametrize(("kv_heads", "programs"), [(8, 5), (2, 3)])
def test_a_launch_for_common_beginnings_multiplies_by_warp_groups_two_on_a_multiprocessor(
    kv_heads, programs
):
    runs, rest = (
        decode(1000, 128, shared=True, group=5, which=one, kv_heads=kv_heads) for one in (1, 2)
    )
    assert "wgmma" in runs.asm["ptx"] and "wgmma" not in rest.asm["ptx"]
    assert runs.metadata.shared < 227 * 1024 // 2 - 1024
    assert rest.metadata.shared < 227 * 1024 // programs


@pytest.mark.parametrize("scales", [skinny.BY_ROW.value, skinny.BY_BLOCK.value])
def test_few_rows_with_weights_in_8_bits(scales):
    types = {"x": EIGHTH, "x_scale": "*fp32", "weight": EIGHTH, "scale": "*fp32", "bias": HALF}
    types |= {"out": HALF, "rows": "i32", "x_stride": "i32"}
    constants = {
        "WIDTH": 1024, "DEPTH": 1024, "ROWS": 16, "COLUMNS": 64, "STEP": 128, "SPLITS": 1,
        "GATED": False, "BIASED": False, "SCALES": scales, "AHEAD": 1, "EARLY": True,
    }  # fmt: skip
    made = compiled(skinny._product, types, constants, num_warps=4, num_stages=6)
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in made.asm["ptx"]


@pytest.mark.parametrize("part", [17408, 128])
def test_rounding_to_8_bits(part):
    types = {"x": HALF, "out": EIGHTH, "scale": "*fp32", "x_stride": "i32"}
    constants = {"SIZE": 17408, "PART": part, "BLOCK": 16384, "MOST": 448.0, "LEAST_SCALE": 1e-12}
    constants |= {"EARLY": True, "REST": 1024}
    for gated in (False, True):
        made = compiled(rounding._round, types, constants | {"GATED": gated}, num_warps=32)
        assert CONVERTED in made.asm["ptx"]


def test_many_rows_with_weights_in_blocks_of_8_bits():
    types = {"x": EIGHTH, "x_scale": "*fp32", "weight": EIGHTH, "scale": "*fp32", "bias": HALF}
    types |= {"out": HALF, "rows": "i32", "row_blocks": "i32"}
    constants = {"WIDTH": 5120, "DEPTH": 5120, "ROWS": 128, "SIDE": 128, "GROUP": 8, "BIASED": True}
    made = compiled(fp8_blocks._product, types, constants, num_warps=8, num_stages=3)
    assert "wgmma" in made.asm["ptx"] and made.metadata.shared < 227 * 1024


@pytest.mark.parametrize("group", [32, 128])
def test_weights_in_4_bits(group):
    types = {"x": HALF, "numbers": "*i32", "kept": "*i32", "bias": HALF, "parts": "*fp32"}
    types |= {"out": HALF, "arrived": "*i32", "rows": "i32", "x_stride": "i32"}
    constants = {"WIDTH": 1024, "DEPTH": 1024, "GROUP": group, "HALVES": True}
    few = constants | {"ROWS": 16, "COUNT": 64, "RUNS": 2, "SPLITS": 4}
    for merged in (False, True):
        few |= {"BIASED": merged, "MERGED": merged, "EARLY": True}
        made = compiled(int4._few_rows, types, few, num_warps=4, num_stages=3)
        assert made.asm["ptx"].count("wgmma.mma") >= 2 * 8
        assert made.asm["ptx"].count("mul.rn.bf16x2") == 2 * 32  # nothing is made twice
        # Weights go from registers to tensor cores; what is stored there is the result.
        assert len(re.findall(r"st\.shared", made.asm["ptx"])) < 24
    types = {name: types[name] for name in ("numbers", "kept", "out")}
    constants = {"WIDTH": 1024, "DEPTH": 1024, "GROUP": group, "COUNT": 8, "HALVES": True}
    assert compiled(int4._decode, types, constants, num_warps=4).asm["ptx"]


@pytest.mark.parametrize("partials", [0, 8])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (5, 5)])
def test_choices_of_experts(experts, top_k, partials):
    types = {"scores": "*fp32" if partials else HALF, "weights": HALF, "chosen": "*i32"}
    types |= {"rows": "i32", "stride": "i32", "partial_stride": "i32"}
    constants = {
        "PARTIALS": partials, "EXPERTS": experts, "BLOCK": triton.next_power_of_2(experts),
        "TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "NORMALIZE": True,
        "ROWS": softmax_choice.ROWS, "EARLY": True,
    }  # fmt: skip
    made = compiled(softmax_choice._choose, types, constants, num_warps=softmax_choice.ROWS)
    assert made.asm["ptx"]


@pytest.mark.parametrize("chosen", ["*i32", "*i64"])
@pytest.mark.parametrize(
    ("experts", "chunk", "warps"), [(1, 16, 8), (128, 2048, 8), (8, 16384, 16)]
)
def test_pairs_by_expert(experts, chunk, warps, chosen):
    types = dict.fromkeys(("pairs", "experts", "used"), "*i32") | {"chosen": chosen}
    types |= dict.fromkeys(("size", "num_experts", "name_of_0"), "i32")
    constants = {"EXPERTS": experts, "BLOCK": 16, "CHUNK": chunk, "EARLY": True}
    assert compiled(moe_align._align, types, constants, num_warps=warps).asm["ptx"]


def experts(kernel: Any, rows: int, cut: MoeTiles, scales: int, bounded: bool = False) -> Any:
    """Of the shape of Qwen3-30B-A3B; bounded: of gpt-oss-20b."""
    whole = dict.fromkeys(("x", "hidden", "factors", "out", "weight", "scale", "bias"), HALF)
    if scales == moe.MXFP4.value:
        whole |= {"weight": "*u8", "scale": "*i32"}
    elif scales != moe.UNSCALED.value:
        whole |= {"weight": EIGHTH, "scale": "*fp32"}
    whole |= dict.fromkeys(("pairs", "experts", "used"), "*i32")
    whole |= dict.fromkeys(("size", "x_stride", "row_blocks", "held"), "i32")
    constants = {
        "TOP_K": 8, "HIDDEN": 2048, "INTER": 768, "ROWS": rows, "COLUMNS": cut.columns,
        "DEPTH": cut.depth, "TURNED": cut.turned, "SCALES": scales, "GROUP": 8, "EARLY": True,
        "BLOCKS": 2048 // 128, "BIASED": bounded, "SLOPE": 1.0, "LIMIT": 0.0,
    }  # fmt: skip
    if bounded:
        constants |= {"TOP_K": 4, "HIDDEN": 2880, "INTER": 2880, "SLOPE": 1.702, "LIMIT": 7.0}
        constants |= {"BLOCKS": 23}  # of 90 exponents and two that fill up, four each
    names = kernel.arg_names
    types = {name: whole[name] for name in names if name in whole}
    given = {name: constants[name] for name in names if name in constants}
    return compiled(kernel, types, given, num_warps=cut.warps, num_stages=cut.stages)


MIXTURES = [(shape, moe.UNSCALED.value) for _, shape in PLAIN] + [
    (shape, scales.value) for _, shape in EIGHT_BITS for scales in (moe.BY_ROW, moe.BY_BLOCK)
]


@pytest.mark.parametrize(("shape", "scales"), MIXTURES)
def test_experts_of_every_tile_that_may_be_chosen(shape, scales):
    for kernel, each in ((moe._gate_up, shape.gate_up), (moe._down, shape.down)):
        made = experts(kernel, shape.rows, each, scales)
        assert made.metadata.shared < 227 * 1024
        # Tensor cores at their full speed, where rows or columns are the 64 that these take.
        full = each.columns if each.turned else shape.rows
        assert ("wgmma" in made.asm["ptx"]) == (full >= 64)
        assert "cvt.bf16.f16" not in made.asm["ptx"], "16 values a cycle"


@pytest.mark.parametrize("shape", [shape for _, shape in ROUNDED])
@pytest.mark.parametrize("blocks", [0, 16])
def test_experts_and_rows_in_8_bits_of_every_tile_that_may_be_chosen(shape, blocks):
    whole = dict.fromkeys(("x", "hidden", "weight"), EIGHTH)
    whole |= dict.fromkeys(("x_scale", "hidden_scale", "scale", "out_scale"), "*fp32")
    whole |= dict.fromkeys(("pairs", "experts", "used"), "*i32")
    whole |= dict.fromkeys(("size", "row_blocks", "held"), "i32")
    for kernel, each in ((moe_e4m3._gate_up, shape.gate_up), (moe_e4m3._down, shape.down)):
        gated = kernel is moe_e4m3._gate_up
        whole |= {"out": EIGHTH if gated else HALF, "factors": HALF}
        constants = {
            "TOP_K": 8, "HIDDEN": 2048, "INTER": 768, "ROWS": shape.rows, "COLUMNS": each.columns,
            "DEPTH": each.depth, "TURNED": each.turned, "BLOCKS": blocks if gated else blocks and 6,
            "PART": moe_e4m3.MIDDLE, "GROUP": 8, "MOST": 448.0, "LEAST_SCALE": 1e-12, "EARLY": True,
        }  # fmt: skip
        names = kernel.arg_names
        types = {name: whole[name] for name in names if name in whole}
        given = {name: constants[name] for name in names if name in constants}
        made = compiled(kernel, types, given, num_warps=each.warps, num_stages=each.stages)
        assert made.metadata.shared < 227 * 1024
        assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"]
        assert ".e4m3.e4m3" in made.asm["ptx"], "nothing is widened"
        assert (CONVERTED in made.asm["ptx"]) == gated, "rounded where it is made"


BOUNDED = [(shape, moe.UNSCALED.value) for _, shape in PLAIN]
BOUNDED += [(shape, moe.MXFP4.value) for _, shape in FOUR_BITS]


@pytest.mark.parametrize(("shape", "scales"), BOUNDED)
def test_experts_with_bounds_and_biases_of_every_tile(shape, scales):
    for kernel, each in ((moe._gate_up, shape.gate_up), (moe._down, shape.down)):
        made = experts(kernel, shape.rows, each, scales, bounded=True)
        assert made.metadata.shared < 227 * 1024
        if scales == moe.MXFP4.value:
            assert "wgmma" in made.asm["ptx"]
            assert "mul.bf16" in made.asm["ptx"], "scaled in 16 bits, two by an instruction"
            held = 5 if kernel is moe._gate_up else 3  # rows, and weights and exponents of each
            assert made.asm["ttgir"].count("async_copy_global") == held * each.stages
        else:
            full = each.columns if each.turned else shape.rows
            assert ("wgmma" in made.asm["ptx"]) == (full >= 64)


def test_sums_of_a_tokens_pairs():
    types = {"by_pair": HALF, "chosen": "*i32", "out": HALF, "first": "i32", "held": "i32"}
    constants = {"TOP_K": 8, "HIDDEN": 2048, "BLOCK": 1024, "SOME": True, "EARLY": True}
    assert compiled(moe._combine, types, constants, num_warps=4).asm["ptx"]
    types = dict.fromkeys(("x", "residual", "weight", "out"), HALF)
    types |= {"eps": "fp32", "x_stride": "i32", "partial_stride": "i32"}
    constants = {"SIZE": 2048, "BLOCK": 2048, "PARTIALS": 8, "ADD": True, "OFFSET": 0.0}
    constants |= {"out_scale": None, "PART": 0, "MOST": 0.0, "LEAST_SCALE": 0.0}
    constants |= {"plain": None, "KEEPS": False}
    assert compiled(norm._norm, types, constants | {"EARLY": True}, num_warps=16).asm["ptx"]
