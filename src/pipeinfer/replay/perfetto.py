"""A picture as a Chrome trace: the JSON array of events that Perfetto and chrome://tracing open.

The format is Google's "Trace Event Format": complete events (ph X), flows (s, t, f) that bind to
the slice around them, and metadata (M) that names processes and threads. Times are microseconds.
"""

from __future__ import annotations

from pipeinfer.json_values import JsonObject
from pipeinfer.replay.spans import Picture

MICRO = 1e6


def events(picture: Picture) -> list[JsonObject]:
    """One process for each stage, one thread for each of its rows, one flow for each request."""
    stages = list(dict.fromkeys(stage for stage, _ in picture.rows))
    pids = {stage: at for at, stage in enumerate(stages, 1)}
    tids = {row: at for at, row in enumerate(picture.rows, 1)}
    out: list[JsonObject] = []
    for stage, pid in pids.items():
        out.append(_named("process_name", pid, 0, stage))
        out.append(_sorted("process_sort_index", pid, 0, pid))
    for (stage, row), tid in tids.items():
        out.append(_named("thread_name", pids[stage], tid, row))
        out.append(_sorted("thread_sort_index", pids[stage], tid, tid))
    for span in picture.spans:
        out.append(
            {
                "ph": "X", "name": span.name, "cat": span.row, "pid": pids[span.stage],
                "tid": tids[span.stage, span.row], "ts": span.start * MICRO,
                "dur": (span.end - span.start) * MICRO,
                "args": {"seq": span.seqs[0], "requests": list(span.requests),
                         "message": span.detail},
            }
        )  # fmt: skip
    for number, flow in enumerate(picture.flows, 1):
        last = len(flow.points) - 1
        for at, (seconds, stage, row) in enumerate(flow.points):
            event = {
                "ph": "s" if at == 0 else "f" if at == last else "t", "id": number,
                "name": flow.request_id, "cat": "request", "pid": pids[stage],
                "tid": tids[stage, row], "ts": seconds * MICRO,
            }  # fmt: skip
            if at == last:
                event["bp"] = "e"  # to the slice around it, not to the next one
            out.append(event)
    return out


def _named(kind: str, pid: int, tid: int, name: str) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _sorted(kind: str, pid: int, tid: int, at: int) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": at}}
