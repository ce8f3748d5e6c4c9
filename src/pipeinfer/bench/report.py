"""Results of a benchmark: as a JSON file, as text for a terminal, and as an HTML page with charts.

The page is one file without scripts. All text is escaped, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from html import escape
from pathlib import Path
from typing import TextIO

import numpy as np

from pipeinfer.bench.client import GoodputTarget, RequestTiming
from pipeinfer.bench.runner import PointResult, WorkerProgress
from pipeinfer.command_line import counted
from pipeinfer.version import __version__

SCHEMA = "pipeinfer-bench/1"


def write_result(
    path: Path, command: str, metrics: Mapping[str, object], commit: str = "", schema: str = SCHEMA
) -> None:
    """Writes the result of `command` as JSON."""
    content = {
        "schema": schema,
        "command": command,
        "commit": commit,
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "metrics": metrics,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def hardware() -> dict[str, object]:
    """Processor, cores that this process may use, memory in GiB, and GPUs by name."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {
        "cpu": _processor(),
        "cores": cores(),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": gpus,
    }


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_output(*command: str) -> str:
    """What a command prints; "" where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


PERCENTILE_COLUMNS = ("mean", "p50", "p90", "p99", "max")
TIME_NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
PLAIN_PROGRESS_SECONDS = 10.0  # between two lines, where a line cannot be overwritten
CLEAR_LINE = "\r\x1b[K"


class ProgressLine:
    """Progress of a load: one line that is overwritten on a terminal, else a line now and then."""

    def __init__(self, label: str, requests: int | None, out: TextIO) -> None:
        self._label, self._requests, self._out = label, requests, out
        self._began = self._shown = time.monotonic()
        self._live = out.isatty()
        self._progress: WorkerProgress | None = None

    def show(self, progress: WorkerProgress) -> None:
        """Shows the counts so far."""
        now = time.monotonic()
        self._progress = progress
        if not self._live and now - self._shown < PLAIN_PROGRESS_SECONDS:
            return
        self._shown = now
        self._out.write(
            (CLEAR_LINE if self._live else "") + self._text(progress, now - self._began)
        )
        self._out.write("" if self._live else "\n")
        self._out.flush()

    def end(self) -> None:
        """Clears the line."""
        if self._live:
            self._out.write(CLEAR_LINE)
            self._out.flush()

    def counts(self) -> str:
        """The counts so far, as text; "" before the first."""
        seconds = time.monotonic() - self._began
        return "" if self._progress is None else self._text(self._progress, seconds)

    def _text(self, progress: WorkerProgress, seconds: float) -> str:
        done = (
            f"{progress.done}" if self._requests is None else f"{progress.done} of {self._requests}"
        )
        failed = f", {progress.failed} failed" if progress.failed else ""
        return (
            f"{self._label}: {seconds:.0f} s, {done} done{failed}, {progress.running} running, "
            f"{counted(progress.tokens, 'token')}"
        )


def point_text(result: PointResult, target: GoodputTarget) -> str:
    """The result of one point, as text."""
    metrics, cached = result.metrics, cached_share(result)
    lines = [
        f"{result.point.label}: {counted(metrics['requests'], 'request')} in "
        f"{metrics['seconds']:.1f} s, {metrics['requests_per_s']:.2f} a second",
        f"  {metrics['tokens_per_s']:,.1f} tokens/s of output, "
        f"{metrics['prompt_tokens_per_s']:,.1f} of prompts, {cached:.0%} of these cached",
        f"  {metrics['good_share']:.0%} good, {metrics['goodput_per_s']:.2f} a second "
        f"({target_text(target)})",
    ]
    if metrics["ttft_ms"]:
        lines.append(f"  {'ms':6}" + "".join(f"{name:>10}" for name in PERCENTILE_COLUMNS))
    for name, title in TIME_NAMES.items():
        if metrics[name]:
            lines.append(
                f"  {title:6}" + "".join(f"{metrics[name][c]:10.1f}" for c in PERCENTILE_COLUMNS)
            )
    for kind, (many, error) in result.errors().items():
        lines.append(f"  failed: {many} by {kind}: {' '.join(error.split())}")
    return "\n".join([*lines, *(f"  note: {note}" for note in result.notes)])


def overview_text(points: Sequence[PointResult]) -> str:
    """A table with a line for each point."""
    heads = ("load", "done", "failed", "tokens/s", "good/s", "TTFT p50", "p99", "ITL p50", "p99")
    rows: list[tuple[str, ...]] = [heads]
    for result in points:
        metrics = result.metrics
        times = [metrics[name].get(c) for name in ("ttft_ms", "itl_ms") for c in ("p50", "p99")]
        rows.append(
            (
                result.point.label,
                str(metrics["requests"] - metrics["failed"]),
                str(metrics["failed"]),
                f"{metrics['tokens_per_s']:,.1f}",
                f"{metrics['goodput_per_s']:.2f}",
                *("-" if one is None else f"{one:.1f}" for one in times),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def cached_share(result: PointResult) -> float:
    """The share of prompt tokens that came from the server's prefix cache."""
    prompt = result.metrics["prompt_tokens"]
    return result.metrics["cached_tokens"] / prompt if prompt else 0.0


def target_text(target: GoodputTarget) -> str:
    """The limits of a good request, as text."""
    return f"TTFT up to {target.ttft * 1e3:g} ms, TPOT up to {target.tpot * 1e3:g} ms"


# Sizes of a chart, in units of its SVG.
WIDTH = 360.0
HEIGHT = 196.0
LEFT = 46.0  # of the axes, beside which numbers stand
RIGHT = 12.0
TOP = 22.0  # above which names of lines stand
BOTTOM = 34.0

BINS = 36  # of a histogram
LOG_AXIS_RATIO = 20.0  # longest value over the median, from which on the axis is logarithmic
TICKS = 4  # of an axis, about


@dataclass(frozen=True)
class AxisScale:
    """Maps values to coordinates of a drawing.

    low, high: values at the ends of the axis.
    begin, end: their coordinates.
    """

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high = self._of(self.low), self._of(self.high)
        part = (self._of(value) - low) / (high - low) if high > low else 0.5
        return self.begin + (self.end - self.begin) * part

    def ticks(self) -> list[float]:
        """Round values between low and high."""
        return (
            _decade_ticks(self.low, self.high)
            if self.logarithmic
            else _round_ticks(self.low, self.high)
        )

    def _of(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value


def histogram(milliseconds: Sequence[float], label: str) -> str:
    """A histogram of times with marks at p50, p90 and p99, as SVG; "" without values."""
    values = np.asarray(milliseconds, dtype=float)
    values = values[values > 0]
    if not values.size:
        return ""
    marks = dict(zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)), strict=True))
    logarithmic = bool(values.max() > LOG_AXIS_RATIO * marks["p50"])
    low, high = float(values.min()), float(values.max())
    if not logarithmic:
        low = 0.0 if low < 0.5 * high else low
    low, high = (low, high) if high > low else (low * 0.9, high * 1.1)
    spaced = np.geomspace if logarithmic else np.linspace
    edges = spaced(low, high, BINS + 1)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    across = AxisScale(low, high, LEFT, WIDTH - RIGHT, logarithmic)
    up = AxisScale(0.0, float(counts.max()), HEIGHT - BOTTOM, TOP)
    parts = [_axes(across, up, "ms", "")]
    for count, begin, end in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        if not count:
            continue
        x, right, y = across.at(begin), across.at(end), up.at(count)
        text = f"{format_number(begin)} to {format_number(end)} ms: {count} of {values.size}"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{max(right - x - 1, 0.5):.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}"><title>{escape(text)}</title></rect>'
        )
    for name, value in marks.items():
        x = across.at(float(value))
        parts.append(
            f'<line class="mark {name}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
            f'y2="{HEIGHT - BOTTOM}"><title>{name}: {format_number(value)} ms</title></line>'
        )
    parts.append(_mark_names([(name, across.at(float(value))) for name, value in marks.items()]))
    return _drawing(label, parts)


def line_chart(
    across: Sequence[float],
    series: Mapping[str, Sequence[float]],
    axes: tuple[str, str],
    label: str,
) -> str:
    """One line for each series over the same x values, as SVG; "" without values.

    axes: units of x and y.
    """
    every = [value for values in series.values() for value in values]
    if not every or not across:
        return ""
    x = AxisScale(min(across), max(across), LEFT, WIDTH - RIGHT)
    y = AxisScale(0.0, max(*every, 1e-9), HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, *axes)]
    for place, (name, values) in enumerate(series.items()):
        points = [(x.at(at), y.at(value)) for at, value in zip(across, values, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="line s{place}" points="{path}"/>')
        if len(points) <= BINS:
            text = [f"{name}: {format_number(value)} at {format_number(at)}"
                    for at, value in zip(across, values, strict=True)]  # fmt: skip
            parts += [
                f'<circle class="dot s{place}" cx="{px:.1f}" cy="{py:.1f}" r="3">'
                f"<title>{escape(text)}</title></circle>"
                for (px, py), text in zip(points, text, strict=True)
            ]
    if len(series) > 1:
        parts.append(_legend(list(series)))
    return _drawing(label, parts)


def format_number(value: float) -> str:
    """Three digits, or all before the decimal point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _drawing(label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _axes(across: AxisScale, up: AxisScale, below: str, beside: str) -> str:
    """Ticks with numbers, lines behind, and what is counted."""
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    parts: list[str] = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(_line("grid", (left, y), (right, y)))
        parts.append(_text(format_number(tick), left - 6, y + 4, "right"))
    parts.append(_line("axis", (left, bottom), (right, bottom)))
    for tick in across.ticks():
        x = across.at(tick)
        parts.append(_line("axis", (x, bottom), (x, bottom + 4)))
        parts.append(_text(format_number(tick), x, bottom + 16, "middle"))
    parts.append(_text(below, right, HEIGHT - 4, "right"))
    return "".join([*parts, _text(beside, 4.0, 12.0, "left")])


def _line(kind: str, begin: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = begin, end
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(text: str, x: float, y: float, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>' if text else ""


def _legend(names: Sequence[str]) -> str:
    parts, x = [], WIDTH - RIGHT
    for place in reversed(range(len(names))):
        x -= 7.0 * len(names[place]) + 4
        parts.append(_text(names[place], x, 12.0, "left"))
        parts.append(f'<rect class="swatch s{place}" x="{x - 13:.1f}" y="4" width="9" height="9"/>')
        x -= 24
    return "".join(parts)


def _mark_names(marks: Sequence[tuple[str, float]]) -> str:
    """Above the marks, from left to right, pushed apart where they would meet."""
    parts, least = [], 0.0
    for name, x in marks:
        x = min(max(x, least), WIDTH - RIGHT)
        least = x + 30
        parts.append(_text(name, x, TOP - 8, f"middle {name}"))
    return "".join(parts)


def _round_ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / TICKS)) if high > low else 0.0
    if not step:
        return [low]
    step *= next(one for one in (1, 2, 5, 10) if (high - low) / (step * one) <= TICKS + 1)
    first = math.ceil(low / step - 1e-9)
    return [step * count for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _decade_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = (1, 2, 5) if len(powers) <= 3 else (1,)
    return [10.0**p * one for p in powers for one in fine if low <= 10.0**p * one <= high]


TIME_BINS = 48  # of the charts over time
STYLE = """
:root { color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5c6879; --line: #dfe4ea;
  --a: #2f6fde; --b: #e08a1e; --c: #c23d5c; --warn-back: #fff4e0; --warn: #7a4a00; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #9aa7b8; --line: #303947;
  --a: #6ea3ff; --b: #f0ad57; --c: #f07f9b; --warn-back: #3a2c12; --warn: #f5cf8e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 16px 48px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 0 0 6px; }
p { margin: 4px 0; color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px; }
.wide { overflow-x: auto; padding: 0; }
.charts { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.facts { display: grid; gap: 10px 20px; margin: 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 190px), 1fr)); }
.facts dt { font-size: 12px; color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.numbers { display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 0 0 12px; }
.numbers b { font-size: 21px; font-weight: 650; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 7px 9px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-size: 12px; font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; }
tbody tr:last-child td { border-bottom: 0; }
.note { background: var(--warn-back); color: var(--warn); border-radius: 8px; padding: 8px 12px;
  margin: 0 0 10px; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); }
svg .right { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); }
svg .bar { fill: var(--a); opacity: .75; } svg .bar:hover { opacity: 1; }
svg .mark { stroke-width: 1.5; stroke-dasharray: 4 3; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .s0 { stroke: var(--a); fill: var(--a); } svg .s1 { stroke: var(--b); fill: var(--b); }
svg .s2 { stroke: var(--c); fill: var(--c); } svg polyline.line { fill: none; }
svg line.p50 { stroke: var(--ink); } svg line.p90 { stroke: var(--b); }
svg line.p99 { stroke: var(--c); } svg text.p50 { fill: var(--ink); }
svg text.p90 { fill: var(--b); } svg text.p99 { fill: var(--c); }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""


def html_page(
    title: str, settings: Mapping[str, str], points: Sequence[PointResult], target: GoodputTarget
) -> str:
    """The whole page."""
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in settings.items()
    )
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(made)}, pipeinfer {escape(__version__)}</p>",
        _summary_table(points, target),
        _comparison_charts(points),
        *(_point_section(result) for result in points),
        f'<h2>Settings</h2><dl class="card facts">{facts}</dl>',
        _terms(target),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _summary_table(points: Sequence[PointResult], target: GoodputTarget) -> str:
    heads = (
        "load", "requests", "failed", "requests/s", "tokens/s", "prompt tokens/s", "cached",
        "good/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "E2E p50", "p99",
    )  # fmt: skip
    columns = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"),
               ("tpot_ms", "p50"), ("e2e_ms", "p50"), ("e2e_ms", "p99"))  # fmt: skip
    rows = []
    for result in points:
        metrics = result.metrics
        cells = [
            result.point.label,
            f"{metrics['requests']:,}",
            f"{metrics['failed']:,}",
            format_number(metrics["requests_per_s"]),
            format_number(metrics["tokens_per_s"]),
            format_number(metrics["prompt_tokens_per_s"]),
            f"{cached_share(result):.0%}",
            format_number(metrics["goodput_per_s"]),
            *(format_number(metrics[n][c]) if metrics[n] else "-" for n, c in columns),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f'<h2>Summary</h2><div class="card wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"<p>Times in milliseconds. Good: {escape(target_text(target))}.</p>"
    )


def _comparison_charts(points: Sequence[PointResult]) -> str:
    """Percentiles over the rates, and over the numbers of streams, where there are several."""
    by_rate = [(result.point.rate, result) for result in points if result.point.rate is not None]
    by_streams = [(float(s.point.streams), s) for s in points if s.point.streams is not None]
    parts = [
        *_over(by_rate, "requests a second"),
        *_over(by_streams, "streams at a time"),
    ]
    return f'<h2>Loads compared</h2><div class="charts">{"".join(parts)}</div>' if parts else ""


def _over(places: Sequence[tuple[float, PointResult]], below: str) -> list[str]:
    places = sorted(
        [(at, result) for at, result in places if result.metrics["itl_ms"]],
        key=lambda pair: pair[0],
    )
    if len(places) < 2:
        return []
    across = [at for at, _ in places]
    drawn = [
        _card(
            f"{title}, ms",
            line_chart(
                across,
                {
                    c: [result.metrics[name][c] for _, result in places]
                    for c in ("p50", "p90", "p99")
                },
                (below, ""),
                f"{title} in milliseconds by {below}",
            ),
        )
        for name, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"))
    ]
    rates = {"all": [result.metrics["tokens_per_s"] for _, result in places]}
    text = "Output tokens a second"
    return [
        *drawn,
        _card(text, line_chart(across, rates, (below, ""), f"{text} by {below}")),
    ]


def _point_section(result: PointResult) -> str:
    metrics, timings = result.metrics, [timing for timing in result.timings if timing.success]
    notes = [f"{many} failed by {kind}: {error}" for kind, (many, error) in result.errors().items()]
    notes += result.notes
    numbers = {
        "output tokens/s": format_number(metrics["tokens_per_s"]),
        "requests/s": format_number(metrics["requests_per_s"]),
        "good": f"{metrics['good_share']:.0%}",
        "failed": f"{metrics['failed']:,} of {metrics['requests']:,}",
        "seconds": format_number(metrics["seconds"]),
    }
    shown = "".join(
        f"<div><b>{escape(value)}</b> <span>{escape(name)}</span></div>"
        for name, value in numbers.items()
    )
    times = {
        "Time to first token (TTFT), ms": [timing.ttft * 1e3 for timing in timings],
        "Time between pieces (ITL), ms": [gap * 1e3 for timing in timings for gap in timing.itls],
        "Mean time of a token (TPOT), ms": [
            timing.tpot * 1e3 for timing in timings if timing.output_tokens > 1
        ],
        "Time of a whole answer (E2E), ms": [timing.e2e * 1e3 for timing in timings],
    }
    drawn = [_card(name, histogram(values, name)) for name, values in times.items()]
    at, rate, running = over_time(timings)
    for name, values in (("Output tokens a second", rate), ("Requests under way", running)):
        drawing = line_chart(at, {name: values}, ("seconds", ""), f"{name} over time")
        drawn.append(_card(f"{name}, over time", drawing))
    text = "".join(f"<div>{escape(note)}</div>" for note in notes)
    text = f'<div class="note">{text}</div>' if text else ""
    return (
        f'<h2>{escape(result.point.label)}</h2><div class="numbers">{shown}</div>{text}'
        f'<div class="charts">{"".join(drawn)}</div>'
    )


def over_time(timings: Sequence[RequestTiming]) -> tuple[list[float], list[float], list[float]]:
    """Seconds after the first request was due, and there: tokens a second, requests under way."""
    if not timings:
        return [], [], []
    begin, end = min(timing.due for timing in timings), max(timing.end_time for timing in timings)
    edges = np.linspace(0.0, max(end - begin, 1e-6), TIME_BINS + 1)
    at = [piece - begin for timing in timings for piece in timing.chunk_times]
    weights = [
        timing.output_tokens / len(timing.chunk_times)
        for timing in timings
        for _ in timing.chunk_times
    ]
    counts, _ = np.histogram(at, edges, weights=weights)
    middles = (edges[:-1] + edges[1:]) / 2
    begun = np.sort([timing.due - begin for timing in timings])
    ended = np.sort([timing.end_time - begin for timing in timings])
    running = np.searchsorted(begun, middles, "right") - np.searchsorted(ended, middles, "right")
    rate = counts / (edges[1] - edges[0])
    return middles.tolist(), rate.tolist(), running.astype(float).tolist()


def _card(title: str, drawing: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{drawing}</div>' if drawing else ""


def _terms(target: GoodputTarget) -> str:
    return (
        "<h2>What the numbers are</h2><p>All times are the client's. TTFT: from when a request was "
        "due to its first token. ITL: every gap between two pieces of a stream. TPOT: of one "
        "request, the time after its first token by the number of tokens after it. E2E: to the end "
        "of the answer. Requests that failed are in no time and no rate. "
        f"A request is good if it did not fail, {escape(target_text(target))}.</p>"
    )
