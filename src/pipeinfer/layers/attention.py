"""The layers around attention: merged QKV, optional QK norm, rotary position embedding, output.

The attention itself is a function handed in with each call: this module knows no cache, no page
and no backend. Of RoPE, torch operations get the angles of a step's positions, computed in float32
once for all layers; a kernel that looks angles up itself gets a table up to the longest position.
Each is made at its first use. A pair that is rotated is always half a head apart: weights of files
with another order are permuted when they are final (`neox_permutation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from pipeinfer.checkpoint.config import RopeConfig
from pipeinfer.layers.elementwise import HeadNorm, NormKind
from pipeinfer.layers.linear import RowParallelLinear, is_adapted, merged_qkv
from pipeinfer.layers.placement import (
    IN_TORCH,
    ParameterMemory,
    PartialSum,
    Placement,
    WeightSource,
)
from pipeinfer.layers.weight import ActivationQuantizer, Activations


class CosSin(NamedTuple):
    """cos and sin [T, 1, head_dim] in the model's dtype, for the T positions of a step: the factors
    of each value of a head, and of its partner, half a head apart. The first half of sin is
    negative.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Rotation:
    """A rotation of the tokens of a step by one RoPE: positions int64 or int32 [T]."""

    rope: Rope
    positions: torch.Tensor

    @cached_property
    def cos_sin(self) -> CosSin:
        """cos and sin of the positions; the same for all layers of the step that have this RoPE."""
        return self.rope.cos_sin(self.positions)


class Rope:
    """Rotary position embedding: positions to rotations. Source: https://arxiv.org/abs/2104.09864,
    halves form as in Llama.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        """Computes the frequencies. max_positions: length of the table."""
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
        """Returns the rotation of `positions`, int64 or int32 [T]."""
        return Rotation(self, positions)

    @cached_property
    def cos_sin_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [max_positions, head_dim / 2]: megabytes, which stay."""
        cos, sin = self._cos_sin(torch.arange(self._max_positions, device=self._inverse.device))
        return cos[:, 0], sin[:, 0]

    def cos_sin(self, positions: torch.Tensor) -> CosSin:
        """Returns cos and sin of `positions`, int64 or int32 [T]."""
        cos, sin = (part.to(self._dtype) for part in self._cos_sin(positions))
        return CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [T, 1, head_dim / 2]."""
        inverse = self._inverse
        if self._config.type == "dynamic":
            inverse = self._dynamic(positions)
        angles = (positions.to(torch.float32)[:, None] * inverse)[:, None, :]
        return angles.cos() * self._scale, angles.sin() * self._scale

    def _padded(self, values: torch.Tensor, still: float = 0.0) -> torch.Tensor:
        """Returns [..., head_dim / 2]: values [..., pairs that are rotated], and `still` for the
        other pairs.
        """
        return functional.pad(values, (0, self._unrotated_pairs), value=still)

    def _dynamic(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns inverse frequencies [T, head_dim / 2] of NTK scaling by the sequence length so
        far.

        Position p past the original context is rotated with the base of a sequence of p + 1 tokens,
        and a cached key keeps the rotation that it was stored with: transformers does the same when
        it decodes token by token with a cache. The result differs only if transformers computes a
        prompt longer than the original context in one forward pass, because there all positions
        share the base of the whole prompt; here a position's rotation must not depend on how a
        prompt was chunked.
        """
        config = self._config
        longest = (positions + 1).to(torch.float32)[:, None] / config.original_max
        power = self._rotated / (self._rotated - 2)
        base = config.theta * (config.factor * longest - (config.factor - 1)).clamp(min=1) ** power
        return torch.where(longest > 1, self._padded(1.0 / base**self._exponents), self._inverse)


def neox_permutation(config: RopeConfig, head_dim: int) -> list[int] | None:
    """Returns the order of the values of a head, as files have it, for pairs that are half a head
    apart; None: the order of the file is right.

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
    """float32, of the shape of `exponents`, 2 i / (rotated dimensions of a head); for sequences
    within original_max."""
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
    partners = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * angles.cos).addcmul_(partners, angles.sin)


class LayerQKV(Protocol):
    """A layer's queries, keys and values, of the tokens of a step."""

    @property
    def merged(self) -> MergedQKV | None:
        """The product that a kernel can split, norm and rotate as it stores; None: the heads are
        ready.
        """
        ...

    def split_and_rotate(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, heads, head_dim], normed and rotated."""
        ...


class RotatedQKV(NamedTuple):
    """`LayerQKV` that their model has split, normed and rotated."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def merged(self) -> MergedQKV | None:
        """None: the heads are ready."""
        return None

    def split_and_rotate(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values, see LayerQKV."""
        return self.queries, self.keys, self.values


class MergedQKV(NamedTuple):
    """A layer's queries, keys and values as one product, not yet normed and rotated.

    Attributes:
    - product: [T, (num_heads + 2 num_kv_heads) * head_dim]
    - num_heads: query heads of this rank
    - num_kv_heads: KV heads of this rank
    - norm: the QK norm; None: there is none
    - rotation: RoPE at the tokens' positions
    """

    product: torch.Tensor
    num_heads: int
    num_kv_heads: int
    norm: HeadNorm | None
    rotation: Rotation

    @property
    def merged(self) -> MergedQKV | None:
        """The product itself."""
        return self

    def split_and_rotate(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, heads, head_dim], normed and rotated by torch operations;
        views with strided rows.
        """
        # Heads of one token: [ queries | keys | values ]
        heads = self.product.unflatten(-1, (self.num_heads + 2 * self.num_kv_heads, -1))
        rotated = self.num_heads + self.num_kv_heads
        keyed, values = heads[:, :rotated], heads[:, rotated:]
        if self.norm is not None:
            keyed = self.norm(keyed)
        keyed = rotate(keyed, self.rotation.cos_sin)
        return keyed[:, : self.num_heads], keyed[:, self.num_heads :], values


# (layer number, heads) -> [T, num_heads, head_dim]. The function that a model calls in each layer:
# stores keys and values, and attends.
Attend = Callable[[int, LayerQKV], torch.Tensor]


class AttentionHeads(NamedTuple):
    """The heads of a layer, of all ranks.

    Attributes:
    - queries: query heads
    - keys: KV heads
    - head_dim: values of a head
    - norm: kind and epsilon of the QK norm; None: there is none
    - permutation: of a head's values from the order in files to NeoX order (neox_permutation);
      None: files have NeoX order
    - sinks: whether each query head has an attention sink (see AttentionShape)
    """

    queries: int
    keys: int
    head_dim: int
    norm: tuple[NormKind, float] | None = None
    permutation: list[int] | None = None
    sinks: bool = False


class SelfAttention:
    """The attention of a layer: [T, hidden] to [T, hidden]. bias: of queries, keys and values."""

    def __init__(
        self,
        layer: int,
        *,
        hidden_size: int,
        heads: AttentionHeads,
        bias: bool,
        output_bias: bool,
        placement: Placement,
    ) -> None:
        shard = placement.shard
        self.layer = layer
        self._permutation = heads.permutation
        self.head_dim = heads.head_dim
        self.num_heads = heads.queries // shard.size
        first, last = shard.kv_span(heads.keys)
        self.num_kv_heads = last - first
        self._query_heads = (heads.queries, shard.span(heads.queries))
        self.sinks = placement.empty(self.num_heads) if heads.sinks else None
        self.qkv = merged_qkv(
            hidden_size, heads.queries, heads.keys, heads.head_dim, bias, placement
        )
        self.norm: HeadNorm | None = None
        if heads.norm is not None:
            kind, eps = heads.norm
            self.norm = HeadNorm(
                self.num_heads, self.num_kv_heads, heads.head_dim, eps, placement, kind
            )
        width = heads.queries * heads.head_dim
        self.output = RowParallelLinear("o_proj", width, hidden_size, output_bias, placement)

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """Quantizer of the input, see Weight (weight.py); None if adapters need the rows
        unquantized.
        """
        return None if is_adapted(self.qkv.adapters) else self.qkv.weight.input_quantizer

    def __call__(
        self,
        x: Activations,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor | PartialSum:
        """Computes the layer's attention. rows: int64 [L], the tokens whose output is wanted; None:
        all.
        """
        heads = MergedQKV(self.qkv(x), self.num_heads, self.num_kv_heads, self.norm, rotation)
        out = attend(self.layer, heads).flatten(1)
        return self.output(out if rows is None else out[rows])

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        if self._permutation is not None:
            self._permute(self._permutation, memory.final)
            self._permutation = None
        self.qkv.weight.pack(memory)
        self.output.weight.pack(memory)

    def _permute(self, permutation: list[int], permuted: bool) -> None:
        """Permutes queries and keys, which are the first heads of the product. permuted: the
        weights are in that order already, but no adapters.
        """
        keyed = (self.num_heads + self.num_kv_heads) * self.head_dim
        rows = torch.arange(keyed).unflatten(0, (-1, self.head_dim))[:, permutation].flatten()
        if self.qkv.adapters is not None:
            self.qkv.adapters.permutation = rows
        if permuted:
            return
        matrix = self.qkv.weight
        matrix.permute(rows)
        if matrix.bias is not None:
            matrix.bias[:keyed] = matrix.bias[rows]
        if self.norm is not None:
            self.norm.weight.copy_(self.norm.weight[:, permutation])

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.qkv.sources(prefix)
        yield from self.output.sources(prefix)
        if self.norm is not None:
            yield from self.norm.sources(prefix)
        if self.sinks is not None:
            total, span = self._query_heads
            yield WeightSource(f"{prefix}sinks", (total,), (slice(*span),), self.sinks)
