"""Kernels with an offset compile for a GPU, which takes none: the interpreter accepts more.

Large heads are read with no more shared memory than those for which the cuts were measured.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeinfer.attention.triton_backend import tile_config
from pipeinfer.engine.step_buffers import SEQUENCES
from pipeinfer.kernels import (
    by_triton,
    decode_attention,
    elementwise,
    gemm,
    moe,
    moe_fp8,
    rotate_and_store,
)  # fmt: skip
from pipeinfer.kernels.tile_configs import (
    MOE_CONFIGS_MXFP4,
    MOE_CONFIGS_W8A8,
    MOE_CONFIGS_W8A16,
    MOE_CONFIGS_W16,
    MoeConfig,
    MoeGemmConfig,
)
from pipeinfer.params import MAX_BAD_WORD_IDS

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


def test_norms():
    types = dict.fromkeys(("x", "residual", "weight", "out"), HALF)
    types |= {"eps": "fp32", "x_stride": "i32", "partial_stride": "i32"}
    constants = {"SIZE": 640, "BLOCK": 1024, "PARTIALS": 1, "ADD": True, "USE_PDL": True}
    constants |= {"OFFSET": 0.0, "E4M3_MAX": 448.0, "MIN_SCALE": 1e-12}
    alone = {"unquantized_out": None, "STORE_UNQUANTIZED": False}
    usual = constants | alone | {"OFFSET": 1.0, "GROUP_SIZE": 0, "out_scale": None}
    assert compiled(elementwise._rms_norm_kernel, types, usual, num_warps=8).asm["ptx"]
    types |= {"out": EIGHTH, "out_scale": "*fp32"}
    kept = {"unquantized_out": HALF}, {"STORE_UNQUANTIZED": True, "GROUP_SIZE": 128}
    for more, quantized in (({}, alone | {"GROUP_SIZE": 640, "OFFSET": 1.0}), kept):
        made = compiled(
            elementwise._rms_norm_kernel, types | more, constants | quantized, num_warps=8
        )
        assert CONVERTED in made.asm["ptx"]


@pytest.mark.parametrize("values", [False, True])
def test_edits(values):
    types = dict.fromkeys(("slots", "positions", "last_token"), "*i64")
    types |= dict.fromkeys(("counts", "words", "bad_words"), "*i32")
    types |= dict.fromkeys(
        ("num_slots", "max_entries", "first_id", "width", "bad_words_stride"), "i32"
    )
    types |= {"logits": "*fp32" if values else HALF, "stride": "i32"}
    constants = {
        "ADD_BIAS": values, "BLOCK": by_triton.EDITS_BLOCK,
        "ALLOWED_BLOCK": by_triton.MAX_ALLOWED_IDS,
        "FILL_BLOCK": by_triton.FILL_BLOCK, "HISTORY": MAX_BAD_WORD_IDS,
        "SEQUENCES": SEQUENCES,
    }  # fmt: skip
    assert compiled(by_triton._logit_edits_kernel, types, constants, num_warps=1).asm["ptx"]


@pytest.mark.parametrize(("offset", "pages"), [(0.0, EIGHTH), (1.0, HALF)])
def test_the_store_of_large_heads(offset, pages):
    halves = ("qkv", "queries", "k_cache", "v_cache", "q_norm", "k_norm")
    strides = ("qkv_stride", "angle_stride", "k_stride", "v_stride")
    types = dict.fromkeys(halves, HALF) | dict.fromkeys(strides, "i32")
    types |= {
        "cos": "*fp32",
        "sin": "*fp32",
        "positions": "*i32",
        "slot_mapping": "*i32",
        "eps": "fp32",
    }
    types |= {"k_cache": pages, "v_cache": pages, "k_scale": "fp32", "v_scale": "fp32"}
    narrow = pages == EIGHTH
    types |= {"key_center": "*fp32"} if narrow else {}
    constants = {
        "HEADS": 4, "KV_HEADS": 1, "DIM": 256, "GROUP": 4, "BLOCK": 128, "NORM": True,
        "OFFSET": offset, "ANGLE_TABLE": True, "E4M3_PAGES": narrow, "USE_PDL": True,
        "CENTER_KEYS": narrow,
        "HADAMARD_HALF": 128 if narrow else 0,
    }  # fmt: skip
    constants |= {} if narrow else {"key_center": None}
    ptx = compiled(rotate_and_store._rotate_and_store_kernel, types, constants, num_warps=2).asm[
        "ptx"
    ]
    assert ("e4m3x2.f32" in ptx) == (pages == EIGHTH), "the GPU's own conversion, or none"


def test_the_gate():
    types = {"merged": HALF, "out": HALF, "stride": "i32"}
    constants = {"SIZE": 2048, "ACTIVATION_BLOCK": 1024, "GELU_SLOPE": elementwise.GELU_SLOPE}
    assert compiled(elementwise._geglu_kernel, types, constants, num_warps=4).asm["ptx"]


def test_log_probs():
    whole = dict.fromkeys(("token_keys", "block_records", "records", "ids", "keys"), "*i64") | {
        "logits": HALF
    }
    whole |= dict.fromkeys(("stride", "width", "first_id", "count", "num_top"), "i32")
    whole |= dict.fromkeys(("row_stride", "record_stride"), "i32")
    whole["out"] = "*i32"
    constants = {
        "BLOCK": by_triton.BLOCK,
        "MAX_KEYS": by_triton.MAX_KEYS,
        "RECORDS": 64,
        "WHOLE": True,
    }
    for kernel in (
        by_triton._logit_keys_kernel,
        by_triton._scan_block,
        by_triton._merge_blocks,
        by_triton._merge_records,
    ):
        names = kernel.arg_names
        types = {name: whole[name] for name in names if name in whole}
        given = {name: constants[name] for name in names if name in constants}
        assert compiled(kernel, types, given).asm["ptx"]


MERGED = 4  # splits of a row, of 32: no less shared memory, and compiled in less time


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
    types |= dict.fromkeys(("counters", "seq_lens", "kv_indptr", "kv_indices", "splits"), "*i32")
    types |= {"partial_out": "*fp32", "partial_max_sum": "*fp32", "scale": "fp32", "window": "i32"}
    types |= dict.fromkeys(("q_stride", "page_stride", "token_stride"), "i32")
    types |= dict.fromkeys(("prefix_out", "prefix_max_sum"), "*fp32")
    types |= dict.fromkeys(("members", "merges"), "*i32")
    how = tile_config(rows, kv_heads, dim, pages == EIGHTH)
    tile, reads = how.prefix_queries if shared else 0, how.prefix_load if which == 1 else how.load
    assert reads is not None
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "PAGE": 64, "BLOCK": reads.block_n,
        "MAX_SPLITS": MERGED, "QUERY_ROWS": 16, "WINDOWED": not shared, "SINKS": True,
        "USE_PDL": True,
        "E4M3_PAGES": pages == EIGHTH, "PREFIX_QUERIES": tile, "WHICH_SPLITS": which,
    }  # fmt: skip
    return compiled(
        decode_attention._decode_attention_kernel,
        types,
        constants,
        num_warps=reads.num_warps,
        num_stages=reads.num_stages,
    )


def test_decodes_with_large_heads_find_shared_memory():
    large, usual = (decode(1, dim).metadata.shared for dim in (256, 128))
    assert large < 1.25 * usual < 100_000


def test_decodes_over_pages_of_8_bits_convert_them_as_the_gpu_does_and_read_no_single_bytes():
    narrow, usual = decode(1, 128, EIGHTH), decode(1, 128)
    assert "f16x2.e4m3x2" in narrow.asm["ptx"] and "e4m3" not in usual.asm["ptx"]
    assert "ldmatrix" in narrow.asm["ptx"] and "ld.shared.b8" not in narrow.asm["ptx"]
    assert narrow.metadata.shared < 1.1 * usual.metadata.shared


def test_decodes_with_a_common_beginning_leave_room_for_others_beside_them():
    """Four programs on a multiprocessor, as without. Twice as many tokens in 8 bits take what
    those in 16 do."""
    for narrow in (False, True):
        how = tile_config(300, 1, 128, narrow)
        assert how.prefix_queries and how.prefix_load is None
    assert decode(300, 128, EIGHTH, shared=True, group=5).metadata.shared < 227 * 1024 // 4


def test_a_launch_for_common_beginnings_multiplies_by_warp_groups_two_on_a_multiprocessor():
    runs = decode(1000, 128, shared=True, group=5, which=1, kv_heads=8)
    assert "wgmma" in runs.asm["ptx"]
    assert runs.metadata.shared < 227 * 1024 // 2 - 1024


@pytest.mark.parametrize(("kv_heads", "programs"), [(8, 5), (2, 3)])
def test_rows_beside_that_launch_leave_room_for_others(kv_heads, programs):
    rest = decode(1000, 128, shared=True, group=5, which=2, kv_heads=kv_heads)
    assert "wgmma" not in rest.asm["ptx"]
    assert rest.metadata.shared < 227 * 1024 // programs


@pytest.mark.parametrize("scales", [gemm.ROW_SCALES.value, gemm.BLOCK_SCALES.value])
def test_few_rows_with_weights_in_8_bits(scales):
    types = {"x": EIGHTH, "x_scale": "*fp32", "weight": EIGHTH, "scale": "*fp32", "bias": HALF}
    types |= {"out": HALF, "rows": "i32", "x_stride": "i32"}
    constants = {
        "N": 1024, "K": 1024, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "SPLIT_K": 1,
        "SWIGLU": False, "HAS_BIAS": False, "SCALES": scales, "PREFETCH_STEPS": 1, "USE_PDL": True,
    }  # fmt: skip
    made = compiled(gemm._small_m_kernel, types, constants, num_warps=4, num_stages=6)
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in made.asm["ptx"]


@pytest.mark.parametrize("part", [17408, 128])
def test_rounding_to_8_bits(part):
    types = {"x": HALF, "out": EIGHTH, "scale": "*fp32", "x_stride": "i32"}
    constants = {
        "SIZE": 17408,
        "GROUP_SIZE": part,
        "BLOCK": 16384,
        "E4M3_MAX": 448.0,
        "MIN_SCALE": 1e-12,
    }
    constants |= {"USE_PDL": True, "TAIL": 1024}
    for gated in (False, True):
        made = compiled(
            elementwise._quantize_kernel, types, constants | {"SWIGLU": gated}, num_warps=32
        )
        assert CONVERTED in made.asm["ptx"]


def test_many_rows_with_weights_in_blocks_of_8_bits():
    types = {"x": EIGHTH, "x_scale": "*fp32", "weight": EIGHTH, "scale": "*fp32", "bias": HALF}
    types |= {"out": HALF, "rows": "i32", "row_blocks": "i32"}
    constants = {
        "N": 5120,
        "K": 5120,
        "BLOCK_M": 128,
        "SCALE_BLOCK": 128,
        "GROUP_M": 8,
        "HAS_BIAS": True,
    }
    made = compiled(gemm._block_scaled_kernel, types, constants, num_warps=8, num_stages=3)
    assert "wgmma" in made.asm["ptx"] and made.metadata.shared < 227 * 1024


@pytest.mark.parametrize(("group", "merged"), [(32, False), (128, True)])
def test_weights_in_4_bits(group, merged):
    types = {"x": HALF, "packed": "*i32", "scales_zeros": "*i32", "bias": HALF, "parts": "*fp32"}
    types |= {"out": HALF, "counters": "*i32", "rows": "i32", "x_stride": "i32"}
    constants = {"N": 1024, "K": 1024, "GROUP_SIZE": group, "PAIRS": True}
    few = constants | {"BLOCK_M": 16, "BLOCK_N": 64, "K_TILES": 2, "SPLIT_K": 4}
    few |= {"HAS_BIAS": merged, "MERGE_SPLITS": merged, "USE_PDL": True}
    made = compiled(gemm._int4_small_m_kernel, types, few, num_warps=4, num_stages=3)
    assert made.asm["ptx"].count("wgmma.mma") >= 2 * 8
    assert made.asm["ptx"].count("mul.rn.bf16x2") == 2 * 32  # nothing is made twice
    # Weights go from registers to tensor cores; what is stored there is the result.
    assert len(re.findall(r"st\.shared", made.asm["ptx"])) < 24
    types = {name: types[name] for name in ("packed", "scales_zeros", "out")}
    constants = {"N": 1024, "K": 1024, "GROUP_SIZE": group, "BLOCK_N": 8, "PAIRS": True}
    assert compiled(gemm._int4_dequantize_kernel, types, constants, num_warps=4).asm["ptx"]


@pytest.mark.parametrize(("experts", "top_k", "partials"), [(128, 8, 8), (60, 4, 0), (5, 5, 8)])
def test_choices_of_experts(experts, top_k, partials):
    types = {
        "router_logits": "*fp32" if partials else HALF,
        "topk_weights": HALF,
        "topk_ids": "*i32",
    }
    types |= {"rows": "i32", "stride": "i32", "partial_stride": "i32"}
    constants = {
        "PARTIALS": partials, "NUM_EXPERTS": experts, "BLOCK": triton.next_power_of_2(experts),
        "TOP_K": top_k, "TOP_K_PADDED": triton.next_power_of_2(top_k), "RENORMALIZE": True,
        "TOKENS": moe.TOKENS_PER_PROGRAM, "USE_PDL": True,
    }  # fmt: skip
    made = compiled(moe._topk_softmax_kernel, types, constants, num_warps=moe.TOKENS_PER_PROGRAM)
    assert made.asm["ptx"]


@pytest.mark.parametrize(
    ("experts", "chunk", "warps", "chosen"),
    [(1, 16, 8, "*i64"), (128, 2048, 8, "*i64"), (8, 16384, 16, "*i32")],
)
def test_pairs_by_expert(experts, chunk, warps, chosen):
    types = dict.fromkeys(("sorted_pair_ids", "expert_ids", "num_padded_pairs"), "*i32") | {
        "topk_ids": chosen
    }
    types |= dict.fromkeys(("num_pairs", "num_experts", "first_expert"), "i32")
    constants = {"NUM_EXPERTS": experts, "BLOCK": 16, "PAIRS_PER_CHUNK": chunk, "USE_PDL": True}
    assert compiled(moe._align_kernel, types, constants, num_warps=warps).asm["ptx"]


def experts(kernel: Any, rows: int, cut: MoeGemmConfig, scales: int, bounded: bool = False) -> Any:
    """Of the shape of Qwen3-30B-A3B; bounded: of gpt-oss-20b."""
    whole = dict.fromkeys(("x", "hidden", "topk_weights", "out", "weight", "scale", "bias"), HALF)
    if scales == moe.MXFP4_SCALES.value:
        whole |= {"weight": "*u8", "scale": "*i32"}
    elif scales != moe.NO_SCALES.value:
        whole |= {"weight": EIGHTH, "scale": "*fp32"}
    whole |= dict.fromkeys(("sorted_pair_ids", "expert_ids", "num_padded_pairs"), "*i32")
    whole |= dict.fromkeys(("num_pairs", "x_stride", "row_blocks", "num_local_experts"), "i32")
    constants = {
        "TOP_K": 8, "HIDDEN": 2048, "INTERMEDIATE": 768, "BLOCK_M": rows, "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k, "SWAP_AB": cut.swap_ab, "SCALES": scales, "GROUP_M": 8,
        "USE_PDL": True,
        "SCALES_PER_ROW": 2048 // 128, "HAS_BIAS": bounded, "SLOPE": 1.0, "LIMIT": 0.0,
    }  # fmt: skip
    if bounded:
        constants |= {
            "TOP_K": 4,
            "HIDDEN": 2880,
            "INTERMEDIATE": 2880,
            "SLOPE": 1.702,
            "LIMIT": 7.0,
        }
        constants |= {"SCALES_PER_ROW": 23}  # of 90 exponents and two that fill up, four each
    names = kernel.arg_names
    types = {name: whole[name] for name in names if name in whole}
    given = {name: constants[name] for name in names if name in constants}
    return compiled(kernel, types, given, num_warps=cut.num_warps, num_stages=cut.num_stages)


def demanding(table: Sequence[tuple[float, MoeConfig]]) -> list[MoeConfig]:
    """Of the tiles that may be chosen, for both operands and each size of tensor core instruction,
    those that hold the most elements in their stages. On a GPU all of them are run."""
    most: dict[tuple[bool, bool], tuple[int, MoeConfig]] = {}
    for _, config in table:
        for gemm_config in (config.gate_up, config.down):
            rows = gemm_config.block_n if gemm_config.swap_ab else config.block_m
            kind = gemm_config.swap_ab, rows >= 64
            stage = (config.block_m + 2 * gemm_config.block_n) * gemm_config.block_k
            held = stage * gemm_config.num_stages
            if held > most.get(kind, (0, config))[0]:
                most[kind] = held, config
    return list(dict.fromkeys(config for _, config in most.values()))


SCALES = moe.ROW_SCALES.value, moe.BLOCK_SCALES.value
MIXTURES = [(shape, moe.NO_SCALES.value) for shape in demanding(MOE_CONFIGS_W16)]
MIXTURES += zip(demanding(MOE_CONFIGS_W8A16), itertools.cycle(SCALES))


@pytest.mark.parametrize(("shape", "scales"), MIXTURES)
def test_experts_of_demanding_tiles(shape, scales):
    for kernel, each in ((moe._gate_up_kernel, shape.gate_up), (moe._down_kernel, shape.down)):
        made = experts(kernel, shape.block_m, each, scales)
        assert made.metadata.shared < 227 * 1024
        # Tensor cores at their full speed, where rows or columns are the 64 that these take.
        full = each.block_n if each.swap_ab else shape.block_m
        assert ("wgmma" in made.asm["ptx"]) == (full >= 64)
        assert "cvt.bf16.f16" not in made.asm["ptx"], "16 values a cycle"


@pytest.mark.parametrize(
    ("shape", "blocks"), [*zip(demanding(MOE_CONFIGS_W8A8), itertools.cycle((0, 16)))]
)
def test_experts_and_rows_in_8_bits_of_demanding_tiles(shape, blocks):
    whole = dict.fromkeys(("x", "hidden", "weight"), EIGHTH)
    whole |= dict.fromkeys(("x_scale", "hidden_scale", "scale", "out_scale"), "*fp32")
    whole |= dict.fromkeys(("sorted_pair_ids", "expert_ids", "num_padded_pairs"), "*i32")
    whole |= dict.fromkeys(("num_pairs", "row_blocks", "num_local_experts"), "i32")
    for kernel, each in (
        (moe_fp8._gate_up_w8a8_kernel, shape.gate_up),
        (moe_fp8._down_w8a8_kernel, shape.down),
    ):
        gated = kernel is moe_fp8._gate_up_w8a8_kernel
        whole |= {"out": EIGHTH if gated else HALF, "topk_weights": HALF}
        constants = {
            "TOP_K": 8, "HIDDEN": 2048, "INTERMEDIATE": 768, "BLOCK_M": shape.block_m,
            "BLOCK_N": each.block_n,
            "BLOCK_K": each.block_k, "SWAP_AB": each.swap_ab,
            "SCALES_PER_ROW": blocks if gated else blocks and 6,
            "GROUP_SIZE": moe_fp8.INTERMEDIATE_GROUP, "GROUP_M": 8, "E4M3_MAX": 448.0,
            "MIN_SCALE": 1e-12, "USE_PDL": True,
        }  # fmt: skip
        names = kernel.arg_names
        types = {name: whole[name] for name in names if name in whole}
        given = {name: constants[name] for name in names if name in constants}
        made = compiled(kernel, types, given, num_warps=each.num_warps, num_stages=each.num_stages)
        assert made.metadata.shared < 227 * 1024
        assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"]
        assert ".e4m3.e4m3" in made.asm["ptx"], "nothing is widened"
        assert (CONVERTED in made.asm["ptx"]) == gated, "rounded where it is made"


@pytest.mark.parametrize("shape", demanding(MOE_CONFIGS_MXFP4))
def test_experts_in_mxfp4_with_bounds_and_biases_of_demanding_tiles(shape):
    for kernel, each in ((moe._gate_up_kernel, shape.gate_up), (moe._down_kernel, shape.down)):
        made = experts(kernel, shape.block_m, each, moe.MXFP4_SCALES.value, bounded=True)
        assert made.metadata.shared < 227 * 1024
        assert "wgmma" in made.asm["ptx"]
        assert "mul.bf16" in made.asm["ptx"], "scaled in 16 bits, two by an instruction"
        held = 5 if kernel is moe._gate_up_kernel else 3  # rows, and weights and exponents of each
        assert made.asm["ttgir"].count("async_copy_global") == held * each.num_stages


def test_sums_of_a_tokens_pairs():
    types = {
        "by_pair": HALF,
        "topk_ids": "*i32",
        "out": HALF,
        "first_expert": "i32",
        "num_local_experts": "i32",
    }
    constants = {"TOP_K": 8, "HIDDEN": 2048, "BLOCK": 1024, "LOCAL_ONLY": True, "USE_PDL": True}
    assert compiled(moe._moe_sum_kernel, types, constants, num_warps=4).asm["ptx"]
    types = dict.fromkeys(("x", "residual", "weight", "out"), HALF)
    types |= {"eps": "fp32", "x_stride": "i32", "partial_stride": "i32"}
    constants = {"SIZE": 2048, "BLOCK": 2048, "PARTIALS": 8, "ADD": True, "OFFSET": 0.0}
    constants |= {"out_scale": None, "GROUP_SIZE": 0, "E4M3_MAX": 0.0, "MIN_SCALE": 0.0}
    constants |= {"unquantized_out": None, "STORE_UNQUANTIZED": False}
    assert compiled(
        elementwise._rms_norm_kernel, types, constants | {"USE_PDL": True}, num_warps=16
    ).asm["ptx"]


@pytest.mark.parametrize(("kind", "rank"), [("*bf16", 16), ("*fp32", 512)])
def test_adapters_products_compile_with_room_to_spare(kind: str, rank: int) -> None:
    sizes = {"RANK": rank, "MODULES": 3, "SPLITS": 5, "USE_PDL": True}
    sizes["BLOCK_T"] = gemm.BLOCK_TOKENS
    sizes["BLOCK_R"] = max(rank, gemm.MIN_RANK)
    blocks = {"sorted_tokens": "*i32", "block_adapters": "*i32", "num_padded": "*i32"}
    block_k, block_n = gemm.block_sizes(rank)
    shrink = compiled(
        gemm._shrink_kernel,
        {"x": kind, "a": kind, **blocks, "low": "*fp32", "tokens": "i32", "x_stride": "i32"},
        {**sizes, "DEPTH": 5120, "BLOCK_K": block_k},
        num_stages=2 if rank > gemm.LARGE_RANK else 3,
    )
    expand = compiled(
        gemm._expand_kernel,
        {"low": "*fp32", "b": kind, **blocks, "y": kind, "tokens": "i32",
         "y_stride": "i32", "first_module": "i32",
         **{f"{bound}_{n}": "i32" for n in range(gemm.MAX_MODULES) for bound in ("first", "end")}},
        {**sizes, "WIDTH": 7168, "BLOCK_N": block_n},
    )  # fmt: skip
    assert max(shrink.metadata.shared, expand.metadata.shared) < 200 * 1024


INT32S, INT64S = "*i32", "*i64"
PREPARED = [
    "positions",
    "slot_mapping",
    "input_ids",
    "logits_indices",
    "write_slots",
    "sample_positions",
    "last_token",
]


@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_step_reads(drafts: bool) -> None:
    kernel = by_triton._prepare_inputs_kernel
    constants = {
        "PAGE": 64, "PADDING_ROW_TOKENS": 1, "LISTS_PAGES": False, "HAS_DRAFTS": drafts,
        "NUM_WIDE": 1, "NUM_NARROW": 4, "INPUTS_BLOCK": by_triton.INPUTS_BLOCK,
    }  # fmt: skip
    sizes = set(by_triton.UNSPECIALIZED_SIZES)
    names = [name for name in kernel.arg_names if name not in constants]
    types = {
        name: "i32" if name in sizes else INT64S if name in PREPARED else INT32S for name in names
    }
    compiled(kernel, types, constants, num_warps=4)


def test_drafts_are_made_and_accepted() -> None:
    sizes = {"width": "i32", "max_drafts": "i32"}
    pointers = ("slots", "starts", "counts", "lengths", "token_ids", "drafts")
    constants = {"MAX_NGRAM": 4, "DRAFTS_BLOCK": 4, "HISTORY_BLOCK": by_triton.HISTORY_BLOCK}
    types = dict.fromkeys(pointers, INT32S) | sizes
    compiled(by_triton._propose_ngrams_kernel, types, constants, num_warps=4)
    wide = dict.fromkeys(("sample_positions", "drawn", "last_token"), INT64S)
    types |= wide | {"logits_rows": INT32S, "acceptance": "fp32"}
    compiled(by_triton._accept_drafts_kernel, types, {}, num_warps=1)
