"""Whether FlashInfer has its kernels of mixtures on this machine, or would have to compile them."""

from __future__ import annotations

import importlib.util

import torch

SAME = {110: 100, 121: 120}  # GPUs that get another one's kernels


def missing_kernels():
    """Why FlashInfer's fused experts cannot be run at once, or ""."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    from flashinfer.jit import env

    major, minor = torch.cuda.get_device_capability()
    number = 10 * major + minor
    name = f"fused_moe_{SAME.get(number, number)}"
    folders = (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)
    if any((folder / name / f"{name}.so").exists() for folder in folders):
        return ""
    return f"FlashInfer's {name}.so was never compiled here, which takes the better part of an hour"
