"""`llama`: a GGUF file on a CPU, by pipeinfer and by llama.cpp, in turns.

llama.cpp reads the file as it is, and as float16; pipeinfer computes as its settings say, such as
`--dtype` and `--quantization`. Each round is a process of its own, while nothing of the other
runs. llama.cpp is driven by llama_generate.py, in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, dequantize

from harness.command_line import ROOT
from harness.processes import Others
from pipeinfer import AsyncLLM, SamplingParams
from pipeinfer.offline.llm import NO_TARGETS
from pipeinfer.settings import ConfigurationError

FILE_TYPE = Keys.General.FILE_TYPE
WRITTEN_BY_GGUF = "GGUF."  # such fields describe the file, and its writer makes them


def write(source: Path, target: Path) -> Path:
    """Writes `target`, which is returned, from the GGUF file `source` of any quantization."""
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name != Keys.General.ARCHITECTURE and not field.name.startswith(WRITTEN_BY_GGUF):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            value = field.contents() if field.name != FILE_TYPE else LlamaFileType.MOSTLY_F16.value
            writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype(np.float16 if weights.ndim > 1 else "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


PROMPTS = (128, 1000)  # tokens of the prompts whose rate is measured
PROMPT_TIMES = 2  # as often a round: a short one takes less than a time slice of a neighbour
OUTPUT_ALONE, OUTPUT_TOGETHER = 128, 64


class Case(msgspec.Struct, frozen=True):
    """Streams of `output` tokens each, one for each prompt. `flash`: with flash attention, which
    llama.cpp is faster with where it reads a prompt, and slower where it decodes."""

    name: str
    prompts: list[list[int]]
    output: int
    flash: bool


class Seen(msgspec.Struct, frozen=True):
    """For each stream: (seconds since all began, the tokens that came then), in order."""

    streams: list[list[tuple[float, list[int]]]]

    def outputs(self) -> list[list[int]]:
        return [[token for _, ids in stream for token in ids] for stream in self.streams]


@dataclass
class Pieces:
    """Cuts a text's tokens into prompts. No two are alike, so no cache of prefixes can help."""

    tokens: Sequence[int]
    used: int = 0

    def case(self, name: str, streams: int, prompt: int, output: int) -> Case:
        prompts = [self._take(prompt) for _ in range(streams)]
        return Case(name, prompts, output, flash=output == 1)

    def _take(self, count: int) -> list[int]:
        self.used += count
        if self.used > len(self.tokens):
            raise ValueError(f"the text has {len(self.tokens)} tokens, fewer than {self.used}")
        return list(self.tokens[self.used - count : self.used])


def cases(pieces: Pieces, streams: int) -> list[Case]:
    """What is measured once a round."""
    alone = pieces.case("1 stream", 1, 128, OUTPUT_ALONE)
    together = pieces.case(f"{streams} streams", streams, 128, OUTPUT_TOGETHER)
    prompts = [
        pieces.case(f"prompt of {length}", 1, length, 1)
        for length in PROMPTS
        for _ in range(PROMPT_TIMES)
    ]
    return [alone, together, *prompts]


def warm_up(pieces: Pieces, streams: int) -> list[Case]:
    """The same shapes with short outputs."""
    lengths = [pieces.case("", 1, length, 1) for length in PROMPTS]
    return [pieces.case("", 1, 128, 8), pieces.case("", streams, 32, 8), *lengths]


def numbers(case: Case, seen: Seen) -> dict[str, float]:
    """{name of the number: value} of one case; RuntimeError if tokens are missing.

    Decoding counts while all streams decode: from the last one's first token to the first end.
    """
    counts = [len(ids) for ids in seen.outputs()]
    if counts != [case.output] * len(case.prompts):
        raise RuntimeError(f"{case.name}: {counts} tokens instead of {case.output} each")
    firsts = [stream[0][0] for stream in seen.streams]
    if case.output == 1:
        rate = sum(map(len, case.prompts)) / max(firsts)
        return {f"{case.name}: prompt tokens/s": rate}
    begin, end = max(firsts), min(stream[-1][0] for stream in seen.streams)
    decoded = sum(
        len(ids) for stream in seen.streams for at, ids in stream if begin < at <= end
    )  # fmt: skip
    whole = max(stream[-1][0] for stream in seen.streams)
    return {
        f"{case.name}: decode tokens/s": decoded / (end - begin),
        f"{case.name}: all tokens/s": sum(counts) / whole,
        f"{case.name}: time to first token, ms": 1e3 * statistics.median(firsts),
    }


def of_round(cases: Sequence[Case], seen: Sequence[Seen]) -> dict[str, float]:
    """The numbers of one round; the median of those that it has several times."""
    found: dict[str, list[float]] = {}
    for case, one in zip(cases, seen, strict=True):
        for name, value in numbers(case, one).items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and ends."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def compared(rounds: Mapping[str, Sequence[Mapping[str, float]]], ours: str) -> dict[str, Any]:
    """{number: {side: spread, "ratio to SIDE": spread}}; ratios are ours by theirs in one round,
    of rates and of times alike."""
    result: dict[str, Any] = {}
    for name in rounds[ours][0]:
        values = {side: [one[name] for one in of] for side, of in rounds.items()}
        result[name] = {side: spread(of) for side, of in values.items()}
        for side in rounds.keys() - {ours}:
            pairs = zip(values[ours], values[side], strict=True)
            result[name][f"ratio to {side}"] = spread([a / b for a, b in pairs])
    return result


def equal_beginning(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """The share of all tokens before two outputs part, over pairs of outputs."""
    same = total = 0
    for a, b in zip(one, other, strict=True):
        equal = [x == y for x, y in zip(a, b, strict=True)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(equal)
    return same / total


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
        files = {QUANTIZED: model, HALF: write(model, folder / "f16.gguf")}
        llama = Llama(options.llama_python, int(ours["threads"]), folder)
        pieces = Pieces(llama.tokens(model))
        warm = warm_up(pieces, options.streams)
        work = cases(pieces, options.streams)
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
    each = {side: [of_round(work, one) for one in of] for side, of in rounds.items()}
    outputs = {
        side: [ids for seen in of[0] for ids in seen.outputs() if len(ids) > 1]
        for side, of in rounds.items()
    }
    equal = {
        side: equal_beginning(outputs[OURS], ids) for side, ids in outputs.items() if side != OURS
    }
    return {"numbers": compared(each, OURS), "equal_tokens": equal}


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
        pages = sorted((ROOT / "docs").glob("*.md"))
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
