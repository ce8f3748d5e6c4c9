"""What was measured as text for a terminal, and how far a measurement is.

Knows points and their metrics, and how wide a terminal is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from pipeinfer.bench.jobs import WorkerProgress
from pipeinfer.bench.latency import GoodputTarget
from pipeinfer.bench.points import PointResult

COLUMNS = ("mean", "p50", "p90", "p99", "max")
TIMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
PLAIN_EVERY = 10.0  # seconds between two lines where no line can be written over
CLEAR = "\r\x1b[K"


class ProgressLine:
    """One line that is written over again and again, or now and then a new one."""

    def __init__(self, label: str, requests: int | None, out: TextIO) -> None:
        self._label, self._requests, self._out = label, requests, out
        self._began = self._shown = time.monotonic()
        self._live = out.isatty()

    def show(self, report: WorkerProgress) -> None:
        """How far it is."""
        now = time.monotonic()
        if not self._live and now - self._shown < PLAIN_EVERY:
            return
        self._shown = now
        self._out.write((CLEAR if self._live else "") + self._text(report, now - self._began))
        self._out.write("" if self._live else "\n")
        self._out.flush()

    def end(self) -> None:
        """Its place is free."""
        if self._live:
            self._out.write(CLEAR)
            self._out.flush()

    def _text(self, report: WorkerProgress, seconds: float) -> str:
        done = f"{report.done}" if self._requests is None else f"{report.done} of {self._requests}"
        failed = f", {report.failed} failed" if report.failed else ""
        return (
            f"{self._label}: {seconds:.0f} s, {done} done{failed}, {report.running} running, "
            f"{report.tokens:,} tokens"
        )


def point_text(seen: PointResult, target: GoodputTarget) -> str:
    """All about one point."""
    found = seen.metrics
    lines = [
        f"{seen.point.label}: {_requests(found['requests'])} in {found['seconds']:.1f} s, "
        f"{found['requests_per_s']:.2f} a second",
        f"  {found['tokens_per_s']:,.1f} tokens/s of output, "
        f"{found['prompt_tokens_per_s']:,.1f} of prompts, {cached_share(seen):.0%} of these cached",
        f"  {found['good_share']:.0%} good, {found['goodput_per_s']:.2f} a second "
        f"({target_text(target)})",
    ]
    if found["ttft_ms"]:
        lines.append(f"  {'ms':6}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, title in TIMES.items():
        if found[name]:
            lines.append(f"  {title:6}" + "".join(f"{found[name][c]:10.1f}" for c in COLUMNS))
    for kind, (many, error) in seen.errors().items():
        lines.append(f"  failed: {many} by {kind}: {' '.join(error.split())}")
    return "\n".join([*lines, *(f"  note: {note}" for note in seen.notes)])


def overview_text(points: Sequence[PointResult]) -> str:
    """One line for each point."""
    heads = ("load", "done", "failed", "tokens/s", "good/s", "TTFT p50", "p99", "ITL p50", "p99")
    rows: list[tuple[str, ...]] = [heads]
    for seen in points:
        found = seen.metrics
        times = [found[name].get(c) for name in ("ttft_ms", "itl_ms") for c in ("p50", "p99")]
        rows.append(
            (
                seen.point.label,
                str(found["requests"] - found["failed"]),
                str(found["failed"]),
                f"{found['tokens_per_s']:,.1f}",
                f"{found['goodput_per_s']:.2f}",
                *("-" if one is None else f"{one:.1f}" for one in times),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def cached_share(seen: PointResult) -> float:
    """Of all prompt tokens, those that came from the server's cache."""
    prompt = seen.metrics["prompt_tokens"]
    return seen.metrics["cached_tokens"] / prompt if prompt else 0.0


def target_text(target: GoodputTarget) -> str:
    """What a good request is."""
    return f"TTFT up to {target.ttft * 1e3:g} ms, TPOT up to {target.tpot * 1e3:g} ms"


def _requests(count: int) -> str:
    return f"{count} request{'s' if count != 1 else ''}"
