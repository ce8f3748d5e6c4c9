"""The jobs of tensor_parallel.py, each the whole work of one process; what they return is printed.

Knows models and measures; nothing of GPUs that are shared out, limits or tables.
"""

from __future__ import annotations

import json
import os
import random
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
RANK_SECONDS = 80.0  # until ranks that add up count as hung
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
    """Microseconds of each algorithm by message, inside CUDA graphs; and whether sums are right.

    Ranks that hang or fail leave an "error" that says what each had begun.
    """
    with tempfile.TemporaryDirectory() as folder:
        code = "import tensor_parallel_jobs as jobs, sys; jobs.all_reduce_rank(*sys.argv[1:])"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, f"ipc://{folder}/rank-0", str(rank), ranks, folder],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            )
            for rank in range(int(ranks))
        ]
        deadline = time.monotonic() + RANK_SECONDS
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.2)
            codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
        files = [Path(folder) / f"{rank}.json" for rank in range(int(ranks))]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if any(code != 0 for code in codes):
        begun = [one.get("begun", "to join") for one in found]
        found[0]["error"] = f"ranks ended with {codes} (None: not at all) when they had begun"
        found[0]["error"] += f" {begun}"
        found[0]["log"] = [f"{key}: {value}" for key, value in found[0].items()]
    return found[0]


def all_reduce_rank(address: str, rank: str, ranks: str, folder: str) -> None:
    import torch
    from fused_all_reduce import measured as measured_norms

    from pipeinfer.collectives import join_group

    result: dict[str, Any] = {"ranks": int(ranks)}

    def save(**more: Any) -> None:
        """Whole or not at all: this process may be killed at any time."""
        result.update(more)
        path = Path(folder) / f"{rank}.json"
        path.with_suffix(".new").write_text(json.dumps(result))
        path.with_suffix(".new").replace(path)

    collectives = join_group(address, int(rank), int(ranks), DEVICE, 60)
    if DEVICE == "cuda":
        save(begun="the custom kernels' proof")
        save(
            custom=collectives.enable_custom_all_reduce(torch.bfloat16, HIDDEN),
            fused=collectives.fusion is not None,
        )
        result["us"] = {}
        for rows in ROWS:
            save(begun=f"all-reduces of {rows} rows")
            result["us"][rows] = measured(collectives, rows)
        measured_norms(collectives, HIDDEN, save, graph_us)
    else:
        total = collectives.all_reduce(torch.full((4,), 1.0 + int(rank)))
        save(sum=total.tolist())
    collectives.close()


def measured(collectives: Any, rows: int) -> dict[str, Any]:
    """Of a message of `rows` rows of bfloat16: microseconds, and trouble if there is any."""
    import torch
    import torch.distributed as dist

    from pipeinfer.collectives import MAX_MESSAGE_BYTES

    torch.manual_seed(collectives.rank)
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    expected = x.float()
    dist.all_reduce(expected)

    def library(y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y)
        return y

    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nccl": library}
    custom = collectives.custom
    if custom is not None and x.nbytes <= MAX_MESSAGE_BYTES:
        ways["one-shot"] = lambda y: custom.all_reduce(y, "one-shot")
        ways["two-shot"] = lambda y: custom.all_reduce(y, "two-shot")
        if x.nbytes % (16 * collectives.size):
            del ways["two-shot"]
    found: dict[str, Any] = {}
    for name, way in ways.items():
        total = way(x.clone())
        error = float((total.float() - expected).abs().max() / expected.abs().max())
        same = collectives.all_gather_stacked(total.view(torch.int16).to(torch.int64).sum().view(1))
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


def tokens(ranks: str, what: str) -> dict[str, Any]:
    """Ids of small random checkpoints and of the demo model, by model; compared later.
    `what`: those with a mixture of experts, or the others.

    Of one rank also "gaps", by model: see `gaps`.
    """
    from checkpoints import CheckpointCache
    from pipeinfer.demo import demo_path

    found: dict[str, Any] = {}
    alone = int(ranks) == 1
    with tempfile.TemporaryDirectory() as folder:
        cache = CheckpointCache(Path(folder))
        architecture = "Qwen3ForCausalLM" if what == "dense" else "Qwen3MoeForCausalLM"
        model = small(cache, architecture)
        runs: list[tuple[str, Path, int, dict[str, Any]]] = [(architecture, model, 1024, {})]
        if what == "dense":
            plain = {"dtype": "float32", "attention": "torch"}
            runs.append(("demo, float32", demo_path(), 250, plain))
        elif not alone:
            runs.append((f"{architecture} moe-ep", model, 1024, {"enable_expert_parallel": True}))
        for name, model, ids, settings in runs:
            found[name], found[f"{name}, sampled"] = generated(
                str(model), int(ranks), ids, **settings
            )
            if alone:
                found.setdefault("gaps", {})[name] = gaps(model, asked(ids), found[name])
    return found


def small(cache: Any, architecture: str) -> Path:
    import torch

    sizes = SMALL | (SMALL_MOE if "Moe" in architecture else {})
    if DEVICE == "cpu":
        sizes = SMALL_MOE if "Moe" in architecture else {}
    return cache(architecture, dtype=torch.bfloat16, **sizes)


def asked(ids: int) -> list[list[int]]:
    """Prompts of ids below `ids`."""
    source = random.Random(3)
    return [[source.randrange(min(ids, 250)) for _ in range(source.randint(3, 200))]
            for _ in range(16)]  # fmt: skip


def gaps(model: Path, prompts: list[list[int]], given: list[list[int]]) -> list[list[list[float]]]:
    """For each prompt and each id given: [how far it is above the best other, that other's id].

    By the logits of all that comes before it, from plain attention in float32 on the CPU, as a part
    of their range. What is near zero, or below, is a near tie.
    """
    import torch

    from dense_attention import dense_causal
    from pipeinfer.checkpoint.config import read_config
    from pipeinfer.models.loading import build_model, load_weights

    reference, found = build_model(read_config(model)), []
    load_weights(reference, model)
    attend = dense_causal(reference.attention_shapes())
    for prompt, ids in zip(prompts, given, strict=True):
        known = torch.tensor(prompt + ids[:-1])
        with torch.inference_mode():
            hidden = reference(known, torch.arange(len(known)), attend)
            logits = reference.logits(hidden[len(prompt) - 1 :])
        chosen = torch.tensor(ids)[:, None]
        value = logits.gather(1, chosen)[:, 0]
        spread = logits.amax(1) - logits.amin(1)
        best, other = logits.scatter(1, chosen, -torch.inf).max(1)
        above = ((value - best) / spread).tolist()
        found.append([[round(a, 5), o] for a, o in zip(above, other.tolist(), strict=True)])
    return found


def forms(ranks: str) -> dict[str, Any]:
    """Ids of the demo model where three of four requests have a form, one of them a costly one, so
    that rank 0 hands its masks over late; every form is checked.

    The greedy ids, and those by temperature, of one rank and of several are the same.
    """
    import re

    from pipeinfer import LLM, SamplingParams
    from pipeinfer.demo import demo_path
    from pipeinfer.params import StructuredOutputs

    names = range(40)
    costly = "start: r+\nr: " + " | ".join(f"t{n}" for n in names) + "\n"
    costly += "\n".join(f"t{n}: /[a-z]{{1,{n + 1}}}/ t{n * 7 % 40}?" for n in names)
    specs = (
        (StructuredOutputs(regex="[a-f]{3,30}-[0-9]{2,9}"), "[a-f]{3,30}-[0-9]{2,9}"),
        (StructuredOutputs(choice=("apples", "apricots", "pears")), "apples|apricots|pears"),
        (StructuredOutputs(grammar=costly), "[a-z]+"),
        (None, "(?s:.*)"),
    )
    prompts = ["Once upon a time " + "there was " * n for n in range(24)]
    found: dict[str, Any] = {}
    with LLM(
        str(demo_path()), device=DEVICE, tp=int(ranks), kv_pages=2000, max_running=16,
        dtype="float32", attention="torch",
    ) as llm:  # fmt: skip
        for name, temperature in (("greedy", 0.0), ("sampled", 1.5)):
            params = [
                SamplingParams(
                    temperature=temperature, seed=n, max_tokens=48,
                    structured_outputs=specs[n % 4][0], ignore_eos=n % 4 == 3,
                )
                for n in range(len(prompts))
            ]  # fmt: skip
            answers = llm.generate(prompts, params, use_tqdm=False)
            found[name] = [list(answer.outputs[0].token_ids) for answer in answers]
            for n, answer in enumerate(answers):
                output = answer.outputs[0]
                if output.finish_reason == "stop":
                    assert re.fullmatch(specs[n % 4][1], output.text), (n, output.text)
            found[f"{name}, reasons"] = [answer.outputs[0].finish_reason for answer in answers]
    return found


def generated(model: str, ranks: int, ids: int, **settings: Any) -> list[list[list[int]]]:
    """For each prompt the greedy ids, and those by temperature, every second one with top-p."""
    from pipeinfer import LLM, SamplingParams

    prompts = asked(ids)
    knobs: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
    random_ones = [
        SamplingParams(temperature=0.8, top_p=1 - 0.1 * (n % 2), seed=n, **knobs)
        for n in range(len(prompts))
    ]
    usual: dict[str, Any] = {"device": DEVICE, "tp": ranks, "kv_pages": 2000, "max_running": 16}
    with LLM(model, **(usual | settings)) as llm:
        return [
            [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False)]
            for params in (SamplingParams(temperature=0, **knobs), random_ones)
        ]


# -------------------------------------------------------------------------------------- throughput


def offline(shape: str, tp: str, dp: str, all_reduce: str) -> dict[str, Any]:
    """The usual 256 requests, twice as many for two groups, and the time between tokens alone."""
    from bench import batch, shapes, workload
    from bench.workload import Work
    from pipeinfer import LLM
    from pipeinfer.bench.dataset import TokenRange

    spans = (
        (TokenRange(100, 1024), TokenRange(100, 1024))
        if DEVICE == "cuda"
        else (TokenRange(8, 16), TokenRange(4, 8))
    )
    groups, requests = int(dp), 256 if DEVICE == "cuda" else 16
    parts = [workload.uniform(requests, *spans, 500, seed) for seed in range(groups)]
    work = Work(
        [prompt for part in parts for prompt in part.prompts],
        [count for part in parts for count in part.outputs],
    )
    warm = workload.uniform(64, TokenRange(16, 64), TokenRange(4, 8), 500, -1)
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_folder(Path(folder), TINY if shape == "tiny" else shapes.shape(shape))
        began = time.perf_counter()
        with LLM(
            folder, device=DEVICE, tp=int(tp), dp=groups, load_format="dummy", cache="naive",
            max_model_len=4096 if DEVICE == "cuda" else 512, all_reduce=all_reduce,
            memory_fraction=0.85, routing="least-loaded",
        ) as llm:  # fmt: skip
            loaded = time.perf_counter() - began
            batch.measure(llm, warm, 0.6)
            before = llm.stats()
            run = batch.measure(llm, work, 0.6)
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


def loss(what: str) -> dict[str, Any]:
    """See tensor_parallel_loss.py."""
    import tensor_parallel_loss

    return tensor_parallel_loss.loss(what, DEVICE)


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "ar": all_reduce,
    "tokens": tokens,
    "forms": forms,
    "offline": offline,
    "loss": loss,
}
