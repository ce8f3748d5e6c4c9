"""The command line: workers in processes of their own, then one result of all they found.

A result has "findings"; the exit code is 1 if there are any. Every input that broke something lies
in --out, and --replay runs one of them again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz import engines
from fuzz.engines import Judge, last_input
from harness.command_line import write_report

SCHEMA = "pipeinfer-fuzz/1"
TOOL = str(Path(__file__).parent)
EXTRA = 60.0  # seconds for a worker to start and to end, beyond its time


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = argparse.ArgumentParser(prog="python tools/fuzz", description=__doc__)
    targets = [f"{name}: {text}" for name, text in engines.TARGETS.items()]
    made.add_argument("target", choices=list(engines.TARGETS), help="; ".join(targets))
    made.add_argument("--seconds", type=float, default=60.0, help="for each worker")
    made.add_argument("--seed", type=int, default=0, help="of the first worker, then one more each")
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--engine", choices=engines.ENGINES, default="auto")
    said = "end with the first finding, or with the first whose signature contains TEXT"
    made.add_argument("--first", metavar="TEXT", nargs="?", const="", help=said)
    made.add_argument("--out", type=Path, help="where inputs that broke something are put")
    made.add_argument("--corpus", type=Path, help="inputs to begin with, kept for the next time")
    made.add_argument("--replay", type=Path, metavar="FILE", help="run this input and no other")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the result there")
    made.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if anything was found."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if options.replay is not None:
        return _replay(options)
    if options.worker is not None:
        _work(options)
        return 0
    options.out = options.out or Path(tempfile.mkdtemp(prefix="pipeinfer-fuzz-"))
    options.out.mkdir(parents=True, exist_ok=True)
    metrics = _result(options, _run(options, words))
    print(json.dumps({k: v for k, v in metrics.items() if k != "findings"}))
    for finding in metrics["findings"]:
        said = f"{finding['signature']}: {finding['message']}\n  --replay {finding['file']}"
        print(said, file=sys.stderr)
    if options.json is not None:
        write_report(options.json, "fuzz", words, metrics, SCHEMA)
    return 1 if metrics["findings"] else 0


def _replay(options: argparse.Namespace) -> int:
    """Raises what the input raises, with its traceback."""
    chosen = engines.make(options.target)
    chosen.one(options.replay.read_bytes())
    chosen.close()
    print(f"{options.replay} breaks nothing")
    return 0


def _work(options: argparse.Namespace) -> None:
    target = engines.make(options.target)
    judge = Judge(target, options.target, options.out, options.worker, options.first)
    corpus = options.corpus or options.out / "corpus" / options.target
    engine = engines.chosen(options.engine)
    seed = options.seed + options.worker
    engines.run(engine, target, judge, options.seconds, seed, corpus)


def _run(options: argparse.Namespace, words: list[str]) -> list[int]:
    """The exit codes of the workers."""
    workers = []
    for number in range(options.workers):
        mine = [*words, "--out", str(options.out), "--worker", str(number)]
        with (options.out / f"worker-{number}.log").open("w") as log:
            workers.append(subprocess.Popen([sys.executable, TOOL, *mine], stdout=log, stderr=log))
    codes = []
    for worker in workers:
        try:
            codes.append(worker.wait(options.seconds + EXTRA))
        except subprocess.TimeoutExpired:
            worker.kill()
            codes.append(worker.wait())
    return codes


def _result(options: argparse.Namespace, codes: list[int]) -> dict[str, Any]:
    """The sum of what the workers noted; a worker that died is a finding itself."""
    findings: dict[str, dict[str, Any]] = {}
    said = []
    for number, code in enumerate(codes):
        note = options.out / f"worker-{number}.json"
        said.append(json.loads(note.read_text()) if note.exists() else {})
        for finding in said[-1].get("findings", []):
            findings.setdefault(finding["signature"], finding)
        if code:
            file = options.out / f"{options.target}-died-{number}.bin"
            file.write_bytes(last_input(options.out, number))
            words = (options.out / f"worker-{number}.log").read_text(errors="replace")[-2000:]
            text = f"the process ended with code {code}: {words}"
            findings[text] = {"signature": "died", "message": text, "file": str(file)}
        (options.out / f"worker-{number}.last").unlink(missing_ok=True)
    corpus = options.corpus or options.out / "corpus" / options.target
    return {
        "target": options.target,
        "engine": engines.chosen(options.engine),
        "workers": options.workers,
        "executions": sum(one.get("executions", 0) for one in said),
        "seconds": max((one.get("seconds", 0.0) for one in said), default=0.0),
        "cpu_seconds": round(sum(one.get("cpu_seconds", 0.0) for one in said), 1),
        "corpus": len(list(corpus.iterdir())) if corpus.exists() else 0,
        "found": len(findings),
        "findings": list(findings.values()),
    }
