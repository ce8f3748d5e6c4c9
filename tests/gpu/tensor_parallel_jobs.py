"""The jobs of tensor_parallel.py, each the whole work of one process; what they return is printed.

Knows models and measures; nothing of GPUs that are shared out, limits or tables.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN = 5120
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 8192)
CALLS, REPLAYS = 16, 7
DEVICE = os.environ.get("PIPEINFER_DEVICE", "cuda")
SMALL = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 128,
    "max_position_embeddings": 1024, "initializer_range": 0.02,
}  # fmt: skip
SMALL_MOE = {
    "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "router_gain": 8.0,
}  # fmt: skip
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


# ------------------------------------------------------------------------------------- all-reduce


def all_reduce(ranks: str) -> dict[str, Any]:
    """Microseconds of each algorithm by message, inside CUDA graphs; and whether sums are right."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import tensor_parallel_jobs as jobs, sys; jobs.all_reduce_rank(*sys.argv[1:])"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, f"ipc://{folder}/rank-0", str(rank), ranks, folder],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            )
            for rank in range(int(ranks))
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads((Path(folder) / "0.json").read_text())


def all_reduce_rank(address: str, rank: str, ranks: str, folder: str) -> None:
    import torch

    from pipeinfer.distributed.group import join

    group = join(address, int(rank), int(ranks), DEVICE, 60)
    result: dict[str, Any] = {"ranks": int(ranks)}
    if DEVICE == "cuda":
        result["custom"] = group.use_custom(torch.bfloat16)
        result["us"] = {rows: measured(group, rows) for rows in ROWS}
    else:
        total = group.all_reduce(torch.full((4,), 1.0 + int(rank)))
        result["sum"] = total.tolist()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    group.close()


def measured(group: Any, rows: int) -> dict[str, Any]:
    """Of a message of `rows` rows of bfloat16: microseconds, and trouble if there is any."""
    import torch
    import torch.distributed as dist

    from pipeinfer.distributed.custom_all_reduce import MOST_BYTES

    torch.manual_seed(group.rank)
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    expected = x.float()
    dist.all_reduce(expected)

    def library(y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y)
        return y

    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nccl": library}
    custom = group.custom
    if custom is not None and x.nbytes <= MOST_BYTES:
        ways["one-shot"] = lambda y: custom.add_up(y, "one-shot")
        ways["two-shot"] = lambda y: custom.add_up(y, "two-shot")
        if x.nbytes % (16 * group.size):
            del ways["two-shot"]
    found: dict[str, Any] = {}
    for name, way in ways.items():
        total = way(x.clone())
        error = float((total.float() - expected).abs().max() / expected.abs().max())
        same = group.collect(total.view(torch.int16).to(torch.int64).sum().view(1))
        found[name] = round(graph_us(way, x), 2)
        if error > 0.02 or len(set(same.flatten().tolist())) > 1:
            found[f"{name} wrong"] = [error, same.flatten().tolist()]
    return found


def graph_us(way: Callable[[Any], Any], x: Any) -> float:
    """Microseconds of one call, of several in one graph, the fastest of some replays."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = torch.zeros_like(x)
        for _ in range(3):
            way(y)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                way(y)
        times = []
        for _ in range(REPLAYS):
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            done.record()
            done.synchronize()
            times.append(begin.elapsed_time(done) * 1e3 / CALLS)
    return statistics.median(times)


# ------------------------------------------------------------------------------------ equal tokens


def tokens(ranks: str) -> dict[str, Any]:
    """Greedy ids of small random checkpoints and of the demo model, by model; compared later."""
    from checkpoints import CheckpointCache

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = CheckpointCache(Path(folder))
        for architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            model = str(small(cache, architecture))
            found[architecture] = greedy(model, int(ranks), 1024)
    found["demo, float32"] = greedy("", int(ranks), 250, dtype="float32", attention="torch")
    return found


def small(cache: Any, architecture: str) -> Path:
    import torch

    sizes = SMALL | (SMALL_MOE if "Moe" in architecture else {})
    if DEVICE == "cpu":
        sizes = SMALL_MOE if "Moe" in architecture else {}
    return cache(architecture, dtype=torch.bfloat16, **sizes)


def greedy(model: str, ranks: int, ids: int, **settings: Any) -> list[list[int]]:
    from pipeinfer import LLM, SamplingParams

    source = random.Random(3)
    prompts = [[source.randrange(min(ids, 250)) for _ in range(source.randint(3, 200))]
               for _ in range(16)]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    usual: dict[str, Any] = {"device": DEVICE, "tp": ranks, "kv_pages": 2000, "max_running": 16}
    with LLM(model, **(usual | settings)) as llm:
        return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False)]


# -------------------------------------------------------------------------------------- throughput


def offline(shape: str, tp: str, dp: str, all_reduce: str) -> dict[str, Any]:
    """The usual 256 requests, twice as many for two groups, and the time between tokens alone."""
    from bench import offline as bench
    from bench import shapes, workload
    from bench.workload import Span, Work
    from pipeinfer import LLM

    spans = (Span(100, 1024), Span(100, 1024)) if DEVICE == "cuda" else (Span(8, 16), Span(4, 8))
    groups, requests = int(dp), 256 if DEVICE == "cuda" else 16
    parts = [workload.uniform(requests, *spans, 500, seed) for seed in range(groups)]
    work = Work(
        [prompt for part in parts for prompt in part.prompts],
        [count for part in parts for count in part.outputs],
    )
    warm = workload.uniform(64, Span(16, 64), Span(4, 8), 500, -1)
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_folder(Path(folder), TINY if shape == "tiny" else shapes.shape(shape))
        began = time.perf_counter()
        with LLM(
            folder, device=DEVICE, tp=int(tp), dp=groups, load_format="dummy", cache="naive",
            max_model_len=4096 if DEVICE == "cuda" else 512, all_reduce=all_reduce,
            memory_fraction=0.85, routing="least-loaded",
        ) as llm:  # fmt: skip
            loaded = time.perf_counter() - began
            bench.measure(llm, warm, 0.6)
            before = llm.stats()
            run = bench.measure(llm, work, 0.6)
            stats = llm.stats()
            gaps = {n: between(llm, n) for n in (1, 8, 32, 256)}
    engines = {name: row for name, row in stats.items() if name.startswith("engine")}
    return {
        "shape": shape, "tp": int(tp), "dp": groups, "all_reduce": all_reduce,
        "tokens_per_s": work.output_tokens / run.seconds, "run_seconds": run.seconds,
        "busy": run.engine["busy"], "idle_share": run.share_without("busy"),
        "steps": {n: row["steps_total"] - before[n]["steps_total"] for n, row in engines.items()},
        "pages": {name: row["pages_total"] for name, row in engines.items()},
        "agreed_plans": [r["agreed_plans"] for n, r in stats.items() if n.startswith("scheduler")],
        "load_seconds": loaded, "tbt_ms": gaps,
    }  # fmt: skip


def between(llm: Any, streams: int, most: int = 128) -> float:
    """Milliseconds between tokens of so many requests at once, prefill taken out."""
    from pipeinfer import SamplingParams

    source = random.Random(streams)
    prompts = [[source.randint(0, 500) for _ in range(128)] for _ in range(streams)]
    seconds = []
    for tokens in (2, most if DEVICE == "cuda" else 8):
        params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True)
        best = []
        for _ in range(2 if streams < 256 else 1):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best.append(time.perf_counter() - begin)
        seconds.append(min(best))
    return (seconds[1] - seconds[0]) * 1e3 / (tokens - 2)


# ------------------------------------------------------------------------------------------- loss


def loss() -> dict[str, Any]:
    """A rank killed and a rank stopped under streams: do they go on, and after how long?"""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "distributed"))
    from chat_streams import Chats, hurt, questions

    from servers import Server

    asked, found = questions(8), {}
    with Server(
        "--tp", "2", "--device", DEVICE, "--attention", "torch", "--dtype", "float32",
        "--kv-pages", "400", "--watchdog", "6",
    ) as server:  # fmt: skip
        expected = Chats(server, asked, 1500 if DEVICE == "cuda" else 60).run()
        for name, rank, how in (("killed", 1, signal.SIGKILL), ("stopped", 1, signal.SIGSTOP)):
            away = []

            def disturb(rank: int = rank, how: Any = how, away: list = away) -> None:
                begin = time.monotonic()
                hurt(server, rank, how)
                away.append(round(time.monotonic() - begin, 1))

            texts = Chats(server, asked, 1500 if DEVICE == "cuda" else 60).run(disturb)
            same = [text == other for text, other in zip(texts, expected, strict=True)]
            found[name] = {"seconds_away": away[0], "equal_texts": sum(same), "of": len(same)}
        found["log"] = [line for line in server.log if " W " in line or " E " in line][-12:]
    return found


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "ar": all_reduce,
    "tokens": tokens,
    "offline": offline,
    "loss": loss,
}
