"""The runner of GPUs on the host's device: its own steps, packing and kernels.

A program, because Triton's interpreter is chosen when triton is imported. A graph runs its body
again there, and attention is plain torch over the index arrays.
`TRITON_INTERPRET=1 python tests/engine/interpreted_runner.py FOLDER` prints tokens by way of
running and more, with the word tokens behind it those with graphs and without alone; with ADDRESS
RANK SIZE behind it, it is one of several ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("", "gpu", "parity"))]

import msgspec  # noqa: E402
import torch  # noqa: E402
from overlapped import GpuCores  # noqa: E402
from runner_requests import good_ones, logprobs_of, masks_for, run_alike, submit_all  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from pipeinfer.attention import triton_backend  # noqa: E402
from pipeinfer.attention.interface import BackendCapabilities, PagedKind, qo_indptr_of  # noqa: E402
from pipeinfer.attention.torch_backend import TorchBackend  # noqa: E402
from pipeinfer.collectives import join_group  # noqa: E402
from pipeinfer.engine import calibrate, graphs, loading  # noqa: E402
from pipeinfer.engine.calibrate import alike_decodes  # noqa: E402
from pipeinfer.engine.device import HostDevice, Replay  # noqa: E402
from pipeinfer.engine.machine import HostMachine  # noqa: E402
from pipeinfer.engine.runner import Runner  # noqa: E402
from pipeinfer.kernels import by_triton  # noqa: E402
from pipeinfer.kernels.interface import StepShape  # noqa: E402
from pipeinfer.kernels.tile_configs import DecodeConfig, LoadConfig  # noqa: E402
from pipeinfer.memory import pages as kv_pages  # noqa: E402
from pipeinfer.settings import Settings  # noqa: E402
from quick_interpreter import hurry  # noqa: E402

MIXED = (0, 1), (2, 2)  # decodes and prompts that a graph has room for, of so many tokens
SIZES = (4, 24)
GRAPHS: dict[str, list[int]] = {}  # of the latest engine that reads so: how many, and to come


class TorchPart:
    """Reads what a device kernel would read: the arrays on the device's side, nothing else."""

    by_table = False  # where pages stand: in rows that were gathered, or behind where they begin

    def __init__(self, shapes, device) -> None:
        self._shapes = shapes

    def bind(self, pool, max_rows) -> None:
        self._pool = pool

    def build_metadata(self, inputs, begin, end):
        return inputs.step, begin, end, qo_indptr_of(inputs.step, begin, end)

    def run(self, layer, q, out, metadata) -> None:
        arrays, begin, end, queries = metadata
        firsts, size = queries.tolist(), self._pool.page_size
        lengths = arrays.seq_lens[begin:end].tolist()
        for row, (length, pages) in enumerate(
            zip(lengths, self._pages(*metadata[:3]), strict=True)
        ):
            mine = slice(firsts[row], firsts[row + 1])
            if mine.start < mine.stop and length:
                out[mine] = self._attend(layer, q[mine], pages[: -(-length // size)], length)

    def _pages(self, arrays, begin, end):
        if self.by_table:
            yield from arrays.page_table_of(begin, end).long()
            return
        for row in range(begin, end):
            first, length = int(arrays.kv_indptr[row]), int(arrays.seq_lens[row])
            held, last = -(-length // self._pool.page_size), int(arrays.last_page_len[row])
            assert length in (0, (held - 1) * self._pool.page_size + last)  # 0: a row left over
            yield arrays.kv_indices[first : first + held].long()

    def _attend(self, layer, q, pages, length):
        kv = self._pool.k[layer][pages], self._pool.v[layer][pages]
        wide = q.shape[1] // kv[0].shape[2]
        k, v = (part.flatten(0, 1)[:length].repeat_interleave(wide, 1) for part in kv)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self._shapes[layer].scale
        back = torch.arange(length - len(q), length)[:, None] - torch.arange(length)[None]
        seen = (back >= 0) & (back < (self._shapes[layer].sliding_window or length))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


class TablePart(TorchPart):
    by_table = True


def kind(prefill, decode=TorchPart, **traits):
    graphs = {"captures_decode": True, "captures_prefill": True}
    return PagedKind(decode, prefill, BackendCapabilities(None, 16, **graphs, **traits))


# What a GPU's backends read, and that of any device.
READS = "hybrid"
KINDS = {
    "hybrid": kind(TablePart, page_table="prefills"),
    "flashinfer": kind(TorchPart, host_lengths=True, lists_pages=True),
    "fa3": PagedKind(
        TablePart, TablePart, BackendCapabilities(None, 16, captures_decode=True, page_table="all")
    ),
    "torch": TorchBackend,
    "own decodes": kind(
        TablePart, triton_backend.TritonDecodeKernel, page_table="prefills", shares=True
    ),
}


class LendingDevice(HostDevice):
    """As a GPU, where graphs leave their results in the same memory: what one has left is gone when
    another one runs, or is captured. Its time is that of the operations of all products, so that a
    busy host does not make one step look faster than another."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[torch.Tensor] = []

    def capture(self, body, first_run=True):
        made = super().capture(body, first_run)

        def again() -> None:
            self._forget()
            made.run()

        self._forget()
        self._left += made.tensors
        return Replay(again, made.tensors)

    def seconds(self, work, times):
        with FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops() * 1e-9

    def _forget(self) -> None:
        for tensor in self._left:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class InterpretedMachine(HostMachine):
    """The host with a GPU's kernels, and what graphs leave as there."""

    def __init__(self) -> None:
        super().__init__(threads=1, ranks=1)
        self.device = LendingDevice()
        self.kernels = by_triton


def ladder(tokens, rows, decodes, mixed) -> tuple[StepShape, ...]:
    usual = [StepShape(tokens, *kind) for tokens in SIZES for kind in MIXED]
    # Room for fewer decodes than any other has: all numbers of tokens are measured yet.
    return tuple(sorted([*usual, StepShape(SIZES[0], 1, 2)])) if decodes else ()


def checked(work):
    """Like it, but looks at the pool afterwards."""

    def check(runner, *arguments, **named) -> None:
        work(runner, *arguments, **named)
        for part in (*runner.pool.k, *runner.pool.v):
            assert not part[1:].any(), "what was measured or captured is the dummy page's alone"

    return check


def where_it_is_looked_at(work):
    """Like it, for the engines whose measurements tests look at; nothing for the others."""
    return lambda *arguments, **named: work(*arguments, **named) if READS == "hybrid" else None


hurry()
kv_pages.MIN_SHARED_TOKENS = 16  # tokens: prompts here are short
graphs.MIN_SHARED_DECODES = 2
READ = LoadConfig(block_n=16, num_warps=4, num_stages=2)
FEW = DecodeConfig(8, 4, 64, READ, prefix_queries=16, min_prefix_tokens=16, prefix_load=READ)
triton_backend.tile_config = lambda *_: FEW
calibrate.REPLAYS = 1
loading.machine = lambda device, settings, ordinal: InterpretedMachine()
loading.mixed_ladder = ladder
loading.registry.create = lambda name, shapes, device: KINDS[READS](shapes, device)
Runner.capture, Runner.measure = map(checked, (Runner.capture, Runner.measure))
Runner.measure = where_it_is_looked_at(Runner.measure)
Graphs = graphs.Graphs
Graphs.drop_slower_small_ones = where_it_is_looked_at(Graphs.drop_slower_small_ones)


def served(folder: str, collectives=None, reads="hybrid", late=False, **changes) -> GpuCores:
    """All requests, to their ends. late: all but the first graphs are captured between steps."""
    global READS, SIZES
    READS = reads
    SIZES = (4, 24) if collectives is None else (4,)  # ranks that measured otherwise would hang
    settings = Settings(
        model=folder, device="cpu", kv_pages=40, page_size=16, max_running=3, max_step_tokens=24,
        cuda_graph_max_batch=2, **changes,
    )  # fmt: skip
    masks = masks_for(Path(folder))
    cores = GpuCores(
        Path(folder), settings, budget=24, collectives=collectives, masks=masks, late=late
    )
    GRAPHS[reads] = [cores.loaded.runner.graphs, cores.loaded.runner.graphs_deferred]
    submit_all(cores, bad=True)
    cores.run()
    GRAPHS[reads] += [cores.loaded.runner.graphs, cores.loaded.runner.graphs_deferred]
    cores.loaded.runner.device.close()  # a thread that is amid something would not outlive us well
    return cores


def alike(folder: str, **changes) -> tuple[dict[str, list[int]], int, int]:
    """What requests give that begin alike, by our own decode attention; the number of steps in
    which their beginning is read once, and of those that took a graph which does so."""
    global READS
    READS = "own decodes"
    settings = Settings(
        model=folder, device="cpu", kv_pages=40, page_size=16, max_running=3, max_step_tokens=24,
        cuda_graph_max_batch=3, **changes,
    )  # fmt: skip
    cores = GpuCores(Path(folder), settings, budget=24, keep=False)
    captured = cores.loaded.runner._graphs
    fitting, taken = captured.fitting, []
    captured.fitting = lambda step: taken.append(fitting(step)) or taken[-1]
    for prompts in range(2):  # as a GPU is warmed up
        drawn = cores.loaded.runner.run(alike_decodes(2, prompts, 16))
        assert len(drawn.ids) == 2 + prompts
    taken.clear()
    found = run_alike(cores)
    cores.loaded.runner.device.close()
    sharing = [one for one in taken if one is not None and one.views.shape.shared_prefix]
    return found, cores.sharing, len(sharing)


def rank(folder: str, address: str, rank: str, size: str) -> dict[str, Any]:
    collectives = join_group(address, int(rank), int(size), "cpu", 300)
    done = served(folder, collectives, tp=int(size))
    collectives.close()
    cost = msgspec.to_builtins(done.loaded.step_cost)
    return {"graphs": good_ones(done), "logprobs": {"graphs": logprobs_of(done)}, "step cost": cost}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 3:
        print(json.dumps(rank(*sys.argv[1:])))
        sys.exit()
    folder = sys.argv[1]
    replayed = served(folder)
    eager = served(folder, no_cuda_graph=True)
    found: dict[str, Any] = {"graphs": good_ones(replayed), "no graphs": good_ones(eager)}
    if sys.argv[2:] != ["tokens"]:
        found |= {
            "pages listed, lengths on the host": good_ones(
                served(folder, reads="flashinfer", late=True)
            ),
            "all pages gathered": good_ones(served(folder, reads="fa3")),
            "torch backend": good_ones(served(folder, reads="torch")),
            "logprobs": {"graphs": logprobs_of(replayed), "no graphs": logprobs_of(eager)},
            "late graphs": GRAPHS["flashinfer"],
            "alike": alike(folder),
            "alike, no graphs": alike(folder, no_cuda_graph=True),
            "step cost": msgspec.to_builtins(replayed.loaded.step_cost),
            "step cost without graphs": msgspec.to_builtins(eager.loaded.step_cost),
        }
    print(json.dumps(found))
