"""What an engine gives back while it sleeps, and has again when it wakes: pages and weights.

    EngineMemory       a rank's pool and weights, and what its memory holder has of them
    ReloadableModel    a model of a host, which can be dropped and loaded anew

Knows no plan and no kind of device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from pipeinfer.engine.kept_memory import POOL, KeptMemory
from pipeinfer.layers.attention import Attend
from pipeinfer.models.causal_lm import LanguageModel, VocabShard
from pipeinfer.runtime.memory_holder import Keep
from pipeinfer.step import AttentionShape

if TYPE_CHECKING:
    from pipeinfer.engine.device_memory import DeviceMemory

WITHOUT_WEIGHTS = 2  # the level of sleep from which on weights are loaded anew


class SleepingWeights(Protocol):
    """A rank's weights, of which no step is under way."""

    @property
    def memories(self) -> dict[str, DeviceMemory]:
        """Their memory that a memory holder has, by name."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if they are not as they were when this process had them first."""
        ...

    def give_back(self, level: int, /) -> None:
        """As SetSleep(level) says; they may be at a lower level already."""
        ...

    def take_back(self) -> None:
        """They are as before, at the same addresses."""
        ...


class EngineMemory:
    """Pool and weights of one rank, whose pool is `kept` (KeptMemory.opened).

    To sleep: `withdraw`, then `give_back`. To wake: `take_back`, then `keep`. give_back and
    take_back take long, and may be called on any thread; `run` calls what they do where steps are
    computed, when all that was launched has ended.
    """

    def __init__(
        self, kept: KeptMemory, weights: SleepingWeights, run: Callable[[Callable[[], None]], None]
    ) -> None:
        assert kept.opened is not None
        self._kept = kept
        self._pool, self._directory = kept.opened.memory, kept.opened.directory
        self._weights = weights
        self._run = run
        self._withdrawn: list[Keep] = []
        self._has_pool = True

    def withdraw(self) -> None:
        """Nobody believes the pages any more, and the memory holder has no memory of this rank that
        it would keep from others. On the event loop."""
        self._directory.make_unusable()
        self._withdrawn += self._kept.withdraw(POOL, *self._weights.memories)

    def give_back(self, level: int) -> None:
        """Memory that others may use; `level`: of SetSleep."""
        self._run(lambda: self._give_back(level))

    def _give_back(self, level: int) -> None:
        if self._has_pool:
            self._has_pool = False
            self._pool.give_back()
        self._weights.give_back(level)
        gc.collect()

    def take_back(self) -> None:
        """All is there again, pages as zeros. Raises RuntimeError where there is no memory."""
        self._run(self._take_back)

    def _take_back(self) -> None:
        self._weights.take_back()
        self._pool.take_back()
        self._has_pool = True

    def keep(self) -> None:
        """The memory holder has all again. On the event loop."""
        memory = {POOL: self._pool, **self._weights.memories}
        for entry in self._withdrawn:
            self._kept.keep(entry.name, entry.kind, entry.note, memory[entry.name].descriptor)
        self._withdrawn.clear()


class ReloadableModel:
    """See LanguageModel and SleepingWeights. Its weights are in memory of the host already, so at
    level 1 they stay."""

    def __init__(self, load: Callable[[], LanguageModel], trim: Callable[[], None]) -> None:
        """load: makes the model with its weights. trim: gives freed memory to the kernel."""
        self._load, self._trim = load, trim
        self._model: LanguageModel | None = load()
        self._shapes = self._model.attention_shapes()
        self.vocab_shard: VocabShard = self._model.vocab_shard
        self.capture_may_fail = self._model.capture_may_fail
        self.memories: dict[str, DeviceMemory] = {}

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._loaded(tokens, positions, attend, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._loaded.logits(hidden)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._loaded.local_logits(hidden)

    def attention_shapes(self) -> Sequence[AttentionShape]:
        return self._shapes

    def check(self) -> None:
        """No other process has them."""

    def give_back(self, level: int) -> None:
        if level >= WITHOUT_WEIGHTS:
            self._model = None
            gc.collect()
            self._trim()

    def take_back(self) -> None:
        if self._model is None:
            self._model = self._load()
            self._trim()

    @property
    def _loaded(self) -> LanguageModel:
        if self._model is None:
            raise RuntimeError("the model sleeps: its weights are not there")
        return self._model
