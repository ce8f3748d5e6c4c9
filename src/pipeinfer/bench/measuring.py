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
from pipeinfer.bench.jobs import Begin, Job, Report, Result
from pipeinfer.bench.lag import Own
from pipeinfer.bench.latency import Timeline
from pipeinfer.bench.load import Load
from pipeinfer.bench.prompts import Drawn, Listed

MODULE = "pipeinfer.bench.client_process"
SOON = 0.1  # seconds until all begin, once all are ready

Progress = Callable[[Report], None]


class ClientDied(RuntimeError):
    """A process of the client ended before its work did; its own words are on stderr."""


@dataclass(frozen=True)
class Measured:
    """What all processes saw: every request, and how each process did."""

    lines: list[Timeline]
    owns: list[Own]


def measure(
    endpoint: Endpoint,
    source: Drawn | Listed,
    load: Load,
    processes: int = 1,
    progress: Progress = lambda report: None,
) -> Measured:
    """Sends the load by so many processes. `progress` hears of all of them together.

    Raises ClientDied.
    """
    many = max(min(processes, load.streams), 1)
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder:
        try:
            for first in range(many):
                children.append(pipes.start(MODULE, {}))
                job = Job(endpoint, source, load.share(Path(folder), first, many))
                _say(children[-1], job)
            reports = [_hear(child) for child in children]  # all are ready
            begin = Begin(time.perf_counter() + SOON)
            for child in children:
                _say(child, begin)
            return joined(_followed(children, reports, progress))
        finally:
            for child in children:
                _end(child)


def joined(results: Sequence[Result]) -> Measured:
    """What several processes saw, as if it had been one; in the order in which it was due."""
    lines = [line for result in results for line in result.lines]
    lines.sort(key=lambda line: line.due)
    return Measured(lines, [result.own for result in results])


def total(reports: Sequence[Report]) -> Report:
    """How far all are together."""
    return Report(
        done=sum(report.done for report in reports),
        failed=sum(report.failed for report in reports),
        running=sum(report.running for report in reports),
        tokens=sum(report.tokens for report in reports),
    )


def _followed(
    children: Sequence[subprocess.Popen[bytes]], reports: list[Report], progress: Progress
) -> list[Result]:
    """Hears all processes until each has said what it saw."""
    results: dict[int, Result] = {}
    numbers = {cast(BinaryIO, child.stdout).fileno(): n for n, child in enumerate(children)}
    while len(results) < len(children):
        waiting = [fd for fd, number in numbers.items() if number not in results]
        for fd in select.select(waiting, [], [])[0]:
            number = numbers[fd]
            reports[number] = _hear(children[number])
            result = reports[number].result
            if result is not None:
                results[number] = result
        progress(total(reports))
    return [results[number] for number in range(len(children))]


def _say(child: subprocess.Popen[bytes], message: Job | Begin) -> None:
    try:
        pipes.write(cast(BinaryIO, child.stdin), jobs.encoded(message))
    except BrokenPipeError:
        raise _died(child) from None


def _hear(child: subprocess.Popen[bytes]) -> Report:
    frame = pipes.read(cast(BinaryIO, child.stdout).fileno())
    if frame is None:
        raise _died(child)
    return msgspec.msgpack.decode(frame, type=Report)


def _died(child: subprocess.Popen[bytes]) -> ClientDied:
    return ClientDied(f"a process of the client ended with {child.wait()}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """The end of its input ends a process, whatever it is at."""
    for pipe in (child.stdin, child.stdout):
        cast(BinaryIO, pipe).close()
    child.wait()
