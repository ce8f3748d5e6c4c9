"""The ranks of a group as processes: each runs the same work and writes what came out.

`python rank_process.py ADDRESS WORK.json OUT.json ...`, a file for each rank; see
test_tensor_parallel.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "parity")]

import torch  # noqa: E402
from cores import Cores  # noqa: E402
from forked_ranks import run_forked  # noqa: E402

from pipeinfer.collectives import join_group  # noqa: E402
from pipeinfer.params import RequestParams, normalized  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402


def generate(folder: str, requests: list[dict], size: int, collectives=None, **changes) -> Cores:
    """Runs requests {"prompt", "params", "seed"} and returns the cores that did it."""
    settings = Settings(
        device="cpu", dtype="float32", kv_pages=200, page_size=16, max_running=8, tp=size,
        **changes,
    )  # fmt: skip
    cores = Cores(Path(folder), settings, collectives=collectives)
    for index, request in enumerate(requests):
        params = normalized(RequestParams(**request["params"]))
        cores.submit(f"r{index}", request["prompt"], params, seed=request["seed"])
    cores.run()
    return cores


def logprobs_of(cores: Cores) -> dict[str, list[str]]:
    """By request its log-probs, of the output and of the prompt, as hexadecimal digits."""
    return {
        name: [cores.logprobs[name].hex(), cores.prompt_logprobs[name].hex()]
        for name in cores.outputs
    }


def run(address: str, rank: int, work: str, outs: list[str]) -> None:
    collectives = join_group(address, rank, len(outs), "cpu", 300)
    found = []
    for folder, requests, changes in json.loads(Path(work).read_text()):
        cores = generate(folder, requests, len(outs), collectives, **changes)
        shifts = [None if x is None else x.tolist() for x in cores.loaded.runner.pool.key_centers]
        stats = cores.scheduler.stats()
        drafts = [stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]]
        found.append(
            {
                "outputs": cores.outputs,
                "logprobs": logprobs_of(cores),
                "shifts": shifts,
                "drafts": drafts,
            }
        )
    Path(outs[rank]).write_text(json.dumps(found))
    collectives.close()


def main() -> None:
    address, work, *outs = sys.argv[1:]
    torch.set_num_threads(1)
    run_forked(lambda rank: run(address, rank, work, outs), len(outs))


if __name__ == "__main__":
    main()
