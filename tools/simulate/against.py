"""`against`: a recorded run and the same requests simulated, side by side.

Arrivals, groups and routing are those of the recording; only the step times are a model's, which
may have been fitted to another recording.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulate import metrics, recordings, step_model
from simulate.recordings import Stream
from simulate.run import simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what --record wrote, of all stages")
    add("--model", default="demo-cpu", metavar="FILE", help="step times: a shipped one or a file")
    add("--repeat", type=int, default=8, metavar="N", help="simulations that are averaged")
    add("--skip", type=int, default=0, metavar="N", help="first requests left out, a warm-up")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Both sides' metrics, and their ratios; prints them too. Raises ConfigurationError."""
    found = recordings.recordings(options.folder)
    model = step_model.load(options.model)
    kept = recordings.streams(found, options.skip)
    deployment, groups, routing = recordings.deployment(found)
    arriving = recordings.arrivals(kept)
    tallies = [
        simulate(deployment, model, iter(arriving), routing, groups, seed)
        for seed in range(max(options.repeat, 1))
    ]
    real = _metrics(kept) | {"steps": recordings.steps_since(found, kept[0].sent)}
    runs = [metrics.of(tally, 0.0) for tally in tallies]
    said = {name: _mean([one[name] for one in runs]) for name in real}
    ratios = {name: _ratio(said[name], real[name]) for name in real}
    _show(real, said, ratios)
    return {"measured": real, "simulated": said, "ratio": ratios}


def _metrics(kept: Sequence[Stream]) -> dict[str, Any]:
    """Names as in metrics.py."""
    seconds = max(stream.pieces[-1] for stream in kept) - kept[0].sent
    tokens = sum(stream.tokens for stream in kept)
    gaps = np.concatenate([np.diff(stream.pieces) for stream in kept])
    return {
        "requests": len(kept),
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "ttft_ms": metrics.percentiles([stream.pieces[0] - stream.sent for stream in kept]),
        "itl_ms": metrics.percentiles(gaps),
        "e2e_ms": metrics.percentiles([stream.pieces[-1] - stream.sent for stream in kept]),
    }


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _mean([value[name] for value in values]) for name in values[0]}
    return float(np.mean(values))


def _ratio(said: Any, real: Any) -> Any:
    if isinstance(real, Mapping):
        return {name: _ratio(said[name], real[name]) for name in real}
    return said / real if real else 1.0


def _show(real: Any, said: Any, ratios: Any, prefix: str = "") -> None:
    for name in real:
        if isinstance(real[name], Mapping):
            _show(real[name], said[name], ratios[name], f"{prefix}{name} ")
        else:
            off = ratios[name] - 1.0
            print(f"{prefix + name:<16}{real[name]:14,.2f}{said[name]:14,.2f}{off:+10.1%}")
