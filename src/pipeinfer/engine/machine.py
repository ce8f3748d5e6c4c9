"""What an engine stands on: everything of it that depends on the kind of device, in one place.

Knows settings and bytes; no model and no step. The GPU's is in engine/cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from pipeinfer.engine.device import Device, HostDevice
from pipeinfer.engine.host_memory import available_bytes, return_freed_memory
from pipeinfer.kernels import host
from pipeinfer.kernels.interface import Kernels

if TYPE_CHECKING:
    from pipeinfer.engine.runner import Runner

# A pool on the host competes with everything else that runs there, so it is not taken as large as
# it could be; --kv-pages takes more.
MAX_HOST_BYTES = 4 * 2**30
HOST_STEP_TOKENS = 2048

Built = TypeVar("Built")


class Machine(Protocol):
    """One rank's."""

    @property
    def where(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def device(self) -> Device:
        """What works off its steps."""
        ...

    @property
    def kernels(self) -> Kernels:
        """For tensors that are there."""
        ...

    @property
    def step_tokens(self) -> int:
        """Of the largest step, unless settings say otherwise."""
        ...

    def build(self, work: Callable[[], Built], /) -> Built:
        """What `work` gives, called on the thread that builds engines here."""
        ...

    def warm_up(self, runner: Runner, max_tokens: int, /) -> None:
        """Has everything compiled and allocated that steps need, before memory is looked at; a
        request has at most so many tokens."""
        ...

    def free_for_pages(self, fraction: float, /) -> int:
        """Bytes for KV pages, if `fraction` of its memory may be in use."""
        ...


class HostMachine:
    """This host, one of `ranks` that share it."""

    step_tokens = HOST_STEP_TOKENS

    def __init__(self, threads: int, ranks: int) -> None:
        """Sets torch's number of threads; 0: all cores, shared with the other ranks."""
        if threads or ranks > 1:
            torch.set_num_threads(threads or max(torch.get_num_threads() // ranks, 1))
        self.device = HostDevice()
        self.kernels: Kernels = host
        self.where = torch.device("cpu")
        self._ranks = ranks
        self._sampling_bytes = 0

    def build(self, work: Callable[[], Built]) -> Built:
        """On the thread that computes steps. OpenMP has a team of threads for each thread that ever
        computed anything large; with two such teams on the same cores each barrier of a step would
        put its threads to sleep, and steps took up to twice as long. What was only needed to read
        weights goes back to the kernel."""
        built: list[Built] = []
        self.device.run(lambda: built.append(work()))
        return_freed_memory()
        return built[0]

    def warm_up(self, runner: Runner, max_tokens: int) -> None:
        """Nothing is compiled here; what sampling takes is noted."""
        self._sampling_bytes = runner.sampling_bytes

    def free_for_pages(self, fraction: float) -> int:
        of_rank = int(available_bytes() // self._ranks * fraction)
        return min(of_rank - self._sampling_bytes, MAX_HOST_BYTES)
