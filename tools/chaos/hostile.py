"""`hostile`: while one client sends the worst that it may, eight others' streams must go on.

A real server with the demo model. The streams' longest gap is taken in calm first; then each case
of chaos/cases.py is sent in a loop from a process of its own. Broken: a gap more than 0.5 s longer
than in calm, a failed stream, a restarted process, an answer of another status than expected.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.cases import CASES, Case
from chaos.serving import Serving
from chaos.streams import TOOL, Calm, Streams
from pipeinfer.gateway.api_keys import new_key

BEYOND = 0.5  # seconds
STARTING = 60.0  # seconds for a case's requests to be built
ENGINE = {"threads": 1, "log_level": "info"}


@dataclass(frozen=True)
class Found:
    """What a case did. gap, first: the streams' longest, in seconds; cpu: the hostile client's
    share of a core; tracebacks: new ones in the server's log."""

    case: str
    sent: int
    statuses: dict[str, int]
    gap: float
    first: float
    pieces: int
    cpu: float
    restarts: int
    tracebacks: int
    broken: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds without any of them")
    parser.add_argument("--streams", type=int, default=8)
    said = "requests that the hostile client's key may have at a time"
    parser.add_argument("--concurrent", type=int, default=16, help=said)
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--list", action="store_true", help="names the cases, and does nothing")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints a table while it goes on."""
    cases = [case for case in CASES if options.only in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return {"broken": []}
    with _keys(options.concurrent) as (file, good, bad), ExitStack() as stack:  # good: no limits
        server = stack.enter_context(Serving({**ENGINE, "api_key_file": file, **settings}))
        streams = stack.enter_context(Streams(server.url, options.streams, good))
        streams.settle()
        began = time.monotonic()
        time.sleep(options.calm)
        calm = streams.told.between(began, time.monotonic())
        _say("calm", "", calm.gap, calm.first, 0.0, calm.pieces / (time.monotonic() - began), "")
        found = []
        for case in cases:
            key = good if case.unlimited else bad
            found.append(_suffered(case, server, streams, (options.seconds, key), calm))
            if server.process.poll() is not None:
                break
    return {
        "calm": asdict(calm),
        "cases": [asdict(one) for one in found],
        "longest_gap": max((one.gap for one in found), default=0.0),
        "longest_first": max((one.first for one in found), default=0.0),
        "broken": [f"{one.case}: {what}" for one in found for what in one.broken],
    }


@contextmanager
def _keys(concurrent: int) -> Iterator[tuple[str, str, str]]:
    """(a file of two keys, the key of the eight, the key of the hostile client)."""
    good, good_line = new_key("good")
    bad, bad_line = new_key("bad")
    with tempfile.TemporaryDirectory(prefix="pipeinfer-chaos-") as folder:
        file = Path(folder, "keys.txt")
        file.write_text(f"{good_line}\n{bad_line} concurrent={concurrent}\n")
        yield str(file), good, bad


def _suffered(
    case: Case, server: Serving, streams: Streams, attack: tuple[float, str], calm: Calm
) -> Found:
    """Sends a case, and looks at everybody else."""
    pids, tracebacks = server.pids(), server.tracebacks()
    began, said = _attack(case, server.url, *attack)
    settled = streams.settle()
    ended = time.monotonic()
    during = streams.told.between(began, ended)
    now = _pids(server)
    restarts = sum(now.get(stage) != pid for stage, pid in pids.items())
    broken = [f"unexpected answer: {text}" for text in said["unexpected"]]
    broken += [f"a stream failed: {text}" for text in during.failed[:3]]
    if not settled:
        broken.append("a stream never went on")
    if during.gap > calm.gap + BEYOND:
        broken.append(f"a gap of {during.gap:.2f} s; in calm it is {calm.gap:.2f} s")
    if during.first > calm.first + BEYOND and not case.unlimited:
        broken.append(f"a first token after {during.first:.2f} s; in calm {calm.first:.2f} s")
    if restarts:
        broken.append(f"{restarts} processes are others now")
    found = Found(
        case.name, said["sent"], said["statuses"], during.gap, during.first, during.pieces,
        said["cpu"], restarts, server.tracebacks() - tracebacks, broken,
    )  # fmt: skip
    rate = during.pieces / (ended - began)
    statuses = " ".join(f"{status}:{count}" for status, count in said["statuses"].items())
    notes = "; ".join(broken)[:300]
    _say(case.name, statuses, during.gap, during.first, said["cpu"], rate, notes)
    return found


def _attack(case: Case, url: str, seconds: float, key: str) -> tuple[float, dict[str, Any]]:
    """(when it began, what it did) of an `attack` in a process of its own."""
    words = ["attack", "--url", url, "--case", case.name, "--seconds", str(seconds)]
    words += ["--key", key]
    with subprocess.Popen(
        [sys.executable, TOOL, *words], stdout=subprocess.PIPE, text=True
    ) as process:
        printed, _ = process.communicate(timeout=STARTING + 2 * seconds)
    began, said = printed.strip().split("\n")
    return float(began), json.loads(said)


def _pids(server: Serving) -> dict[Any, int]:
    try:
        return server.pids()
    except OSError:
        return {}


def _say(
    name: str, statuses: str, gap: float, first: float, cpu: float, rate: float, notes: str
) -> None:
    print(
        f"{name:34} gap {gap:6.3f} first {first:6.3f} {rate:6.0f}/s cpu {cpu:4.0%}"
        f"  {statuses[:60]:60} {notes}",
        file=sys.stderr,
        flush=True,
    )
