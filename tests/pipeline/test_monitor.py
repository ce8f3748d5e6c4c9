"""The feed of a running server: a killed stage is seen, a request's way is that of a recording."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from statistics import median

import pytest
import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.control import Observed
from pipeinfer.messages import Heartbeat
from pipeinfer.replay.timeline import request_times
from pipeinfer.replay.traces import load_merged
from pipeinfer.runtime.servers import running_servers, running_topology
from pipeinfer.topology import Topology
from servers import Server

KEY, OTHER = "secret", "other"
STAGES = ["gateway-0", "tokenizer-0", "scheduler-0", "engine-0-0", "detokenizer-0"]
TRIES = 3
SLACK = 0.1  # seconds between what two clocks of two threads say of one event


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(traces):
    keys = traces / "keys"
    digests = [sha256(key.encode()).hexdigest() for key in (KEY, OTHER)]
    keys.write_text("root sha256:{} admin\none sha256:{}\n".format(*digests))
    with Server("--threads", "1", "--kv-pages", "300", "--api-key-file", str(keys),
                "--record", str(traces)) as running:  # fmt: skip
        yield running


def opened(server: Server, path: str, body: dict | None = None, key: str = KEY):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, headers), timeout=60
    )


def asked(server: Server, path: str, body: dict | None = None, key: str = KEY) -> dict:
    with opened(server, path, body, key) as answer:
        return json.load(answer)


def complete(server: Server, prompt: str, **more) -> dict:
    return asked(server, "/v1/completions", {"prompt": prompt, "max_tokens": 8, **more})


class Feed:
    """Reads events in a thread; `events` grows."""

    def __init__(self, server: Server) -> None:
        self.events: list[tuple[float, dict]] = []
        self._response = opened(server, "/monitor/events")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for line in self._response:
                if line.startswith(b"data: "):
                    self.events.append((time.monotonic(), json.loads(line[6:])))

    def wait(self, condition, what: str, seconds: float = 30.0):
        """The first event for which it is true: (when it came, the event)."""
        deadline, seen = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            for at, event in self.events[seen:]:
                if condition(event):
                    return at, event
                seen += 1
            time.sleep(0.01)
        raise AssertionError(f"never seen: {what}; last: {self.events[-1:]}")

    def close(self) -> None:
        self._response.close()


@contextlib.contextmanager
def looking(server: Server) -> Iterator[Feed]:
    feed = Feed(server)
    try:
        feed.wait(lambda event: True, "a first event")
        yield feed
    finally:
        feed.close()


def stage(event: dict, name: str) -> dict:
    return next(one for one in event["stages"] if one["stage"] == name)


def test_it_needs_the_key(server):
    for path in ("events", "requests/x", "prefixes"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            opened(server, f"/monitor/{path}", key="wrong")
        assert refused.value.code == 401


def latencies(event: dict) -> dict[str, float | None]:
    return {one["stage"]: one["latency_ms"] for one in event["stages"]}


def test_figures_say_what_runs(server):
    with looking(server) as feed:
        names = []

        def watched() -> bool:
            names.append(complete(server, "Are you there?")["id"])
            return any(None not in latencies(one).values() for _, one in list(feed.events))

        # A stage that has not heard yet that somebody looks misses a request's first text.
        server.wait(watched, "stages that are looked at")
        told = complete(server, "What is pipeinfer?", max_tokens=60, ignore_eos=True)
        # Said by the engine and by the gateway, each in its own second.
        feed.wait(lambda event: event["tokens_per_s"] > 0, "tokens")
        _, event = feed.wait(lambda event: event["latency"]["itl_ms"]["count"], "times between")
        feed.wait(lambda event: any(r["finish"] == "length" for r in event["requests"]), "its end")
        assert [one["stage"] for one in event["stages"]] == STAGES
        assert all(one["state"] == "ready" and one["restarts"] == 0 for one in event["stages"])
        assert event["status"] == "ready" and event["model"] == "pipeinfer-demo"
        (pages,) = event["pages"]
        assert pages["total"] == pages["free"] + pages["cached"] + pages["used"] == 300
        assert 0 < event["latency"]["ttft_ms"]["p50"] <= event["latency"]["ttft_ms"]["p99"]
        assert len(event["edges"]) == 5

        def steps() -> list[dict]:
            return [step for _, one in list(feed.events) for step in one["steps"]]

        server.wait(lambda: sum(step["decodes"] for step in steps()) >= 59, "all its steps")
        assert sum(step["prompt_tokens"] for step in steps()) >= len("What is pipeinfer?")
        way = server.wait(lambda: whole(server, told["id"]), "five spans that have ended")
        took = {one["stage"]: 1e3 * (one["ended"] - one["began"]) for one in way["spans"]}
        spans = [
            one
            for name in [*names, told["id"]]
            for one in asked(server, f"/monitor/requests/{name}")["spans"]
        ]
        tokenized = [
            1e3 * (one["ended"] - one["began"])
            for one in spans
            if one["stage"] == "tokenizer-0" and one["ended"]
        ]
        texts = [
            1e3 * moment["values"]["seconds"]
            for one in spans
            if one["stage"] == "detokenizer-0"
            for moment in one["moments"]
            if moment["name"] == "first_text"
        ]
        wanted = {"tokenizer-0": median(tokenized), "detokenizer-0": median(texts)}
        _, event = feed.wait(
            lambda event: (
                None not in latencies(event).values()
                and {stage: latencies(event)[stage] for stage in wanted} == pytest.approx(wanted)
            ),
            "the latency of every stage",
        )
        assert 0 < latencies(event)["detokenizer-0"] < took["detokenizer-0"]
        times = [one["time"] for _, one in list(feed.events)]
        assert len(times) <= 4 * (times[-1] - times[0]) + 2, "at most four a second"


def test_a_request_passes_all_stages_as_a_recording_says(server, traces):
    for left in reversed(range(TRIES)):  # a stage may stand still between two looks at a clock
        try:
            passes_as_recorded(server, traces)
            break
        except AssertionError:
            if not left:
                raise


def passes_as_recorded(server: Server, traces: Path) -> None:
    with looking(server) as feed:
        prompt = "How many words has a recording of a request, from its first stage to its last?"
        asked_for: dict[str, float] = {}

        def seen() -> tuple[str, dict] | None:
            """A stage that has not heard yet that somebody looks has no span: asks again then."""
            if time.monotonic() > max(asked_for.values(), default=0.0) + 3.0:
                name = complete(server, prompt)["id"]
                feed.wait(
                    lambda event: any(r["id"] == name and r["ended"] for r in event["requests"]),
                    "its end",
                )
                asked_for[name] = time.monotonic()
            ways = [(name, whole(server, name)) for name in asked_for]
            return next(((name, way) for name, way in ways if way is not None), None)

        name, way = server.wait(seen, "five spans that have ended")
    spans = {one["stage"]: one for one in way["spans"]}
    assert sorted(spans) == sorted(STAGES)
    for one in way["spans"]:
        assert one["began"] <= one["ended"]
        times = [moment["at"] for moment in one["moments"]]
        assert times == sorted(times)
        assert one["began"] - SLACK <= times[0] and times[-1] <= one["ended"] + SLACK
    assert spans["gateway-0"]["outcome"] == "length"
    begun = [spans[stage]["began"] for stage in STAGES[:4]]
    assert all(first <= then + SLACK for first, then in itertools.pairwise(begun))
    agrees_with_recording(server, name, spans, traces)


def whole(server: Server, name: str) -> dict | None:
    way = asked(server, f"/monitor/requests/{name}")
    ended = len(way["spans"]) == len(STAGES) and all(one["ended"] for one in way["spans"])
    return way if ended else None


def agrees_with_recording(server: Server, name: str, spans: dict, traces: Path) -> None:
    """What `tools/replay timeline` draws from: each stage's messages that name the request."""
    events = {"tokenizer-0": "submitted", "scheduler-0": "queued", "engine-0-0": "planned"}

    def recorded() -> dict[str, float] | None:
        """When what happened first; each stage writes a block of its recording now and then."""
        times = request_times(load_merged(sorted(traces.glob("*.pitrace"))))
        first = times[name].first if name in times else {}
        return first if first.keys() >= {"called", *events.values()} else None

    first = server.wait(recorded, "recordings of all stages")
    zero = spans["gateway-0"]["began"] - first["called"]
    for stage, event in events.items():
        assert spans[stage]["began"] - zero == pytest.approx(first[event], abs=SLACK), stage


def test_the_largest_prefixes_are_told_with_their_text(server):
    shared = "This is a long beginning that several prompts have in common, all of it: "
    for end in ("one", "two and more", "three, and that is it"):
        complete(server, shared + end + "." * 40)

    def largest() -> dict | None:
        """Once the engine has heard of the ends of all three, and has the time to answer."""
        for group in asked(server, "/monitor/prefixes")["groups"]:
            one = group["prefixes"][0]
            if one["sequences"] >= 3 and one["locks"] == 0:
                return one
        return None

    first = server.wait(largest, "three sequences of one beginning")
    assert shared.startswith(first["text"][:40])
    assert first["tokens"] // 16 == len(shared) // 16


def test_prompts_are_told_to_no_other_key_and_salted_ones_to_nobody(server):
    secret = "A secret of one tenant that no other one may read, whatever they ask. " * 6
    complete(server, secret, cache_salt="a tenant's own")
    complete(server, "This one is an operator's to see.")

    def long_one(key: str) -> dict | None:
        """The group, once the engine has cached the prompt and has the time to answer."""
        for group in asked(server, "/monitor/prefixes", key=key)["groups"]:
            if max(one["tokens"] for one in group["prefixes"]) >= 400:
                return group
        return None

    for key in (KEY, OTHER):
        group = server.wait(lambda key=key: long_one(key), "the long prompt")
        longest = max(group["prefixes"], key=lambda one: one["tokens"])
        assert set(longest) == {"tokens", "sequences", "locks"}
        shown = [one for one in group["prefixes"] if "text" in one]
        assert bool(shown) == (key == KEY)
        assert "secret" not in json.dumps(group)


def test_a_killed_stage_is_seen_at_once_and_its_recovery_too(server):
    """A gateway that stands still until it hears of both shows no event between: then again."""
    with looking(server) as feed:
        _, event = feed.wait(lambda event: event["status"] == "ready", "a ready server")
        gone: list[dict] = []
        for killed in range(1, TRIES + 1):
            pid, seen = stage(event, "detokenizer-0")["pid"], len(feed.events)
            os.kill(pid, signal.SIGKILL)
            _, event = feed.wait(
                lambda event, killed=killed: (
                    stage(event, "detokenizer-0")["restarts"] == killed
                    and event["status"] == "ready"
                ),
                "its recovery",
            )
            rows = [stage(one, "detokenizer-0") for _, one in feed.events[seen:]]
            gone = [row for row in rows if row["state"] != "ready"]
            assert stage(event, "detokenizer-0")["pid"] != pid
            assert stage(event, "detokenizer-0")["last_restart"] is not None
            assert stage(event, "engine-0-0")["restarts"] == 0
            # Its supervisor says so, at once; silence would be noticed after seconds.
            if gone and "silent" not in gone[0]["reason"]:
                break
        assert gone, "that it was gone"
        assert "silent" not in gone[0]["reason"]


def topology(server: Server) -> Topology:
    [file] = [s.file for s in running_servers() if s.pid == server.process.pid]
    return running_topology(str(file))


def test_stages_say_nothing_while_nobody_looks(server):
    heard: list[object] = []
    with ControlClient(topology(server), zmq.Context.instance()) as caller:
        for name in STAGES:
            caller.listen(name)

        def until(condition) -> None:
            deadline = time.monotonic() + 20
            while not condition() and time.monotonic() < deadline:
                heard.extend(message for _, message in caller.receive(0.2))
            assert condition()

        def beats() -> int:
            return sum(isinstance(one, Heartbeat) for one in heard)

        with looking(server):
            complete(server, "Somebody looks.")
            until(lambda: any(isinstance(one, Observed) for one in heard))
        # A gateway that stands still asks until it sees that nobody looks any more, and who was
        # asked forgets that seconds later.
        deadline = time.monotonic() + 60
        while True:
            heard.clear()
            complete(server, "Nobody looks.")
            until(lambda: beats() > 20)
            if not any(isinstance(one, Observed) for one in heard):
                break
            assert time.monotonic() < deadline, "they go on"
