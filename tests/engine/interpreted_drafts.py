"""Steps that verify draft tokens, by the runner of GPUs on the host's device: see
interpreted_runner.py.

`TRITON_INTERPRET=1 python tests/engine/interpreted_drafts.py FOLDER` prints the tokens, how many
draft tokens there were and how many were accepted, and how many steps that verify some took a
graph. With the word plain in front of FOLDER it is the CPU's own path, without drafts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("", "gpu", "parity"))]
PLAIN = sys.argv[1] == "plain"

if not PLAIN:
    import interpreted_runner  # noqa: F401

import torch  # noqa: E402
from cores import Cores  # noqa: E402

from pipeinfer.params import RequestParams  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402


def served(folder: Path, **changes: Any) -> dict[str, Any]:
    """Prompts beside decodes, then decodes that all verify draft tokens."""
    settings = Settings(
        model=str(folder), device="cpu", dtype="float32", kv_pages=60, page_size=16, max_running=3,
        max_step_tokens=24, cuda_graph_max_batch=2, num_speculative_tokens=2, **changes,
    )  # fmt: skip
    cores = Cores(folder, settings, budget=24)
    runner, verified = cores.loaded.runner, 0
    fitting = runner._fitting

    def counted(step):
        nonlocal verified
        found = fitting(step)
        verified += found is not None and found.views.shape.verifies
        return found

    runner._fitting = counted
    for number, length in enumerate((5, 30, 17)):
        params = RequestParams(
            max_tokens=8 + number, temperature=(0.0, 0.9)[number % 2], ignore_eos=True
        )
        prompt = [(7 * number + at) % 20 for at in range(length)]
        cores.submit(f"r{number}", prompt, params, seed=number)
    cores.run()
    runner.device.close()
    stats = cores.scheduler.stats()
    drafts = [stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]]
    return {"tokens": cores.outputs, "drafts": drafts, "graphs": verified}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1 + PLAIN])
    print(json.dumps(served(folder, speculate="none" if PLAIN else str(folder))))
