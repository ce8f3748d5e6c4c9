"""The page of a result: settings, a table, charts of each point. One file of HTML, no script.

Knows points and settings. All text is escaped, and nothing is fetched from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape

import numpy as np

from pipeinfer.bench import charts, table
from pipeinfer.bench.latency import GoodputTarget, RequestTiming
from pipeinfer.bench.points import PointResult
from pipeinfer.version import __version__

PIECES_OF_TIME = 48  # of the chart of throughput
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
    """The whole file."""
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in settings.items()
    )
    body = [
        f"<h1>{escape(title)}</h1><p>{escape(made)}, pipeinfer {escape(__version__)}</p>",
        _summary_table(points, target),
        _comparison_charts(points),
        *(_point_section(seen) for seen in points),
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
    for seen in points:
        found = seen.metrics
        cells = [
            seen.point.label,
            f"{found['requests']:,}",
            f"{found['failed']:,}",
            charts.format_number(found["requests_per_s"]),
            charts.format_number(found["tokens_per_s"]),
            charts.format_number(found["prompt_tokens_per_s"]),
            f"{table.cached_share(seen):.0%}",
            charts.format_number(found["goodput_per_s"]),
            *(charts.format_number(found[n][c]) if found[n] else "-" for n, c in columns),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f'<h2>Summary</h2><div class="card wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"<p>Times in milliseconds. Good: {escape(table.target_text(target))}.</p>"
    )


def _comparison_charts(points: Sequence[PointResult]) -> str:
    """Percentiles over the rates, and over the numbers of streams, where there are several."""
    by_rate = [(seen.point.rate, seen) for seen in points if seen.point.rate is not None]
    by_streams = [(float(s.point.streams), s) for s in points if s.point.streams is not None]
    parts = [
        *_over(by_rate, "requests a second"),
        *_over(by_streams, "streams at a time"),
    ]
    return f'<h2>Loads compared</h2><div class="charts">{"".join(parts)}</div>' if parts else ""


def _over(places: Sequence[tuple[float, PointResult]], below: str) -> list[str]:
    places = sorted(
        [(at, seen) for at, seen in places if seen.metrics["itl_ms"]], key=lambda pair: pair[0]
    )
    if len(places) < 2:
        return []
    across = [at for at, _ in places]
    drawn = [
        _card(
            f"{title}, ms",
            charts.line_chart(
                across,
                {c: [seen.metrics[name][c] for _, seen in places] for c in ("p50", "p90", "p99")},
                (below, ""),
                f"{title} in milliseconds by {below}",
            ),
        )
        for name, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"))
    ]
    rates = {"all": [seen.metrics["tokens_per_s"] for _, seen in places]}
    said = "Output tokens a second"
    return [
        *drawn,
        _card(said, charts.line_chart(across, rates, (below, ""), f"{said} by {below}")),
    ]


def _point_section(seen: PointResult) -> str:
    found, lines = seen.metrics, [line for line in seen.timings if line.success]
    notes = [f"{many} failed by {kind}: {error}" for kind, (many, error) in seen.errors().items()]
    notes += seen.notes
    numbers = {
        "output tokens/s": charts.format_number(found["tokens_per_s"]),
        "requests/s": charts.format_number(found["requests_per_s"]),
        "good": f"{found['good_share']:.0%}",
        "failed": f"{found['failed']:,} of {found['requests']:,}",
        "seconds": charts.format_number(found["seconds"]),
    }
    shown = "".join(
        f"<div><b>{escape(value)}</b> <span>{escape(name)}</span></div>"
        for name, value in numbers.items()
    )
    times = {
        "Time to first token (TTFT), ms": [line.ttft * 1e3 for line in lines],
        "Time between pieces (ITL), ms": [gap * 1e3 for line in lines for gap in line.itls],
        "Mean time of a token (TPOT), ms": [
            line.tpot * 1e3 for line in lines if line.output_tokens > 1
        ],
        "Time of a whole answer (E2E), ms": [line.e2e * 1e3 for line in lines],
    }
    drawn = [_card(name, charts.histogram(values, name)) for name, values in times.items()]
    at, rate, running = over_time(lines)
    for name, values in (("Output tokens a second", rate), ("Requests under way", running)):
        drawing = charts.line_chart(at, {name: values}, ("seconds", ""), f"{name} over time")
        drawn.append(_card(f"{name}, over time", drawing))
    said = "".join(f"<div>{escape(note)}</div>" for note in notes)
    said = f'<div class="note">{said}</div>' if said else ""
    return (
        f'<h2>{escape(seen.point.label)}</h2><div class="numbers">{shown}</div>{said}'
        f'<div class="charts">{"".join(drawn)}</div>'
    )


def over_time(lines: Sequence[RequestTiming]) -> tuple[list[float], list[float], list[float]]:
    """Seconds after the first request was due, and there: tokens a second, requests under way."""
    if not lines:
        return [], [], []
    begin, end = min(line.due for line in lines), max(line.end_time for line in lines)
    edges = np.linspace(0.0, max(end - begin, 1e-6), PIECES_OF_TIME + 1)
    at = [piece - begin for line in lines for piece in line.chunk_times]
    weights = [
        line.output_tokens / len(line.chunk_times) for line in lines for _ in line.chunk_times
    ]
    counts, _ = np.histogram(at, edges, weights=weights)
    middles = (edges[:-1] + edges[1:]) / 2
    begun = np.sort([line.due - begin for line in lines])
    ended = np.sort([line.end_time - begin for line in lines])
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
        f"A request is good if it did not fail, {escape(table.target_text(target))}.</p>"
    )
