"""What must hold after a soak: flat memory, an idle server, counters that add up.

Memory: a process has its working size after the first tenth of the requests. Samples of the rest
are cut into nine parts, in the order of time, whose level is their median. No level may be more
than 5 % above the first, so what grows late, or grows and shrinks again, counts too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from pipeinfer.scheduler.core import FINISH_KINDS

TENTHS = 10
MOST = 5.0  # percent
PARTS = TENTHS - 1
FEWEST = 3  # samples of a part
MIB = 2**20

Sample = Mapping[str, Any]


def levels(samples: Sequence[Sample], requests: int) -> dict[str, list[float]]:
    """For each process that is in every sample after the first tenth of the `requests`: the median
    of its own bytes in each part. ValueError if a part has fewer than FEWEST samples."""
    late = [one["processes"] for one in samples if one["done"] * TENTHS >= requests]
    if len(late) < PARTS * FEWEST:
        raise ValueError(f"{len(late)} samples after a tenth of the requests are too few")
    cuts = [len(late) * part // PARTS for part in range(PARTS + 1)]
    names = set.intersection(*map(set, late))
    return {
        name: [
            median(one[name]["own"] for one in late[begin:end])
            for begin, end in itertools.pairwise(cuts)
        ]
        for name in sorted(names)
    }


def judged(
    samples: Sequence[Sample], requests: int, most: float = MOST
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(for each process: MiB of the first level, of the last, of the highest, and of the greatest
    sample after the first tenth; percent by which the highest and the last level exceed the first;
    what grew by more than `most` percent)."""
    found: dict[str, dict[str, float]] = {}
    broken: list[str] = []
    try:
        by_name = levels(samples, requests)
    except ValueError as error:
        return found, [f"memory: {error}"]
    for name, its in by_name.items():
        first, highest = its[0], max(its)
        late = [one for one in samples if one["done"] * TENTHS >= requests]
        grown = 100 * (highest / first - 1)
        found[name] = {
            "first_mib": round(first / MIB, 2),
            "last_mib": round(its[-1] / MIB, 2),
            "highest_mib": round(highest / MIB, 2),
            "greatest_sample_mib": round(
                max(one["processes"][name]["own"] for one in late) / MIB, 2
            ),
            "highest_percent": round(grown, 2),
            "last_percent": round(100 * (its[-1] / first - 1), 2),
        }
        if grown > most:
            broken.append(
                f"memory of {name} grew by {grown:.1f} %: {first / MIB:.1f} MiB after a tenth of "
                f"the requests, then {highest / MIB:.1f} MiB"
            )
    return found, broken


def changed(before: Sample, after: Sample) -> list[str]:
    """What is another number now, or another process."""
    broken: list[str] = []
    was, now = before["processes"], after["processes"]
    if set(was) != set(now):
        broken.append(f"processes {sorted(now)}, before {sorted(was)}")
    for name in sorted(set(was) & set(now)):
        broken += [
            f"{what} of {name}: {now[name][what]}, before {was[name][what]}"
            for what in ("pid", "descriptors", "threads")
            if now[name][what] != was[name][what]
        ]
    return broken


def in_use(sample: Sample) -> list[str]:
    """Pages and slots that are not given back."""
    broken: list[str] = []
    for stage, stats in sample["stages"].items():
        if not stage.startswith("engine"):
            continue
        pages = stats["pages_total"] - stats["pages_free"] - stats["pages_evictable"]
        for what, many in (("pages", pages), ("slots", stats["slots_used"])):
            if many:
                broken.append(f"{many:g} {what} of {stage} are in use")
    return broken


Numbers = Mapping[str, float]
Check = tuple[str, float, float, float]  # what it is, its value, the least and the most it may be


def added_up(clients: Numbers, gateway: Numbers, stages: Mapping[str, Numbers]) -> list[str]:
    """What does not add up, of an idle server whose processes are those of its start. `clients`:
    counts of all requests that it ever had; `stages`: statistics by stage id."""
    checks = chain(
        _clients(clients, gateway), _between(gateway, stages), _within(stages), _plans(stages)
    )
    broken = []
    for what, value, least, most in checks:
        if not least <= value <= most:
            wanted = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            broken.append(f"{what}: {value:g}, and not {wanted}")
    return broken


def _clients(clients: Numbers, gateway: Numbers) -> Iterator[Check]:
    """A client that leaves before any answer cannot know whether it was a request by then."""
    for outcome in ("ok", "refused", "error", "abort", "limited"):
        told = clients.get(f"key {outcome}", 0)
        yield _same(f"key_requests_total {outcome}", gateway[f"key_requests_total {outcome}"], told)
    for outcome in ("stop", "length", "error"):
        told = clients.get(f"end {outcome}", 0)
        yield _same(f"requests_total {outcome}", gateway[f"requests_total {outcome}"], told)
    told, maybe = clients.get("end abort", 0), clients.get("maybe abort", 0)
    yield "requests_total abort", gateway["requests_total abort"], told, told + maybe
    yield _same("bad_requests_total", gateway["bad_requests_total"], clients.get("bad", 0))


def _between(gateway: Numbers, stages: Mapping[str, Numbers]) -> Iterator[Check]:
    """From stage to stage nothing is lost."""

    def total(name: str) -> float:
        return _total(stages, *name.split(" ", 1))

    requests = sum(value for name, value in gateway.items() if name.startswith("requests_total "))
    taken = total("tokenizer accepted_total")
    refused = total("tokenizer refused_total")
    told = taken + refused + total("tokenizer abandoned_total") + total("tokenizer encoded_total")
    yield _same("requests of the gateway that the tokenizer had", told, requests)
    refused += total("scheduler refused_total")
    yield _same("requests_total refused", gateway["requests_total refused"], refused)
    scheduled = total("scheduler accepted_total") - total("scheduler handed_over_total")
    yield _same("requests of the tokenizer that a scheduler had", scheduled, taken)
    opened = total("scheduler accepted_total") - total("scheduler refused_total")
    yield _same(
        "requests of a scheduler that were opened", total("detokenizer opened_total"), opened
    )
    read, sampled = total("detokenizer tokens_total"), total("engine sampled_tokens_total")
    yield "generated_tokens_total", gateway["generated_tokens_total"], 1, read
    yield "tokens that the detokenizer read", read, 1, sampled
    prompts = total("tokenizer prompt_tokens_total")
    yield "prompt_tokens_total", gateway["prompt_tokens_total"], 1, prompts


def _within(stages: Mapping[str, Numbers]) -> Iterator[Check]:
    """What a stage accepted has ended in one of its ways."""
    for stage, stats in stages.items():
        if stage.startswith("scheduler"):
            ended = sum(stats[f"{end}_total"] for end in FINISH_KINDS)
            yield _same(f"ended requests of {stage}", ended, stats["accepted_total"])
            yield _same(f"failed requests of {stage}", stats["failed_total"], 0)
        if stage.startswith("detokenizer"):
            ended = stats["finished_total"] + stats["aborted_total"]
            yield _same(f"ended requests of {stage}", ended, stats["opened_total"])
            yield _same(f"failed requests of {stage}", stats["failed_total"], 0)
        yield _same(f"bad frames of {stage}", stats["bad_frames"], 0)
        yield _same(f"unsent messages of {stage}", stats["unsent_total"], 0)


def _plans(stages: Mapping[str, Numbers]) -> Iterator[Check]:
    """Every rank of a group has applied each plan of its scheduler."""
    for stage, stats in stages.items():
        kind, _, place = stage.partition("-")
        if kind == "engine":
            published = stages[f"scheduler-{place.partition('-')[0]}"]["plans_total"]
            yield _same(f"plans applied by {stage}", stats["plans_total"], published)


def _same(what: str, value: float, wanted: float) -> Check:
    return what, value, wanted, wanted


def _total(stages: Mapping[str, Numbers], kind: str, stat: str) -> float:
    """Of all groups; of ranks, which say the same, the first counts."""
    its = (stats for stage, stats in stages.items() if stage.partition("-")[0] == kind)
    if kind == "engine":
        its = (stats for stage, stats in stages.items() if _first_rank(stage))
    return sum(stats[stat] for stats in its)


def _first_rank(stage: str) -> bool:
    kind, _, place = stage.partition("-")
    return kind == "engine" and place.endswith("-0")
