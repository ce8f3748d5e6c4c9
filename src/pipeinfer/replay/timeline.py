"""`timeline FILE... --out X`: several stages' traces on one clock, as X.html for a browser or
X.json for Perfetto.

Knows which writer belongs to which ending; what is drawn is decided in spans.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeinfer.replay import page, perfetto
from pipeinfer.replay.codes import EQUAL, USAGE, CannotReplay
from pipeinfer.replay.merging import load_merged
from pipeinfer.replay.recording import warn_of_tail
from pipeinfer.replay.spans import picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, metavar="FILE", nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="X.html|X.json")
    parser.add_argument("--request", metavar="ID", help="only what is about this request")
    parser.add_argument("--from", dest="begin", type=float, default=0.0, metavar="S")
    parser.add_argument("--to", dest="end", type=float, default=float("inf"), metavar="S",
                        help="seconds since the earliest message")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    kind = options.out.suffix
    if kind not in (".html", ".json"):
        raise CannotReplay(USAGE, f"--out {options.out}: a timeline is an .html or a .json file")
    recordings = load_merged(options.files)
    for recording in recordings:
        warn_of_tail(recording)
        if recording.offset:
            print(f"{recording.stage}: its clock is {recording.offset:+.6f} s off, corrected")
    drawn = picture(recordings, options.begin, options.end, options.request)
    if kind == ".json":
        text = json.dumps(perfetto.events(drawn), separators=(",", ":"))
    else:
        text = page.html(drawn)
    try:
        options.out.write_text(text)
    except OSError as error:
        raise CannotReplay(USAGE, f"cannot write {options.out}: {error.strerror}") from None
    print(
        f"{options.out}: {len(drawn.spans)} spans on {len(drawn.rows)} rows, "
        f"{len(drawn.flows)} requests, {drawn.seconds:.3f} s"
    )
    return EQUAL
