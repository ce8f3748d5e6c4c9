"""The pipeline can tell clients apart, and can tell nothing else of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.gateway.auth import ClientHashes, host_bytes


async def names(gateway: Gateway, *keys: str) -> list[str]:
    """Of two requests on one connection for each of `keys`, each by another endpoint."""
    for key in keys:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
            await http.post("/v1/completions", json={"prompt": "a b"})
            chat = [{"role": "user", "content": "a"}]
            await http.post("/v1/chat/completions", json={"messages": chat})
    return [submit.client for submit in gateway.pipeline.submits]


async def test_without_keys_a_client_is_a_connection_of_its_host(gateway: Gateway) -> None:
    first, again, second, third = await names(gateway, "none", "none")
    assert first == again != second == third
    assert first.partition("/")[0] == second.partition("/")[0]
    assert all(part for part in first.split("/")) and "127" not in first


async def test_with_keys_a_client_is_a_key_on_whatever_connection_and_gateway(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    lines = [f"{n} sha256:{hashlib.sha256(n.encode()).hexdigest()}\n" for n in ("alice", "bob")]
    file.write_text("".join(lines))
    gateway, other = [await start_gateway(api_key_file=str(file)) for _ in range(2)]
    alice, _, bob, _, again, _ = await names(gateway, "alice", "bob", "alice")
    assert alice == again != bob and "alice" not in alice and "/" not in alice
    assert (await names(other, "alice"))[0] == alice


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8:1:2::3", "2001:db8:1:2:ffff::4", True),
        ("2001:db8:1:2::3", "2001:db8:1:3::3", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "no address", False),
    ],
)
def test_a_host_is_an_address_or_what_a_user_has_of_ipv6(one: str, other: str, same: bool) -> None:
    assert (host_bytes(one) == host_bytes(other)) == same


def test_an_address_is_not_found_by_trying_hashes() -> None:
    assert ClientHashes().of_key("a") == ClientHashes().of_key("a")
    assert ClientHashes().of_peer("10.0.0.1", None) != ClientHashes().of_peer("10.0.0.1", None)
