"""`llama`: one GGUF file through pipeinfer and through llama.cpp on a CPU, in turns, side by side.

llama.cpp gets it as it is and as float16; pipeinfer computes as its settings say, such as `--dtype`
and `--quantization`. Each round is a process of its own, while nothing of the other runs. How
llama.cpp is driven is in llama_generate.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import gguf_f16, report, streams
from bench.processes import Others
from bench.streams import Case, Pieces, Seen
from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer.offline.llm import NO_TARGETS
from pipeinfer.settings import ConfigurationError

THREADS = 2
SCRIPT = Path(__file__).with_name("llama_generate.py")
OURS, QUANTIZED, HALF = "pipeinfer", "llama.cpp as is", "llama.cpp F16"
SHOWN = 160  # letters of each side's first answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL, a .gguf file, is a setting."""
    add = parser.add_argument
    add("--llama-python", metavar="PYTHON", required=True, help="interpreter that has llama_cpp")
    add("--rounds", type=int, default=3, help="rounds of each side")
    add("--streams", type=int, default=16, help="streams that decode together")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    model = Path(settings.get("model", ""))
    if model.suffix != ".gguf" or not model.is_file():
        raise ConfigurationError("MODEL must be a .gguf file here")
    ours = {"threads": THREADS, **settings}
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as temporary:
        folder = Path(temporary)
        files = {QUANTIZED: model, HALF: gguf_f16.write(model, folder / "f16.gguf")}
        llama = Llama(options.llama_python, int(ours["threads"]), folder)
        pieces = Pieces(llama.tokens(model))
        warm = streams.warm_up(pieces, options.streams)
        work = streams.cases(pieces, options.streams)
        llama.find_buffers(files.values(), warm[:1])
        rounds: dict[str, list[list[Seen]]] = {side: [] for side in (OURS, *files)}
        others: list[float] = []
        for _ in range(options.rounds):
            for side, seen in rounds.items():
                with Others() as measured:
                    if side == OURS:
                        seen.append(asyncio.run(_ours(ours, warm, work)))
                    else:
                        seen.append(llama.run(files[side], warm, work))
                others.append(measured.share)
        metrics = summary(work, rounds)
        first = {side: seen[0][0].outputs()[0] for side, seen in rounds.items()}
        texts = llama.texts(model, list(first.values()))
    metrics |= {
        "threads": ours["threads"],
        "used_by_others": max(others),
        "llama_extra_buffers": llama.extra_buffers,
        "texts": dict(zip(first, texts, strict=True)),
    }
    show(metrics)
    return metrics


def summary(work: Sequence[Case], rounds: Mapping[str, Sequence[Sequence[Seen]]]) -> dict[str, Any]:
    """Numbers of all rounds, and how far the greedy outputs agree with ours."""
    each = {side: [streams.of_round(work, one) for one in of] for side, of in rounds.items()}
    outputs = {
        side: [ids for seen in of[0] for ids in seen.outputs() if len(ids) > 1]
        for side, of in rounds.items()
    }
    equal = {
        side: streams.equal_beginning(outputs[OURS], ids)
        for side, ids in outputs.items()
        if side != OURS
    }
    return {"numbers": streams.compared(each, OURS), "equal_tokens": equal}


def show(metrics: Mapping[str, Any]) -> None:
    """Prints the medians, and our numbers divided by theirs with the spread over the rounds."""
    sides = [OURS, QUANTIZED, HALF]
    print(f"{'':40}" + "".join(f"{side:>20}" for side in sides) + f"{'ratios, as is and F16':>50}")
    for name, values in metrics["numbers"].items():
        line = f"{name:40}" + "".join(f"{values[side]['median']:20,.1f}" for side in sides)
        for side in sides[1:]:
            ratio = values[f"ratio to {side}"]
            line += f"{ratio['median']:9.2f} ({ratio['low']:5.2f} to {ratio['high']:5.2f})"
        print(line)
    for side, share in metrics["equal_tokens"].items():
        print(f"tokens before outputs part from ours, {side}: {share:.0%}")
    for side, text in metrics["texts"].items():
        print(f"{side}: {text[:SHOWN]!r}")
    if not metrics["llama_extra_buffers"]:
        print("llama.cpp without its rearranged weights (AMX ...): it crashes with them here")
    print(f"others used up to {metrics['used_by_others']:.0%} of the machine")


async def _ours(
    settings: Mapping[str, Any], warm: Sequence[Case], work: Sequence[Case]
) -> list[Seen]:
    async with AsyncLLM(**(NO_TARGETS | settings)) as llm:
        for case in warm:
            await _together(llm, case)
        return [await _together(llm, case) for case in work]


async def _together(llm: AsyncLLM, case: Case) -> Seen:
    params = SamplingParams(temperature=0, max_tokens=case.output, ignore_eos=True)
    begin = time.perf_counter()

    async def one(prompt: list[int]) -> list[tuple[float, list[int]]]:
        return [
            (time.perf_counter() - begin, delta.token_ids)
            async for delta in llm.generate(prompt, params)
            if delta.token_ids
        ]

    return Seen(list(await asyncio.gather(*map(one, case.prompts))))


class Llama:
    """The other side: a program of its own interpreter, anew for each call."""

    def __init__(self, python: str, threads: int, folder: Path) -> None:
        self._python, self._threads, self._folder = python, threads, folder
        self.extra_buffers = True

    def tokens(self, model: Path) -> list[int]:
        """The pages of docs/ as the model's tokens."""
        pages = sorted((report.ROOT / "docs").glob("*.md"))
        text = self._folder / "text"
        text.write_text("\n".join(page.read_text() for page in pages))
        return json.loads(self._call("tokens", model, text))

    def texts(self, model: Path, outputs: list[list[int]]) -> list[str]:
        return json.loads(self._call("texts", model, self._written(outputs)))

    def run(self, model: Path, warm: Sequence[Case], work: Sequence[Case]) -> list[Seen]:
        asked = {"warm": warm, "cases": work, "extra_buffers": self.extra_buffers}
        return msgspec.json.decode(self._call("run", model, self._written(asked)), type=list[Seen])

    def find_buffers(self, models: Iterable[Path], warm: Sequence[Case]) -> None:
        """Goes without rearranged weights if llama.cpp dies with them: some builds' AMX does."""
        try:
            for model in models:
                self.run(model, warm, [])
        except subprocess.CalledProcessError as error:
            if error.returncode >= 0:
                raise
            self.extra_buffers = False

    def _written(self, content: Any) -> Path:
        file = self._folder / "work.json"
        file.write_bytes(msgspec.json.encode(content))
        return file

    def _call(self, command: str, model: Path, file: Path) -> str:
        """What the script prints last; CalledProcessError if it fails, its words on stderr."""
        words = [self._python, SCRIPT, self._threads, command, model, file]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        environment.pop("PYTHONPATH", None)  # another interpreter's packages
        done = subprocess.run(
            [str(word) for word in words], stdout=subprocess.PIPE, text=True, env=environment,
            check=True,
        )  # fmt: skip
        return done.stdout.strip().rpartition("\n")[2]
