"""`pipeinfer bench` against a real server, and against servers that fail as servers do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from aiohttp import web

import servers
from pipeinfer.bench.client import Endpoint
from pipeinfer.bench.dataset import RandomDataset, TokenRange
from pipeinfer.bench.runner import ClosedLoop, run_load
from pipeinfer.cli.main import main

NEVER_CLOSED = {"meta", "br", "rect", "line", "circle", "polyline"}
EVENT_STREAM = {"content-type": "text/event-stream"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with servers.Server("--threads", "1") as server:
        yield server.url


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command; gives its points, its page and what it printed."""

    def run(*words: str, code: int = 0) -> tuple[list[dict], str, str]:
        out, page = tmp_path / "out.json", tmp_path / "out.html"
        assert main(["bench", *words, "--json", str(out), "--html", str(page)]) == code
        result = json.loads(out.read_text())
        assert set(result) == {"schema", "command", "commit", "hardware", "date", "metrics"}
        assert result["command"].startswith("pipeinfer bench ")
        last = result["metrics"]["points"][-1]
        assert result["metrics"]["ttft_ms"] == last["ttft_ms"]
        return result["metrics"]["points"], page.read_text(), capsys.readouterr().out

    return run


class Tags(HTMLParser):
    """Whether each tag is closed in its turn, and what addresses and scripts there are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen[tag] += 1
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag not in NEVER_CLOSED:
            assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == [] and tags.seen["html"] == tags.seen["body"] == 1
    assert tags.addresses == [] and not tags.seen.keys() & {"script", "link", "img", "iframe"}
    assert not re.search(r"url\(|@import", page)
    return tags


def test_a_closed_loop_of_two_processes_sends_each_request_once(url: str) -> None:
    """Three at a time; fewer, where one of the processes has no time for its own."""
    most = [most_of_a_closed_loop(url)]
    while max(most) < 3 and len(most) < 8:
        most.append(most_of_a_closed_loop(url))
    assert max(most) == 3


def most_of_a_closed_loop(url: str) -> int:
    """How many of its requests ran at the same time."""
    drawn = RandomDataset(TokenRange(4, 40), TokenRange(3, 9), 0, highest_id=255)
    reports = []
    found = run_load(Endpoint(url), drawn, ClosedLoop(3, requests=10), 2, reports.append)
    requests = [drawn.sample(index) for index in range(10)]
    assert [line.error for line in found.timings] == [""] * 10
    assert sorted((line.prompt_tokens, line.output_tokens) for line in found.timings) == sorted(
        (len(request.prompt_ids), request.output_len) for request in requests
    )
    begun = [(line.sent, 1) for line in found.timings] + [
        (line.end_time, -1) for line in found.timings
    ]
    running = [0]
    for _, change in sorted(begun):
        running.append(running[-1] + change)
    assert len(found.client_loads) == 2
    assert reports[-1].done == 10 and reports[-1].running == 0
    for line in found.timings:
        assert (
            line.due
            <= line.sent
            < line.chunk_times[0]
            <= line.chunk_times[-1]
            <= line.last_chunk_time
        )
    return max(running)


def test_loads_are_measured_in_turn_and_drawn_on_one_page(bench, url) -> None:
    found, page, printed = bench(
        f"{url}/v1", "--concurrency", "2", "--rate", "20,40", "--burst", "--requests", "6",
        "--prompt-tokens", "100", "--output-tokens", "4:8", "--ignore-eos",
    )  # fmt: skip
    labels = ["2 streams", "20/s", "40/s", "all at once"]
    assert [one["load"] for one in found] == labels
    assert [one["rate"] for one in found] == [None, 20.0, 40.0, None]
    for one in found:
        assert (one["requests"], one["failed"], one["failures"]) == (6, 0, {})
        assert one["output_tokens"] == pytest.approx(one["tokens_per_s"] * one["seconds"])
        assert 6 * 4 <= one["output_tokens"] <= 6 * 8
        # A token is a byte there, which nobody said: two prompts were asked.
        assert one["prompt_tokens"] == pytest.approx(6 * 100, rel=0.15)
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            assert 0 < one[name]["p50"] <= one[name]["p90"] <= one[name]["p99"] <= one[name]["max"]
        assert one["ttft_ms"]["p50"] < one["e2e_ms"]["p50"]
        assert one["client"]["processes"] >= 1 and one["client"]["lag_ms"]
    assert all(f"{label}: 6 requests" in printed for label in labels)
    assert [line.split("  ")[0] for line in printed.splitlines()[-6:-2]] == labels
    tags = parsed(page)
    assert set(labels) <= set(tags.text)
    assert tags.seen["svg"] == 4 * 6 + 3, "each load's, and those over the rates"


def test_shared_prefixes_come_from_the_cache_and_other_prompts_do_not(bench, url) -> None:
    words = ("--requests", "6", "--concurrency", "1", "--prompt-tokens", "20", "--ids",
             "--output-tokens", "2", "--endpoint", "completions", "--ignore-eos")  # fmt: skip
    (shared,), page, _ = bench(url, *words, "--shared-prefixes", "1", "--shared-tokens", "200")
    assert shared["prompt_tokens"] == 6 * 220
    assert shared["cached_tokens"] >= 5 * 150
    assert "1 prefixes of 200" in page
    (own,), _, _ = bench(url, *words, "--seed", "77")
    assert own["prompt_tokens"] == 6 * 20 and own["cached_tokens"] == 0


def test_a_duration_bounds_a_load_and_processes_share_it(bench, url) -> None:
    (found,), _, _ = bench(
        url, "--concurrency", "4", "--duration", "1", "--processes", "2", "--output-tokens", "4",
        "--prompt-tokens", "30:40", "--good-ttft", "0.001",
    )  # fmt: skip
    assert found["requests"] >= 4 and found["failed"] == 0
    assert found["client"]["processes"] == 2
    assert found["good_share"] == found["goodput_per_s"] == 0


def test_conversations_of_a_file_and_times_of_a_trace_are_sent(bench, url, tmp_path) -> None:
    file, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Count from 3 to 12."}]}\n"Hello"\n')
    lines = [{"timestamp": at, "input_length": 50, "output_length": 3} for at in (5.0, 5.1, 5.3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (listed,), page, _ = bench(url, "--prompts", str(file), "--requests", "3")
    assert (listed["requests"], listed["failed"]) == (3, 0)
    assert "prompts.jsonl" in page
    (recorded,), _, _ = bench(url, "--trace", str(trace), "--ignore-eos")
    assert (recorded["requests"], recorded["output_tokens"]) == (3, 9)
    assert recorded["seconds"] >= 0.3


@contextmanager
def serving(
    answer: Callable[[web.Request, dict], Awaitable[web.StreamResponse]], models: int = 1
) -> Iterator[str]:
    """A server in a thread of its own; its address."""

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "<b>toy</b>"}] * models})

    async def asked(request: web.Request) -> web.StreamResponse:
        return await answer(request, await request.json())

    async def serve() -> None:
        nonlocal address
        app = web.Application()
        app.router.add_get("/v1/models", listed)
        app.router.add_post("/v1/chat/completions", asked)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await over.wait()
        await runner.cleanup()

    address, ready = "", threading.Event()
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield address
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def chunk(delta: dict, finish: str | None = None) -> bytes:
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(tokens: int, prompt: int) -> bytes:
    counts = {"completion_tokens": tokens, "prompt_tokens": prompt}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


async def streamed(request: web.Request, *parts: bytes | float) -> web.StreamResponse:
    """Bytes, and seconds to wait between them."""
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    for part in parts:
        if isinstance(part, float):
            await asyncio.sleep(part)
        else:
            await response.write(part)
    return response


def whole(tokens: int, pause: float = 0.0) -> list[bytes | float]:
    """A chat as OpenAI streams it: the role, pieces, the end, the usage."""
    opening = chunk({"role": "assistant", "content": ""})
    pieces = [part for _ in range(tokens) for part in (pause, chunk({"content": "a"}))]
    end = [chunk({}, "length"), usage(tokens, 11), b"data: [DONE]\n\n"]
    return [opening, *pieces, *end]


MEASURED = 5  # output tokens of what is measured; what comes before asks for others


def test_each_way_to_fail_is_named_and_counted(bench) -> None:
    turns = iter(range(100))

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        if body["max_tokens"] != MEASURED:
            return await streamed(request, *whole(body["max_tokens"]))
        turn = next(turns) % 10
        if turn == 1:
            return web.Response(status=500, text="<script>alert(1)</script> broke")
        if turn in (2, 3):
            return web.json_response({"error": {"message": "too many"}}, status=429)
        if turn == 4:
            response = await streamed(request, *whole(2)[:5])
            request.transport.abort()
            return response
        if turn == 5:
            return await streamed(request, *whole(2)[:3])  # it just ends
        if turn == 6:
            return await streamed(request, chunk({"content": "a"}), b'data: {"choi\n\n')
        if turn == 7:
            return web.Response(text="It works!\n")
        if turn == 8:
            return await streamed(request, chunk({"content": "a"}), b'data: {"error": "died"}\n\n')
        if turn == 9:
            return await streamed(request, *whole(2)[:3], 60.0)
        return await streamed(request, *whole(MEASURED))

    with serving(answer) as url:
        (found,), page, printed = bench(
            url, "--concurrency", "1", "--requests", "20", "--output-tokens", str(MEASURED),
            "--timeout", "6", "--warm-up", "2", "--api-key", "sesame",
        )  # fmt: skip
    assert found["failures"] == {
        "cut stream": 4, "error in stream": 2, "garbage": 4, "status 429": 4, "status 500": 2,
        "timeout": 2,
    }  # fmt: skip
    assert (found["requests"], found["failed"], found["output_tokens"]) == (20, 18, 2 * MEASURED)
    assert found["good_share"] == pytest.approx(0.1)
    assert "2 by status 500: <script>alert(1)</script> broke" in printed
    text = " ".join(parsed(page).text)
    assert "<script>alert(1)</script>" in text and "<b>toy</b>" in text
    assert "sesame" not in page + printed


def test_times_are_those_of_the_stream_and_its_opening_is_no_token(bench) -> None:
    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        return await streamed(request, *whole(body["max_tokens"], 0.05))

    with serving(answer) as url:
        (found,), _, _ = bench(url, "--requests", "4", "--output-tokens", "5", "--warm-up", "0")
    assert found["output_tokens"] == 20 and found["prompt_tokens"] == 44
    assert found["ttft_ms"]["p50"] >= 50 and found["e2e_ms"]["p50"] >= 250
    for between in (found["itl_ms"]["p50"], found["tpot_ms"]["p50"]):  # four of them are in each
        assert 45 <= between < found["e2e_ms"]["p50"] / 2


def test_waiting_in_an_open_loop_counts_from_when_a_request_was_due(bench) -> None:
    """The server answers one at a time: a client that waited with it would not see that."""
    turn = threading.Semaphore(1)

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        while not turn.acquire(blocking=False):
            await asyncio.sleep(0.001)
        try:
            return await streamed(request, 0.1, *whole(body["max_tokens"]))
        finally:
            turn.release()

    with serving(answer) as url:
        (found,), _, _ = bench(
            url, "--burst", "--requests", "8", "--output-tokens", "2", "--warm-up", "0"
        )
    assert found["ttft_ms"]["max"] >= 800 and found["ttft_ms"]["p50"] >= 400


def test_servers_that_know_less_are_measured_by_pieces_and_a_note_says_so(bench) -> None:
    """No usage, no ignore_eos, no [DONE]; thoughts and calls are tokens, too."""

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        if "stream_options" in body:
            return web.json_response({"error": "stream_options is unknown"}, status=400)
        call = {"index": 0, "function": {"name": "f", "arguments": ""}}
        pieces = [{"reasoning_content": "so"}, {"content": "a"}, {"tool_calls": [call]}]
        said = [chunk(piece) for piece in pieces]  # as many, whatever is asked for
        opening = chunk({"role": "assistant", "content": None})
        return await streamed(
            request, b": hello\n\n", opening, *said, chunk({"content": ""}, "stop")
        )

    with serving(answer) as url:
        words = ("--requests", "4", "--output-tokens", "9", "--ignore-eos", "--model", "any")
        (found,), page, _ = bench(url, *words)
    assert (found["failed"], found["output_tokens"], found["prompt_tokens"]) == (0, 12, 0)
    notes = " ".join(found["notes"])
    assert "4 answers have fewer tokens" in notes and "4 answers came without usage" in notes
    assert "without usage" in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_bench_that_is_ended_says_what_it_had_and_leaves_no_file(tmp_path, number) -> None:
    """The first load is measured, and of the second one request is never answered."""
    asked, hangs = 0, threading.Event()

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked > 7:  # some are asked before all loads
            hangs.set()
            await asyncio.sleep(600)
        return await streamed(request, chunk({"content": "a"}), chunk({"content": ""}, "stop"))

    out = tmp_path / "out.json"
    with serving(answer) as url:
        words = ("--requests", "4", "--concurrency", "1,1", "--warm-up", "0", "--model", "any")
        running = subprocess.Popen(
            [sys.executable, "-m", "pipeinfer", "bench", url, *words, "--json", str(out)],
            env=servers.environment() | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert hangs.wait(60) and [*tmp_path.glob("pipeinfer-bench-*")]
        running.send_signal(number)
        said, errors = running.communicate(timeout=300)
    assert (running.returncode, errors) == (1, "")
    assert "\nended early: 1 stream" in said
    assert said.endswith("\npartial: 1 of 2 loads measured to the end\n")
    assert [*tmp_path.iterdir()] == [out]
    [point] = json.loads(out.read_text())["metrics"]["points"]
    assert point["requests"] == 4


def test_nothing_answered_is_code_1(capsys) -> None:
    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        return web.Response(status=503, text="not now")

    with serving(answer) as url:
        assert main(["bench", url, "--requests", "2"]) == 1
        assert "status 503" in capsys.readouterr().err
        assert main(["bench", url, "--requests", "2", "--warm-up", "0"]) == 1
        assert "failed: 2 by status 503: not now" in capsys.readouterr().out
    assert main(["bench", url]) == 1, "it has ended"
    assert "/v1/models" in capsys.readouterr().err
    with serving(answer, models=0) as url:
        assert main(["bench", url]) == 1
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["URL", "--rate", "0"],
        ["URL", "--rate", "1,x"],
        ["URL", "--concurrency", "1.5"],
        ["URL", "--prompt-tokens", "5:2"],
        ["URL", "--burst", "--duration", "3"],
        ["URL", "--requests", "3", "--duration", "3"],
        ["URL", "--ids"],
        ["URL", "--extra", "[]"],
        ["URL", "--html", "/nowhere/there/x.html"],
        ["URL", "--prompts", "/nowhere"],
        ["URL", "--trace", "/nowhere"],
        ["URL", "--frobnicate"],
    ],
)
def test_wrong_usage_is_code_2(words, capsys) -> None:
    try:
        code = main(["bench", *words])
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 2 and "error" in capsys.readouterr().err
