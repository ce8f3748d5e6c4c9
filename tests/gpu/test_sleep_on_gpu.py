"""A server on a GPU that sleeps: its memory is free, and its graphs are valid when it wakes."""

from __future__ import annotations

import os
import signal
import time

import aiohttp
import pytest
import torch
from greedy_answers import ask, settings_of_small_model  # which puts tools on the path

from harness.server import ServerUnderTest
from memory_holders import running_holder
from pipeinfer.engine.device_memory import CudaMemory, HostCopy
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.engine.loading import load_engine
from pipeinfer.engine.sleeping import GpuWeights
from pipeinfer.settings import Settings
from quantized_checkpoints import quantize

pytestmark = pytest.mark.gpu

SIZE = 192 << 20  # bytes


@pytest.mark.parametrize("level", [1, 2])
def test_weights_come_back_where_they_were_and_graphs_read_them(level):
    memory = CudaMemory(SIZE)
    numbers = memory.data.view(torch.int32)
    wanted = torch.arange(SIZE // 4, device="cuda", dtype=torch.int32)

    def fill(data: torch.Tensor) -> None:
        data.view(torch.int32).copy_(wanted)

    fill(memory.data)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    numbers.sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(numbers.sum())
    memory.protect(writable=False)
    weights = GpuWeights("weights", memory, fill)
    for _ in range(2):
        before = torch.cuda.mem_get_info()[0]
        weights.give_back(level)
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] - before >= SIZE
        weights.take_back()
        total.zero_()
        graph.replay()
        assert int(total) == int(wanted.sum())
    weights.give_back(1)
    weights.give_back(2)  # the copy goes, too
    weights.take_back()
    assert torch.equal(numbers, wanted)
    memory.unmap()


def test_a_copy_on_the_host_is_pinned_and_let_go():
    data = torch.arange(64 << 20, device="cuda", dtype=torch.int32).view(torch.uint8)
    copy = HostCopy(data)
    assert copy.data.is_pinned() and torch.equal(copy.data, data.cpu())
    copy.close()
    copy.close()
    assert not copy.data.is_pinned()


@pytest.mark.parametrize("form", ["fp8 rows", "awq"])
def test_quantized_weights_sleep_and_come_back(gpu_checkpoints, tmp_path, form):
    folder = quantize(gpu_checkpoints("Qwen3ForCausalLM"), tmp_path, form)[0]
    settings = Settings(device="cuda", kv_pages=64, max_running=2, no_cuda_graph=True)
    hidden = torch.ones(2, 512, dtype=torch.bfloat16, device="cuda")
    with running_holder() as address:
        kept = KeptMemory(address)
        engine = load_engine(settings, folder, kept=lambda: kept)
        model = engine.runner._model
        block = model.layers[0].mlp
        before = model.logits(hidden).clone(), block.unreduced(hidden).clone()
        for level in (1, 2):
            engine.memory.withdraw()
            engine.memory.give_back(level)
            engine.memory.take_back()
            engine.memory.keep()
            assert torch.equal(model.logits(hidden), before[0])
            found = block.unreduced(hidden)
            assert torch.allclose(found.float(), before[1].float(), rtol=1e-2, atol=1e-3)
        kept.close()


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


@pytest.mark.parametrize("level", [1, 2])
async def test_answers_are_the_same_after_a_sleep_and_after_a_death_in_it(
    gpu_checkpoints, tmp_path, level
):
    settings = settings_of_small_model(gpu_checkpoints, tmp_path, memory_fraction=0.2)
    model = settings["model"]
    prompt = [index % 90 + 2 for index in range(200)]
    with ServerUnderTest(settings, "-v") as server:
        patience = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(server.url, timeout=patience) as api:

            async def post(path: str) -> float:
                began = time.monotonic()
                async with api.post(path) as answer:
                    assert answer.status == 200, await answer.text()
                return time.monotonic() - began

            before, awake = await ask(api, model, prompt), free_gib()
            for kills in (False, True):
                slept = await post(f"/sleep?level={level}")
                asleep = free_gib()
                print(f"level {level}: {slept:.2f} s to sleep, {asleep - awake:.2f} GiB more free")
                assert asleep - awake >= 0.75, "the pool holds 262,144 tokens"
                if kills:
                    os.kill(server.pids()["engine-0-0"], signal.SIGKILL)
                print(f"{await post('/wake_up'):.2f} s to wake up")
                text, logprobs, cached = await ask(api, model, prompt)
                assert (text, cached) == (before[0], 0)
                assert logprobs == before[1]
        print(server.log())
