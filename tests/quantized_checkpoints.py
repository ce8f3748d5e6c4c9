"""Checkpoints in the number formats that others write, and the same values as plain weights.

Knows nothing of pipeinfer: numbers are rounded and packed here as those formats describe it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

MATRIX = re.compile(r".*(_proj|\.w[123])\.weight")
EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")
E4M3 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column lies in which four bits, from the lowest on
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
GROUP = 32
BLOCK = (16, 32)

Tensors = dict[str, torch.Tensor]
# A matrix's name and values to what is stored in its place, and what those values are then.
Quantizer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


def packed(numbers: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """int [n, 8 m] of 0 to 15 as int32 [n, m], `order[i]` of each eight in bits 4 i and up."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate(order):
        words |= numbers[:, column::8].numpy().astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).clamp(-448, 448).to(E4M3)


def fp8_rows(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (values.abs().amax(1, keepdim=True) / 448).bfloat16()
    rounded = to_e4m3(values, scale.float())
    stored = {f"{name}.weight": rounded, f"{name}.weight_scale": scale}
    return stored, rounded.float() * scale.float()


def fp8_closest_rows(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Of eight scales for each row, the one with the least square error."""
    scales = torch.empty(values.shape[0], 1)
    for i, row in enumerate(values):
        tried = [row.abs().max() / 448 * 2 ** (step / 8) for step in range(8)]
        scales[i] = min(
            tried, key=lambda s: float(((to_e4m3(row, s).float() * s - row) ** 2).sum())
        )
    rounded = to_e4m3(values, scales)
    stored = {f"{name}.weight": rounded, f"{name}.weight_scale": scales}
    return stored, rounded.float() * scales


def fp8_tensor(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = values.abs().max() / 448
    rounded = to_e4m3(values, scale)
    stored = {
        f"{name}.weight": rounded,
        f"{name}.weight_scale": scale,
        f"{name}.input_scale": torch.tensor(0.5),
    }
    return stored, rounded.float() * scale


def fp8_blocks(
    name: str, values: torch.Tensor, called: str = "weight_scale_inv"
) -> tuple[Tensors, torch.Tensor]:
    rows, columns = values.shape
    high, wide = BLOCK
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    rounded, plain = torch.empty(rows, columns, dtype=E4M3), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = values[at].abs().max() / 448
            rounded[at] = to_e4m3(values[at], scales[i, j])
            plain[at] = rounded[at].float() * scales[i, j]
    return {f"{name}.weight": rounded, f"{name}.{called}": scales}, plain


def in_groups(
    values: torch.Tensor, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(numbers 0 to 15 [n, k], scales and zeros [n, groups], what they stand for)."""
    parts = values.unflatten(1, (-1, group))
    if symmetric:
        scale = parts.abs().amax(2) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    scale = scale.half().float()
    numbers = ((parts / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    plain = ((numbers - zero[..., None]) * scale[..., None]).flatten(1)
    return numbers.flatten(1).int(), scale.half(), zero.int(), plain


def awq(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scale, zero, plain = in_groups(values, GROUP, symmetric=False)
    stored = {
        f"{name}.qweight": packed(numbers.t(), AWQ_ORDER),
        f"{name}.qzeros": packed(zero.t(), AWQ_ORDER),
        f"{name}.scales": scale.t().contiguous(),
    }
    return stored, plain


def gptq(
    name: str, values: torch.Tensor, symmetric: bool = True, shift: int = 1, group: int = GROUP
) -> tuple[Tensors, torch.Tensor]:
    group = group if group > 0 else values.shape[1]
    numbers, scale, zero, plain = in_groups(values, group, symmetric)
    if shift:  # such files cannot say 0
        zero = zero.clamp(min=1)
        spread, wide = zero.repeat_interleave(group, 1), scale.float().repeat_interleave(group, 1)
        plain = (numbers - spread) * wide
    stored = {
        f"{name}.qweight": packed(numbers).t().contiguous(),
        f"{name}.qzeros": packed((zero - shift).t()),
        f"{name}.scales": scale.t().contiguous(),
        f"{name}.g_idx": torch.arange(values.shape[1], dtype=torch.int32) // group,
    }
    return stored, plain


def compressed_4_bits(
    name: str, values: torch.Tensor, symmetric: bool = True, group: int = GROUP
) -> tuple[Tensors, torch.Tensor]:
    group = group if group > 0 else values.shape[1]
    numbers, scale, zero, plain = in_groups(values, group, symmetric)
    stored = {
        f"{name}.weight_packed": packed(numbers),
        f"{name}.weight_scale": scale.bfloat16(),
        f"{name}.weight_shape": torch.tensor(values.shape),
    }
    spread = scale.bfloat16().float().repeat_interleave(group, 1)
    plain = (numbers - zero.repeat_interleave(group, 1)) * spread
    if not symmetric:
        stored[f"{name}.weight_zero_point"] = packed(zero.t()).t().contiguous()
    return stored, plain


def mxfp4(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Of experts [n, in, out], stored [n, out, in / 32, 16]."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = values.transpose(1, 2).unflatten(2, (-1, 32))
    power = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / power.exp2()[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    plain = (table[codes] * power.exp2()[..., None]).flatten(2).transpose(1, 2)
    stored = {
        f"{name}_blocks": (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8),
        f"{name}_scales": (power + 127).to(torch.uint8),
    }
    return stored, plain


def _compressed(weights: dict[str, Any], form: str) -> dict[str, Any]:
    dynamic = {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"}
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False} | weights,
        "input_activations": None if form == "pack-quantized" else dynamic,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    }


def _float(**more: Any) -> dict[str, Any]:
    return _compressed({"type": "float", "num_bits": 8} | more, "float-quantized")


def _int(**more: Any) -> dict[str, Any]:
    return _compressed({"type": "int", "num_bits": 4} | more, "pack-quantized")


def _gptq(sym: bool = True, form: str = "gptq", group: int = GROUP) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": sym,
        "checkpoint_format": form, "lm_head": False,
    }  # fmt: skip


# By name: what config.json says, and how a matrix is stored.
FORMATS: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "fp8 rows": (_float(strategy="channel"), fp8_rows),
    "fp8 closest rows": (_float(strategy="channel"), fp8_closest_rows),
    "fp8 tensor": (_float(strategy="tensor"), fp8_tensor),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic",
         "modules_to_not_convert": ["lm_head"]},
        fp8_blocks,
    ),
    "fp8 compressed blocks": (
        _float(strategy="block", block_structure=list(BLOCK)),
        lambda name, values: fp8_blocks(name, values, "weight_scale"),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
         "version": "gemm"},
        awq,
    ),
    "gptq": (_gptq(), gptq),
    "gptq asymmetric": (_gptq(sym=False), lambda name, values: gptq(name, values, False)),
    "gptq v2": (_gptq(False, "gptq_v2"), lambda name, values: gptq(name, values, False, 0)),
    "gptq rows": (_gptq(group=-1), lambda name, values: gptq(name, values, group=-1)),
    "4 bits": (_int(strategy="group", group_size=GROUP), compressed_4_bits),
    "4 bits asymmetric": (
        _int(strategy="group", group_size=GROUP, symmetric=False),
        lambda name, values: compressed_4_bits(name, values, False),
    ),
    "4 bits rows": (
        _int(strategy="channel"), lambda name, values: compressed_4_bits(name, values, group=-1),
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert":
         ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
        mxfp4,
    ),
}  # fmt: skip


def quantize(source: Path, out: Path, form: str, kept: str = "") -> tuple[Path, Path]:
    """Writes the checkpoint `source` twice: (in `form`, in plain weights of the same values).

    kept: of matrices whose name contains it nothing changes, and config.json says so.
    """
    how, quantizer = FORMATS[form]
    tensors = load_file(source / "model.safetensors")
    pattern = EXPERTS if form == "mxfp4" else MATRIX
    stored: Tensors = {}
    plain: Tensors = {}
    for name, values in tensors.items():
        if pattern.fullmatch(name) is None or (kept and kept in name):
            stored[name] = plain[name] = values
            continue
        parts, same = quantizer(name.removesuffix(".weight"), values.float())
        stored |= parts
        plain[name] = same.contiguous()
    if kept:
        field = "ignore" if "ignore" in how else "modules_to_not_convert"
        how = how | {field: [*(how.get(field) or []), kept]}
    config = json.loads((source / "config.json").read_text())
    pair = out / "quantized", out / "plain"
    for folder, weights, more in zip(
        pair, (stored, plain), ({"quantization_config": how}, {}), strict=True
    ):
        shutil.copytree(source, folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | more))
    return pair
