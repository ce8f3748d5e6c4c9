"""The all-reduce that also adds the residual and norms, on GPUs: is it right, and how fast?

Part of the `ar` job of tensor_parallel.py; every rank calls the same functions in the same order.
Knows collectives with a fusion, no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)
CALLS, REPLAYS = 16, 100
EPS = 1e-6
TOLERANCE = 0.03  # of the largest value; one row of another call is wrong by as much as it itself


def measured(
    collectives: Any, hidden: int, save: Callable[..., None], graph_us: Callable[[Any, Any], float]
) -> None:
    """By rows: microseconds of sum and norm inside CUDA graphs, and what was wrong.

    `save(begun=...)` hears what is begun, `save(norm_us=...)` what is known so far.
    """
    if collectives.fusion is None:
        return
    found: dict[str, Any] = {}
    for rows in ROWS:
        line = found[str(rows)] = {}
        for shots in (1, 2):
            begin(collectives, save, f"check of {rows} rows in {shots} shots")
            wrong = Check(collectives, rows, hidden, shots).run()
            if wrong:
                line[f"fused-{shots} wrong"] = wrong
            save(norm_us=found)
        for name, way in ways(collectives, rows, hidden).items():
            begin(collectives, save, f"times of {name}, {rows} rows")
            line[name] = round(graph_us(way, empty(rows, hidden)), 2)
            save(norm_us=found)
    begin(collectives, save, "nothing more")


def begin(collectives: Any, save: Callable[..., None], what: str) -> None:
    """Ranks are together before it is said: if one hangs, it is in what was said last."""
    import torch

    torch.cuda.synchronize()
    collectives.all_reduce_min(0)
    save(begun=what)
    print(f"rank {collectives.rank} begins: {what}", flush=True)


def empty(*shape: int) -> Any:
    import torch

    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")


def ways(collectives: Any, rows: int, hidden: int) -> dict[str, Callable[[Any], Any]]:
    """What a row-parallel product is followed by, in the ways there are."""
    import torch
    import torch.distributed as dist

    from pipeinfer.layers.elementwise import fused_ops

    device = torch.device("cuda", torch.cuda.current_device())
    fused = fused_ops(device, torch.bfloat16)
    assert fused is not None
    add = fused.norm.add_norm
    residual, weight = torch.zeros_like(empty(rows, hidden)), torch.ones_like(empty(hidden))

    def library(y: Any) -> Any:
        dist.all_reduce(y)
        return add(y, residual, weight, EPS)

    def both(y: Any) -> Any:
        return add(collectives.all_reduce(y), residual, weight, EPS)

    def one_kernel(_: Any, shots: int) -> Any:
        buffer = collectives.fusion.buffer(rows, hidden)
        return collectives.fusion.add_norm(buffer, residual, weight, EPS, shots)

    return {
        "nccl+norm": library,
        "auto+norm": both,
        "fused-1": partial(one_kernel, shots=1),
        "fused-2": partial(one_kernel, shots=2),
    }


class Check:
    """Replays of a graph of several calls whose numbers differ from call to call and replay to
    replay, with ranks that dawdle at different calls.
    """

    def __init__(self, collectives: Any, rows: int, hidden: int, shots: int) -> None:
        import torch

        from pipeinfer.kernels.elementwise import all_reduce_norm_reference

        self.collectives, self.shots = collectives, shots
        make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        torch.manual_seed(rows)
        self.residual, self.weight = make(rows, hidden), make(hidden)
        torch.manual_seed(100 + collectives.rank)
        self.parts = make(CALLS, rows, hidden)
        pairs = [
            all_reduce_norm_reference(
                collectives.all_gather_stacked(part), self.residual, self.weight, EPS
            )
            for part in self.parts
        ]
        self.norms, self.sums = (torch.stack(one) for one in zip(*pairs, strict=True))
        self.own = slice(collectives.rank, None, collectives.size) if shots == 2 else slice(None)
        self.replay = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.calls = torch.arange(CALLS, device="cuda") * 5
        self.bad = torch.zeros(CALLS, dtype=torch.int64, device="cuda")  # replays, by call
        self.digest = torch.zeros(1, dtype=torch.int64, device="cuda")

    def body(self) -> None:
        import torch

        fusion = self.collectives.fusion
        self.replay.add_(1)
        order = (self.calls + self.replay) % CALLS
        outs, sums = [], []
        for call in range(CALLS):
            if (3 * call + self.collectives.rank) % 4 == 0:
                torch.cuda._sleep(20_000)
            residual = self.residual.clone()
            buffer = fusion.buffer(*residual.shape)
            torch.index_select(self.parts, 0, order[call : call + 1], out=buffer.unsqueeze(0))
            out, total = fusion.add_norm(buffer, residual, self.weight, EPS, self.shots)
            outs.append(out.clone())
            sums.append(total)
        got = torch.stack(outs)
        self.count(got, self.norms[order])
        self.count(torch.stack(sums)[:, self.own], self.sums[order][:, self.own])
        self.digest.add_(got.view(torch.int16).to(torch.int64).sum())

    def count(self, got: Any, expected: Any) -> None:
        if not got.numel():
            return  # fewer rows than ranks: this one has none
        error = (got.float() - expected.float()).abs().flatten(1).amax(1)
        self.bad += ~(error <= TOLERANCE * expected.float().abs().max())  # NaN is wrong too

    def run(self) -> dict[str, Any]:
        """What was wrong; empty if nothing was."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.body()
            self.body()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.body()
            for _ in range(REPLAYS):
                graph.replay()
            stream.synchronize()
        wrong: dict[str, Any] = {}
        every = self.collectives.all_gather_stacked(self.bad)
        if every.any():
            wrong["replays with wrong values, by rank and call"] = every.tolist()
        digests = self.collectives.all_gather_stacked(self.digest).flatten().tolist()
        if len(set(digests)) > 1:
            wrong["ranks differ"] = digests
        return wrong
