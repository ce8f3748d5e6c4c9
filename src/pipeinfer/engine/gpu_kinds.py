"""Which kind of GPU can run what, as the code that chooses says, and what was ever run there.

docs/gpus.md has the table, `pipeinfer doctor` a line of it. Knows capabilities; it asks no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeinfer.attention import registry
from pipeinfer.attention.registry import Gpu
from pipeinfer.layers.quantized_float import FP8_MIN_CAPABILITY
from pipeinfer.layers.weight import MIN_SHARED_MEMORY_BYTES

HEADS = (64, 96, 128, 192, 256)
ALL_PACKAGES: frozenset[str] = frozenset({"flashinfer", "sgl_kernel"})
YES, PLAIN = "in their format", "plain"
TABLE_HEAD = (
    "capability",
    "GPUs",
    "attention, heads",
    "FP8 weights",
    "4 bits",
    "FP8 KV",
    "run so far",
)


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one capability. shared_bytes: of memory that a block may have; run: what was run
    on one, in words; missing: what never was, though code is there for it."""

    capability: tuple[int, int]
    names: str
    shared_bytes: int
    run: str = "nothing"
    missing: str = ""

    @property
    def number(self) -> str:
        """As NVIDIA writes it."""
        return "{}.{}".format(*self.capability)

    @property
    def backends(self) -> dict[str, tuple[int, ...]]:
        """Head sizes by the attention backend that takes them in bfloat16, all packages there."""
        found = {
            name: tuple(dim for dim in HEADS if self._supports(name, dim))
            for name in registry.BACKENDS
        }
        return {name: dims for name, dims in found.items() if dims}

    def _supports(self, name: str, dim: int, e4m3: bool = False) -> bool:
        gpu = Gpu(self.capability, "bfloat16", dim, ALL_PACKAGES, e4m3=e4m3)
        return registry.obstacle(name, gpu) == ""

    @property
    def fp8_weights(self) -> str:
        """In which format FP8 weights are computed: their own, or plain."""
        fits = (
            self.capability >= FP8_MIN_CAPABILITY and self.shared_bytes >= MIN_SHARED_MEMORY_BYTES
        )
        return YES if fits else PLAIN

    @property
    def int4_weights(self) -> str:
        """In which format FP8 weights are computed: their own, or plain."""
        return YES if self.shared_bytes >= MIN_SHARED_MEMORY_BYTES else PLAIN

    @property
    def fp8_kv(self) -> str:
        """The backends that take it, for heads of 128."""
        names = [name for name in registry.BACKENDS if self._supports(name, 128, e4m3=True)]
        return ", ".join(names)

    def cells(self) -> tuple[str, ...]:
        """A row of the table, under HEAD."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, dims in self.backends.items():
            groups.setdefault(dims, []).append(name)
        attention = "; ".join(
            f"{', '.join(names)}: {'all' if dims == HEADS else ', '.join(map(str, dims))}"
            for dims, names in groups.items()
        )
        run = f"{self.run}; not yet: {self.missing}" if self.missing else self.run
        formats = (self.fp8_weights, self.int4_weights, self.fp8_kv)
        return (self.number, self.names, attention, *formats, run)


KINDS: Sequence[GpuKind] = (
    GpuKind((8, 0), "A100", 163 * 1024),
    GpuKind((8, 9), "L4, L40S, RTX 4090", 99 * 1024),
    GpuKind(
        (9, 0),
        "H100, H200",
        227 * 1024,
        run="bfloat16 and float16, heads of 64 and 128, with flashinfer 256, FP8 and 4 bits, "
        "FP8 KV, models of transformers",
        missing="other heads of 256, FP8 KV with flashinfer but for heads of 64",
    ),
    GpuKind((10, 0), "B200", 227 * 1024),
)


def doctor_line(capability: tuple[int, int]) -> str:
    """The line of `pipeinfer doctor` about a GPU of that capability."""
    kind = next((one for one in KINDS if one.capability == capability), None)
    if kind is None:
        return "pipeinfer was never run on this kind of GPU"
    run = f"of this kind, what was run: {kind.run}"
    return f"{run}; not yet: {kind.missing}" if kind.missing else run


def table() -> str:
    """All kinds, in Markdown."""
    rows = (TABLE_HEAD, ("---",) * len(TABLE_HEAD), *(kind.cells() for kind in KINDS))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
