"""What the benchmarks compute from lengths and times, without running any server."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

import pytest

from bench import TOOL, compare, floor, online, shapes, storm, workload
from harness.command_line import write_report
from pipeinfer.bench.client import GoodputTarget, RequestTiming, benchmark_metrics
from pipeinfer.bench.dataset import TokenRange

H200 = floor.Machine(flops=790e12, bandwidth=4.3e12)


def published() -> workload.Work:
    return workload.uniform(256, TokenRange(100, 1024), TokenRange(100, 1024), 10_000, 0)


def test_default_work_is_the_published_benchmark_draw_by_draw():
    work = published()
    assert (work.prompt_tokens, work.output_tokens) == (142_827, 133_966)
    source = random.Random(0)
    first = [source.randint(0, 10_000) for _ in range(source.randint(100, 1024))]
    assert work.prompts[0] == first


@pytest.mark.parametrize(("shape", "seconds"), [("qwen3-0.6b", 3.75), ("qwen3-14b", 16.84)])
def test_floor_of_the_published_benchmark_is_the_published_floor(tmp_path, shape, seconds):
    folder = shapes.write_folder(tmp_path, shapes.shape(shape))
    size = floor.model_size(folder, "bfloat16")
    assert floor.floor_seconds(published(), size, H200, 256) == pytest.approx(seconds, abs=0.006)


def test_the_floor_of_fp8_has_half_the_bytes_and_half_the_time_of_products(tmp_path):
    folder = shapes.write_folder(tmp_path, shapes.shape("qwen3-14b"))
    plain, size = (floor.model_size(folder, "bfloat16", how) for how in ("auto", "fp8"))
    head = shapes.shape("qwen3-14b")["vocab_size"] * 5120
    norms = plain.parameters - head - size.narrow
    assert size.parameters == plain.parameters and 0 < norms < 1e6, "head and norms are plain"
    assert size.dense_bytes == pytest.approx(plain.dense_bytes - size.narrow, rel=1e-3)
    seconds = floor.floor_seconds(published(), size, H200, 256)
    assert 133_966 / seconds == pytest.approx(12_109, rel=1e-3)
    narrow = floor.model_size(folder, "bfloat16", "fp8", "fp8_e4m3")
    assert 2 * narrow.kv_bytes == size.kv_bytes


def test_the_floor_counts_the_experts_that_are_read(tmp_path):
    folder = shapes.write_folder(tmp_path, shapes.shape("qwen3-30b-a3b"))
    size = floor.model_size(folder, "bfloat16")
    assert size.parameters == pytest.approx(3.04e9, rel=0.01), "3 billion a token"
    assert size.dense_bytes + size.expert_bytes == pytest.approx(60.4e9, rel=0.01)
    assert size.bytes_read(1) == pytest.approx(2 * size.parameters)
    assert size.bytes_read(256) == pytest.approx(size.dense_bytes + size.expert_bytes, rel=1e-6)
    dense = floor.ModelSize(size.parameters, int(2 * size.parameters), size.kv_bytes)
    work = published()
    assert floor.floor_seconds(work, size, H200, 256) > 2 * floor.floor_seconds(
        work, dense, H200, 256
    )


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, 4),
    ],
)
def test_the_floor_counts_weights_as_they_are_stored(tmp_path, how, bits):
    shape = shapes.shape("qwen3-14b")
    plain = floor.model_size(shapes.write_folder(tmp_path / "plain", shape), "bfloat16")
    stored = shapes.write_folder(tmp_path / "stored", shape | {"quantization_config": how})
    size = floor.model_size(stored, "bfloat16")
    assert size.parameters == plain.parameters
    head = 2 * shape["vocab_size"] * shape["hidden_size"]
    layers = (plain.dense_bytes - head) * bits / 16
    assert layers < size.dense_bytes - head < 1.05 * layers


def test_a_request_takes_the_place_of_one_that_ends():
    assert floor.batch_sizes([3, 1, 2], max_running=3) == [3, 2, 1]
    assert floor.batch_sizes([3, 1, 2], max_running=2) == [2, 2, 2]
    assert floor.batch_sizes([2, 2, 2], max_running=1) == [1] * 6
    outputs = [random.Random(1).randint(1, 40) for _ in range(50)]
    sizes = floor.batch_sizes(outputs, max_running=7)
    assert sum(sizes) == sum(outputs) and max(sizes) <= 7


def test_lateness_counts_against_the_server():
    late = RequestTiming(due=10.0, chunk_times=[10.5, 10.6, 10.9], output_tokens=3)
    assert late.ttft == pytest.approx(0.5)
    assert late.e2e == pytest.approx(0.9)
    assert late.tpot == pytest.approx(0.2)
    broken = RequestTiming(due=10.0, chunk_times=[10.1], output_tokens=1, error="gone")
    slow = RequestTiming(due=9.0, chunk_times=[11.0], output_tokens=1)
    result = benchmark_metrics([late, broken, slow], GoodputTarget(ttft=0.6, tpot=0.25))
    assert (result["requests"], result["failed"]) == (3, 1)
    assert result["good_share"] == pytest.approx(1 / 3)
    assert result["tokens_per_s"] == pytest.approx(4 / 2.0)
    assert result["ttft_ms"]["p50"] == pytest.approx(1250.0)
    assert result["itl_ms"]["p50"] == pytest.approx(200.0)


def test_the_work_of_online_follows_a_trace_or_a_rate(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 104.0, "input_length": 2, "output_length": 6, "other": 1},
        {"timestamp": 100.0, "input_length": 7, "output_length": 5},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n\n")

    def planned(*words, rate=None):
        parser = argparse.ArgumentParser()
        online.add_arguments(parser)
        drawn, load = online.plan(parser.parse_args(words), rate)
        requests = [drawn.sample(index) for index, _ in load.arrivals]
        assert all(0 <= token <= 9 for request in requests for token in request.prompt_ids)
        lengths = [(len(request.prompt_ids), request.output_len) for request in requests]
        return [at for _, at in load.arrivals], lengths, requests

    of_trace = planned("--trace", str(trace), "--speed", "2", "--highest-id", "9")
    assert of_trace[:2] == ([0.0, 2.0], [(7, 5), (2, 6)])
    words = ("--requests", "300", "--prompt-tokens", "3:5", "--highest-id", "9")
    times, lengths, requests = planned(*words, rate=8.0)
    assert times[-1] == pytest.approx(300 / 8.0, rel=0.2)
    assert {prompt for prompt, _ in lengths} == {3, 4, 5}
    doubled = planned(*words, rate=16.0)
    assert [2 * at for at in doubled[0]] == pytest.approx(times)
    assert doubled[2] != requests, "another rate has other prompts: none is in a cache"


def test_compare_shows_every_number_that_both_files_have(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    write_report(
        before,
        "bench",
        ["offline"],
        {"tokens_per_s": 50.0, "ttft_ms": {"p50": 4.0}, "old": 1},
        TOOL.schema,
    )
    write_report(
        after,
        "bench",
        ["offline"],
        {"tokens_per_s": 75.0, "ttft_ms": {"p50": 2.0}, "new": 1},
        TOOL.schema,
    )
    assert TOOL.main(["compare", str(before), str(after)]) == 0
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert shown["tokens_per_s"] == ["50", "75", "1.500"]
    assert shown["ttft_ms.p50"] == ["4", "2", "0.500"]
    assert shown["new"] == ["-", "1"] and shown["old"] == ["1", "-"]


def test_numbers_are_found_in_nested_results():
    metrics = {"a": 1, "b": {"c": [2.5, {"d": 3}]}, "text": "x", "flag": True}
    assert dict(compare.numbers(metrics)) == {"a": 1.0, "b.c.0": 2.5, "b.c.1.d": 3.0}


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "no-such.json", "no-such.json"],
        ["offline", "--config", "no-such-shape"],
        ["online", "--url", "http://localhost:1", "--threads", "1"],
        ["startup", "--no-such-flag"],
        ["offline", "--prompt-tokens", "9:3"],
        ["online", "--rates", "0"],
        ["storm", "--policy", "mixed"],
    ],
)
def test_wrong_usage_ends_with_code_2(arguments, capsys):
    try:
        code = TOOL.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert "error" in capsys.readouterr().err


def test_made_up_tokenizer_has_every_id_and_its_own_text_for_each():
    tokenizer = shapes.make_tokenizer(1_000)
    texts = [tokenizer.decode([i]) for i in range(256, 1_000)]
    assert tokenizer.get_vocab_size() == 1_000
    assert len(set(texts)) == len(texts) and all(texts)


def test_shape_may_come_from_a_file(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"vocab_size": 7}))
    assert shapes.shape(str(file)) == {"vocab_size": 7}


def test_a_gap_belongs_to_every_time_that_it_reaches_into_and_may_be_open():
    stream = storm.Stream([1.0, 2.0, 5.0, 5.5])
    assert stream.gaps(1.2, 1.8) == [1.0]
    assert stream.gaps(3.0, 5.2) == [3.0, 0.5]
    assert stream.gaps(5.2, 9.0) == [0.5, 3.5]  # it still waits
    stream.ended = True
    assert stream.gaps(5.2, 9.0) == [0.5]
    assert stream.gaps(0.0, 1.0) == []


def test_a_storm_is_compared_with_the_same_tokens_undisturbed():
    """One stream: 10 ms a token, 60 in the storm; another needs 20 for the same."""
    steps = [0.01] * 100 + [0.06] * 50
    pieces = list(itertools.accumulate(steps, initial=0.0))
    others = list(itertools.accumulate([0.01] * 100 + [0.02] * 50, initial=0.0))
    end = 1.0 + 50 * 0.06
    found = storm.Measured(
        [storm.Stream(pieces, ended=True)], storm=(1.0, end), firsts=[0.5, 1.0],
        others=[storm.Stream(others, ended=True)], same=(1.0, 2.0),
    ).metrics()  # fmt: skip
    assert found["ratio"] == pytest.approx(3)
    assert found["storm_itl_ms"]["longest"] == pytest.approx(60)
