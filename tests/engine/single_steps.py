"""Steps by hand, and a minimal driver that gives requests pages and turns chunks into steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.step_builder import filled
from pipeinfer.step import LAST_TOKEN, Sampled, Step
from step_pages import all_pages


class HostFlight:
    """A step that `run` computes on a device, as those of a runner are."""

    def __init__(self, device: HostDevice, run: Callable[[], Sampled]) -> None:
        self._sampled: list[Sampled] = []
        self.event = device.submit(lambda: self._sampled.append(run()))

    def take(self) -> Sampled:
        self.event.wait()
        return self._sampled[0]


class HostRunner:
    """Runs steps by a function on the host's device."""

    def __init__(self, run: Callable[[Step], Sampled]) -> None:
        self.device, self.run = HostDevice(), run

    def launch(self, step: Step, before: Callable[[Step], None] | None = None) -> HostFlight:
        def run() -> Sampled:
            if before is not None:
                before(step)
            return self.run(step)

        return HostFlight(self.device, run)


def empty_step(number: int = 0) -> Step:
    """A step without rows."""
    return build_step([], number, max_pages=1)


@dataclass
class Row:
    """One request's part of a step. `tokens` None: the id that the last step left."""

    slot: int
    start: int
    tokens: list[int] | None
    pages: np.ndarray
    samples: bool
    temperature: float = 0.0
    seed: int = 0

    @property
    def count(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


def build_step(rows: list[Row], number: int, max_pages: int) -> Step:
    """Single-token rows first, as a step must have them; otherwise in the order given."""
    rows = sorted(rows, key=lambda row: row.count != 1)
    sampling = [row for row in rows if row.samples]
    tokens: list[int] = []
    for row in rows:
        tokens += [LAST_TOKEN] if row.tokens is None else row.tokens
    return Step(
        epoch=0,
        number=number,
        num_decodes=sum(row.count == 1 for row in rows),
        slots=np.array([row.slot for row in rows], dtype=np.int32),
        starts=np.array([row.start for row in rows], dtype=np.int32),
        counts=np.array([row.count for row in rows], dtype=np.int32),
        samples=np.array([row.samples for row in rows], dtype=bool),
        tokens=np.array(tokens, dtype=np.int32),
        fields=fields_of(sampling),
        delta=replace(
            all_pages(
                [row.slot for row in rows],
                np.array([row.pages for row in rows], dtype=np.int32).reshape(len(rows), max_pages),
            ),
            admitted=np.array([row.slot for row in rows], dtype=np.int32),
            fields=fields_of(rows),
        ),
    )


def fields_of(rows: list[Row]) -> dict[str, np.ndarray]:
    """What is declared of sampling, of these rows."""
    return filled(
        len(rows),
        temperature=[row.temperature for row in rows],
        seed=[row.seed for row in rows],
    )


@dataclass
class Request:
    """A prompt, its outputs so far, and pages scattered over the pool."""

    slot: int
    prompt: list[int]
    pages: np.ndarray
    temperature: float = 0.0
    computed: int = 0
    outputs: list[int] = field(default_factory=list)


class Driver:
    """Feeds requests to a runner: prompts in chunks, then one token a step, all in one batch."""

    def __init__(self, runner, prompts: list[list[int]], length: int, temperature: float = 0.0):
        size = runner.pool.page_size
        per_request = -(-(max(map(len, prompts)) + length) // size)
        order = np.random.default_rng(0).permutation(runner.pool.num_pages - 1) + 1
        self.runner = runner
        self.length = length
        self.max_pages = per_request
        self.steps = 0
        self.requests = [
            Request(slot, prompt, order[slot * per_request : (slot + 1) * per_request], temperature)
            for slot, prompt in enumerate(prompts)
        ]

    def run(self, chunk: int, stagger: int = 0) -> list[list[int]]:
        """Outputs of all requests; request i joins at step i * stagger."""
        while any(len(request.outputs) < self.length for request in self.requests):
            active = [
                request
                for request in self.requests
                if len(request.outputs) < self.length and self.steps >= request.slot * stagger
            ]
            self._step(active, chunk)
        return [request.outputs for request in self.requests]

    def _step(self, active: list[Request], chunk: int) -> None:
        rows = [self._row(request, chunk) for request in active]
        step = build_step(rows, self.steps, self.max_pages)
        by_slot = {request.slot: request for request in active}
        ids = self.runner.run(step).ids
        for slot, token in zip(step.slots[step.samples], ids, strict=True):
            by_slot[int(slot)].outputs.append(int(token))
        for row in rows:
            by_slot[row.slot].computed += row.count
        self.steps += 1

    def _row(self, request: Request, chunk: int) -> Row:
        start = request.computed
        left = request.prompt[start : start + chunk]
        samples = start + max(len(left), 1) >= len(request.prompt)
        return Row(
            request.slot, start, left or None, request.pages, samples, request.temperature,
            seed=request.slot,
        )  # fmt: skip
