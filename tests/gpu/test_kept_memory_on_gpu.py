"""Memory of a GPU that outlives the engine that made it: real processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import aiohttp
import numpy as np
import pytest
import torch
from greedy_answers import ask, settings_of_small_model  # which puts tools on the path

from harness.server import ServerUnderTest
from kept_engines import two_lives
from memory_holders import running_holder
from pipeinfer.attention.interface import KVPool
from pipeinfer.engine.device_memory import GRANULARITY, CudaMemory
from pipeinfer.runtime.memory_holder import HolderLink, Keep
from pipeinfer.step import AttentionShape
from quantized_checkpoints import quantize

pytestmark = pytest.mark.gpu

SIZE = 3 * GRANULARITY + 4096  # bytes
MAKER = """
import sys
import torch
from pipeinfer.engine.device_memory import CudaMemory
from pipeinfer.runtime.memory_holder import HolderLink, Keep
torch.cuda.set_device(0)
link = HolderLink(sys.argv[1], timeout=60)
link.attach()
memory = CudaMemory(int(sys.argv[2]))
assert not memory.data.any()
memory.data.view(torch.int32).copy_(torch.arange(int(sys.argv[2]) // 4, device="cuda"))
torch.cuda.synchronize()
link.keep(Keep("pool", "pages"), memory.descriptor)
print("written", flush=True)
sys.stdin.read()
"""
# A kernel is always running that spins for 2 s and writes the whole memory as its last act, and
# others like it are queued behind it.
SPINNER = """
import sys
import torch
from pipeinfer.engine.device_memory import CudaMemory
from pipeinfer.runtime.memory_holder import HolderLink, Keep
from spinning_kernel import spin_and_write
torch.cuda.set_device(0)
memory = CudaMemory(int(sys.argv[2]))
words = memory.data.view(torch.int32)
spin_and_write(words, 1, seconds=0.001)
torch.cuda.synchronize()
link = HolderLink(sys.argv[1], timeout=60)
link.attach()
link.keep(Keep("pool", "pages"), memory.descriptor)
for number in range(30):
    spin_and_write(words, 2 + number, seconds=0.5)
print("spinning", flush=True)
sys.stdin.read()
"""
SPINNERS = int(os.environ.get("SPINNERS", "10"))  # killed, five at a time


@pytest.fixture
def address():
    """Of a holder on a thread."""
    with running_holder() as where:
        yield where


def test_what_a_killed_process_wrote_is_there(address):
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER, address, str(SIZE)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert maker.stdout.readline() == "written\n"
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    link = HolderLink(address, timeout=60)
    attached, [descriptor] = link.attach()
    assert attached.entries == (Keep("pool", "pages"),) and attached.losses == 1
    memory = CudaMemory(SIZE, descriptor)
    wanted = torch.arange(SIZE // 4, device="cuda", dtype=torch.int32)
    assert torch.equal(memory.data.view(torch.int32), wanted)
    link.drop("pool")
    memory.unmap()
    link.close()


def test_nothing_that_a_killed_process_launched_is_written_once_its_memory_is_handed_on():
    random = np.random.default_rng(SPINNERS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(SPINNERS // 5):
        began = time.monotonic()
        with ExitStack() as holders:
            addresses = [holders.enter_context(running_holder()) for _ in range(5)]
            makers = [
                subprocess.Popen(
                    [sys.executable, "-c", SPINNER, address, str(SIZE)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
                )
                for address in addresses
            ]  # fmt: skip
            for maker in makers:
                assert maker.stdout.readline() == "spinning\n"
            taken = []
            for address, maker in zip(addresses, makers, strict=True):
                time.sleep(random.uniform(0.0, 0.5))  # into whichever moment of a kernel
                maker.send_signal(signal.SIGKILL)
                link = HolderLink(address, timeout=60)
                _, [descriptor] = link.attach()
                memory = CudaMemory(SIZE, descriptor)
                words = memory.data.view(torch.int32)
                words.fill_(-1)  # the successor's first launch
                taken.append((link, memory, words))
            torch.cuda.synchronize()
            time.sleep(1.0)  # longer than any kernel of theirs spins
            for link, memory, words in taken:
                assert bool((words == -1).all())
                link.drop("pool")
                memory.unmap()
                link.close()
            for maker in makers:
                maker.communicate()
        print(f"KILLS: 5 more, {time.monotonic() - began:.1f} s")


def test_tensors_and_graphs_stay_valid_when_memory_is_given_back_and_made_anew():
    memory = CudaMemory(256 << 20)
    numbers = memory.data.view(torch.int32)[:1024]
    numbers.fill_(5)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    numbers.sum()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(numbers.sum())
    graph.replay()
    torch.cuda.synchronize()
    assert int(total) == 5 * 1024
    before = torch.cuda.mem_get_info()[0]
    memory.unmap()
    assert torch.cuda.mem_get_info()[0] - before >= 256 << 20
    memory.map()
    numbers.fill_(6)
    graph.replay()
    assert int(total) == 6 * 1024
    memory.unmap()


def test_scratch_takes_any_writes_and_gives_way_to_what_was_kept():
    kept = CudaMemory(200 << 20)
    kept.data.fill_(7)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    memory = CudaMemory(200 << 20, scratch=True)
    assert before - torch.cuda.mem_get_info()[0] <= 80 << 20
    memory.data.fill_(9)
    torch.cuda.synchronize()
    memory.map(os.dup(kept.descriptor), writable=False)
    assert bool((memory.data == 7).all())
    memory.unmap()
    kept.unmap()


def test_pages_of_a_pool_are_zeroed_in_its_memory():
    shapes = [AttentionShape(4, 2, 64, 1.0), AttentionShape(4, 1, 128, 1.0)]
    size = KVPool(shapes, 9, 16, torch.bfloat16).total_bytes
    memory = CudaMemory(size)
    pool = KVPool(shapes, 9, 16, torch.bfloat16, "cuda", memory=memory.data)
    for part in (*pool.k, *pool.v):
        part.fill_(float("nan"))
    memory.zero_pages(pool, np.array([1, 2, 5], np.int32))
    for part in (*pool.k, *pool.v):
        zero = [not bool(page.isnan().any()) for page in part]
        assert zero == [page in (1, 2, 5) for page in range(9)]
    memory.unmap()


@pytest.mark.parametrize("form", ["fp8 rows", "awq", "gptq", "4 bits"])
def test_a_successor_has_weights_that_stay_quantized(gpu_checkpoints, tmp_path, form):
    folder = quantize(gpu_checkpoints("Qwen3ForCausalLM"), tmp_path, form)[0]
    [first], [second] = two_lives([(folder, {"device": "cuda", "no_cuda_graph": True})])
    assert (first.left, second.left) == ([], ["weights"])
    assert first.reads > 0 == second.reads
    assert second.numbers == pytest.approx(first.numbers, rel=1e-3, abs=1e-3)


def test_a_successor_has_experts_in_mxfp4_or_turned_for_their_backend_and_a_draft_model(
    gpu_checkpoints, tmp_path
):
    how = {"device": "cuda", "no_cuda_graph": True}
    mxfp4 = quantize(gpu_checkpoints("GptOssForCausalLM"), tmp_path, "mxfp4")[0]
    plain, experts = gpu_checkpoints("Qwen3ForCausalLM"), gpu_checkpoints("Qwen3MoeForCausalLM")
    models = [
        (mxfp4, how),
        (mxfp4, how | {"quantization": "none"}),  # dequantized into memory that stays
        (experts, how),
        (experts, how | {"moe_backend": "torch"}),
        (plain, how | {"speculate": str(plain)}),
    ]
    for (folder, more), first, second in zip(models, *two_lives(models), strict=True):
        names = ["draft weights", "weights"] if "speculate" in more else ["weights"]
        assert (first.left, second.left) == ([], names), more
        assert second.numbers == pytest.approx(first.numbers, rel=1e-3, abs=1e-3), (folder, more)


def test_matrices_that_are_dequantized_as_they_are_loaded_are_read_again(gpu_checkpoints, tmp_path):
    folder = quantize(gpu_checkpoints("Qwen3ForCausalLM"), tmp_path, "fp8 rows")[0]
    how = {"device": "cuda", "no_cuda_graph": True, "quantization": "none"}
    [first], [second] = two_lives([(folder, how)])
    assert first.left == second.left == [] and first.reads == second.reads > 0


async def test_a_killed_engine_leaves_its_weights_and_pages_to_the_next_one(
    gpu_checkpoints, tmp_path
):
    """Greedy answers and their log-probs are the same, and a long prompt is not computed again."""
    settings = settings_of_small_model(gpu_checkpoints, tmp_path, memory_fraction=0.2)
    model = settings["model"]
    short, long = list(range(2, 12)), [index % 90 + 2 for index in range(200)]
    with ServerUnderTest(settings, "-v") as server:
        async with aiohttp.ClientSession(server.url) as api:
            before, long_before = await ask(api, model, short), await ask(api, model, long)
            os.kill(server.pids()["engine-0-0"], signal.SIGKILL)
            after, long_after = await ask(api, model, short), await ask(api, model, long)
        log = server.log()
    print(log)
    assert after == before
    assert long_after[0] == long_before[0]
    assert long_before[2] == 0 and long_after[2] >= 128
    [line] = [line for line in log.splitlines() if "an engine before has left" in line]
    assert all(name in line for name in ("weights", "pool", "directory"))
