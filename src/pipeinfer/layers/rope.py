"""Rotary position embedding: the angle of each position, and the rotation of queries and keys.

Torch operations get the angles of a step's positions, computed in float32 once for all layers; a
kernel that looks them up itself gets a table up to the longest position. Each is made when somebody
first asks for it. A pair that is rotated is always half a head apart: what files have otherwise is
put in order when weights are final (`neox_permutation`). Knows no cache and no request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional

from pipeinfer.checkpoint.rope import RopeConfig


class CosSin(NamedTuple):
    """cos, sin [T, 1, head_dim / 2] in the model's dtype, of the T positions of a step."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Rotation:
    """By one RoPE, of the tokens of a step: positions int64 or int32 [T]."""

    rope: Rope
    positions: torch.Tensor

    @cached_property
    def cos_sin(self) -> CosSin:
        """Of these positions; the same for all layers of the step that have this RoPE."""
        return self.rope.cos_sin(self.positions)


class Rope:
    """Positions to rotations. Source: https://arxiv.org/abs/2104.09864, halves form as in Llama."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        """`longest`: positions that the table has."""
        self._config = config
        self._dtype = dtype
        self._max_positions = max_positions
        self._rotated = config.rotated(head_dim)
        self._unrotated_pairs = (
            head_dim // 2 - self._rotated // 2
        )  # pairs that are not: angle 0, scale 1
        exponents = torch.arange(0, self._rotated, 2, dtype=torch.float32) / self._rotated
        self._exponents = exponents.to(device)
        self._inverse = self._padded(inverse_frequencies(config, exponents)).to(device)
        scale = torch.full((self._rotated // 2,), config.attention_factor)
        self._scale = self._padded(scale, 1.0).to(device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions: int64 or int32 [T]."""
        return Rotation(self, positions)

    @cached_property
    def cos_sin_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [longest, head_dim / 2]: megabytes, which stay."""
        cos, sin = self._cos_sin(torch.arange(self._max_positions, device=self._inverse.device))
        return cos[:, 0], sin[:, 0]

    def cos_sin(self, positions: torch.Tensor) -> CosSin:
        """positions: int64 or int32 [T]."""
        cos, sin = self._cos_sin(positions)
        return CosSin(cos.to(self._dtype), sin.to(self._dtype))

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [T, 1, head_dim / 2]."""
        inverse = self._inverse
        if self._config.type == "dynamic":
            inverse = self._dynamic(positions)
        angles = (positions.to(torch.float32)[:, None] * inverse)[:, None, :]
        return angles.cos() * self._scale, angles.sin() * self._scale

    def _padded(self, values: torch.Tensor, still: float = 0.0) -> torch.Tensor:
        """[..., pairs that are rotated] with `still` for the others: [..., head_dim / 2]."""
        return functional.pad(values, (0, self._unrotated_pairs), value=still)

    def _dynamic(self, positions: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies [T, head_dim / 2] of NTK scaling by the sequence length so far.

        Position p past the original context is rotated with the base of a sequence of p + 1 tokens,
        and a cached key keeps the rotation that it was stored with: what transformers does when it
        decodes token by token with a cache. It differs only where transformers computes a prompt
        longer than the original context in one forward, because there all positions share the base
        of the whole prompt; here a position's rotation must not depend on how a prompt was chunked.
        """
        config = self._config
        longest = (positions + 1).to(torch.float32)[:, None] / config.original_max
        power = self._rotated / (self._rotated - 2)
        base = config.theta * (config.factor * longest - (config.factor - 1)).clamp(min=1) ** power
        return torch.where(longest > 1, self._padded(1.0 / base**self._exponents), self._inverse)


def neox_permutation(config: RopeConfig, head_dim: int) -> list[int] | None:
    """Which value of a head, as files have it, belongs where, for pairs that are half a head apart;
    None: each where it is.

    Scores are sums over a head, so that they do not change if queries and keys are put in another
    order alike.
    """
    rotated = config.rotated(head_dim)
    if rotated == head_dim and not config.interleaved:
        return None
    own, still = list(range(rotated)), list(range(rotated, head_dim))
    half, rest = rotated // 2, len(still) // 2
    first, second = own[:half], own[half:]
    if config.interleaved:
        first, second = own[::2], own[1::2]
    return first + still[:rest] + second + still[rest:]


def inverse_frequencies(config: RopeConfig, exponents: torch.Tensor) -> torch.Tensor:
    """float32 [head_dim / 2] from `exponents` 2 i / head_dim, for sequences within original_max."""
    inverse = 1.0 / (config.theta**exponents)
    if config.type == "linear":
        return inverse / config.factor
    if config.type == "yarn":
        return _yarn(config, inverse)
    if config.type == "llama3":
        return _llama3(config, inverse)
    return inverse


def _yarn(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Fast dimensions stay, slow ones are interpolated. Source: https://arxiv.org/abs/2309.00071."""
    half = inverse.numel()

    def dimension(rotations: float) -> float:
        turns = config.original_max / (rotations * 2 * math.pi)
        return half * math.log(turns) / math.log(config.theta)

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # the ramp is a step
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / config.factor * ramp + inverse * (1 - ramp)


def _llama3(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones stay, between them a blend (Llama 3.1's code)."""
    waves_in_context = config.original_max * inverse / (2 * math.pi)
    blend = (waves_in_context - config.low_freq) / (config.high_freq - config.low_freq)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / config.factor + blend * inverse


def rotate(heads: torch.Tensor, angles: CosSin) -> torch.Tensor:
    """A rotated copy, contiguous, of heads [T, N, head_dim]; the input may be a strided view."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    rotated = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    left, right = rotated[..., :half], rotated[..., half:]
    torch.mul(first, angles.cos, out=left).addcmul_(second, angles.sin, value=-1)
    torch.mul(second, angles.cos, out=right).addcmul_(first, angles.sin)
    return rotated
