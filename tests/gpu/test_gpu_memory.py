"""What a GPU's memory is given to: pages are what is left, whatever requests ask for later."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.engine.calibrate import allow_all, largest_step
from pipeinfer.engine.loading import load_engine
from pipeinfer.settings import Settings

pytestmark = pytest.mark.gpu

FRACTION = 0.2
LATE = 32 * 2**20  # bytes: of kernels that the driver loads when they are first called


def test_requests_for_all_that_sampling_can_do_take_no_memory_beyond_what_was_left(gpu_checkpoints):
    """256 rows of a large vocabulary: counts of penalties and logits in float32 are 155 MB each."""
    folder = gpu_checkpoints(
        "Qwen3ForCausalLM", vocab_size=151_936, max_position_embeddings=131_072
    )
    settings = Settings(device="cuda", memory_fraction=FRACTION, no_cuda_graph=True)
    loaded = load_engine(settings, folder)
    runner, total = loaded.runner, torch.cuda.mem_get_info()[1]
    assert runner.sampling_bytes == 2 * 256 * 151_936 * 4
    assert runner.pool.num_pages < 256 * 131_072 // loaded.page_size, "memory bounds the pool"
    most = 0
    for _ in range(3):
        launched = runner.launch(largest_step(runner.largest, loaded.page_size, 131_072))
        runner.sample_masked(launched, allow_all)
        launched.take()
        free, _ = torch.cuda.mem_get_info()
        most = max(most, total - free)
    print(f"MEMORY {most / total:.4f} of the GPU, where {FRACTION} was allowed")
    assert most <= total * FRACTION + LATE
