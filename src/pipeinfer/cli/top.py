"""`pipeinfer top`: what the stages of a running server do at this moment, a line for each; and
single keys of a terminal, which end it.

Listens to heartbeats. Unless it looks once only, stages are asked for latencies, which they publish
only while they are asked. The web page shows the same figures.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.cli.operate import add_server_flags, chosen_topology
from pipeinfer.command_line import CommandLine, counted
from pipeinfer.control import Observed, Watch
from pipeinfer.gateway.health import Health, StageStatus, describe_takeover, expected_stages
from pipeinfer.gateway.monitor import (
    LatencyQuantiles,
    PipelineRates,
    PipelineSnapshot,
    StageSnapshot,
)
from pipeinfer.messages import Heartbeat
from pipeinfer.observe.spans import MEASURED_PART, StageDurations
from pipeinfer.runtime.logs import can_rewrite
from pipeinfer.topology import SUPERVISOR

QUIT = b"qQ"


class TerminalKeys:
    """Use it as a context manager: in it, a terminal gives keys without Enter and shows none.

    Without a terminal, in the background or if not `wanted`, nothing is read and nothing changes.
    `hint`: which key ends the command, "" if none does.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._source = -1
        self._quits = False
        if enabled and sys.stdin.isatty():
            source = sys.stdin.fileno()
            if not _in_background(source):
                self._source = source
        self.hint = "q ends" if self._source >= 0 else ""

    def __enter__(self) -> TerminalKeys:
        if self._source >= 0:
            self._before = termios.tcgetattr(self._source)
            self._handler = signal.signal(signal.SIGTERM, _end)  # or the terminal stays as it is
            tty.setcbreak(self._source)
        return self

    def __exit__(self, *_: object) -> None:
        if self._source >= 0:
            termios.tcsetattr(self._source, termios.TCSADRAIN, self._before)
            signal.signal(signal.SIGTERM, self._handler)

    def quit_pressed(self) -> bool:
        """Whether q was pressed; other keys do nothing."""
        while self._source >= 0 and not self._quits:
            if not select.select([self._source], [], [], 0)[0]:
                break
            keys = os.read(self._source, 1024)
            # A terminal that has gone is always readable, and gives nothing.
            self._quits = not keys or any(key in QUIT for key in keys)
        return self._quits


def _in_background(terminal: int) -> bool:
    """Whether the process would be stopped if it changed `terminal`."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # it is not the terminal that controls this process
        return False


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


FIRST_LOOK_SECONDS = 3.0  # seconds in which two heartbeats of every stage should come
WATCH_MARGIN = 2.5  # seconds beyond the next look for which stages publish their spans
CLEAR = "\x1b[H\x1b[2J"


def run_top(arguments: Sequence[str]) -> int:
    """0 when ended by q or Ctrl-C, or with --once when every stage sent a heartbeat; else 1."""
    options = top_parser().parse_args(arguments)
    topology = chosen_topology(options)
    health = Health(expected_stages(topology))
    rates, latencies = PipelineRates(health), StageDurations()
    rewritten = can_rewrite(sys.stdout) and not options.once
    with ControlClient(topology, zmq.Context.instance()) as caller, TerminalKeys(rewritten) as keys:
        for stage in (*health.stages, *([SUPERVISOR] if topology.supervisor else [])):
            caller.listen(stage)
        with suppress(KeyboardInterrupt):
            heartbeats = dict.fromkeys(health.stages, 0)
            listen(
                caller,
                health,
                FIRST_LOOK_SECONDS,
                lambda beat: _seen_twice(heartbeats, beat, rates),
                quits=keys.quit_pressed,
            )
            while not keys.quit_pressed():
                now = time.monotonic()
                health.mark_lost(now)
                rates.update()
                snapshot = rates.snapshot("", now, time.time(), latencies.median)
                lines = _screen_lines(health, rates, snapshot, keys.hint)
                print("\n".join(_fitting(lines, rewritten)), flush=True)
                if options.once:
                    return (
                        0 if all(row.last_seen is not None for row in health.stages.values()) else 1
                    )
                _request_spans(caller, health, options.seconds + WATCH_MARGIN)
                listen(caller, health, options.seconds, observed=latencies, quits=keys.quit_pressed)
    return 0


def top_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer top",
        description="Shows what the stages of a running server do, until q or Ctrl-C.",
    )
    add = command_line.add_argument
    add_server_flags(command_line)
    add("--seconds", type=float, default=1.0, metavar="N", help="between two looks (default: 1)")
    add("--once", action="store_true", help="one look, then end; 1 if a stage says nothing")
    return command_line


def listen(
    caller: ControlClient,
    health: Health,
    seconds: float,
    enough: Callable[[Heartbeat], bool] = lambda beat: False,
    observed: StageDurations | None = None,
    quits: Callable[[], bool] = lambda: False,
) -> None:
    """Passes heartbeats to `health` for `seconds`, or until `enough(heartbeat)` or `quits()`; and
    spans to `observed`."""
    deadline = time.monotonic() + max(seconds, 0.1)
    while (remaining := deadline - time.monotonic()) > 0 and not quits():
        for _, message in caller.receive(min(0.2, remaining)):
            if isinstance(message, Heartbeat):
                health.on_heartbeat(message, time.monotonic())
                if message.stage in health.stages and enough(message):
                    return
            elif isinstance(message, Observed) and observed is not None:
                for span in message.spans:
                    observed.on_span(span)


def _request_spans(caller: ControlClient, health: Health, seconds: float) -> None:
    """Asks running stages that measure a latency to publish it for `seconds`."""
    for row in health.stages.values():
        if row.name in MEASURED_PART and row.last_seen is not None and row.state != "lost":
            caller.send(row.stage, Watch(seconds))


def _seen_twice(heartbeats: dict[str, int], beat: Heartbeat, rates: PipelineRates) -> bool:
    """Whether every stage sent two heartbeats, so that there are rates."""
    heartbeats[beat.stage] += 1
    if heartbeats[beat.stage] == 1:
        rates.update()
    return min(heartbeats.values()) >= 2


@dataclass(frozen=True)
class StageLine:
    """A line of the screen: `head`, never cut, and as many of `parts` as fit, the most important
    first."""

    head: str
    parts: Sequence[str]

    def within(self, columns: int) -> str:
        """At most `columns` characters; the part that says why something is wrong may be cut."""
        text = ", ".join(self.parts)
        for count in range(len(self.parts), 0, -1):
            text = ", ".join(self.parts[:count])
            if len(self.head) + len(text) <= columns:
                break
        line = (self.head + text).rstrip()
        return line if len(line) <= columns else f"{line[: columns - 1]}…"


def _fitting(lines: list[StageLine], rewritten: bool) -> list[str]:
    """On a terminal they are cut to its columns, and to its rows if they are rewritten."""
    if not sys.stdout.isatty():
        return [line.within(sys.maxsize) for line in lines]
    columns, rows = shutil.get_terminal_size()
    fitting = [line.within(columns) for line in lines]
    if not rewritten:
        return fitting
    if len(fitting) >= rows > 2:
        fitting[rows - 2 :] = [f"and {len(fitting) - rows + 2} more lines, in a taller window"]
    return [CLEAR + fitting[0], *fitting[1:]]


def _screen_lines(
    health: Health, rates: PipelineRates, snapshot: PipelineSnapshot, hint: str
) -> list[StageLine]:
    """A head, a line for each stage, and one for each latency of the last minute."""
    wide = max(map(len, health.stages))
    lines = [StageLine(f"{'stage':{wide}} {'pid':>7} {'state':8} ", [hint])]
    for shown in snapshot.stages:
        row = health.stages[shown.stage]
        if row.last_seen is None:
            lines.append(StageLine(f"{shown.stage:{wide}} {'':7} silent", []))
            continue
        head = f"{shown.stage:{wide}} {row.pid:7} {row.state:8} "
        parts = [row.reason] if row.state != "ready" and row.reason else _details(row, shown, rates)
        if row.restarts:
            parts.insert(1, f"started again {counted(row.restarts, 'time')}")
        lines.append(StageLine(head, parts))
    if health.standbys_ready:
        lines.append(StageLine(f"{'standbys':{wide}} ", [f"{health.standbys_ready} ready"]))
    for what, name in (("first token", "ttft_ms"), ("between tokens", "itl_ms")):
        latency = snapshot.latency[name]
        if latency.count:
            lines.append(StageLine(f"{what + ':':15} ", _milliseconds(latency)))
    return lines


def _milliseconds(latency: LatencyQuantiles) -> list[str]:
    """The quantiles of the last minute in milliseconds, as a line; [] if there are none."""
    quantiles = (("p50", latency.p50), ("p90", latency.p90), ("p99", latency.p99))
    shown = ", ".join(f"{name} {value:,.1f}" for name, value in quantiles if value is not None)
    return [f"{shown} ms ({latency.count:,} in the last minute)"]


def _details(row: StageStatus, shown: StageSnapshot, rates: PipelineRates) -> list[str]:
    parts = DETAILS[row.name](row, shown, rates)
    if shown.latency_ms is not None and row.name != "gateway":  # it has a line of its own
        parts.append(f"latency {shown.latency_ms:,.2f} ms")
    return parts


def _gateway(row: StageStatus, shown: StageSnapshot, rates: PipelineRates) -> list[str]:
    return [counted(shown.running or 0, "stream"), f"{shown.waiting} without output yet"]


def _tokenizer(row: StageStatus, shown: StageSnapshot, rates: PipelineRates) -> list[str]:
    return [
        f"{shown.rate:,.1f} requests/s",
        f"{rates.rate(row.stage, 'prompt_tokens_total'):,.0f} prompt tokens/s",
        f"{counted(row.stats.get('groups_up', 0.0), 'group')} up",
    ]


def _scheduler(row: StageStatus, shown: StageSnapshot, rates: PipelineRates) -> list[str]:
    return [
        f"{shown.running} run",
        f"{shown.waiting} wait",
        f"{shown.rate:,.0f} steps/s",
        f"preempted {row.stats.get('preemptions_total', 0.0):.0f}",
        *([takeover] if (takeover := describe_takeover(row.stats)) else []),
    ]


def _engine(row: StageStatus, shown: StageSnapshot, rates: PipelineRates) -> list[str]:
    stats = row.stats
    busy, idle = (rates.increase(row.stage, name) for name in ("busy_seconds", "idle_seconds"))
    pages = max(stats.get("pages_total", 0.0), 1.0)
    cached, prompts = (stats.get(f"{name}_tokens_total", 0.0) for name in ("cached", "prompt"))
    busy_share = busy / (busy + idle) if busy + idle > 0 else 0.0
    return [
        f"{shown.rate:,.0f} tokens/s",
        f"{busy_share:.0%} busy",
        f"{shown.running}/{stats.get('slots_total', 0.0):.0f} slots",
        f"KV {stats.get('pages_free', 0.0) / pages:.0%} free",
        f"{stats.get('pages_evictable', 0.0) / pages:.0%} cached",
        f"hits {cached / max(prompts, 1.0):.0%}",
    ]


def _detokenizer(row: StageStatus, shown: StageSnapshot, rates: PipelineRates) -> list[str]:
    return [f"{shown.rate:,.0f} tokens/s", counted(shown.running or 0, "stream")]


DETAILS: dict[str, Callable[[StageStatus, StageSnapshot, PipelineRates], list[str]]] = {
    "gateway": _gateway,
    "tokenizer": _tokenizer,
    "scheduler": _scheduler,
    "engine": _engine,
    "detokenizer": _detokenizer,
}
