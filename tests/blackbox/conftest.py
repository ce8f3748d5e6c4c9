"""One server for all tests of this folder: the demo model, with a chat template that shows tools.

What the tests of vLLM and SGLang check of a server from outside, as far as it applies here.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest

from servers import Server

TEMPLATE = Path(__file__).parents[1] / "clients" / "hermes.jinja"


class Http:
    """Plain requests, with answers as (status, JSON)."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: object = None, raw: bytes | None = None, **headers: str):
        sent = json.dumps(body).encode() if raw is None else raw
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        headers = {"content-type": "application/json", **named}
        answer = self.client.post(path, content=sent, headers=headers)
        return answer.status_code, answer.json()

    def get(self, path: str):
        answer = self.client.get(path)
        return answer.status_code, answer.json()

    def ask(self, path: str, body: dict) -> dict:
        """The answer, which must be one."""
        status, answer = self.post(path, body)
        assert status == 200, answer
        return answer


@pytest.fixture(scope="session")
def server(shared):
    return shared.enter_context(Server("--chat-template", str(TEMPLATE)))


@pytest.fixture(scope="session")
def http(server):
    made = Http(server.url)
    yield made
    made.client.close()


@pytest.fixture(scope="session")
def api(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="session")
def claude(server):
    import anthropic  # 2 s, which only the worker that has these tests spends

    with anthropic.Anthropic(
        base_url=server.url, api_key="none", timeout=120, max_retries=0
    ) as made:
        yield made
