"""schemathesis: whatever /openapi.json allows, and what it forbids, is answered as it says.

Servers of their own, one that serves adapters and one that makes vectors, with a short context, so
that an answer without `max_tokens` ends soon. Left out: /sleep while others are asked, which would
wait until somebody wakes the server; and the check that all that fits a schema is accepted, since a
schema does not say that `messages` of no message ask for nothing.
"""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from servers import Server

TEMPLATE = Path(__file__).parents[1] / "hermes.jinja"
KEY = "secret"
VECTORS = "^(/v1)?/(embeddings|score|rerank)$"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


def pids(server: Server) -> list[int]:
    return [stage["pid"] for stage in server.health()["stages"]]


def assert_conforms(server: Server, folder: Path, *paths: str) -> None:
    """Of the operations at `paths`, which are words of schemathesis."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("--config-file", str(Path(__file__).with_name("schemathesis.toml"))),
            *("run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing"),
            *("--checks", ",".join(CHECKS), *paths),
            *("--header", f"Authorization: Bearer {KEY}", "--max-examples", "8"),
            *("--seed", "0", "--workers", "1", "--continue-on-failure", "--no-color"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout.rpartition("Test cases:")[2]


@pytest.mark.timeout(600)
def test_answers_are_what_the_document_says(tmp_path):
    settings = ("--max-model-len", "64", "--api-key", KEY, "--chat-template", str(TEMPLATE))
    settings = (*settings, "--enable-lora")
    with Server(*settings, python=os.environ["PYTHON_OF_SERVER"]) as server:
        before = pids(server)
        assert_conforms(server, tmp_path, "--exclude-path-regex", f"{VECTORS}|^/sleep$")
        assert server.health()["status"] == "ready"
        assert_conforms(server, tmp_path, "--include-path-regex", "^/(sleep|wake_up|is_sleeping)$")
        woken = urllib.request.Request(
            f"{server.url}/wake_up", method="POST", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(woken, timeout=60) as answer:
            assert answer.status == 200
        assert pids(server) == before
        assert server.health()["status"] == "ready"
        assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.timeout(600)
def test_answers_with_vectors_are_what_the_document_says(tmp_path):
    settings = ("--max-model-len", "64", "--api-key", KEY, "--task", "embed")
    with Server(*settings, python=os.environ["PYTHON_OF_SERVER"]) as server:
        before = pids(server)
        assert_conforms(server, tmp_path, "--include-path-regex", VECTORS)
        assert pids(server) == before
        assert server.health()["status"] == "ready"
        assert not [line for line in server.log if "Traceback" in line]
