"""What an engine loads goes to its slot behind the steps before, and the last one wins."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from pipeinfer.checkpoint.lora import identify
from pipeinfer.engine import lora
from pipeinfer.engine.core import AdapterRead
from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.lora import AdapterLoads
from pipeinfer.layers.lora import AdaptedLinear, AdaptedModule, AdapterBank, AdapterWeights
from pipeinfer.messages import LoadAdapter
from pipeinfer.params import Adapter

SIZE, RANK = 4, 2


def written(folder: Path, value: float) -> LoadAdapter:
    """Of a model of one layer, `m`; numbered by `value`."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    parts = {
        "base_model.model.m.lora_A.weight": torch.full((RANK, SIZE), value),
        "base_model.model.m.lora_B.weight": torch.full((SIZE, RANK), value),
    }
    save_file(parts, folder / "adapter_model.safetensors")
    return LoadAdapter(1, int(value), 1, identify(folder.name, str(folder), RANK))


class Engine:
    def __init__(self) -> None:
        bank = AdapterBank(1, RANK, torch.float32, torch.device("cpu"))
        whole = slice(0, SIZE)
        self.layer: AdaptedLinear = bank.linear(
            [AdaptedModule("m", (SIZE, SIZE), whole, whole, whole)]
        )
        self.device = HostDevice()
        self.loads = AdapterLoads(bank, self.device)
        self.ready = asyncio.Event()

    def ask(self, message: LoadAdapter, submitted: int = 0) -> None:
        self.ready.clear()
        self.loads.begin(message, submitted, self.ready.set)

    def put(self, launched: int = 0) -> list[AdapterRead]:
        said = list(self.loads.put_ready(launched))
        self.device.run(lambda: None)
        return said

    def held(self) -> float:
        return float(self.layer.matrices.a[0, 0, 0])


@pytest.fixture
def messages(tmp_path: Path) -> list[LoadAdapter]:
    return [written(tmp_path / str(value), float(value)) for value in (1, 2, 3)]


async def test_it_waits_for_the_steps_that_were_submitted_before(
    messages: list[LoadAdapter],
) -> None:
    engine = Engine()
    engine.ask(messages[0], submitted=3)
    await engine.ready.wait()
    assert engine.put(launched=2) == [] and engine.held() == 0.0
    assert engine.put(launched=3) == [AdapterRead(1, 1)] and engine.held() == 1.0
    engine.ask(messages[0])  # again: it is there
    assert engine.put() == [AdapterRead(1, 1)]
    engine.device.close()


async def test_of_several_for_one_slot_the_last_one_is_put(messages: list[LoadAdapter]) -> None:
    engine = Engine()
    for message in (*messages, messages[0], messages[0]):
        engine.ask(message)
    await engine.loads.close()
    assert engine.put() == [AdapterRead(1, 1)] and engine.held() == 1.0
    engine.ask(messages[1])
    engine.ask(messages[0])  # what is there, while another is being read
    await engine.loads.close()
    assert engine.put() == [AdapterRead(1, 1)] and engine.held() == 1.0
    engine.device.close()


async def test_what_is_asked_for_again_behind_later_plans_is_read_once(
    messages: list[LoadAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' steps run meanwhile: reading may take longer than it takes to be asked again."""
    read = list[str]()

    def load_adapter(adapter: Adapter, bank: AdapterBank) -> AdapterWeights:
        read.append(adapter.name)
        return load(adapter, bank)

    load = lora.load_adapter
    monkeypatch.setattr(lora, "load_adapter", load_adapter)
    engine = Engine()
    for plans in range(3):
        engine.ask(replace(messages[0], next_plan=plans))
    await engine.loads.close()
    assert engine.put() == [AdapterRead(1, 1)] and engine.held() == 1.0
    assert read == [messages[0].adapter.name]
    engine.device.close()


async def test_what_cannot_be_read_is_said_and_leaves_the_slot_as_it_was(
    messages: list[LoadAdapter],
) -> None:
    engine = Engine()
    engine.ask(messages[0])
    await engine.ready.wait()
    engine.put()
    (Path(messages[1].adapter.path) / "adapter_config.json").unlink()
    engine.ask(messages[1])
    await engine.ready.wait()
    (said,) = engine.put()
    assert said.number == 2 and "adapter_config.json" in said.error
    assert engine.held() == 1.0
    engine.device.close()
