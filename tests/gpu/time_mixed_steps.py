"""Whole mixed steps with decodes deep in their contexts, by how many multiprocessors prompts leave
to them: `python tests/gpu/time_mixed_steps.py [SHAPE]`. Prints milliseconds of a graph's replay.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tools"), str(HERE.parent.parent / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench import shapes  # noqa: E402
from pipeinfer.attention import fa3_backend  # noqa: E402
from pipeinfer.engine.cuda.artificial import artificial_step  # noqa: E402
from pipeinfer.engine.cuda.graphs import replay_seconds  # noqa: E402
from pipeinfer.engine.cuda.mixed_graphs import MixedSize  # noqa: E402
from pipeinfer.engine.loading import load_engine  # noqa: E402
from pipeinfer.engine.step import Step  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402

MARGINS = 0, 8, 16, 24, 32, 48, 64
# Tokens of the step, decodes, tokens before each of them, and tokens of the prompt before.
STEPS = (
    (6144, 20, 8000, 0), (6144, 20, 8000, 3000), (6144, 8, 8000, 3000), (4096, 40, 8000, 3000),
    (4096, 64, 600, 0), (2048, 64, 600, 2000), (2048, 40, 8000, 3000), (8192, 4, 8000, 0),
)  # fmt: skip


def step_of(tokens: int, decodes: int, context: int, before: int, page_size: int) -> Step:
    """Every row on pages of its own."""
    counts = np.array([1] * decodes + [tokens - decodes], dtype=np.int32)
    starts = np.array([context] * decodes + [before], dtype=np.int32)
    held = -(-(starts + counts) // page_size)
    table = np.zeros((len(counts), int(held.max())), dtype=np.int32)
    taken = 1
    for row, many in enumerate(held.tolist()):
        table[row, :many] = np.arange(taken, taken + many)
        taken += many
    step = artificial_step(counts, page_size)
    return replace(step, starts=starts, pages=table, slots=np.arange(len(counts), dtype=np.int32))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_folder(Path(folder), shapes.shape((sys.argv[1:] or ["qwen3-0.6b"])[0]))
        settings = Settings(
            model=folder, load_format="dummy", device="cuda", max_model_len=16_384,
            no_cuda_graph=True,
        )  # fmt: skip
        runner = load_engine(settings, Path(folder)).runner
    sizes = tuple(MixedSize(tokens, 256, 64) for tokens in sorted({one[0] for one in STEPS}))
    for margin in MARGINS:
        fa3_backend.MARGIN = margin
        runner.capture((8,), sizes)
        graphs = runner._graphs[1]
        times = []
        for tokens, *rest in STEPS:
            size = next(one for one in sizes if one.tokens == tokens)
            with torch.cuda.stream(runner._forward):
                runner._planned(graphs, size, step_of(tokens, *rest, runner.pool.page_size))
                times.append(replay_seconds(graphs[size], 6) * 1e3)
        print(f"margin {margin:3}:", "  ".join(f"{time:6.2f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
