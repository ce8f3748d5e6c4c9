"""How long kernels take in a CUDA graph: what the tools that time them share."""

from __future__ import annotations

import torch


def each_us(call, operands, times):
    """Microseconds of one call(operand): the median of seven replays, each of `times` rounds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for operand in operands[:2]:
            call(operand)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(times):
                for operand in operands:
                    call(operand)
        found = []
        for _ in range(7):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(stream)
            graph.replay()
            ended.record(stream)
            ended.synchronize()
            found.append(began.elapsed_time(ended))
    return sorted(found)[3] * 1e3 / (times * len(operands))
