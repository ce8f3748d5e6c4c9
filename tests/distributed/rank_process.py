"""One rank of a group as a process: runs the same work as all others and writes what came out.

`python rank_process.py ADDRESS RANK SIZE WORK.json OUT.json`; see test_tensor_parallel.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "parity")]

import torch  # noqa: E402
from cores import Cores  # noqa: E402

from pipeinfer.collectives import join_group  # noqa: E402
from pipeinfer.params import SamplingParams, normalized  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402


def generate(folder: str, requests: list[dict], size: int, collectives=None, **changes) -> Cores:
    """Runs requests {"prompt", "params", "seed"} and returns the cores that did it."""
    settings = Settings(
        device="cpu", dtype="float32", kv_pages=200, page_size=16, max_running=8, tp=size,
        **changes,
    )  # fmt: skip
    cores = Cores(Path(folder), settings, collectives=collectives)
    for index, request in enumerate(requests):
        params = normalized(SamplingParams(**request["params"]))
        cores.submit(f"r{index}", request["prompt"], params, seed=request["seed"])
    cores.run()
    return cores


def scores(cores: Cores) -> dict[str, list[str]]:
    """By request its log-probs, of the output and of the prompt, as hexadecimal digits."""
    return {
        name: [cores.logprobs[name].hex(), cores.prompt_logprobs[name].hex()]
        for name in cores.outputs
    }


def main() -> None:
    address, rank, size, work, out = sys.argv[1:]
    torch.set_num_threads(1)
    collectives = join_group(address, int(rank), int(size), "cpu", 120)
    found = []
    for folder, requests, changes in json.loads(Path(work).read_text()):
        cores = generate(folder, requests, int(size), collectives, **changes)
        shifts = [None if x is None else x.tolist() for x in cores.loaded.runner.pool.key_centers]
        found.append({"outputs": cores.outputs, "scores": scores(cores), "shifts": shifts})
    Path(out).write_text(json.dumps(found))
    collectives.close()


if __name__ == "__main__":
    main()
