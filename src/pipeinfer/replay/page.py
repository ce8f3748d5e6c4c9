"""A picture as one HTML page that needs nothing else: no network, no library.

Puts the picture's numbers into page.html, which draws them.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeinfer.replay.spans import Picture

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/*DATA*/null"
MICRO = 1e6


def html(picture: Picture) -> str:
    """The page. Names and details are data, never markup."""
    data = json.dumps(_compact(picture), separators=(",", ":"))
    # What could end the script element from within a string.
    return TEMPLATE.read_text().replace(PLACE, data.replace("<", "\\u003c"))


def _compact(picture: Picture) -> dict[str, object]:
    """Rows, spans [row, start µs, length µs, name, seq, requests, detail] with requests as numbers,
    flows [request, [µs, row], ...]."""
    rows = {row: at for at, row in enumerate(picture.rows)}
    names: dict[str, int] = {}
    for span in picture.spans:
        for name in span.requests:
            names.setdefault(name, len(names))
    for flow in picture.flows:
        names.setdefault(flow.request_id, len(names))
    spans = [
        [
            rows[s.stage, s.row], round(s.start * MICRO, 1), round((s.end - s.start) * MICRO, 1),
            s.name, s.seqs[0], [names[name] for name in s.requests], s.detail,
        ]
        for s in picture.spans
    ]  # fmt: skip
    flows = [
        [
            names[f.request_id],
            [[round(t * MICRO, 1), rows[stage, row]] for t, stage, row in f.points],
        ]
        for f in picture.flows
    ]
    return {
        "rows": [f"{stage} {row}" for stage, row in picture.rows],
        "requests": list(names),
        "spans": spans,
        "flows": flows,
        "begin": round(min((s.start for s in picture.spans), default=0.0) * MICRO, 1),
        "length": round(picture.seconds * MICRO, 1),
    }
