"""Who may load adapters over HTTP. That they are loaded is tests/pipeline's business."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway


async def refused(
    gateway: Gateway, path: str, key: str = "", folder: str = "/nowhere"
) -> tuple[int, str]:
    """Status and code."""
    body = {"lora_name": "mine", "lora_path": folder}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}{path}", json=body, headers=headers)
    return answer.status_code, answer.json()["error"]["code"]


async def test_without_keys_nobody_may(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(enable_lora=True)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert await refused(gateway, path) == (403, "api_key_needed")


async def test_where_there_are_operators_they_alone_may(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("anna", "operator")}
    lines = f"anna sha256:{digest['anna']}\noperator sha256:{digest['operator']} admin\n"
    file.write_text(lines)
    gateway = await start_gateway(enable_lora=True, api_key_file=str(file))
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert await refused(gateway, load, "anna") == (403, "operators_only")
    assert await refused(gateway, unload, "anna") == (403, "operators_only")
    assert await refused(gateway, load, "operator") == (400, "adapter_not_loaded")
    assert await refused(gateway, unload, "operator") == (404, "model_not_found")


@pytest.mark.parametrize("path", ["a" * 300, "/" + "b/" * 2000, "~nobody-of-this-name/x", "x\0y"])
async def test_a_path_that_no_folder_can_have_is_refused(
    start_gateway: StartGateway, path: str
) -> None:
    gateway = await start_gateway(enable_lora=True, api_key="operator")
    load = "/v1/load_lora_adapter"
    assert await refused(gateway, load, "operator", path) == (400, "adapter_not_loaded")
