"""What several GPUs of one host give: all-reduce times, equal tokens, throughput, survival.

`python tests/gpu/tensor_parallel.py --gpus 4` runs every part that fits, each as a process of its
own under a time limit, side by side where GPUs are free; it prints a table and writes JSON into
$OUT. `--parts ar,tokens` selects. Not a test: a tool beside the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT = 150.0  # seconds that one job may take
PARTS = ("ar", "tokens", "forms", "loss", "14b", "32b", "dp")


@dataclass
class Job:
    """A process that prints `RESULT {...}`, and the GPUs that it has.

    shares: it measures no time, so jobs like it may have the same GPUs.
    """

    name: str
    gpus: int
    arguments: list[str]
    limit: float = LIMIT
    shares: bool = False
    process: subprocess.Popen[str] | None = None
    held: list[int] = field(default_factory=list)
    began: float = 0.0
    log: Any = None


def jobs(
    parts: list[str], gpus: int, device: str, all_reduces: tuple[str, ...] = ("auto", "nccl")
) -> list[Job]:
    """Everything that was asked for and fits, the longest first."""
    degrees = [n for n in (2, 4) if n <= gpus]
    shape = {"14b": "qwen3-14b", "32b": "qwen3-32b"} if device == "cuda" else {"14b": "tiny"}
    found: list[Job] = []
    if "ar" in parts:
        found += [Job(f"ar-{n}", n, ["ar", str(n)], 90) for n in degrees]
    if "tokens" in parts:
        found += [
            Job(f"tokens-{n}-{what}", n, ["tokens", str(n), what], shares=True)
            for n in (1, *degrees)
            for what in ("dense", "moe")
        ]
    if "forms" in parts:
        found += [Job(f"forms-{n}", n, ["forms", str(n)], shares=True) for n in (1, *degrees)]
    if "14b" in parts:
        ways = [(1, "auto"), *((n, way) for n in degrees for way in all_reduces)]
        found += [
            Job(f"14b-tp{n}-{way}", n, ["offline", shape["14b"], str(n), "1", way])
            for n, way in reversed(ways)
        ]
    if "32b" in parts and gpus >= 4 and "32b" in shape:
        found.append(Job("32b-tp4-auto", 4, ["offline", shape["32b"], "4", "1", "auto"]))
    if "dp" in parts:
        found.append(Job("14b-dp2", 2, ["offline", shape["14b"], "1", "2", "auto"]))
    if "loss" in parts:
        found += [Job(f"loss-2-{what}", 2, ["loss", what], 100) for what in ("demo", "graphs")]
    return found


# -------------------------------------------------------------------------- the jobs, side by side


def run_all(waiting: list[Job], options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Results by job name; a job that fails or takes too long has an "error"."""
    running: list[Job] = []
    results: dict[str, Any] = {}
    deadline = time.monotonic() + options.seconds
    while waiting or running:
        for job in list(waiting):
            job.held = places(job, running, options.gpus)
            if job.held:
                waiting.remove(job)
                start(job, options, out)
                running.append(job)
        for job in list(running):
            assert job.process is not None
            late = time.monotonic() - job.began > job.limit or time.monotonic() > deadline
            if job.process.poll() is None and not late:
                continue
            end(job)
            running.remove(job)
            results[job.name] = {"seconds": round(time.monotonic() - job.began, 1)}
            results[job.name] |= read(job, late)
            print(f"{job.name:16} {json.dumps(results[job.name])[:400]}", flush=True)
            (out / "tensor_parallel.json").write_text(json.dumps(results, indent=1))
        if time.monotonic() > deadline:
            results |= {job.name: {"error": "no time was left"} for job in waiting}
            waiting = []
        time.sleep(0.1)
    (out / "tensor_parallel.json").write_text(json.dumps(results, indent=1))
    return results


def places(job: Job, running: list[Job], gpus: int) -> list[int]:
    """GPUs for it, those with the fewest jobs first; none if there are not enough."""
    users = {gpu: [other for other in running if gpu in other.held] for gpu in range(gpus)}
    open_ones = [gpu for gpu in users if all(job.shares and other.shares for other in users[gpu])]
    open_ones.sort(key=lambda gpu: len(users[gpu]))
    return open_ones[: job.gpus] if len(open_ones) >= job.gpus else []


def start(job: Job, options: argparse.Namespace, out: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, job.held)),
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "PIPEINFER_DEVICE": options.device,
    }
    job.log = (out / f"{job.name}.log").open("w+")
    job.began = time.monotonic()
    job.process = subprocess.Popen(
        [sys.executable, __file__, "--job", *job.arguments],
        stdout=job.log, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def end(job: Job) -> None:
    """Whatever is left of it, children in sessions of their own included."""
    assert job.process is not None
    if job.process.poll() is None:
        for pid in [*descendants(job.process.pid), job.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        job.process.wait()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            below = [int(text) for text in task.read_text().split()]
            found += below
            waiting += below
    return found


def read(job: Job, late: bool) -> dict[str, Any]:
    job.log.seek(0)
    lines = job.log.read().splitlines()
    job.log.close()
    results = [line for line in lines if line.startswith("RESULT ")]
    if results:
        return json.loads(results[-1].removeprefix("RESULT "))
    assert job.process is not None
    why = "it took too long" if late else f"exit code {job.process.returncode}"
    so_far = [line.removeprefix("SO FAR ") for line in lines if line.startswith("SO FAR ")]
    known = json.loads(so_far[-1]) if so_far else {}
    return known | {"error": why, "log": lines[-25:]}


# ------------------------------------------------------------------------------------ jobs by name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--all-reduce", default="auto,nccl", help="for the throughput of --tp")
    parser.add_argument("--seconds", type=float, default=400.0, help="for everything")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--job", nargs="+", help="used by itself")
    options = parser.parse_args()
    if options.job:
        sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "tools")]
        import tensor_parallel_jobs

        result = tensor_parallel_jobs.JOBS[options.job[0]](*options.job[1:])
        print("RESULT " + json.dumps(result), flush=True)
        return
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="tensor-parallel-"))
    out.mkdir(parents=True, exist_ok=True)
    ways = tuple(options.all_reduce.split(","))
    found = jobs(options.parts.split(","), options.gpus, options.device, ways)
    results = run_all(found, options, out)
    from tensor_parallel_table import show

    show(results)
    print(f"written to {out}")
    sys.exit(any("error" in result for result in results.values()))


if __name__ == "__main__":
    main()
