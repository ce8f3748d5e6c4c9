"""Prefix routing over groups of real cores: nearly the hits of one cache as large as all together.

Routers, schedulers, engines' memory and page bookkeeping are the real ones; only the model is left
out, so 4,096 requests of 1,500 shared tokens take seconds. Run as a script it prints its numbers.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import cache

import numpy as np

from pipeinfer.core import LOCAL, Core, Tick, highest_random_weight
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.gateway.ledger import Call, prompt_beginning
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, BeginEpoch, Hello, Message, Plan, TokenizedRequest, Tokens
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.step import Sampled
from pipeinfer.tokenizer.routing import GroupMonitor, GroupReport, GroupRouter
from pipeinfer.wire import pack

PREFIXES, EACH, PREFIX = 64, 64, 1500
TAIL, OUTPUTS = 40, 16  # tokens of each request's own prompt, and of its answer
PAGE, POOL = 16, 40_000 * 4  # tokens of a page, and of all pools together
UNDER_WAY = 128  # requests, whatever the number of groups
HEARTBEAT = 8  # rounds of steps between two


class Group:
    """A scheduler core and an engine core that computes nothing: every token is 7."""

    def __init__(self, number: int, pool: int, slots: int) -> None:
        self.number = number
        pages = pool // PAGE
        hello = Hello(PROTOCOL, "0", 0, 1, 1, "m", PAGE, pages, slots, 4096, "none")
        memory = MemoryManager(pages + 1, PAGE, slots, 4096)
        self.engine = EngineCore(hello, f"scheduler-{number}", memory)
        options = SchedulerOptions(max_running=slots, max_step_tokens=4096)
        self.scheduler = SchedulerCore(options, number)
        self.finished: list[str] = []
        self._steps: deque[Compute] = deque()
        self.feed(self.engine, Tick())

    def feed(self, core: Core, event: Message) -> None:
        for channel, _, message in core.handle(event, 0.0):
            if channel == LOCAL:
                assert isinstance(message, Compute)
                self._steps.append(message)
            elif channel == "result":
                self.feed(self.scheduler, message)
            elif isinstance(message, BeginEpoch | Plan):
                self.feed(self.engine, message)
            elif isinstance(message, Tokens):
                self.finished += [row.request_id for row in message.rows if row.finish]

    def step(self) -> None:
        if self._steps:
            step = self._steps.popleft().step
            ids = np.full(int(step.samples.sum()), 7, dtype=np.int32)
            self.feed(self.engine, step_done(step, Sampled.one_each(ids)))


@dataclass(frozen=True)
class Outcome:
    """hits: cached prompt tokens / prompt tokens. peak: the busiest group's prefill and decode
    tokens over the mean of all groups.
    """

    hits: float
    peak: float


class Tokenizers:
    """The routers of several tokenizers, of which the gateway's choice gives each prompt one."""

    def __init__(self, policy: str, groups: int, count: int) -> None:
        self.routers = {f"tokenizer-{n}": GroupRouter(policy, groups) for n in range(count)}
        self._of: dict[str, GroupRouter] = {}

    def choose(self, name: str, prompt: np.ndarray) -> int:
        call = Call(name, RequestParams(), prompt_ids=pack(prompt))
        stage = highest_random_weight(list(self.routers), prompt_beginning(call))
        router = self._of[name] = self.routers[stage]
        return router.choose(name, prompt, OUTPUTS, "")

    def on_ended(self, name: str) -> None:
        self._of.pop(name).on_ended(name)

    def on_report(self, group: int, report: GroupReport) -> None:
        for router in self.routers.values():
            router.on_report(group, report)


@cache
def serve(
    policy: str, groups: int, each: int = EACH, seed: int = 0, tokenizers: int = 1
) -> Outcome:
    """`each` requests of every prefix in random order, over so many groups that share POOL."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 50_000, PREFIX, np.int32) for _ in range(PREFIXES)]
    order = [prefix for prefix in range(PREFIXES) for _ in range(each)]
    random.Random(seed).shuffle(order)
    router, watch = Tokenizers(policy, groups, tokenizers), GroupMonitor()
    cluster = [Group(g, POOL // groups, 256 // groups) for g in range(groups)]
    left, under_way, rounds = deque(enumerate(order)), 0, 0
    params = RequestParams(max_tokens=OUTPUTS, ignore_eos=True)
    while left or under_way:
        while left and under_way < UNDER_WAY:
            number, prefix = left.popleft()
            prompt = np.concatenate((heads[prefix], rng.integers(0, 50_000, TAIL, np.int32)))
            name = f"r{number}"
            group = cluster[router.choose(name, prompt)]
            group.feed(group.scheduler, TokenizedRequest(name, 1, 0, 0, pack(prompt), params, 0))
            under_way += 1
        for group in cluster:
            group.step()
            for name in group.finished:
                router.on_ended(name)
                under_way -= 1
            group.finished.clear()
        rounds += 1
        if rounds % HEARTBEAT == 0:
            for group in cluster:
                report = watch.on_status(group.scheduler.status(), rounds)
                assert report is not None
                router.on_report(group.number, report)
    stats = [group.engine.stats() for group in cluster]
    served = [one["computed_tokens_total"] for one in stats]
    cached = sum(one["cached_tokens_total"] for one in stats)
    prompts = sum(one["prompt_tokens_total"] for one in stats)
    return Outcome(cached / prompts, max(served) * groups / sum(served))


def test_prefix_routing_hits_nearly_as_often_as_one_cache_of_all_memory():
    one, four = serve("prefix", 1, each=16), serve("prefix", 4, each=16)
    assert four.hits >= 0.9 * one.hits
    assert four.peak <= 1.25
    assert serve("round-robin", 4, each=16).hits < 0.6 * four.hits


def test_several_tokenizers_route_as_well_as_one():
    """Each sees all prompts that share a prefix, and what the others sent as load."""
    one, several = serve("prefix", 4, each=16), serve("prefix", 4, each=16, tokenizers=4)
    assert several.hits >= 0.95 * one.hits
    assert several.peak <= 1.25


def main() -> None:
    print(f"{PREFIXES} prefixes of {PREFIX} tokens, {EACH} requests of each")
    for policy, groups, tokenizers in (
        ("prefix", 1, 1), ("prefix", 4, 1), ("prefix", 4, 2), ("prefix", 4, 4),
        ("least-loaded", 4, 1), ("round-robin", 4, 1),
    ):  # fmt: skip
        found = serve(policy, groups, tokenizers=tokenizers)
        numbers = f"{groups:3}{tokenizers:3}{found.hits:10.1%}{found.peak:10.2f}"
        print(f"{policy:14}{numbers}", flush=True)


if __name__ == "__main__":
    main()
