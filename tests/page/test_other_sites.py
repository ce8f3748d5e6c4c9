"""A browser that shows another site's page beside a server without keys: the page has no use of it,
and the server's own page works."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from servers import Server

BODY = json.dumps({"prompt": "count", "max_tokens": 2})
POSTS = """async ([target, body]) => {
  for (const [content, headers] of [
    [body, { "Content-Type": "text/plain" }], [new Blob([body]), {}],
    [new URLSearchParams({ prompt: body }), {}],
  ]) await fetch(target, { method: "POST", mode: "no-cors", body: content, headers });
  navigator.sendBeacon(target, body);
}"""
OWN = """async (body) => (await fetch("/v1/completions", {
  method: "POST", headers: { "Content-Type": "application/json" }, body,
})).status"""


class Site(BaseHTTPRequestHandler):
    """An empty page for every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>another site</title><link rel=icon href=data:,>")

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """The port of one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_pages_of_other_sites_have_no_use_of_a_server_without_keys(site, open_page, evil):
    with Server("--threads", "1", "--kv-pages", "300") as server:
        port = server.url.rsplit(":", 1)[1]
        for origin in (evil, "127.0.0.1", "localhost"):
            page, statuses = open_page(f"http://{origin}:{site}/"), list[int]()
            page.on("response", lambda answer: statuses.append(answer.status))  # noqa: B023
            for target in ("127.0.0.1", "localhost", evil):
                page.evaluate(POSTS, [f"http://{target}:{port}/v1/completions", BODY])
            assert len(statuses) >= 9 and set(statuses) == {403}
        page = open_page(f"http://{evil}:{site}/")
        rebound = page.goto(f"http://{evil}:{port}/v1/models")
        assert rebound.status == 403 and "--allowed-hosts" in rebound.text()
        assert server.metric("pipeinfer_prompt_tokens_total") == 0, "nothing reached the pipeline"
        page.goto(f"http://127.0.0.1:{site}/")
        page.evaluate(f"location.href = 'http://localhost:{port}/'")
        page.wait_for_url(f"http://localhost:{port}/")
        assert page.title() == "pipeinfer" and page.evaluate(OWN, BODY) == 200
