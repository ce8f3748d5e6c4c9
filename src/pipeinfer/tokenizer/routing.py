"""Chooses the data-parallel group of a request, behind one small interface.

Knows prompts as token ids, and of groups what they report and what was sent to them. A choice
depends on what the router was told alone, never on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pipeinfer.close_names import none_of
from pipeinfer.settings import ConfigurationError
from pipeinfer.tokenizer.prefixes import BLOCK_TOKENS, ApproximateCache, block_hashes

# A prefix that is computed in another group is also kept there, in place of somebody else's.
PREFILL_WEIGHT = 2  # times what it costs to compute it

_NO_GROUPS: Set[int] = frozenset()

DEFAULT_OUTPUT_TOKENS = 256  # output tokens that a request without max_tokens is taken to need


@dataclass(frozen=True)
class GroupReport:
    """What a group says of itself. `requests`: live ones, `tokens`: left to compute of them, their
    prompts without regard to what is cached; `capacity`: tokens that its pool holds; `evicted`:
    from its prefix cache so far; `epoch`: how often it began with an empty one.
    """

    up: bool
    tokens: int = 0
    capacity: int = 0
    evicted: int = 0
    epoch: int = 0
    requests: int = 0


class RoutingPolicy(Protocol):
    """Which of the groups that are up gets a request."""

    def choose(self, groups: Sequence[int], hashes: list[bytes], length: int) -> int:
        """One of `groups`. `keys`: the prompt's chain (see prefixes.py), `length`: its tokens."""
        ...


class GroupTable:
    """What is known of all groups: who is up, how much each has to do, what each has cached."""

    def __init__(self, count: int) -> None:
        self.reports = [GroupReport(up=True) for _ in range(count)]
        self.up_count = count  # of those that are up
        self.caches = [ApproximateCache() for _ in range(count)]
        # By the first key of a chain: of no other group is any of the prompt believed cached.
        self._holders: dict[bytes, set[int]] = {}
        self.sent_tokens = [0] * count  # tokens of requests sent from here that have not ended
        self.open_requests = [0] * count  # the number of these requests
        self.total_sent_tokens = [0] * count  # of all requests sent from here
        self._foreign_tokens = [0] * count  # tokens that came from elsewhere, as of the last report

    def load(self, group: int) -> int:
        """Tokens that the group still has to compute, as far as is known here."""
        return self.sent_tokens[group] + self._foreign_tokens[group]

    def holders(self, hashes: Sequence[bytes]) -> Set[int]:
        """The groups that are believed to have the first block of a prompt with the chain `keys`,
        or more of it."""
        return self._holders.get(hashes[0], _NO_GROUPS) if hashes else _NO_GROUPS

    def add(self, group: int, hashes: Sequence[bytes]) -> None:
        """A prompt with the chain `keys` went to `group`."""
        if hashes:
            self._holders.setdefault(hashes[0], set()).add(group)
        self._on_evicted(group, self.caches[group].add(hashes, self.reports[group].capacity))

    def _on_evicted(self, group: int, hashes: Sequence[bytes]) -> None:
        for key in hashes:
            holders = self._holders.get(key)
            if holders is not None:
                holders.discard(group)
                if not holders:
                    del self._holders[key]

    def loads(self) -> list[int]:
        """load() of each group."""
        return [
            sent + foreign
            for sent, foreign in zip(self.sent_tokens, self._foreign_tokens, strict=True)
        ]

    def report(self, group: int, report: GroupReport) -> None:
        """Pages that were said to be evicted stay so: within an epoch they only become more."""
        before = self.reports[group]
        if report.epoch == before.epoch and report.evicted < before.evicted:
            report = replace(report, evicted=before.evicted)
        self.reports[group] = report
        self.up_count += report.up - before.up
        # By their number: of its own requests it is known here what they cost, and their tokens as
        # the group tells them would hide that behind prompts that are cached.
        foreign = max(report.requests - self.open_requests[group], 0)
        self._foreign_tokens[group] = report.tokens * foreign // max(report.requests, 1)
        if report.epoch != before.epoch:
            self._on_evicted(group, self.caches[group].clear())
        elif report.evicted > before.evicted:
            gone = self.caches[group].evict(report.evicted - before.evicted)
            self._on_evicted(group, gone)

    def up(self) -> list[int]:
        """Groups that may get requests; all of them if none is up, since one may come back."""
        up = [group for group, report in enumerate(self.reports) if report.up]
        return up or list(range(len(self.reports)))


class RoundRobin:
    """Each group in turn."""

    def __init__(self, groups: GroupTable) -> None:
        self._next = 0

    def choose(self, groups: Sequence[int], hashes: list[bytes], length: int) -> int:
        chosen = min(groups, key=lambda group: (group < self._next, group))
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The group with the fewest tokens to compute."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups

    def choose(self, groups: Sequence[int], hashes: list[bytes], length: int) -> int:
        known = self._groups
        return min(
            groups, key=lambda group: (known.load(group), known.total_sent_tokens[group], group)
        )


class LongestPrefix:
    """The group that has least to do with the request included: MOVING times what it has to compute
    of the prompt, and what it has to compute before. Among equals, the one that was given least.
    """

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups

    def choose(self, groups: Sequence[int], hashes: list[bytes], length: int) -> int:
        known = self._groups
        best, bound = (0, 0), 1 << 62  # (ever, group) of the best, and its cost
        loads, holders, nothing = known.loads(), known.holders(hashes), PREFILL_WEIGHT * length
        least = PREFILL_WEIGHT * max(length - BLOCK_TOKENS * len(hashes), 0)
        # From the least loaded on, so that of a thousand groups most are never looked at.
        for group in sorted(groups, key=loads.__getitem__):
            load = loads[group]
            if least + load > bound:
                break  # it has more to do even if it had the whole prompt cached, and so have all
            cost = nothing + load
            if group in holders:
                cost -= PREFILL_WEIGHT * known.caches[group].matched_tokens(hashes)
            if cost < bound or (cost == bound and (known.total_sent_tokens[group], group) < best):
                best, bound = (known.total_sent_tokens[group], group), cost
        return best[1]


ROUTING_POLICIES: dict[str, Callable[[GroupTable], RoutingPolicy]] = {
    "prefix": LongestPrefix,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}


class Router:
    """Chooses groups by a policy and keeps account of what it sent where."""

    def __init__(self, policy: str, groups: int) -> None:
        """ConfigurationError for a policy that there is not."""
        if policy not in ROUTING_POLICIES:
            raise ConfigurationError(f"--routing: {none_of(policy, ROUTING_POLICIES)}")
        self._groups = GroupTable(groups)
        self._policy = ROUTING_POLICIES[policy](self._groups)
        self._one_group = groups == 1
        self._open: dict[str, tuple[int, int]] = {}  # request -> (group, tokens counted for it)

    def choose(
        self, request_id: str, prompt_ids: np.ndarray, max_tokens: int | None, cache_salt: str
    ) -> int:
        """The group for a request, which counts as sent there. `prompt_ids`: int32 [n]."""
        if self._one_group:
            return 0
        self.on_ended(request_id)
        keys = block_hashes(prompt_ids, cache_salt)
        group = self._policy.choose(self._groups.up(), keys, len(prompt_ids))
        self._send(request_id, group, keys, len(prompt_ids), max_tokens)
        return group

    def record_sent(
        self,
        group: int,
        request_id: str,
        prompt_ids: np.ndarray,
        max_tokens: int | None,
        cache_salt: str,
    ) -> int:
        """The request is with `group` already, which is returned: an earlier process sent it."""
        if not self._one_group and request_id not in self._open:
            keys = block_hashes(prompt_ids, cache_salt)
            self._send(request_id, group, keys, len(prompt_ids), max_tokens)
        return group

    def add_follower(self, request_id: str, group: int, max_tokens: int | None) -> None:
        """A request was sent to `group` behind another with the same prompt, which it finds there
        computed."""
        if not self._one_group and request_id not in self._open:
            self._count(request_id, group, _output_tokens(max_tokens))

    def on_ended(self, request_id: str) -> None:
        """The request is over; unknown ones are fine."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            group, tokens = entry
            self._groups.sent_tokens[group] -= tokens
            self._groups.open_requests[group] -= 1

    def report(self, group: int, report: GroupReport) -> None:
        """What a group says of itself now."""
        self._groups.report(group, report)

    @property
    def up(self) -> int:
        """How many groups may get requests, as far as is known here."""
        return self._groups.up_count

    def loads(self) -> list[int]:
        """Tokens that each group still has to compute, as far as is known here."""
        return self._groups.loads()

    def _send(
        self, request_id: str, group: int, hashes: list[bytes], length: int, max_tokens: int | None
    ) -> None:
        missing = length - self._groups.caches[group].matched_tokens(hashes)
        self._count(request_id, group, missing + _output_tokens(max_tokens))
        self._groups.add(group, hashes)

    def _count(self, request_id: str, group: int, tokens: int) -> None:
        groups = self._groups
        groups.sent_tokens[group] += tokens
        groups.open_requests[group] += 1
        groups.total_sent_tokens[group] += tokens
        self._open[request_id] = (group, tokens)


def _output_tokens(max_tokens: int | None) -> int:
    return DEFAULT_OUTPUT_TOKENS if max_tokens is None else max_tokens
