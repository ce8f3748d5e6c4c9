"""Charts as SVG, in text: bars of a distribution, lines over an axis.

Knows numbers and labels. Colours are classes, which the page's style sheet gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 360.0, 196.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 22.0, 34.0
BINS = 36
LONG_TAIL = 20.0  # times the median, from which on the axis of a distribution is logarithmic
TICKS = 4


@dataclass(frozen=True)
class AxisScale:
    """Where a value lies between two ends, in a drawing: from `begin` to `end`."""

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
        """Round values between the ends."""
        return (
            _decade_ticks(self.low, self.high)
            if self.logarithmic
            else _round_ticks(self.low, self.high)
        )

    def _of(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value


def histogram(milliseconds: Sequence[float], label: str) -> str:
    """How often which time occurs, with marks at p50, p90 and p99; "" without values."""
    values = np.asarray(milliseconds, dtype=float)
    values = values[values > 0]
    if not values.size:
        return ""
    marks = dict(zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)), strict=True))
    logarithmic = bool(values.max() > LONG_TAIL * marks["p50"])
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
        said = f"{format_number(begin)} to {format_number(end)} ms: {count} of {values.size}"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{max(right - x - 1, 0.5):.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}"><title>{escape(said)}</title></rect>'
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
    """One line for each series over the same values; axes: what they count. "" without values."""
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
            said = [f"{name}: {format_number(value)} at {format_number(at)}"
                    for at, value in zip(across, values, strict=True)]  # fmt: skip
            parts += [
                f'<circle class="dot s{place}" cx="{px:.1f}" cy="{py:.1f}" r="3">'
                f"<title>{escape(text)}</title></circle>"
                for (px, py), text in zip(points, said, strict=True)
            ]
    if len(series) > 1:
        parts.append(_legend(list(series)))
    return _drawing(label, parts)


def format_number(value: float) -> str:
    """Three digits or all before the point."""
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


def _text(said: str, x: float, y: float, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(said)}</text>' if said else ""


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
