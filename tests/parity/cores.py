"""Scheduler core, engine core and model runner in one thread, for tests: no bus, no processes.

The real parts and the real messages; only the shells are missing, so a whole run is repeatable and
every logit can be seen.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import msgspec
import numpy as np

from kept_logits import kept
from pipeinfer.core import Compiled, Tick
from pipeinfer.engine.core import (
    AdapterRead,
    Compile,
    Compute,
    EngineCore,
    FillPages,
    FindPages,
    FoundPages,
    InvalidatePages,
)
from pipeinfer.engine.executor import step_done
from pipeinfer.engine.loading import load_engine
from pipeinfer.engine.lora import load_adapter
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.page_directory import ChainTracker, PageDirectory, directory_bytes
from pipeinfer.messages import (
    PROTOCOL,
    Hello,
    LoadAdapter,
    Plan,
    PromptTokens,
    TokenizedRequest,
    Tokens,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.policies import Mixed, StepComposer
from pipeinfer.settings import Settings
from pipeinfer.wire import pack, unpack


class Nuisance:
    """A policy that takes a running request back every few steps, whatever memory there is."""

    def __init__(self) -> None:
        self._mixed, self._steps = Mixed(), 0

    def compose(self, composer: StepComposer) -> None:
        self._steps += 1
        if self._steps % 6 == 0:
            composer.preempt_one()
        self._mixed.compose(composer)


class Cores:
    """One scheduler and one engine over the checkpoint in `folder`.

    logits: (request id, position) -> float32 [vocab] from which the token there was sampled. With
    `collectives`, of that rank's share; the cores of all ranks then do the same at the same time.
    `loaded`: an engine whose former cores are not used any more, instead of loading one. `masks`:
    for requests with a grammar. `late`: whoever runs them captures most graphs. `keeps_pages`: what
    steps have filled is written into `directory`.
    """

    def __init__(
        self, folder, settings: Settings, policy="mixed", budget=256, collectives=None, loaded=None,
        masks=None, late=False, keeps_pages=False,
    ) -> None:  # fmt: skip
        rank = collectives.rank if collectives else 0
        settings = msgspec.structs.replace(settings, all_graphs_first=not late)
        loaded = loaded or load_engine(settings, folder, rank=rank, collectives=collectives)
        self.loaded = loaded
        self.masks = masks
        sizes = loaded.pages, loaded.page_size
        self.directory = PageDirectory(memoryview(bytearray(directory_bytes(*sizes))), *sizes)
        self.directory.begin(b"model")
        self.memory = MemoryManager(
            *sizes, loaded.max_slots, loaded.max_model_len, settings.cache,
            ChainTracker(*sizes, loaded.max_slots) if keeps_pages else None,
        )  # fmt: skip
        hello = Hello(
            PROTOCOL, "test", 0, 1, 1, "model", loaded.page_size, loaded.pages - 1,
            loaded.max_slots, loaded.max_model_len, loaded.attention,
            step_cost=loaded.step_cost, max_drafts=loaded.max_drafts,
            max_draft_rows=loaded.max_draft_rows, draft_model=loaded.draft_model,
        )  # fmt: skip
        shares = loaded.runner.shares
        self.engine = EngineCore(hello, "scheduler-0", self.memory, shares=shares)
        options = SchedulerOptions(
            policy, settings.overlap_depth, settings.max_running, budget,
            mixed_step_tokens=settings.mixed_step_tokens,
            max_loras=settings.max_loras if settings.enable_lora else 0,
        )  # fmt: skip
        self.scheduler = SchedulerCore(options)
        self.scheduler._planner._drafter.min_rate = 0.0  # every guess is verified
        self.logits: dict[tuple[str, int], np.ndarray] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.logprobs: dict[str, bytes] = {}  # entries of outputs, and of prompts
        self.prompt_logprobs: dict[str, bytes] = {}
        self._slots: dict[int, str] = {}
        self._steps: deque = deque()
        self._results: deque = deque()
        self._to_scheduler(self.engine.handle(Tick(), 0.0)[0].message)
        self._run_one_result()

    def submit(self, name: str, prompt: list[int], params: RequestParams, seed=0, **work) -> None:
        self.outputs[name], self.logprobs[name], self.prompt_logprobs[name] = [], b"", b""
        self._to_scheduler(TokenizedRequest(name, 1, 0, 0, pack(prompt), params, seed, **work))

    def run(self, until=None) -> None:
        """Until nothing is left to do, or `until()` is true.

        Results are held back as long as possible, so depth 2 really has two steps in flight.
        """
        while not (until and until()):
            if self._steps:
                self._run_step(self._steps.popleft())
            elif not self._run_one_result():
                return

    def _to_scheduler(self, message) -> None:
        for send in self.scheduler.handle(message, 0.0):
            if send.channel == "plan":
                self._to_engine(send.message)
            elif isinstance(send.message, Tokens):
                for row in send.message.rows:
                    assert row.offset == len(self.outputs[row.request_id])
                    self.outputs[row.request_id] += unpack(row.ids).tolist()
                    self.logprobs[row.request_id] += row.logprobs
                    self.cached[row.request_id] = row.cached_tokens
                    if row.finish is not None:
                        self.finished[row.request_id] = row.finish
            elif isinstance(send.message, PromptTokens):
                told = send.message
                self.prompt_logprobs[told.request_id] += told.logprobs
                assert told.first * 4 + len(told.ids) == len(self.ids_with_logprobs(told))

    def ids_with_logprobs(self, told: PromptTokens) -> bytes:
        """As many bytes of ids as there are entries of the prompt so far."""
        width = len(told.logprobs) // (len(told.ids) // 4)
        return bytes(len(self.prompt_logprobs[told.request_id]) // width * 4)

    def _to_engine(self, message) -> None:
        if isinstance(message, Plan):
            for admit in message.admits:
                self._slots[admit.slot] = admit.request_id
        for send in self.engine.handle(message, 0.0):
            if isinstance(send.message, Compile):
                self._to_engine(Compiled(send.message.request_id))
            elif isinstance(send.message, FindPages):
                self._to_engine(FoundPages.of(self.directory.read().verified()))
            elif isinstance(send.message, InvalidatePages):
                self.directory.invalidate(send.message.pages)
            elif isinstance(send.message, FillPages):
                self.directory.validate(send.message.chains)
            elif isinstance(send.message, LoadAdapter):
                self._load_adapter(send.message)
            elif isinstance(send.message, Compute):
                # The slots of this step, before a later plan gives them to somebody else.
                names = [self._slots[slot] for slot in send.message.step.slots.tolist()]
                self._steps.append((send.message.step, names))
            else:
                self._results.append(send.message)
        self.memory.check_integrity()

    def _load_adapter(self, load: LoadAdapter) -> None:
        """At once: there must be a slot for each adapter."""
        bank = self.loaded.runner.adapters
        weights = load_adapter(load.adapter, bank)
        self.loaded.runner.device.run(lambda: bank.put(load.slot, weights))
        self._to_engine(AdapterRead(load.epoch, load.number))

    def _run_step(self, item) -> None:
        step, names = item
        runner = self.loaded.runner
        runner.keep_logits = True
        flight = runner.launch(step)
        if step.masked is not None:
            runner.sample_masked(flight, partial(self.masks.fill, step))
        sampled = flight.take()
        if self.masks is not None:
            sampled = self.masks.take(step, sampled)
        self._remember(step, names, flight)
        self._to_engine(step_done(step, sampled))

    def _remember(self, step, names, flight) -> None:
        """What the rows that sample sampled from, by request and position."""
        if flight.logits is None or step.drafts is not None:
            return  # where rows with drafts are, the device alone knows
        logits = kept(flight).float().cpu().numpy()
        ends = (step.starts + step.counts).tolist()
        sampling = np.flatnonzero(step.samples).tolist()
        for row, entry in enumerate(sampling):
            self.logits[names[entry], ends[entry]] = logits[row]

    def _run_one_result(self) -> bool:
        if not self._results:
            return False
        self._to_scheduler(self._results.popleft())
        return True
