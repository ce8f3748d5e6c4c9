"""`formats`: number formats side by side, as a batch and as one stream, each in its own server.

Weights are random ones of the shape, in the format that `quantization_config` or a setting says.
Knows what to measure; the batch is that of `offline`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import batch, floor, shapes, workload
from pipeinfer import LLM
from pipeinfer.bench.dataset import TokenRange

FP8 = {"quantization": "fp8"}
FP8_KV = {"kv_cache_dtype": "fp8_e4m3"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@dataclass(frozen=True)
class Format:
    """settings, and what config.json says of the weights, if anything."""

    settings: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, Any] | None = None


FORMATS = {
    "bf16": Format(),
    "bf16-kv8": Format(FP8_KV),
    "fp8": Format(FP8),
    "fp8-kv8": Format(FP8 | FP8_KV),
    "fp8-blocks": Format(stored=BLOCKS),
    "awq": Format(stored=AWQ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("--config", metavar="SHAPE", required=True, help=f"{', '.join(shapes.SHAPES)} or a file")
    add("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    add("--requests", type=int, default=256, help="of the batch; 0: none")
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--stream-tokens", type=int, default=512, help="of the one stream behind 128; 0: none")
    add("--rounds", type=int, default=1, help="of all formats in turn")
    add("--repeats", type=int, default=1, help="of what is measured, by each server")
    add("--flops", type=float, default=0.0, help="of the machine in bfloat16, for the efficiency")
    add("--bandwidth", type=float, default=0.0, help="of its memory, bytes per second")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"tokens_per_s": [], "efficiency": [], "stream_ms": []} for name in options.formats
    }
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as temporary:
        for number in range(options.rounds):
            for name in options.formats:
                folder = Path(temporary) / f"{number}-{name}"
                for what, value in _measured(options, settings, FORMATS[name], folder):
                    found[name][what].append(value)
                    print(f"{name:12} {what:14} {value:10.2f}", flush=True)
    return {
        name: {what: statistics.median(values) for what, values in metrics.items() if values}
        | {f"all_{what}": values for what, values in metrics.items() if values}
        for name, metrics in found.items()
    }


def _measured(
    options: argparse.Namespace, settings: Mapping[str, Any], which: Format, folder: Path
) -> Iterator[tuple[str, float]]:
    config = shapes.shape(options.config)
    stored = {} if which.stored is None else {"quantization_config": dict(which.stored)}
    shapes.write_folder(folder, {**config, **stored})
    chosen = {"load_format": "dummy", **settings, **which.settings, "model": str(folder)}
    highest = shapes.highest_id(chosen)
    with LLM(**chosen) as llm:
        batch.measure(
            llm, workload.uniform(16, TokenRange(16, 64), TokenRange(4, 8), highest, -1), 0.6
        )
        for turn in range(options.repeats):
            if options.requests:
                spans = options.prompt_tokens, options.output_tokens
                work = workload.uniform(options.requests, *spans, highest, 2 * turn)
                seconds = batch.measure(llm, work, 0.6).seconds
                yield "tokens_per_s", work.output_tokens / seconds
                if options.flops and options.bandwidth:
                    found = floor.efficiency(options, chosen, work, seconds)
                    yield "efficiency", found["efficiency"]
            if options.stream_tokens:
                length = TokenRange(options.stream_tokens, options.stream_tokens)
                alone = workload.uniform(1, TokenRange(128, 128), length, highest, 2 * turn + 1)
                seconds = batch.measure(llm, alone, 0.6).seconds
                yield "stream_ms", 1e3 * seconds / options.stream_tokens
