"""Passages as spans: to a real collector, in the right trace, and at no request's cost."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector import Collector
from pipeinfer.control import RequestSpan, TimedEvent
from pipeinfer.gateway.ledger import RequestTraces
from pipeinfer.observe import observer
from pipeinfer.observe.observer import SHUTDOWN_TIMEOUT, OpenTelemetryExporter
from pipeinfer.observe.spans import read_traceparent
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity
from servers import environment
from waiting import until

TRACE, CLIENT, OWN = "1" * 32, "a" * 16, "b" * 16
SPAN_KINDS = {"internal": 1, "server": 2}


def header(trace: str, span: str, flags: str = "01") -> str:
    return f"00-{trace}-{span}-{flags}"


def passage(stage: str, name: str, trace: str = "", span: str = "", outcome: str = "stop"):
    moments = (
        TimedEvent(10.5, "accepted", {"group": 1, "prompt_tokens": 12}),
        TimedEvent(10.75, "finished", {"output_tokens": 7, "cached_tokens": 4}),
    )
    return RequestSpan(stage, name, 10.25, 11.0, outcome, trace, moments, span)


async def exported(url: str, name: str, *spans: RequestSpan) -> float:
    """Seconds that the end of the stage `name` took."""
    exporting = OpenTelemetryExporter(
        Settings(otlp_endpoint=url, served_model_name="m"), Identity(name)
    )
    for one in spans:
        exporting.add(one)
    began = time.monotonic()
    await exporting.close()
    return time.monotonic() - began


async def test_a_gateways_span_is_a_child_of_its_clients_and_the_parent_of_the_others():
    with Collector() as collector:
        first = passage("gateway-0", "r", header(TRACE, CLIENT), header(TRACE, OWN))
        second = passage("gateway-0", "r/1", header(TRACE, OWN), "", "error")
        await exported(collector.url, "gateway", first, second)
        await exported(
            collector.url + "/v1/traces", "engine", passage("engine-0-0", "r", header(TRACE, OWN))
        )
        mine, choice = collector.of("r", 2), collector.of("r/1")  # a late one comes after the end
        assert collector.paths == {"/v1/traces"}
    (root,), (engine,), (other,) = mine["gateway"], mine["engine"], choice["gateway"]
    assert {root.trace, engine.trace, other.trace} == {TRACE}
    assert (root.parent, root.id) == (CLIENT, OWN)
    assert engine.parent == other.parent == OWN and len({root.id, engine.id, other.id}) == 3
    assert (root.kind, engine.kind) == (SPAN_KINDS["server"], SPAN_KINDS["internal"])
    assert (root.began, root.ended, root.failed, other.failed) == (10.25, 11.0, False, True)
    assert [event[0] for event in root.events] == ["accepted", "finished"]
    assert root.events[0][1] == {"group": 1, "prompt_tokens": 12}
    assert root.attributes == {
        "pipeinfer.request_id": "r",
        "pipeinfer.outcome": "stop",
        "pipeinfer.group": 1,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert root.resource["service.name"] == "pipeinfer"
    assert (root.resource["pipeinfer.stage"], engine.resource["pipeinfer.stage"]) == (
        "gateway-0", "engine-0-0",
    )  # fmt: skip


async def test_what_its_client_does_not_sample_is_not_sent():
    with Collector() as collector:
        unsampled = header(TRACE, CLIENT, "00")
        await exported(collector.url, "gateway", passage("g", "a", unsampled), passage("g", "b"))
        await exported(collector.url, "engine", passage("e", "c", unsampled), passage("e", "d"))
        await exported(collector.url, "engine", passage("e", "e", header(TRACE, OWN)))
        for name in ("b", "e"):
            collector.of(name)
        sent = {span.attributes["pipeinfer.request_id"]: span for span in collector.spans}
    assert sent.keys() == {"b", "e"}, "without a trace only a gateway begins one"
    assert sent["b"].parent == "" and int(sent["b"].trace, 16)


async def test_the_end_of_a_stage_waits_a_second_for_a_collector_at_most(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # seconds: who waits, waits long
    at_most = SHUTDOWN_TIMEOUT + 20
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert await exported(url, "engine", passage("e", "a", header(TRACE, OWN))) < at_most
    assert await exported(url, "engine", passage("e", "a", header(TRACE, OWN))) < at_most


async def test_a_collector_that_does_not_answer_is_one_line_of_the_log(caplog, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setattr(exporter, "filters", [])  # those of stages before in this process
    exporting = OpenTelemetryExporter(Settings(otlp_endpoint=url), Identity("engine"))
    for name in "abc":
        exporting.add(passage("e", name, header(TRACE, OWN)))
        await asyncio.sleep(0.1)  # a batch each; what is missed of them makes the test no stricter
    await exporting.close()

    def said() -> list[str]:
        found = (r for r in caplog.records if r.name.startswith("opentelemetry.exporter"))
        return [record.getMessage() for record in found]

    await until(said)  # the end does not wait for the thread that sends
    assert len(said()) == 1 and "span" in said()[0]


def test_what_it_needs_is_said_in_one_line(monkeypatch):
    observer.check_opentelemetry(Settings())
    observer.check_opentelemetry(Settings(otlp_endpoint="http://host:4318"))
    with pytest.raises(ConfigurationError, match="must begin with http"):
        observer.check_opentelemetry(Settings(otlp_endpoint="host:4317"))
    monkeypatch.setattr(observer, "EXPORTER_PACKAGE", "opentelemetry_that_nobody_has.exporter")
    with pytest.raises(ConfigurationError, match=r"pip install 'pipeinfer\[otel\]'"):
        observer.check_opentelemetry(Settings(otlp_endpoint="http://host:4318"))
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "serve", "--otlp-endpoint", "host:4317"],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "error: --otlp-endpoint"
    )


def test_nobody_imports_it_who_did_not_ask():
    program = (
        "import sys, pipeinfer.gateway.stage, pipeinfer.runtime.entry\n"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# ------------------------------------------------------------------------------------- traceparents


@given(st.text("0123456789abcdef-fxXg", max_size=60))
def test_what_is_no_traceparent_is_none(text):
    assert read_traceparent(text) is None or len(text) == 55


@given(*(st.integers(1, 2**bits - 1) for bits in (128, 64)), st.integers(0, 255))
def test_a_traceparent_is_read_as_it_was_written(trace, span, flags):
    read = read_traceparent(f"00-{trace:032x}-{span:016x}-{flags:02x}")
    assert read == (f"{trace:032x}", f"{span:016x}", flags % 2 == 1)
    assert read_traceparent(read.text) == read


@pytest.mark.parametrize(
    "wrong", [header("0" * 32, OWN), header(TRACE, "0" * 16), "ff" + header(TRACE, OWN)[2:], ""]
)
def test_ids_of_nothing_are_no_trace(wrong):
    assert read_traceparent(wrong) is None


def test_the_gateways_span_stands_in_the_clients_trace_or_a_new_one():
    traces = RequestTraces("process 1", on=True)
    given = header(TRACE, CLIENT)
    (own, mine) = map(
        read_traceparent, (traces.traceparent("r", given), traces.traceparent("r", ""))
    )
    assert own is not None and own.trace_id == TRACE and own.span_id != CLIENT and own.sampled
    assert mine is not None and mine.trace_id != TRACE and mine.sampled
    assert traces.traceparent("r", "") == mine.text, "a replay says the same"
    others = {traces.traceparent("q", ""), RequestTraces("process 2", on=True).traceparent("r", "")}
    assert len({read_traceparent(other).trace_id for other in others} | {mine.trace_id}) == 3
    unsampled = header(TRACE, CLIENT, "00")
    assert traces.traceparent("r", unsampled) == unsampled
    assert (
        RequestTraces("process 1").traceparent("r", given) == given
        and RequestTraces().traceparent("r", "") == ""
    )
