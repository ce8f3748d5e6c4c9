"""schemathesis: whatever /openapi.json allows, and what it forbids, is answered as it says.

A server of its own, with a short context, so that an answer without `max_tokens` ends soon. Left
out: /v1/embeddings, which says 501; and the check that all that fits a schema is accepted, since a
schema does not say that `messages` of no message ask for nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import Server

TEMPLATE = Path(__file__).parents[1] / "hermes.jinja"
KEY = "secret"
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


@pytest.mark.timeout(600)
def test_answers_are_what_the_document_says(tmp_path):
    settings = ("--max-model-len", "64", "--api-key", KEY, "--chat-template", str(TEMPLATE))
    with Server(*settings, python=os.environ["PYTHON_OF_SERVER"]) as server:
        before = pids(server)
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")),
                *("--config-file", str(Path(__file__).with_name("schemathesis.toml"))),
                *("run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing"),
                *("--checks", ",".join(CHECKS), "--exclude-path", "/v1/embeddings"),
                *("--header", f"Authorization: Bearer {KEY}", "--max-examples", "8"),
                *("--seed", "0", "--workers", "1", "--continue-on-failure", "--no-color"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout
        assert " passed" in done.stdout.rpartition("Test cases:")[2]
        assert pids(server) == before
        assert server.health()["status"] == "ready"
        assert not [line for line in server.log if "Traceback" in line]
