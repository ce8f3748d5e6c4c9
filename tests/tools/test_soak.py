"""That a soak finds what grows, stays or is miscounted, and nothing in a server that is well."""

from __future__ import annotations

import json
import random
from copy import deepcopy

import pytest

from soak import checks, requests
from soak.clients import counted, unexpected
from soak.requests import Answer, questions
from soak.watching import metrics

REQUESTS = 10_000


def process(mib: float, **other: int) -> dict:
    return {"pid": 7, "own": int(mib * 2**20), "descriptors": 30, "threads": 4, **other}


def sampled(mib) -> list[dict]:
    """A hundred samples of one process that has `mib(share of the run)` MiB."""
    shares = [number / 100 for number in range(100)]
    return [
        {"done": int(share * REQUESTS), "processes": {"gateway-0": process(mib(share))}}
        for share in shares
    ]


def grown(mib) -> list[str]:
    return checks.judged(sampled(mib), REQUESTS)[1]


def test_flat_memory_is_no_leak_however_it_flickers():
    source = random.Random(3)
    assert grown(lambda share: 50 + source.random()) == []
    assert grown(lambda share: 30 + min(share, 0.1) * 200) == [], "it fills its caches first"
    assert grown(lambda share: 50 + 40 * (source.random() < 0.1)) == [], (
        "a large body, now and then"
    )
    assert grown(lambda share: 60 - 20 * share) == [], "it shrinks"


def test_a_leak_is_found_whenever_it_begins():
    assert "gateway-0 grew by 7." in grown(lambda share: 50 * (1 + 0.09 * share))[0]
    assert grown(lambda share: 50 + 200 * max(share - 0.9, 0)), "late"
    assert grown(lambda share: 50 + 5 * (0.4 < share < 0.6)), "and it is given back"
    assert grown(lambda share: 50 * (1 + 0.04 * share)) == [], "within the bound"


def test_memory_is_not_judged_by_too_few_samples():
    found, broken = checks.judged(sampled(lambda share: 50)[::10], REQUESTS)
    assert found == {} and "9 samples" in broken[0]


def test_what_is_left_in_an_idle_server_is_found():
    before = {
        "processes": {"gateway-0": process(50), "engine-0-0": process(90)},
        "stages": {
            "engine-0-0": {
                "pages_total": 100, "pages_free": 60, "pages_evictable": 40, "slots_used": 0
            }
        },
    }  # fmt: skip
    assert checks.changed(before, before) == [] == checks.in_use(before)
    after = deepcopy(before)
    after["processes"]["gateway-0"] |= {"descriptors": 31, "threads": 3}
    del after["processes"]["engine-0-0"]
    after["processes"]["engine-0-0"] = process(90, pid=8)
    after["stages"]["engine-0-0"] |= {"pages_free": 59, "slots_used": 1}
    assert checks.changed(before, after) == [
        "pid of engine-0-0: 8, before 7",
        "descriptors of gateway-0: 31, before 30",
        "threads of gateway-0: 3, before 4",
    ]
    assert [text[:7] for text in checks.in_use(after)] == ["1 pages", "1 slots"]
    del after["processes"]["gateway-0"]
    assert "gateway-0" in checks.changed(before, after)[0]


CLIENTS = {
    "key ok": 10, "key refused": 4, "key abort": 3, "end stop": 7, "end length": 3,
    "end abort": 3, "maybe abort": 2, "bad": 1,
}  # fmt: skip
GATEWAY = {
    "key_requests_total ok": 10, "key_requests_total refused": 4, "key_requests_total abort": 3,
    "key_requests_total error": 0, "key_requests_total limited": 0, "requests_total stop": 7,
    "requests_total length": 3, "requests_total abort": 4, "requests_total error": 0,
    "requests_total refused": 2, "bad_requests_total": 1, "generated_tokens_total": 90,
    "prompt_tokens_total": 200,
}  # fmt: skip
PLAIN = {"bad_frames": 0, "unsent_total": 0}
STAGES = {
    "gateway-0": PLAIN,
    "tokenizer-0": {
        **PLAIN, "accepted_total": 13, "encoded_total": 0, "refused_total": 2,
        "abandoned_total": 1, "prompt_tokens_total": 210,
    },
    "scheduler-0": {
        **PLAIN, "accepted_total": 13, "finished_total": 9, "stopped_total": 1,
        "timed_out_total": 1, "failed_total": 0, "aborted_total": 2, "refused_total": 0,
        "handed_over_total": 0, "plans_total": 55,
    },
    "engine-0-0": {**PLAIN, "plans_total": 55, "sampled_tokens_total": 100},
    "engine-0-1": {**PLAIN, "plans_total": 55, "sampled_tokens_total": 100},
    "detokenizer-0": {
        **PLAIN, "opened_total": 13, "finished_total": 11, "aborted_total": 2, "failed_total": 0,
        "tokens_total": 95,
    },
}  # fmt: skip


def test_counters_that_add_up_do():
    assert checks.added_up(CLIENTS, GATEWAY, STAGES) == []
    early = {**GATEWAY, "requests_total abort": 6}
    assert len(checks.added_up(CLIENTS, early, STAGES)) == 2, "more than could have been"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("key_requests_total ok", 1),
        ("key_requests_total abort", 1),
        ("requests_total stop", 2),  # and it is one that the tokenizer never had
        ("requests_total error", 2),
        ("requests_total refused", 2),
        ("bad_requests_total", 1),
    ],
)
def test_a_counter_of_the_gateway_that_is_one_off_is_found(name, found):
    gateway = {**GATEWAY, name: GATEWAY[name] + 1}
    assert len(checks.added_up(CLIENTS, gateway, STAGES)) == found


@pytest.mark.parametrize(
    ("stage", "name"),
    [(stage, name) for stage, stats in STAGES.items() for name in stats if "tokens" not in name],
)
def test_a_counter_of_a_stage_that_is_one_off_is_found(stage, name):
    stages = deepcopy(STAGES)
    stages[stage][name] += 1
    assert checks.added_up(CLIENTS, GATEWAY, stages)


def test_more_tokens_than_were_sampled_are_found():
    assert checks.added_up(CLIENTS, {**GATEWAY, "generated_tokens_total": 96}, STAGES)
    stages = {**STAGES, "detokenizer-0": {**STAGES["detokenizer-0"], "tokens_total": 101}}
    assert checks.added_up(CLIENTS, GATEWAY, stages)


def test_metrics_are_read_with_their_labels_and_keys_summed_up():
    text = (
        "# HELP pipeinfer_x X.\n"
        'pipeinfer_requests_total{outcome="stop"} 4.0\n'
        'pipeinfer_key_requests_total{key="a",outcome="ok"} 2.0\n'
        'pipeinfer_key_requests_total{key="b",outcome="ok"} 3.0\n'
        "pipeinfer_pages_free 12.0\n"
        'pipeinfer_inter_token_seconds_bucket{le="0.1"} 9.0\n'
    )
    found = {"requests_total stop": 4.0, "key_requests_total ok": 5.0, "pages_free": 12.0}
    assert metrics(text) == found


def test_the_mix_follows_from_its_seed_in_the_promised_parts():
    known = questions(5)
    assert known == questions(5) != questions(6)
    drawn = [requests.drawn(5, number, known) for number in range(4000)]
    assert drawn[77] == requests.drawn(5, 77, known) != requests.drawn(6, 77, known)
    for kind, part in requests.PARTS.items():
        many = sum(one.kind == kind for one in drawn)
        assert many == pytest.approx(4000 * part / sum(requests.PARTS.values()), rel=0.4), kind
    assert len({one.case.name for one in requests.hostile() if one.case}) == len(requests.CHEAP)


def test_each_answer_counts_as_the_gateway_counts_it_and_a_wrong_one_is_noticed():
    known = questions(0)
    good, [bad, *_] = requests.plain(known, 3), requests.bad()
    stop, error = Answer(200, "a", "stop"), Answer(400, code="invalid_type")
    assert counted(good, stop) == ["asked good", "key ok", "end stop"]
    assert counted(bad, error) == ["asked bad", "key refused"]
    assert unexpected(good, stop) == "" == unexpected(bad, error)
    for asked, answer in ((good, error), (good, Answer(200, "a", "abort")), (bad, stop)):
        assert unexpected(asked, answer)
    late = requests.Asked("time out", b"")
    assert counted(late, Answer(408, code="timeout"))[1:] == ["key refused", "end abort"]
    assert unexpected(late, Answer(408, code="timeout")) == ""
    assert unexpected(late, Answer(200, "a", "length")), "it should have ended before"


def test_a_short_soak_of_a_real_server_breaks_no_promise(tool_run, tmp_path):
    """Memory has more room than in a long run: so short a one is all start-up."""
    samples = tmp_path / "samples.jsonl"
    words = ["--requests", "300", "--warm-up", "20", "--concurrency", "8", "--processes", "1"]
    words += ["--questions", "40", "--every", "0.02", "--memory-percent", "60"]
    done = tool_run("soak", "run", *words, "--samples", str(samples))
    assert done.code == 0, done.err
    found = done.metrics
    assert found["broken"] == [] and found["requests"] == 300
    kinds = {name.removeprefix("asked ") for name in found["counts"] if name.startswith("asked")}
    assert kinds == set(requests.PARTS)
    assert {"gateway-0", "engine-0-0", "supervisor"} <= set(found["memory"])
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["phase"] for row in rows].count("load") == found["samples"] > 30
