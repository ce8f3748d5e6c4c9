"""Products of few rows by the project's own kernels, where a device has room for them.

What a layer asks when it is called; where the answer is None, it calls the library. Knows no layer
and no model.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from pipeinfer.kernels.tile_configs import small_m_gemm_config as choose
from pipeinfer.layers.fused import HALVES
from pipeinfer.layers.partial_sum import PartialSum

SHARED_BYTES = 200 * 1024  # of a block: the tiles were chosen for GPUs that have as much


class SkinnyProducts:
    """Products of x [T, depth] with weights [width, depth]. Knows by measurement which to take.
    Needs triton."""

    def __init__(self) -> None:
        from pipeinfer.kernels import gemm, norm

        self._products = gemm
        self._norm = norm

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """x @ weight.T + bias, [T, width]."""
        tile = choose("product", x.shape[0], *weight.shape)
        return None if tile is None else self._products.small_m_gemm(x, weight, tile, bias)

    def gated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """SwiGLU of x @ weight.T, gate first: [T, width / 2]."""
        tile = choose("gated", x.shape[0], weight.shape[0] // 2, weight.shape[1])
        return None if tile is None else self._products.small_m_gemm_swiglu(x, weight, tile)

    def later(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        """x @ weight.T + bias, [T, width], whose splits the norm that follows adds up."""
        tile = choose("split", x.shape[0], *weight.shape)
        if tile is None:
            return None
        partial = self._products.split_k_gemm(x, weight, tile, bias)
        return PartialSum(partial, self)

    def narrow(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """float32 [P, T, width], whose sum over P is x @ weight.T + bias, of a matrix with few
        rows, such as a router's."""
        tile = choose("narrow", x.shape[0], *weight.shape)
        return None if tile is None else self._products.split_k_gemm(x, weight, tile, bias)

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the splits [P, T, size] of a product; see Summing."""
        return self._norm.sum_rms_norm(partial, residual, weight, eps), residual


@lru_cache(maxsize=8)
def skinny_products(device: torch.device, dtype: torch.dtype) -> SkinnyProducts | None:
    """None where the device has less room than the tiles take, or `dtype` no tensor cores."""
    if device.type != "cuda" or dtype not in HALVES:
        return None
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", 0)
    return SkinnyProducts() if room >= SHARED_BYTES else None
