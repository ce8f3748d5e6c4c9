"""A soak of scheduler core, engine core and runner: random arrivals, aborts and preemptions.

`python tests/gpu/soak.py --seconds 45`, at depth 2, over a small random model; without a GPU over a
tiny one. Whenever nothing runs, all pages must be accounted for; at the end greedy requests are run
again, alone. Prints a line of JSON. `--memcheck` is short enough for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parity"), str(HERE.parent.parent / "tools")]

import torch  # noqa: E402
from cores import Cores  # noqa: E402
from overlapped import GpuCores  # noqa: E402

from bench.shapes import shape  # noqa: E402
from pipeinfer.engine.executor import step_done  # noqa: E402
from pipeinfer.messages import Abort  # noqa: E402
from pipeinfer.params import RequestParams  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402

SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 2048,
}  # fmt: skip
SAMPLE = 16  # greedy requests that are run again, alone
ABORTED = 0.1  # share of the requests
BUSY = 50  # moments between two at which nothing may arrive until all have ended


class HostCores(Cores):
    """On a CPU: the same, without keeping logits."""

    steps = 0

    def _run_step(self, item) -> None:
        step, _ = item
        self.steps += 1
        self._to_engine(step_done(step, self.loaded.runner.run(step)))


class Soak:
    """Submits, aborts and checks. `lengths`: the most tokens of a prompt, and of an output."""

    def __init__(self, cores, seed: int, vocab: int, lengths: tuple[int, int], most: int) -> None:
        self.cores = cores
        self.random = random.Random(seed)
        self.vocab, self.lengths, self.most = vocab, lengths, most
        self.wanted: dict[str, int] = {}  # live requests, and how many tokens each may get
        self.greedy: dict[str, list[int]] = {}  # prompts of the sample
        self.doomed: set[str] = set()
        self.counts = dict.fromkeys(("requests", "aborted", "tokens", "idle_moments"), 0)
        self.prefixes = [self._ids(lengths[0] // 2) for _ in range(4)]
        # The walk over all pages costs more than a step: it is done when nothing runs.
        self._check = cores.memory.check_integrity
        cores.memory.check_integrity = lambda: None

    def run(self, seconds: float, steps: int = 10**9) -> None:
        """For that long, or that many steps; then until nothing runs."""
        end, moment = time.monotonic() + seconds, 0
        while time.monotonic() < end and self.cores.steps < steps:
            moment += 1
            if moment % BUSY == 0:
                self._settle()
            while len(self.wanted) < self.most and self.random.random() < 0.8:
                self._submit()
            until = self.cores.steps + self.random.randint(1, 6)
            self.cores.run(lambda until=until: self.cores.steps >= until)
            self._collect()
            for name in [name for name in self.doomed if self.random.random() < 0.2]:
                self._abort(name)
        self._settle()

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab) for _ in range(count)]

    def _submit(self) -> None:
        choose = self.random
        name = f"r{self.counts['requests']}"
        self.counts["requests"] += 1
        prompt = self._ids(choose.randint(1, self.lengths[0]))
        if choose.random() < 0.3:
            prompt = choose.choice(self.prefixes)[: choose.randint(1, self.lengths[0])] + prompt[:9]
        wanted = choose.randint(1, self.lengths[1])
        knobs: dict = {"temperature": 0.0}
        if choose.random() < 0.7:
            knobs = {
                "temperature": choose.choice([0.3, 0.8, 1.5]), "top_k": choose.choice([0, 0, 20]),
                "top_p": choose.choice([1.0, 0.9]), "min_p": choose.choice([0.0, 0.0, 0.05]),
                "stop_token_ids": tuple(self._ids(choose.choice([0, 3]))),
                "min_tokens": choose.choice([0, min(3, wanted)]),
                "logit_bias": dict.fromkeys(self._ids(choose.choice([0, 0, 5])), 3.0),
            }  # fmt: skip
        params = RequestParams(max_tokens=wanted, **knobs)
        self.wanted[name] = wanted
        if choose.random() < ABORTED:
            self.doomed.add(name)
        elif knobs["temperature"] == 0 and len(self.greedy) < SAMPLE:
            self.greedy[name] = prompt
        self.cores.submit(name, prompt, params, seed=self.counts["requests"])

    def _abort(self, name: str) -> None:
        self.doomed.discard(name)
        if self.wanted.pop(name, None) is not None:
            self.counts["aborted"] += 1
            self.cores._to_scheduler(Abort(name, 1))

    def _collect(self) -> None:
        """What has ended must have got its tokens."""
        for name in [name for name in self.wanted if name in self.cores.finished]:
            got, reason = len(self.cores.outputs[name]), self.cores.finished.pop(name)
            wanted = self.wanted.pop(name)
            assert reason in ("length", "stop"), (name, reason)
            assert got == wanted or (reason == "stop" and got < wanted), (name, reason, got, wanted)
            self.counts["tokens"] += got
            self.doomed.discard(name)
            if name not in self.greedy:
                del self.cores.outputs[name]

    def _settle(self) -> None:
        """Nothing arrives until nothing runs; then every page is free or in the cache."""
        self.cores.run()
        self._collect()
        assert not self.wanted, f"left without an end: {sorted(self.wanted)}"
        assert self.cores.engine.idle()
        self._check()
        stats = self.cores.engine.stats()
        assert stats["slots_used"] == 0
        assert stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"], stats
        self.counts["idle_moments"] += 1


def flips(soak: Soak, alone) -> dict[str, int]:
    """Of the greedy sample: name to the first place where the tokens differ from those alone."""
    found = {}
    for name, prompt in soak.greedy.items():
        before = soak.cores.outputs[name]
        params = RequestParams(temperature=0.0, max_tokens=len(before))
        alone.submit(name, prompt, params)
        alone.run()
        pairs = zip(before, alone.outputs[name], strict=True)
        places = [at for at, (one, other) in enumerate(pairs) if one != other]
        if places:
            found[name] = places[0]
    return found


def settings_for(folder: Path, device: str, large: bool, no_graphs: bool) -> Settings:
    """A pool that is too small for all of them."""
    common = {"model": str(folder), "load_format": "dummy", "device": device, "overlap_depth": 2}
    if large:
        sizes = {"kv_pages": 300, "max_running": 48, "max_model_len": 4096, "max_step_tokens": 2048}
    else:
        sizes = {"kv_pages": 40, "page_size": 8, "max_running": 12, "max_model_len": 200,
                 "max_step_tokens": 96, "threads": 1}  # fmt: skip
    if device == "cpu":
        common["dtype"] = "float32"  # some CPUs would compute in bfloat16, where ties are common
    if device == "cuda":
        sizes |= {"no_cuda_graph": no_graphs, "cuda_graph_max_batch": 48 if large else 8}
        sizes["page_size"] = 64 if large else 16
    return Settings(**common, **sizes)


def soak(
    seconds: float,
    seed: int = 0,
    large: bool = False,
    no_graphs: bool = False,
    steps: int = 10**9,
    shape_name: str = "qwen3-0.6b",
    compare: bool = True,
) -> dict:
    """Runs it all, for `seconds` or `steps`; the counts of what happened. compare: answers of a
    sample with those that they get alone. AssertionError for whatever does not hold."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = shape(shape_name) | ({} if large else SMALL)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(config))
        settings = settings_for(folder, device, large, no_graphs)
        budget = settings.max_step_tokens
        make = GpuCores if device == "cuda" else HostCores
        extra = {"keep": False} if device == "cuda" else {}
        cores = make(folder, settings, budget=budget, **extra)
        lengths = (600, 900) if large else (60, 60)
        running = Soak(cores, seed, config["vocab_size"], lengths, 64 if large else 16)
        running.run(seconds, steps)
        alone = make(folder, settings, budget=budget, loaded=cores.loaded, **extra)
        flipped = flips(running, alone) if compare else {}
    return running.counts | {
        "device": device,
        "steps": cores.steps,
        "preemptions": cores.scheduler.counts["preemptions"],
        "deferred_rows": cores.engine.stats()["rows_deferred_total"],
        "cached_tokens": cores.engine.stats()["cached_tokens_total"],
        "sample": len(running.greedy),
        "flipped": flipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memcheck", action="store_true", help="30 steps of a tiny model")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.memcheck:
        graphs = {"no_graphs": options.no_graphs}
        found = soak(600, options.seed, steps=30, compare=False, **graphs)
    else:
        large = torch.cuda.is_available()
        found = soak(options.seconds, options.seed, large=large, no_graphs=options.no_graphs)
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    print("SOAK " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
