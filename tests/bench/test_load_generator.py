"""What is sent and when: prompts, arrivals, and the shares of several processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.bench import runner
from pipeinfer.bench.client import EncodedRequest, Endpoint
from pipeinfer.bench.dataset import RandomDataset, SampleRequest, TokenRange, load_custom_dataset
from pipeinfer.bench.runner import (
    ClosedLoop,
    LoadLimits,
    OpenLoop,
    TraceRequest,
    load_trace,
    poisson_arrivals,
)
from pipeinfer.settings import ConfigurationError, base_url


class Noted:
    """Sends nothing: notes the numbers, and how many ran at a time."""

    def __init__(self, seconds: float) -> None:
        self.numbers: list[int] = []
        self.dues: list[float] = []
        self.most = self._running = 0
        self._seconds = seconds

    def encode(self, index: int) -> EncodedRequest:
        return EncodedRequest(str(index).encode(), 1)

    async def send(self, asked: EncodedRequest, due: float) -> None:
        self._running += 1
        self.most = max(self.most, self._running)
        self.numbers.append(int(asked.body))
        self.dues.append(due)
        await asyncio.sleep(self._seconds)
        self._running -= 1


def driven(loads, seconds: float) -> list[Noted]:
    """As if each load had a process of its own."""

    async def together() -> None:
        begin = time.perf_counter()
        await asyncio.gather(
            *(load.run(begin, noted) for load, noted in zip(loads, senders, strict=True))
        )

    senders = [Noted(seconds) for _ in loads]
    asyncio.run(together())
    return senders


@pytest.mark.parametrize("many", [1, 3])
def test_processes_send_each_request_of_a_closed_loop_once(tmp_path: Path, many: int) -> None:
    load = ClosedLoop(5, requests=40)
    noted = driven([load.share(tmp_path, first, many) for first in range(many)], 0.001)
    assert sorted(number for one in noted for number in one.numbers) == list(range(40))
    assert sum(one.most for one in noted) == 5


def test_a_closed_loop_begins_nothing_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(100.0, 0.03)  # seconds; each look at the clock takes so long
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    noted, load = Noted(0.0), ClosedLoop(2, seconds=0.2).share(tmp_path, 0, 1)
    asyncio.run(load.run(100.0, noted))
    assert noted.dues == pytest.approx([100.03, 100.06, 100.09, 100.12, 100.15, 100.18])
    assert noted.numbers == list(range(6)) and noted.most == 2


def test_an_open_loop_waits_for_no_answer(tmp_path: Path) -> None:
    times = [0.0, 0.01, 0.02, 0.05]
    load = OpenLoop(list(enumerate(times)))
    noted = driven([load.share(tmp_path, first, 2) for first in range(2)], 0.6)
    assert [one.numbers for one in noted] == [[0, 2], [1, 3]]
    assert [one.most for one in noted] == [2, 2]
    dues = sorted(due for one in noted for due in one.dues)
    assert [due - dues[0] for due in dues] == pytest.approx(times)


def test_poisson_arrivals_come_at_their_rate_and_in_proportion() -> None:
    times = poisson_arrivals(8.0, 0, requests=2_000)
    assert times[-1] == pytest.approx(2_000 / 8.0, rel=0.1)
    assert poisson_arrivals(16.0, 0, requests=2_000) == pytest.approx([t / 2 for t in times])
    within = poisson_arrivals(8.0, 0, seconds=50.0)
    assert within == times[: len(within)] and within[-1] < 50.0 <= times[len(within)]
    assert poisson_arrivals(float("inf"), 0, requests=3) == [0.0] * 3


def test_broken_trace_names_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 0, "output_length": 5}\n')
    with pytest.raises(ConfigurationError, match=r"line 1.*input_length"):
        load_trace(trace)
    trace.write_text("")
    with pytest.raises(ConfigurationError, match="no entries"):
        load_trace(trace)
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_trace(tmp_path / "none")


@given(st.integers(-(2**31), 2**31), st.integers(0, 2**31))
def test_a_request_follows_from_seed_and_number(seed: int, index: int) -> None:
    drawn = RandomDataset(TokenRange(3, 9), TokenRange(2, 4), seed, highest_id=7)
    request = drawn.sample(index)
    assert request == drawn.sample(index)
    assert 3 <= len(request.prompt_ids) <= 9 and 2 <= request.output_len <= 4
    assert all(0 <= token <= 7 for token in request.prompt_ids)
    assert drawn.warmup_sample(index, 5) == RandomDataset(
        TokenRange(3, 9), TokenRange(2, 4), seed + 5, 7
    ).sample(index)


@pytest.mark.parametrize("highest_id", [None, 5000])
def test_prompts_share_as_many_beginnings_as_asked_for(highest_id: int | None) -> None:
    drawn = RandomDataset(
        TokenRange(8, 8), TokenRange(1, 1), 0, highest_id, num_prefixes=3, prefix_len=20
    )
    requests = [drawn.sample(index) for index in range(60)]
    parts = [request.prompt_ids or request.text.split() for request in requests]
    assert {len(part) for part in parts} == {28}
    assert len({tuple(part[:20]) for part in parts}) == 3
    assert len({tuple(part[20:]) for part in parts}) == 60
    other = RandomDataset(
        TokenRange(8, 8), TokenRange(1, 1), 1, highest_id, num_prefixes=3, prefix_len=20
    ).sample(0)
    assert (other.prompt_ids or other.text.split())[:20] not in [part[:20] for part in parts]


def test_words_are_as_many_as_make_the_tokens() -> None:
    drawn = RandomDataset(
        TokenRange(110, 110), TokenRange(1, 1), 0, tokens_per_word=2.0, template_tokens=10.0
    )
    assert len(drawn.sample(0).text.split()) == 50
    assert (
        len(
            RandomDataset(TokenRange(4, 4), TokenRange(1, 1), 0, template_tokens=10.0)
            .sample(0)
            .text.split()
        )
        == 1
    )


def test_lengths_of_a_trace_go_before_spans() -> None:
    drawn = RandomDataset(TokenRange(1, 1), TokenRange(1, 1), 0, 99, lengths=[(4, 2), (7, 3)])
    found = [(len(r.prompt_ids), r.output_len) for r in map(drawn.sample, range(3))]
    assert found == [(4, 2), (7, 3), (4, 2)]


def test_a_file_has_texts_ids_and_conversations(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    talk = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    lines = ["a text", {"prompt": "another", "max_tokens": 7}]
    file.write_text("\n".join(map(json.dumps, [*lines, {"messages": talk}])) + "\n\n")
    found = load_custom_dataset(file, TokenRange(3, 3), 0, chat=True)
    expected = [
        SampleRequest(3, text="a text"),
        SampleRequest(7, text="another"),
        SampleRequest(3, messages=talk),
    ]
    assert [found.sample(index) for index in range(4)] == [*expected, expected[0]]
    body = json.loads(Endpoint("", chat=True).encode(expected[2]).body)
    assert body["messages"] == talk and body["max_tokens"] == 3
    file.write_text('{"prompt": [1, 2]}')
    request = load_custom_dataset(file, TokenRange(3, 3), 0, chat=False).sample(0)
    assert json.loads(Endpoint("").encode(request).body)["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("line", "chat", "said"),
    [
        ("{", True, "line 1"),
        ('{"prompt": 5}', True, "line 1.*prompt"),
        ("{}", True, "neither"),
        ('""', False, "neither"),
        ('{"messages": [{"role": "user"}]}', False, "chat endpoint alone"),
        ('{"prompt": [1]}', True, "completions endpoint alone"),
        ('{"prompt": "a", "max_tokens": 0}', True, "max_tokens"),
        ("", True, "no prompts"),
    ],
)
def test_a_broken_file_of_prompts_names_its_line(tmp_path, line, chat, said) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigurationError, match=said):
        load_custom_dataset(file, TokenRange(3, 3), 0, chat)


def test_further_fields_go_into_the_body_and_the_key_into_the_header() -> None:
    asked = Endpoint(
        "http://h", chat=True, model="m", api_key="k", include_usage=False, ignore_eos=False,
        extra_body={"top_k": 4, "temperature": 0.5},
    )  # fmt: skip
    body = json.loads(asked.encode(SampleRequest(9, text="hi")).body)
    assert body == {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5, "stream": True, "top_k": 4,
    }  # fmt: skip
    assert asked.headers["authorization"] == "Bearer k"
    assert asked.api_url == "http://h/v1/chat/completions"


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "h:1/v1/"])
def test_an_address_may_have_v1_or_not(given: str) -> None:
    assert base_url(given) == "http://h:1"


def test_points_have_enough_requests_and_processes() -> None:
    assert runner.closed_loop_point(4, LoadLimits()).requests == 64
    assert runner.closed_loop_point(100, LoadLimits()).requests == 400
    assert runner.closed_loop_point(100, LoadLimits(requests=7)).requests == 7
    timed = runner.closed_loop_point(100, LoadLimits(seconds=2.0))
    assert timed.requests is None
    assert (timed.processes(8), timed.processes(1)) == (2, 1)
    assert runner.poisson_point(2.0, LoadLimits(), 0).requests == 64
    assert runner.burst_point(LoadLimits(requests=300)).processes(64) == 5
    trace = [TraceRequest(0.0, 1, 1), TraceRequest(3.0, 1, 1)]
    assert runner.trace_point(trace, 2.0).load == OpenLoop([(0, 0.0), (1, 1.5)])
