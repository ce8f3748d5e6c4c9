"""HTTPS with real certificates: who is spoken to, what is refused, and a change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient, answers, post

from certificates import make
from pipeinfer.gateway import connections
from pipeinfer.settings import ConfigurationError
from waiting import until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make(tmp_path_factory.mktemp("tls") / "first", "first")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make(tmp_path_factory.mktemp("tls") / "second", "second")


def trusting(cert: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert)


def port(gateway: Gateway) -> int:
    return int(gateway.url.rsplit(":", 1)[1])


async def test_clients_that_trust_the_certificate_are_served(
    start_gateway: StartGateway, first: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])
    assert gateway.url.startswith("https://127.0.0.1:")
    await until(lambda: f"ready {gateway.url}\n" in capsys.readouterr().out)
    http = httpx.AsyncClient(verify=trusting(first[0]))
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        whole = await client.completions.create(model="test", prompt="a b")
        assert whole.choices[0].text == "a b "
        stream = await client.completions.create(model="test", prompt="a b", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "a b "
    async with httpx.AsyncClient() as stranger:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await stranger.get(f"{gateway.url}/health")


async def test_plain_http_and_old_tls_are_not_spoken_and_harm_nobody(
    start_gateway: StartGateway, first: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])
    plain = await RawClient.connect(gateway)
    plain.send(post({"prompt": "a"}))
    assert b"HTTP" not in await plain.all()
    old = trusting(first[0])
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port(gateway), ssl=old)
    async with httpx.AsyncClient(verify=trusting(first[0])) as http:
        assert (await http.get(f"{gateway.url}/health")).status_code == 200
    assert not [r for r in caplog.records if r.exc_info], "a stranger's noise is no traceback"


async def test_a_client_that_leaves_is_noticed_over_tls(
    start_gateway: StartGateway, first: tuple[str, str]
) -> None:
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])
    client = await RawClient.connect(gateway, ssl=trusting(first[0]))
    client.send(post({"prompt": "hang"}))
    await until(lambda: gateway.pipeline.submits)
    await client.close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)


def descriptors() -> int:
    """Of this process: both ends of what its clients have open to its gateway."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> int:
    most = 4
    monkeypatch.setattr("pipeinfer.gateway.stage.connection_limit", lambda: most)
    return most


async def test_connections_that_never_begin_their_handshake_count_and_make_room(
    start_gateway: StartGateway, first: tuple[str, str], few_connections: int
) -> None:
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])
    before = descriptors()
    silent = [await RawClient.connect(gateway) for _ in range(5 * few_connections)]
    evicted, waiting = silent[:-few_connections], silent[-few_connections:]
    for client in evicted:
        assert await client.all(60) == b""
    assert descriptors() <= before + len(silent) + few_connections + 2  # the loop's own
    async with httpx.AsyncClient(verify=trusting(first[0])) as http:
        metrics = (await http.get(f"{gateway.url}/metrics")).text
        assert f"refused_connections_total {len(evicted) + 1}.0" in metrics
        assert await waiting[0].all(60) == b"", "the oldest one made room for it"
        assert not waiting[1].reader.at_eof()
    for client in silent:
        await client.close()


async def test_a_handshake_that_does_not_end_is_ended(
    start_gateway: StartGateway, first: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT", 0.2)
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])
    client = await RawClient.connect(gateway)
    client.send(b"\x16\x03\x01\x02\x00\x01")  # as a handshake begins
    with contextlib.suppress(ConnectionResetError):
        assert await client.all(60) == b""
    await client.close()


async def test_requests_over_tls_keep_their_connections_and_one_more_is_closed(
    start_gateway: StartGateway, first: tuple[str, str], few_connections: int
) -> None:
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])
    busy = []
    for i in range(few_connections):
        busy.append(await RawClient.connect(gateway, ssl=trusting(first[0])))
        busy[-1].send(post({"prompt": "hang"}))
        await until(lambda: len(gateway.pipeline.submits) == i + 1)  # noqa: B023
    refused = await RawClient.connect(gateway)
    assert await refused.all(60) == b""
    assert not gateway.pipeline.gone
    for client in (*busy, refused):
        await client.close()


async def test_an_idle_client_that_does_not_end_tls_holds_no_descriptor(
    start_gateway: StartGateway, first: tuple[str, str], few_connections: int
) -> None:
    """Its connection made room; it reads nothing any more, and does its part in no end."""
    gateway = await start_gateway(tls_cert=first[0], tls_key=first[1])

    def connect() -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", port(gateway)))
        made = trusting(first[0]).wrap_socket(raw, server_hostname="127.0.0.1")
        made.sendall(post({"prompt": "a"}))
        while not made.recv(65536).endswith(b"}}}"):
            pass
        return made

    held = [await asyncio.to_thread(connect) for _ in range(few_connections)]
    full = descriptors()
    rude = [await asyncio.to_thread(connect) for _ in range(2 * few_connections)]
    await until(lambda: descriptors() == full + len(rude))
    for rude_client in (*held, *rude):
        rude_client.close()


async def test_a_new_certificate_is_for_new_connections(
    start_gateway: StartGateway, first: tuple[str, str], second: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(files: tuple[str, str]) -> None:
        shutil.copy(files[0], cert)
        shutil.copy(files[1], key)

    put(first)
    gateway = await start_gateway(tls_cert=str(cert), tls_key=str(key))
    assert gateway.reload is not None
    before = await RawClient.connect(gateway, ssl=trusting(first[0]))
    put(second)
    gateway.reload()
    await (await RawClient.connect(gateway, ssl=trusting(second[0]))).close()
    with pytest.raises(ssl.SSLError):
        await RawClient.connect(gateway, ssl=trusting(first[0]))
    before.send(post({"prompt": "a"}, "Connection: close"))
    [(status, _, _)] = answers(await before.all())
    assert status == 200, "a connection that was there goes on"
    await before.close()


@pytest.mark.parametrize("broken", ["other key", "half", "gone"])
async def test_a_broken_certificate_leaves_the_old_one_in_place(
    start_gateway: StartGateway,
    first: tuple[str, str],
    second: tuple[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(first[0], cert)
    shutil.copy(first[1], key)
    gateway = await start_gateway(tls_cert=str(cert), tls_key=str(key))
    if broken == "other key":
        shutil.copy(second[0], cert)
    elif broken == "half":
        cert.write_text(cert.read_text()[:200])
    else:
        key.unlink()
    assert gateway.reload is not None
    gateway.reload()
    [error] = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "stays as it was" in error.getMessage()
    await (await RawClient.connect(gateway, ssl=trusting(first[0]))).close()


async def test_wrong_files_are_a_wrong_configuration(
    start_gateway: StartGateway, first: tuple[str, str], second: tuple[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("no PEM")
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", first[1], "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    for cert, key, why in (
        (first[0], "", "need each other"),
        ("", first[1], "need each other"),
        (first[0], str(tmp_path / "none"), "--tls-key .*No such file"),
        (str(tmp_path / "none"), first[1], "--tls-cert .*No such file"),
        (first[0], second[1], "MISMATCH"),
        (str(text), first[1], "PEM"),
        (first[0], str(locked), "."),
    ):
        with pytest.raises(ConfigurationError, match=why):
            await start_gateway(tls_cert=cert, tls_key=key)
