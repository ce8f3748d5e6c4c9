"""A small OTLP collector for tests: takes spans over HTTP and keeps them, decoded."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Span:
    """ids: hexadecimal; times: Unix seconds; resource: of the process that sent it."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began: float
    ended: float
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    failed: bool
    resource: dict[str, Any]


class Collector:
    """Listens on a free port of this host; use it as a context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody listens on its port any more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def of(self, request_id: str, many: int = 1, seconds: float = 30.0) -> dict[str, list[Span]]:
        """Spans of a request by name, when there are so many, or those that came in that time."""
        deadline = time.monotonic() + seconds
        while True:
            mine = [s for s in self.spans if s.attributes["pipeinfer.request_id"] == request_id]
            if len(mine) >= many or time.monotonic() > deadline:
                return {
                    name: [s for s in mine if s.name == name] for name in {s.name for s in mine}
                }
            time.sleep(0.02)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.add(self.path)
                collector.spans += decoded(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Tests print nothing of it."""

        return Handler


def decoded(body: bytes) -> list[Span]:
    found = []
    for each in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _plain(each.resource.attributes)
        for scope in each.scope_spans:
            for span in scope.spans:
                events = [(event.name, _plain(event.attributes)) for event in span.events]
                one = Span(
                    span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    span.kind, span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9,
                    _plain(span.attributes), events, span.status.code == 2, resource,
                )  # fmt: skip
                found.append(one)
    return found


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
