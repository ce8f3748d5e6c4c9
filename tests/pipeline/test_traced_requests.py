"""A server that is watched: spans of every stage, JSON logs, and what stages say on `control`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
import zmq

from collector import Collector
from pipeinfer import topology as topologies
from pipeinfer.bus.bus import ControlClient
from pipeinfer.control import Observed, RequestSpan, StepMade, Watch
from pipeinfer.runtime.servers import TOPOLOGY
from servers import STAGES, Server, environment

ROOT = Path(__file__).parents[2]

TRACE, CLIENT = "7" * 32, "a" * 16
BODY = {"prompt": "count from 1 to 9", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
ASK_AGAIN = 1.0  # seconds in which a request's spans come, of stages that know who watches
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


class Traced(Server):
    """A server whose topology is found, and whose spans leave soon."""

    def __init__(self, url: str) -> None:
        self.temporary = tempfile.mkdtemp(prefix="tr-", dir="/tmp")  # short: sockets lie in it
        wanted = {"TMPDIR": self.temporary, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            super().__init__(
                "--otlp-endpoint", url, "--log-format", "json", "--kv-pages", "300",
                "--threads", "1", "--record", f"{self.temporary}/traces",
            )  # fmt: skip
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def ask(self, flags: str = "01", trace: str = TRACE, **changed) -> dict:
        headers = {"content-type": "application/json", "x-request-id": "mine"}
        if trace:
            headers["traceparent"] = f"00-{trace}-{CLIENT}-{flags}"
        body = json.dumps(BODY | changed).encode()
        asked = urllib.request.Request(self.url + "/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.loads(answer.read())

    def logged(self, many: int, **fields: object) -> list[dict]:
        """Lines of the log with these fields, when there are so many. Every line is an object."""

        def found() -> list[dict]:
            said = [json.loads(line) for line in list(self.log)]
            mine = [line for line in said if fields.items() <= line.items()]
            return mine if len(mine) >= many else []

        return self.wait(found, f"{many} lines with {fields}")

    def topology(self) -> topologies.Topology:
        (file,) = Path(self.temporary).glob(f"*/{TOPOLOGY}")
        return topologies.load(file)


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(collector):
    with Traced(collector.url) as made:
        made.ask()  # a tokenizer that is slow to start may ask for the first one again
        yield made
    shutil.rmtree(made.temporary, ignore_errors=True)


def test_every_stage_sends_its_span_of_a_request_into_its_clients_trace(server, collector):
    before = time.time()
    answer = server.ask()
    spans = collector.of(answer["id"], len(STAGES))
    (line,) = server.logged(1, request_id=answer["id"])
    after = time.time()  # a stage may do its last of a request when the client has its answer
    assert sorted(span.name for found in spans.values() for span in found) == sorted(STAGES)
    (root,) = spans.pop("gateway")
    assert (root.trace, root.parent) == (TRACE, CLIENT)
    for (span,) in spans.values():
        assert (span.trace, span.parent) == (TRACE, root.id)
        assert root.began - 0.05 <= span.began <= span.ended <= after + 0.05
        assert span.resource["service.name"] == "pipeinfer"
        assert span.resource["pipeinfer.stage"].startswith(span.name)
    assert before - 0.05 <= root.began < root.ended <= after + 0.05
    usage = answer["usage"]
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 24
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    events = {name: [event for event, _ in span.events] for name, (span,) in spans.items()}
    events["gateway"] = [event for event, _ in root.events]
    assert events == {
        "gateway": ["submitted", "accepted", "first_text", "finished"],
        "tokenizer": ["routed"],
        "scheduler": ["queued", "admitted", "first_token", "finished"],
        "engine": ["admitted", "computed", "released"],
        "detokenizer": ["opened", "first_text", "finished"],
    }
    assert TIME.fullmatch(line.pop("time"))
    assert root.ended - root.began - 0.05 <= line.pop("seconds") <= after - before + 0.05
    assert line.pop("message").startswith("POST /v1/completions 200 ok in ")
    assert line == {
        "level": "info", "stage": "gateway-0", "pid": server.pid("gateway"),
        "logger": "pipeinfer.access", "method": "POST", "path": "/v1/completions", "status": 200,
        "outcome": "ok", "finish": "length", "request_id": answer["id"], "x_request_id": "mine",
        "trace_id": TRACE, "key": "anonymous", "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": 24,
    }  # fmt: skip


def test_a_request_without_a_trace_begins_one_and_its_choices_are_in_it(server, collector):
    answer = server.ask(trace="", n=2, seed=1, temperature=1)
    spans, second = collector.of(answer["id"], 5), collector.of(answer["id"] + "/1", 5)
    (root,) = spans["gateway"]
    assert root.parent == "" and int(root.trace, 16)
    others = [s for n, found in spans.items() if n != "gateway" for s in found]
    others += [span for found in second.values() for span in found]
    assert len(others) == 4 + 5
    assert {(span.trace, span.parent) for span in others} == {(root.trace, root.id)}
    (line,) = server.logged(1, request_id=answer["id"])
    assert line["trace_id"] == root.trace and line["output_tokens"] == 48


def test_a_request_that_its_client_does_not_sample_leaves_no_span(server, collector):
    unsampled, sampled = server.ask(flags="00"), server.ask()
    collector.of(sampled["id"], len(STAGES))
    assert collector.of(unsampled["id"], seconds=0.2) == {}
    assert server.logged(1, request_id=unsampled["id"])[0]["trace_id"] == TRACE


def test_refused_requests_have_a_line_and_health_has_none(server):
    server.get("/health/live")
    for path, status in (("/v1/completions", 400), ("/v1/nothing", 404)):
        assert server.post(path, {"prompt": 1})[0] == status
        (line,) = server.logged(1, path=path, status=status)
        assert (line["outcome"], line["level"], line["output_tokens"]) == ("refused", "info", 0)
    paths = {line["path"] for line in server.logged(2, logger="pipeinfer.access")}
    assert paths == {"/v1/completions", "/v1/nothing"}


def test_who_watches_hears_of_a_request_from_every_stage_and_of_its_steps(server):
    topology = server.topology()
    # {request id: {stage: its span so far}}
    spans: dict[str, dict[str, RequestSpan]] = defaultdict(dict)
    steps: list[StepMade] = []
    with zmq.Context() as context, ControlClient(topology, context) as caller:
        for stage in topology.ids():
            caller.listen(stage)
        waiting, asked, deadline = set(topology.ids()), 0.0, time.monotonic() + 60
        whole: list[dict[str, RequestSpan]] = []
        while not whole:
            assert time.monotonic() < deadline, spans
            for header, message in caller.receive(0.05):
                waiting.discard(header.sender)  # heard: its answers will be, too
                if isinstance(message, Observed):
                    steps += message.steps
                    for span in message.spans:
                        spans[span.request_id][span.stage] = span
            if not waiting and time.monotonic() > asked + ASK_AGAIN:
                for stage in topology.ids():
                    caller.send(stage, Watch(30.0))
                server.ask()  # a stage that does not know yet that somebody watches says nothing
                asked = time.monotonic()
            whole = [
                found
                for found in spans.values()
                if found.keys() == {*topology.ids()} and all(span.ended for span in found.values())
            ]
    gateway = whole[0]["gateway-0"]
    assert gateway.outcome == "length" and gateway.moments[-1].values["output_tokens"] == 24
    assert sum(step.decodes for step in steps) >= 23
    assert sum(step.prompt_tokens for step in steps) >= 1
    assert all(step.target == 0.025 and step.seconds > 0 for step in steps)


def test_a_collector_that_is_gone_costs_no_request_anything(server, collector):
    before = server.ask()["choices"][0]["text"]
    collector.close()
    for _ in range(3):
        began = time.monotonic()
        assert server.ask()["choices"][0]["text"] == before
        assert time.monotonic() - began < 20
    assert server.stop(30) == 0
    for line in server.log:
        json.loads(line)
    # What the gateway has told of traces was drawn by nobody: its recording replays.
    (recording,) = Path(server.temporary, "traces").glob("gateway-*.pitrace")
    done = subprocess.run(
        [sys.executable, "tools/replay", "run", "gateway", recording], cwd=ROOT,
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "0 differences" in done.stdout, done.stdout + done.stderr
