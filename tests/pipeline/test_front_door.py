"""A whole server behind TLS with named keys: SIGHUP changes both; no key is written anywhere."""

from __future__ import annotations

import hashlib
import shutil
import signal
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from certificates import make
from pipeinfer.trace.format import Trace
from servers import Server

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")

TOKENS = 600
ALICE, BOB = "pik-alice-s3cret", "pik-bob-s3cret"


def line(name: str, key: str) -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()} tokens=100000\n"


def client(url: str, cert: str, key: str) -> openai.OpenAI:
    http = httpx.Client(verify=ssl.create_default_context(cafile=cert))
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0)


def admitted(url: str, cert: str, key: str) -> bool:
    with client(url, cert, key) as asking:
        try:
            asking.models.list()
            return True
        except openai.AuthenticationError:
            return False


def test_keys_and_certificate_change_on_sighup_under_a_running_stream(tmp_path: Path) -> None:
    first, second = make(tmp_path / "first", "first"), make(tmp_path / "second", "second")
    cert, key = make(tmp_path / "used", "used")
    shutil.copy(first[0], cert)
    shutil.copy(first[1], key)
    keys, recorded = tmp_path / "keys.txt", tmp_path / "recorded"
    keys.write_text(line("alice", ALICE))
    arguments = ["--api-key-file", str(keys), "--tls-cert", cert, "--tls-key", key]
    with Server(*arguments, "--record", str(recorded), "--kv-pages", "500") as server:
        assert server.url.startswith("https://")
        with client(server.url, first[0], ALICE) as alice:
            stream = alice.completions.create(
                model="pipeinfer-demo", prompt="count", max_tokens=TOKENS, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            next(iter(stream))
            shutil.copy(second[0], cert)
            shutil.copy(second[1], key)
            keys.write_text(line("bob", BOB))
            server.process.send_signal(signal.SIGHUP)
            server.wait(
                lambda: any("TLS certificate again" in text for text in server.log), "both are read"
            )
            assert admitted(server.url, second[0], BOB)
            assert not admitted(server.url, second[0], ALICE)
            last = list(stream)[-1]
            assert last.choices[0].finish_reason == "length", "what runs goes on"
        context = ssl.create_default_context(cafile=second[0])
        with httpx.Client(verify=context, timeout=120) as http:
            metrics = http.get(f"{server.url}/metrics").text
        assert 'pipeinfer_key_tokens_total{key="alice",kind="output"} ' + f"{TOKENS}.0" in metrics
        assert server.stop() == 0
    said = "\n".join(server.log) + metrics
    for trace in recorded.iterdir():
        read = Trace(trace)
        said += repr(read.header) + "".join(repr(record.body) for record in read)
    assert len(list(recorded.iterdir())) == 5
    for secret in (ALICE, BOB, hashlib.sha256(BOB.encode()).hexdigest()):
        assert secret not in said
