"""transformers as it is normally used: left-padded static batches through `generate`, greedy.

A program of its own: `transformers_generate.py THREADS make FOLDER SEED` gives the configuration in
FOLDER random weights, `... THREADS run WORK.json` generates. Knows nothing of pipeinfer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAD = 0


def make(folder: str, seed: int) -> None:
    """Random float32 weights for the config.json in `folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    model.save_pretrained(folder)


def run(file: str) -> dict[str, Any]:
    """Generates the work in `file`, after the warm-up in it."""
    asked = json.loads(Path(file).read_text())
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    generate_all(model, asked["warm"], asked["batch"])
    begin = time.perf_counter()
    outputs = generate_all(model, asked["work"], asked["batch"])
    return {"seconds": time.perf_counter() - begin, "outputs": outputs}


def generate_all(model: PreTrainedModel, work: dict[str, Any], size: int) -> list[list[int]]:
    """The requested tokens of every request, batch after batch, in the order given."""
    outputs: list[list[int]] = []
    for begin in range(0, len(work["prompts"]), size):
        part = slice(begin, begin + size)
        outputs += generate(model, work["prompts"][part], work["outputs"][part])
    return outputs


def generate(
    model: PreTrainedModel, prompts: list[list[int]], wanted: list[int]
) -> list[list[int]]:
    """A static batch runs until its longest output; of the others only what was asked for counts.

    Ends of sequences are ignored, as everywhere in this comparison.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    most = max(wanted)
    result = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=most,
        min_new_tokens=most,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    if result.shape != (len(prompts), longest + most):
        raise RuntimeError(f"generate gave {tuple(result.shape)}, not {longest} + {most} tokens")
    rows = zip(result[:, longest:], wanted, strict=True)
    return [row[:count].tolist() for row, count in rows]


def main() -> None:
    threads, command, *arguments = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if command == "make":
        make(arguments[0], int(arguments[1]))
    else:
        print(json.dumps(run(arguments[0])))


if __name__ == "__main__":
    main()
