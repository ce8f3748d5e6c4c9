"""One measurement: starts the client's processes, has them begin together, joins what they saw.

Knows processes and pipes. Requests are always sent by other processes than this one, so that what
it does, such as showing how far they are, delays nobody.
"""

from __future__ import annotations

import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from pipeinfer import pipes
from pipeinfer.bench import jobs
from pipeinfer.bench.endpoint import Endpoint
from pipeinfer.bench.jobs import StartSignal, WorkerJob, WorkerProgress, WorkerResult
from pipeinfer.bench.lag import ClientLoad
from pipeinfer.bench.latency import RequestTiming
from pipeinfer.bench.load import Load
from pipeinfer.bench.prompts import CustomDataset, RandomDataset

WORKER_MODULE = "pipeinfer.bench.client_process"
START_DELAY = 0.1  # seconds until all begin, once all are ready

ProgressCallback = Callable[[WorkerProgress], None]


class WorkerDied(RuntimeError):
    """A process of the client ended before its work did; its own words are on stderr."""


@dataclass(frozen=True)
class LoadResult:
    """What all processes saw: every request, and how each process did."""

    timings: list[RequestTiming]
    client_loads: list[ClientLoad]


def run_load(
    endpoint: Endpoint,
    dataset: RandomDataset | CustomDataset,
    load: Load,
    processes: int = 1,
    progress: ProgressCallback = lambda report: None,
) -> LoadResult:
    """Sends the load by so many processes. `progress` hears of all of them together.

    Raises ClientDied.
    """
    many = max(min(processes, load.streams), 1)
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder:
        try:
            for first in range(many):
                children.append(pipes.start(WORKER_MODULE, {}))
                job = WorkerJob(endpoint, dataset, load.share(Path(folder), first, many))
                _send(children[-1], job)
            reports = [_receive(child) for child in children]  # all are ready
            begin = StartSignal(time.perf_counter() + START_DELAY)
            for child in children:
                _send(child, begin)
            return join_results(_collect(children, reports, progress))
        finally:
            for child in children:
                _end(child)


def join_results(results: Sequence[WorkerResult]) -> LoadResult:
    """What several processes saw, as if it had been one; in the order in which it was due."""
    lines = [line for result in results for line in result.timings]
    lines.sort(key=lambda line: line.due)
    return LoadResult(lines, [result.client_load for result in results])


def total_progress(reports: Sequence[WorkerProgress]) -> WorkerProgress:
    """How far all are together."""
    return WorkerProgress(
        done=sum(report.done for report in reports),
        failed=sum(report.failed for report in reports),
        running=sum(report.running for report in reports),
        tokens=sum(report.tokens for report in reports),
    )


def _collect(
    children: Sequence[subprocess.Popen[bytes]],
    reports: list[WorkerProgress],
    progress: ProgressCallback,
) -> list[WorkerResult]:
    """Hears all processes until each has said what it saw."""
    results: dict[int, WorkerResult] = {}
    numbers = {cast(BinaryIO, child.stdout).fileno(): n for n, child in enumerate(children)}
    while len(results) < len(children):
        waiting = [fd for fd, number in numbers.items() if number not in results]
        for fd in select.select(waiting, [], [])[0]:
            number = numbers[fd]
            reports[number] = _receive(children[number])
            result = reports[number].result
            if result is not None:
                results[number] = result
        progress(total_progress(reports))
    return [results[number] for number in range(len(children))]


def _send(child: subprocess.Popen[bytes], message: WorkerJob | StartSignal) -> None:
    try:
        pipes.write(cast(BinaryIO, child.stdin), jobs.encode_message(message))
    except BrokenPipeError:
        raise _died(child) from None


def _receive(child: subprocess.Popen[bytes]) -> WorkerProgress:
    frame = pipes.read(cast(BinaryIO, child.stdout).fileno())
    if frame is None:
        raise _died(child)
    return msgspec.msgpack.decode(frame, type=WorkerProgress)


def _died(child: subprocess.Popen[bytes]) -> WorkerDied:
    return WorkerDied(f"a process of the client ended with {child.wait()}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """The end of its input ends a process, whatever it is at."""
    for pipe in (child.stdin, child.stdout):
        cast(BinaryIO, pipe).close()
    child.wait()
