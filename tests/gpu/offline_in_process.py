"""Offline throughput of scheduler core, engine core and runner in one thread, without processes.

Prints one line of JSON for a shape: `python tests/gpu/offline_in_process.py qwen3-0.6b`. With
--profile it prints where the device's time goes, too. Not a test: a tool beside the tests.
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
from overlapped import GpuCores  # noqa: E402

from bench.shapes import shape  # noqa: E402
from pipeinfer.params import RequestParams  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402


def work(seed, requests):
    source = random.Random(seed)
    prompts = [
        [source.randint(0, 10000) for _ in range(source.randint(100, 1024))]
        for _ in range(requests)
    ]
    return prompts, [source.randint(100, 1024) for _ in range(requests)]


def run_batch(cores, seed, requests, tag, most=0):
    prompts, wanted = work(seed, requests)
    wanted = [min(n, most) if most else n for n in wanted]
    names = [f"{tag}{i}" for i in range(requests)]
    begin = time.perf_counter()
    batch = sorted(zip(names, prompts, wanted, strict=True), key=lambda one: -one[2])
    for i, (name, prompt, n) in enumerate(batch):  # as LLM.generate does
        params = RequestParams(temperature=0.6, max_tokens=n, ignore_eos=True)
        cores.submit(name, prompt, params, seed=i)
    cores.run()
    seconds = time.perf_counter() - begin
    assert [len(cores.outputs[name]) for name in names] == wanted
    return sum(wanted), seconds


def single(cores, tag, prompt_len=128, tokens=512, streams=1):
    """Median time between tokens in ms."""
    source = random.Random(tag)
    for i in range(streams):
        prompt = [source.randint(0, 10000) for _ in range(prompt_len)]
        cores.submit(f"{tag}{i}", prompt, RequestParams(temperature=0.6, max_tokens=tokens,
                     ignore_eos=True), seed=i)  # fmt: skip
    stamps = []

    def stamp():
        stamps.append((time.perf_counter(), len(cores.outputs[f"{tag}0"])))
        return False

    cores.run(stamp)
    gaps = sorted(b[0] - a[0] for a, b in zip(first(stamps), first(stamps)[1:], strict=False))
    return gaps[len(gaps) // 2] * 1e3


def first(stamps):
    """The first moment at which each count of tokens was seen."""
    seen = {}
    for moment, count in stamps:
        seen.setdefault(count, (moment, count))
    return list(seen.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--single", type=int, nargs="*", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--setting", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape(options.shape)))
        begin = time.perf_counter()
        changes = dict(pair.split("=") for pair in options.setting)
        changes = {key: int(v) if v.isdigit() else v for key, v in changes.items()}
        changes = {"max_model_len": 4096, "cache": "naive"} | changes
        settings = Settings(model=folder, load_format="dummy", device="cuda", **changes)
        cores = GpuCores(
            Path(folder), settings, keep=False, budget=settings.max_step_tokens or 8192
        )
        cores.memory.check_integrity = lambda: None  # costs more than the step
        loaded = time.perf_counter() - begin
        report(cores, options, loaded)


def report(cores, options, loaded):
    tag = time.perf_counter_ns()
    run_batch(cores, 1, min(options.requests, 64), f"warm{tag}-", most=64)
    runner = cores.loaded.runner
    before = (cores.busy, cores.idle, cores.steps, dict(runner.phases.seconds))
    cores.kinds.clear()
    tokens, seconds = run_batch(cores, 0, options.requests, "run")
    steps = cores.steps - before[2]
    kinds = {k: (n, round(t / n * 1e3, 3)) for k, (n, t) in cores.kinds.items()}
    line = {
        "shape": options.shape, "settings": options.setting, "tokens_per_s": tokens / seconds,
        "seconds": seconds, "busy": cores.busy - before[0], "idle": cores.idle - before[1],
        "steps": steps, "load_s": loaded, "kv_pages": cores.loaded.pages,
        "steps_and_ms": kinds,
        "host_us": {k: (v - before[3][k]) / steps * 1e6 for k, v in runner.phases.seconds.items()},
        "tbt_ms": {n: single(cores, f"s{n}-", streams=n) for n in options.single},
    }  # fmt: skip
    print("RESULT " + json.dumps(line), flush=True)
    if options.profile:
        profile(cores, options)


def profile(cores, options):
    """Kernel times of some decode steps, and then of prefill steps."""
    trace(cores, options, "decode", options.requests)
    trace(cores, options, "single", 1)
    trace_mixed(cores)
    for i, prompt in enumerate(work(4, options.requests)[0]):
        cores.submit(f"q{i}", prompt, RequestParams(max_tokens=2), seed=i)
    cores.run(lambda: cores.steps >= 8)
    show(cores, "prefill", 4)


def trace_mixed(cores, streams=100, prompts=40):
    """Prompts beside streams."""
    for i in range(streams + prompts):
        if i == streams:
            cores.run(lambda: len(cores.outputs[f"beside{streams - 1}"]) >= 20)
        length, wanted = (300, 300) if i < streams else (600, 1)
        params = RequestParams(temperature=0.6, max_tokens=wanted, ignore_eos=True)
        cores.submit(f"beside{i}", [i + 1] * length, params, seed=i)
    show(cores, "mixed", 10)
    cores.run()


def trace(cores, options, name, requests):
    for i, prompt in enumerate(work(2, requests)[0]):
        cores.submit(f"{name}{i}", prompt, RequestParams(temperature=0.6, max_tokens=100,
                     ignore_eos=True), seed=i)  # fmt: skip
    cores.run(lambda: len(cores.outputs[f"{name}{requests - 1}"]) >= 20)
    show(cores, name, 10)
    cores.run()


def show(cores, name, steps):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as tracing

    begun, busy = cores.steps, cores.busy
    with tracing(activities=[ProfilerActivity.CUDA]) as traced:
        cores.run(lambda: cores.steps >= begun + steps)
        torch.cuda.synchronize()
    lines = [
        (event.self_device_time_total / steps, event.count / steps, event.key[:80])
        for event in traced.key_averages()
    ]
    total = sum(line[0] for line in lines)
    busy = (cores.busy - busy) / steps * 1e6
    print(f"PROFILE {name}: kernels {total:.0f} us, busy {busy:.0f} us a step")
    for us, count, key in sorted(lines, reverse=True)[:16]:
        print(f"PROFILE {us:9.1f} us/step {count:7.1f}x {key}", flush=True)


if __name__ == "__main__":
    main()
