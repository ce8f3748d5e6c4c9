"""Records a batch through the offline class, then replays the engine's trace alone on its device.

    python tests/gpu/replay_engine.py --config qwen3-0.6b --device cuda [--json OUT]

Without flags it takes the demo model on the CPU. Greedy; further flags are settings. Prints how
many tokens differ and where first, and both durations. Exits 0 if none does and the replay was at
least as fast as the recording. Not a test: a tool beside the tests.

On two machines: `--folder FOLDER --only record` on one, FOLDER carried to the same path of the
other one, and there `--folder FOLDER --only replay`, with the same --config.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from bench import batch, shapes, workload  # noqa: E402
from pipeinfer import LLM  # noqa: E402
from pipeinfer import settings as config  # noqa: E402
from pipeinfer.bench.dataset import TokenRange  # noqa: E402
from pipeinfer.replay.run import ReplayRun, rebuild  # noqa: E402
from pipeinfer.replay.traces import load_stage, warn_of_tail  # noqa: E402


def record(folder: Path, options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, float]:
    """Leaves traces in `folder`; seconds of both batches, and tokens of the large one."""
    highest = shapes.highest_id(settings)
    spans = options.prompt_tokens, options.output_tokens
    work = workload.uniform(options.requests, *spans, highest, options.work_seed)
    warm = workload.uniform(
        min(options.requests, 16), TokenRange(16, 64), TokenRange(4, 8), highest, -1
    )
    with LLM(**settings, record=str(folder)) as llm:
        warmed = batch.measure(llm, warm, options.temperature)
        measured = batch.measure(llm, work, options.temperature)
    return {
        "warm_seconds": warmed.seconds,
        "batch_seconds": measured.seconds,
        "tokens_per_s": work.output_tokens / measured.seconds,
    }


def replay(trace: Path) -> dict[str, Any]:
    """Everything that the engine computed, again, without any other stage."""
    recording = load_stage(trace, "engine")
    warn_of_tail(recording)
    rebuilt = rebuild(recording, "", {})
    for warning in rebuilt.warnings:
        print(f"warning: {warning}")
    choices = argparse.Namespace(all=True, halt=False, until=None, realtime=False, json=False)
    player = ReplayRun(recording, rebuilt, choices, print)
    code = player.run()
    first = player.counts.first
    return {
        "code": code,
        "tokens": player.counts.tokens,
        "wrong_tokens": player.counts.wrong,
        "wrong_requests": len(player.counts.requests),
        "first_difference": None if first is None else first.as_json(),
        "replay_seconds": player.seconds,
    }


def main() -> int:
    """The exit code: 0, or 1 if tokens differ or the replay was slower."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--config", metavar="SHAPE", help="random weights of that shape")
    add("--requests", type=int, default=256)
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--temperature", type=float, default=0.0)
    add("--work-seed", type=int, default=0)
    add("--json", type=Path, metavar="OUT")
    add("--folder", type=Path, help="of recordings, which stay; default: one that goes")
    add("--only", choices=["record", "replay"])
    options, rest = parser.parse_known_args()
    settings = dict(config.parse_flags(rest))
    with tempfile.TemporaryDirectory(prefix="pipeinfer-replay-") as temporary:
        folder = options.folder or Path(temporary)
        if options.config:
            model = shapes.write_folder(folder / "model", shapes.shape(options.config))
            settings |= {"model": str(model), "load_format": settings.get("load_format", "dummy")}
        numbers: dict[str, Any] = {}
        if options.only != "replay":
            numbers |= record(folder, options, settings)
            recorded = numbers["warm_seconds"] + numbers["batch_seconds"]
            print(f"recorded in {recorded:.2f} s ({numbers['tokens_per_s']:,.0f} tokens/s)")
        if options.only != "record":
            [trace] = folder.glob("engine-*.pitrace")
            numbers |= {"trace_bytes": trace.stat().st_size} | replay(trace)
            print(
                f"replayed in {numbers['replay_seconds']:.2f} s; {numbers['wrong_tokens']} of "
                f"{numbers['tokens']} tokens differ"
            )
    faster = bool(options.only) or numbers["replay_seconds"] <= recorded
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0 if numbers.get("code", 0) == 0 and faster else 1


if __name__ == "__main__":
    sys.exit(main())
