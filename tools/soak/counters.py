"""Whether the counters of a server add up: with what its clients did, and from stage to stage.

Knows the counts of clients.py, the metrics of the gateway, and the statistics of the stages; what
they mean stands in docs/reference/statistics.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from pipeinfer.scheduler.core import FINISH_KINDS

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
