"""A few requests for any runner, more than slots: greedy, restricted, penalized, and neither."""

from __future__ import annotations

import numpy as np

from pipeinfer.params import SamplingParams

LENGTHS = (3, 60, 17, 33)
WANTED = 5


def submit_all(cores) -> None:
    """The same ones each time."""
    random = np.random.default_rng(0)
    for index, length in enumerate(LENGTHS):
        params = SamplingParams(
            temperature=0.8 * (index % 2), top_k=20 * (index == 3), max_tokens=WANTED,
            min_tokens=2 * (index == 1), stop_token_ids=(250,) * (index == 1),
            repetition_penalty=1.5 if index > 1 else 1.0, presence_penalty=0.5 * (index == 2),
            frequency_penalty=-0.3 * (index == 3),
        )  # fmt: skip
        cores.submit(f"r{index}", random.integers(0, 250, length).tolist(), params, seed=index)
