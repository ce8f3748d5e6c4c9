"""Engines that are killed, and others that come after them: what of their weights these have.

Import it as `from kept_engines import two_lives`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from memory_holders import running_holder

ENGINE_TESTS = str(Path(__file__).parent / "engine")  # where single_steps is

# Loads models one after the other, each with a holder of its own.
ENGINES = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from kept_logits import logits_of
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.engine.loading import load_engine
from pipeinfer.settings import Settings
from single_steps import Row, build_step

for address, folder, more in json.loads(sys.argv[1]):
    kept, read = KeptMemory(address), []
    settings = Settings(kv_pages=32, max_running=2, max_step_tokens=64, threads=1, **more)
    say = lambda done, total: read.append(done)
    engine = load_engine(settings, Path(folder), say, kept=lambda: kept)
    runner = engine.runner
    pages = np.arange(1, 1 + -(-16 // engine.page_size))
    step = build_step([Row(0, 0, list(range(2, 18)), pages, True)], 0, len(pages))
    found = logits_of(runner, step)
    assert found.isfinite().all() and found.std() > 0
    numbers = found.float().flatten().tolist()
    if runner._draft is not None:
        width = runner._draft._model.config.hidden_size
        hidden = torch.ones(2, width, dtype=runner.pool.dtype, device=found.device)
        numbers += runner._draft._model.logits(hidden).float().flatten().tolist()
    left = [name for name in sorted(kept.taken) if name.endswith("weights")]
    print(json.dumps([left, len(read), numbers]), flush=True)
sys.stdin.read()
"""


class Engine(NamedTuple):
    """left: weights that an engine before has left, by name. reads: progress of reading files that
    was told. numbers: logits of the model, and of its draft model."""

    left: list[str]
    reads: int
    numbers: list[float]


def two_lives(models: Sequence[tuple[Path, dict[str, Any]]]) -> tuple[list[Engine], list[Engine]]:
    """Of each model, with its settings, an engine that is killed, and its successor."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([ENGINE_TESTS, *sys.path])}
    lives: list[list[Engine]] = []
    with ExitStack() as holders:
        todo = [(holders.enter_context(running_holder()), str(one), more) for one, more in models]
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", ENGINES, json.dumps(todo)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
            )  # fmt: skip
            lives.append([Engine(*json.loads(process.stdout.readline())) for _ in models])
            process.send_signal(signal.SIGKILL)
            process.communicate()
    return lives[0], lives[1]
