"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) of linear layers, many in one step.

    y[t] += B[a] (A[a] x[t])        a: the adapter slot of token t; slot 0 is no adapter

- AdapterBank: a rank's adapters by slot, for all layers.
- AdaptedLinear: the matrices of one layer, which add their products to its product.
- AdapterWeights: one adapter on the host, in the layout of the bank.

A and B are cut as the weight is: if ranks have rows of the product, B; if ranks have columns of the
input, A, and each rank adds its share before the sum over ranks. All memory has fixed addresses, so
that CUDA graphs may hold it. Knows no request and no file.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from pipeinfer.kernels.interface import DeviceStep, LowRankMatrices


class LowRankPair(NamedTuple):
    """An adapter's matrices for one module, on the host: scale * b (a x) is added to the module's
    product.

    Attributes:
    - a: [rank, in_features]
    - b: [out_features, rank]
    - scale: factor of the product
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class AdaptedModule:
    """A matrix of the checkpoint, or a part of its rows, within a layer's product.

    Attributes:
    - name: of the matrix, such as model.layers.0.self_attn.q_proj
    - shape: of the whole matrix, [out_features, in_features]
    - rows: that this rank has of its out_features
    - columns: that this rank has of its in_features
    - at: where those rows are in the layer's product
    """

    name: str
    shape: tuple[int, int]
    rows: slice
    columns: slice
    at: slice


class AddLowRank(Protocol):
    """Adds the products of many adapters in the layers of one step."""

    def begin_step(self, token_adapters: torch.Tensor, adapter_slots: int) -> None:
        """Notes the adapters of a step's tokens, for all calls until the next step.

        - token_adapters: int32 [T], adapter slots from 1 to `adapter_slots`; 0: none
        """
        ...

    def __call__(self, x: torch.Tensor, matrices: LowRankMatrices, y: torch.Tensor) -> None:
        """Adds to y [T, out] the products of the tokens' adapters with x [T, in]. The rows of both
        may be strided.
        """
        ...


class LowRankOnHost:
    """Low-rank products on the host, adapter by adapter."""

    def __init__(self) -> None:
        self._tokens: dict[int, torch.Tensor] = {}  # by adapter slot

    def begin_step(self, token_adapters: torch.Tensor, adapter_slots: int) -> None:
        """Finds the tokens of each adapter, see AddLowRank."""
        self._tokens = {
            slot: torch.nonzero(token_adapters == slot).flatten()
            for slot in torch.unique(token_adapters).tolist()
            if slot > 0
        }

    def __call__(self, x: torch.Tensor, matrices: LowRankMatrices, y: torch.Tensor) -> None:
        """Adds the products of the step's adapters to y, see AddLowRank."""
        a, b, parts = matrices
        rank = b.shape[2]
        for slot, tokens in self._tokens.items():
            low = torch.nn.functional.linear(x[tokens], a[slot - 1])
            added = [
                torch.nn.functional.linear(low[:, at * rank : (at + 1) * rank], b[slot - 1, part])
                for at, part in enumerate(parts)
            ]
            y[tokens] += torch.cat(added, dim=1)


def low_rank_kernel(device: torch.device) -> AddLowRank:
    """Returns what adds adapters' products on `device`."""
    if device.type != "cuda":
        return LowRankOnHost()
    from pipeinfer.kernels.gemm import LowRankGemm

    return LowRankGemm()


class AdaptedLinear:
    """The adapters of one layer.

    Attributes:
    - modules: parts of the layer's product
    - matrices: zeros in the slot of an adapter that does not change the layer
    - permutation: int64 [n]; the layer's row i < n is row permutation[i] on disk; None: rows are as
      on disk
    """

    def __init__(self, bank: AdapterBank, modules: Iterable[AdaptedModule]) -> None:
        self._bank = bank
        self.modules = tuple(modules)
        self.permutation: torch.Tensor | None = None
        parts = tuple(module.at for module in self.modules)
        columns = self.modules[0].columns
        size = bank.rank * len(self.modules), columns.stop - columns.start
        rows = max(part.stop for part in parts)
        slots, options = bank.adapter_slots, {"dtype": bank.dtype, "device": bank.device}
        self.matrices = LowRankMatrices(
            torch.zeros(slots, *size, **options),
            torch.zeros(slots, rows, bank.rank, **options),
            parts,
        )

    @property
    def active(self) -> bool:
        """Whether some token of the step has an adapter."""
        return self._bank.active

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y [T, out], to which the products of x [T, in] with its tokens' adapters were added."""
        if self._bank.active:
            self._bank.add_low_rank(x, self.matrices, y)
        return y

    def laid_out(self, pairs: Mapping[str, LowRankPair]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the content of one slot of `a` and of `b`, on the host."""
        rank, dtype = self._bank.rank, self._bank.dtype
        a = torch.zeros(self.matrices.a.shape[1:], dtype=torch.float32)
        b = torch.zeros(self.matrices.b.shape[1:], dtype=torch.float32)
        for at, module in enumerate(self.modules):
            pair = pairs.get(module.name)
            if pair is None:
                continue
            begin, size = at * rank, pair.a.shape[0]
            a[begin : begin + size] = pair.a[:, module.columns].float()
            b[module.at, :size] = pair.b[module.rows].float() * pair.scale
        if self.permutation is not None:
            b[: len(self.permutation)] = b[self.permutation]
        return a.to(dtype), b.to(dtype)


class AdapterWeights(NamedTuple):
    """An adapter on the host, as the bank has it: (a, b) of each layer that it changes."""

    layers: dict[AdaptedLinear, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class AdapterBank:
    """Memory for adapters, for all layers of one rank's share.

    Attributes:
    - adapter_slots: number of adapters that there is room for
    - rank: of an adapter at most
    - dtype, device: of the matrices
    - active: whether some token of the step that is queued now has an adapter
    - layers: by the names of their modules
    """

    adapter_slots: int
    rank: int
    dtype: torch.dtype
    device: torch.device
    active: bool = False
    layers: dict[tuple[str, ...], AdaptedLinear] = field(
        default_factory=dict[tuple[str, ...], AdaptedLinear]
    )

    def __post_init__(self) -> None:
        self.add_low_rank = low_rank_kernel(self.device)

    def linear(self, modules: Iterable[AdaptedModule]) -> AdaptedLinear:
        """Returns the adapters of a layer. A model that is built again gets the same ones."""
        listed = tuple(modules)
        key = tuple(module.name for module in listed)
        if key not in self.layers:
            self.layers[key] = AdaptedLinear(self, listed)
        return self.layers[key]

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Returns [out_features, in_features] of every matrix that an adapter may change, by
        name.
        """
        return {
            module.name: module.shape for layer in self.layers.values() for module in layer.modules
        }

    def laid_out(self, pairs: Mapping[str, LowRankPair]) -> AdapterWeights:
        """An adapter of these pairs, by names of modules."""
        changed = (
            layer
            for layer in self.layers.values()
            if any(module.name in pairs for module in layer.modules)
        )
        return AdapterWeights({layer: layer.laid_out(pairs) for layer in changed})

    @torch.inference_mode()
    def put(self, adapter_slot: int, weights: AdapterWeights) -> None:
        """Puts an adapter into `adapter_slot`, 1 to `adapter_slots`, in place of the one there; on
        the current stream.
        """
        for layer in self.layers.values():
            found = weights.layers.get(layer)
            for at, target in enumerate((layer.matrices.a, layer.matrices.b)):
                if found is None:
                    target[adapter_slot - 1].zero_()
                else:
                    target[adapter_slot - 1].copy_(found[at])

    def reserve(self, tokens: int) -> None:
        """Makes room for steps of `tokens` tokens."""
        self._numbers = torch.arange(tokens, dtype=torch.int32, device=self.device)

    @contextmanager
    def step(self, step: DeviceStep, adapter_slots: torch.Tensor) -> Generator[None]:
        """Returns a context in which the products of `step` are queued, some of whose tokens have
        an adapter. adapter_slots: int32, by request slot, where the request's adapter lies.
        """
        tokens, rows = step.shape.num_tokens, step.shape.num_rows
        slots = step.slots
        if step.shape.num_prefills:
            ends, numbers = step.qo_indptr[1:], self._numbers[:tokens]
            row = torch.searchsorted(ends, numbers, right=True).clamp_(max=rows - 1)
            slots = slots[row]
        with self.adapting(adapter_slots[slots]):
            yield

    @contextmanager
    def adapting(self, token_adapters: torch.Tensor) -> Generator[None]:
        """Returns a context in which products are those of tokens with these adapters, see
        AddLowRank.
        """
        self.add_low_rank.begin_step(token_adapters, self.adapter_slots)
        self.active = True
        try:
            yield
        finally:
            self.active = False
