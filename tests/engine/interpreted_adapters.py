"""Steps with adapters, by the runner of GPUs on the host's device: see interpreted_runner.py.

`TRITON_INTERPRET=1 python tests/engine/interpreted_adapters.py FOLDER ADAPTER ADAPTER` prints
tokens by way of running, and how many steps with and without adapters took a graph. Imported, it
has the CPU's own path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import interpreted_runner  # noqa: F401
else:
    sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import torch
from cores import Cores

from pipeinfer.checkpoint.lora import identify
from pipeinfer.layers import lora
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings


def served(folder: Path, adapters: list[str], **changes: Any) -> dict[str, Any]:
    """Requests with each adapter and with none: prompts beside decodes, and decodes alone."""
    settings = Settings(
        model=str(folder), device="cpu", dtype="float32", kv_pages=60, page_size=16, max_running=3,
        max_step_tokens=24, cuda_graph_max_batch=2, enable_lora=True, max_loras=2, max_lora_rank=8,
        **changes,
    )  # fmt: skip
    cores = Cores(folder, settings, budget=24)
    runner, taken = cores.loaded.runner, {False: 0, True: 0}
    fitting = runner._fitting

    def counted(step):
        found = fitting(step)
        taken[step.adapted] += found is not None
        return found

    runner._fitting = counted
    known = [None, *(identify(path, path, 8) for path in adapters)]
    for number, length in enumerate((5, 17, 9, 21, 3, 12)):
        adapter = known[number % 3]
        salt = "" if adapter is None else adapter.salted("")
        params = RequestParams(max_tokens=4 + number % 3, temperature=0.0, ignore_eos=True)
        prompt = [(7 * number + at) % 200 for at in range(length)]
        cores.submit(f"r{number}", prompt, params, cache_salt=salt, adapter=adapter)
    cores.run()
    runner.device.close()
    return {"tokens": cores.outputs, "graphs": [taken[False], taken[True]]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *adapters = sys.argv[1:]
    from pipeinfer.kernels.gemm import LowRankGemm

    lora.low_rank_kernel = lambda device: LowRankGemm()
    found = {
        "graphs": served(Path(folder), adapters),
        "no graphs": served(Path(folder), adapters, no_cuda_graph=True),
    }
    print(json.dumps(found))
