"""Exact mode at real shapes: many requests, computed in many ways, must have the same tokens and
log-probs, bit by bit. Not a test: a tool beside the tests.

    python tests/gpu/exact_shapes.py qwen3-0.6b qwen3-14b [--requests N] [--device cpu]

Random weights. Each way that needs an engine of its own is a process of its own, since a process
gives a GPU's memory back only when it ends. On a CPU tokens alone are compared.
"""

from __future__ import annotations

import argparse
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tools")]

from bench import shapes  # noqa: E402
from pipeinfer import LLM, SamplingParams  # noqa: E402

# Of each engine, beside --exact: which answers are compared with the first one's.
ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks of 64": {"max_step_tokens": 64},
    "chunks of 2,048": {"max_step_tokens": 2048, "overlap_depth": 1},
    "no graphs": {"no_cuda_graph": True},
    "few pages": {"kv_pages": 700, "page_size": 16},
}
ALONE = 8  # requests that are also computed with no other beside them
# Of each request, by its number: its tokens, and their log-probs.
Answers = dict[int, tuple[list[int], list[float]]]


def requests(count: int, highest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 1,024 tokens, a third of them with one beginning; greedy, sampled, top-p."""
    source = random.Random(0)
    common = [source.randint(0, highest) for _ in range(300)]
    found = []
    for number in range(count):
        own = [source.randint(0, highest) for _ in range(source.randint(1, 724))]
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.3)[number % 3],
            top_p=0.9 if number % 5 == 0 else 1.0,
            max_tokens=source.randint(16, 200),
            ignore_eos=True,
            seed=number,
            logprobs=0,
        )
        found.append(((common if number % 3 == 0 else []) + own, params))
    return found


def answers(llm: LLM, asked: list[tuple[list[int], SamplingParams]], order: list[int]) -> Answers:
    prompts = [{"prompt_token_ids": asked[number][0]} for number in order]
    outputs = llm.generate(prompts, [asked[number][1] for number in order], use_tqdm=False)
    found: Answers = {}
    for number, output in zip(order, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        scores = output.outputs[0].logprobs or []
        values = [one[token].logprob for one, token in zip(scores, tokens, strict=True)]
        found[number] = tokens, values
    return found


def compute(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Answers]:
    """What one engine gives, by way."""
    highest = shapes.highest_id({"model": str(folder)})
    asked, every = requests(options.requests, highest), list(range(options.requests))
    sizes = {"kv_pages": options.kv_pages} | ENGINES[name]
    llm = LLM(str(folder), exact=True, load_format="dummy", device=options.device, **sizes)
    found = {name: answers(llm, asked, every)}
    if name == "usual":
        found["warm"] = answers(llm, asked, every)
        found["reversed"] = answers(llm, asked, every[::-1])
        found["alone"] = {n: answers(llm, asked, [n])[n] for n in every[:ALONE]}
    llm.close()
    return found


def compare(shape: str, expected: Answers, found: dict[str, Answers], exactly: bool) -> bool:
    """Whether all ways give what is expected; a line for each."""
    same = True
    for way, given in found.items():
        tokens = [n for n in given if given[n][0] != expected[n][0]]
        scores = [n for n in given if given[n][1] != expected[n][1]]
        total = sum(len(ids) for ids, _ in given.values())
        print(
            f"EXACT {shape}, {way}: {total} tokens of {len(given)} requests; other tokens in "
            f"{len(tokens)}, other log-probs in {len(scores)}",
            flush=True,
        )
        same &= not tokens and not (exactly and scores)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-pages", type=int, default=0, help="0: from free memory")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:  # in a process of its own; `shapes` is the folder
        options.out.write_bytes(
            pickle.dumps(compute(Path(options.shapes[0]), options.engine, options))
        )
        return 0
    same = True
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            shapes.write_folder(Path(folder), shapes.shape(shape))
            expected: Answers = {}
            for name in ENGINES:
                out = Path(folder) / "answers"
                command = [sys.executable, __file__, folder, "--engine", name, "--out", str(out)]
                rest = ["--requests", str(options.requests), "--device", options.device]
                rest += ["--kv-pages", str(options.kv_pages)]
                subprocess.run([*command, *rest], check=True)
                found: dict[str, Answers] = pickle.loads(out.read_bytes())  # written by ourselves
                expected = expected or found["usual"]
                same &= compare(shape, expected, found, exactly=options.device != "cpu")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
