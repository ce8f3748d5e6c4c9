"""The timeline of a recorded session: a page that a browser draws, a file that Perfetto takes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from replay_tool import tool

from pipeinfer.replay.timeline import build_timeline
from pipeinfer.replay.traces import load, load_merged
from pipeinfer.trace import format as form
from pipeinfer.trace.format import Trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}  # fields that the Trace Event Format wants of each phase
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
            "thread_sort_index": "sort_index"}  # fmt: skip


@pytest.fixture(scope="module")
def events(session, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("timeline") / "t.json"
    done = tool("timeline", *session.values(), "--out", out)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_file_for_perfetto_is_what_the_format_asks_for(events):
    assert isinstance(events, list)
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event.get("tid", 0)) is int
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
        else:
            assert event["ts"] >= 0 and event.get("dur", 0) >= 0
            assert isinstance(event["cat"], str)
        if event["ph"] == "f":
            assert event["bp"] == "e"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named


def test_slices_of_a_row_do_not_overlap(events):
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 9  # five cores, two rows of steps in flight, prepare and forward
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(spans))


def test_every_flow_begins_once_ends_once_and_lies_on_slices(events):
    flows, slices = defaultdict(list), defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) > 60
    starts = {key: np.sort([span[0] for span in spans]) for key, spans in slices.items()}
    ends = {key: np.array([s[1] for s in sorted(spans)]) for key, spans in slices.items()}
    for steps in flows.values():
        phases = "".join(step["ph"] for step in steps)
        assert re.fullmatch("st*f", phases), phases
        assert [s["ts"] for s in steps] == sorted(s["ts"] for s in steps)
        for step in steps:
            key = step["pid"], step["tid"]
            at = int(np.searchsorted(starts[key], step["ts"] + 1e-3)) - 1
            assert at >= 0 and step["ts"] <= ends[key][at] + 1e-3, step


def test_flow_of_a_request_goes_from_the_gateway_through_all_stages_back(events, session):
    stages = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    whole = next(
        e.message.request_id
        for e in load(session["gateway"]).entries
        if e.kind == "OutputDelta" and e.message.finish == "length"
    )
    way = [stages[e["pid"]] for e in events if e["ph"] in "stf" and e["name"] == whole]
    assert way[0] == way[-1] == "gateway-0"
    assert list(dict.fromkeys(way)) == [
        "gateway-0", "tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0",
    ]  # fmt: skip


def test_every_step_of_the_device_is_on_the_forward_row(events, session):
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = [e for e in events if e["ph"] == "X" and rows[e["tid"]] == "forward"]
    done = [e.message for e in load(session["engine"]).entries if e.kind == "StepDone"]
    assert [e["name"] for e in steps] == [f"step {message.number}" for message in done]


def test_timeline_of_one_request_shows_only_what_is_about_it(session, tmp_path):
    request = next(
        e.message.request_id
        for e in load(session["scheduler"]).entries
        if e.kind == "TokenizedRequest"
    )
    out = tmp_path / "one.json"
    done = tool("timeline", *session.values(), "--out", out, "--request", request)
    assert done.returncode == 0 and ", 1 request," in done.stdout
    spans = [e for e in json.loads(out.read_text()) if e["ph"] == "X"]
    assert spans and all(request in span["args"]["requests"] for span in spans)


ENGINE, AHEAD = "engine-0-0", 5_000.0


def on_another_host(path: Path, folder: Path) -> Path:
    """The same trace, as if the engine's monotonic clock were AHEAD of the others'."""
    trace = Trace(path)
    mine = trace.header.stage == ENGINE
    rows = []
    for record in trace:
        sender = record.peer if record.direction == "in" else trace.header.stage
        time = record.time + AHEAD * (mine and record.time > 0)
        sent = record.sent + AHEAD * (sender == ENGINE and record.sent > 0)
        rows.append((time, record.direction, record.channel, record.peer, record.number, sent,
                     record.body))  # fmt: skip
    header = msgspec.structs.replace(trace.header, monotonic=trace.header.monotonic + AHEAD * mine)
    copy = folder / path.name
    copy.write_bytes(form.pack_header(header) + form.pack_records(rows))
    return copy


def test_trace_of_another_host_is_put_on_the_clock_of_the_first(session, tmp_path):
    files = [on_another_host(path, tmp_path) for path in session.values()]
    out = tmp_path / "two-hosts.json"
    done = tool("timeline", *files, "--out", out)
    assert done.returncode == 0, done.stderr
    said = re.search(rf"{ENGINE}: its clock is \+([\d.]+) s off, corrected", done.stdout)
    assert float(said[1]) == pytest.approx(AHEAD, abs=0.02)
    assert done.stdout.count("corrected") == 1
    spans = [e for e in json.loads(out.read_text()) if e["ph"] == "X"]
    whole = max(load(path).seconds for path in session.values())
    assert max(span["ts"] for span in spans) / 1e6 < whole + 60, "not hours apart"


# ------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def page(session, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "t.html"
    done = tool("timeline", *session.values(), "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_page_needs_nothing_else(page):
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://|fetch\(|import\s*\(""", text)
    data = text.split("const data = ")[1].split(";\n")[0]
    assert "<" not in data
    assert len(json.loads(data)["rows"]) == 9


def test_page_of_a_part_begins_with_that_part(session, tmp_path):
    out = tmp_path / "part.html"
    done = tool("timeline", *session.values(), "--out", out, "--from", "2", "--to", "3")
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text().split("const data = ")[1].split(";\n")[0])
    assert data["begin"] == min(span[1] for span in data["spans"])


def test_part_shows_what_touches_it_as_it_is_drawn(session):
    """Spans that reach into the next are drawn shorter: a part counts what is left of them."""
    recordings = load_merged(list(session.values()))
    whole = build_timeline(recordings)
    drawn = set(whole.spans)
    for begin in (whole.seconds * n / 4 for n in range(4)):
        end = begin + whole.seconds / 4
        part = build_timeline(recordings, begin, end).spans
        assert set(part) == {s for s in drawn if s.end >= begin and s.start <= end}


def browser(page: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    assert CHROMIUM is not None
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder}/profile", "--window-size=1400,700", *words, page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_page_opens_in_a_browser_and_draws_every_row(page, tmp_path):
    picture = tmp_path / "t.png"
    done = browser(page, tmp_path, f"--screenshot={picture}")
    assert ":CONSOLE" not in done.stderr, done.stderr  # neither errors nor warnings
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels.shape == (700, 1400, 3)
    # Coloured, unlike paper, grid and letters: the spread of a pixel's channels.
    coloured = (pixels.max(axis=2) - pixels.min(axis=2)) > 60
    header = int(np.flatnonzero(coloured[:, 6:10].any(axis=1))[0])  # the first row's mark
    for row in range(9):
        at = header + row * 30
        assert coloured[at : at + 14, 170:].any(), f"row {row} is blank"
    assert not coloured[header + 9 * 30 + 10 :].any()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_page_draws_every_span_and_answers_zoom_pan_and_hover(page, tmp_path):
    """The page's own functions, called from within, as a mouse would."""
    probe = """
<script>
const log = [];
const box = canvas.getBoundingClientRect();
const at = (type, x, y, more = {}) => canvas.dispatchEvent(
  new (type === "wheel" ? WheelEvent : PointerEvent)(type,
    { clientX: box.left + x, clientY: box.top + y, bubbles: true, pointerId: 1, ...more }));
canvas.setPointerCapture = () => {};
const before = to - from;
at("wheel", 700, 50, { deltaY: -1000 });
log.push(to - from < before / 3 ? "zoomed" : "not zoomed");
const left = from;
at("pointerdown", 700, 50);
at("pointermove", 500, 50);
at("pointerup", 500, 50);
log.push(from > left ? "moved" : "not moved");
whole();
const span = data.spans.find(s => data.rows[s[0]].endsWith("forward"));
at("pointermove", x(span[1] + span[2] / 2), y(span[0]) + ROW / 2);
log.push(tip.style.display, tip.textContent.split("\\n")[0]);
document.title = log.join("|");
</script>
"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</html>", probe + "</html>"))
    done = browser(copy, tmp_path, "--dump-dom")
    assert ":CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    zoomed, moved, shown, text = title.split("|")
    assert (zoomed, moved, shown) == ("zoomed", "moved", "block")
    assert re.match(r"engine-0-0 forward: step \d+", text)
    drawn = re.search(r'data-drawn="(\d+)"', done.stdout)[1]
    data = json.loads(page.read_text().split("const data = ")[1].split(";\n")[0])
    assert int(drawn) == len(data["spans"]) > 500
