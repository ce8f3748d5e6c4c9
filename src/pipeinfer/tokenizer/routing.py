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
from pipeinfer.tokenizer.prefixes import BLOCK, Prefixes, chain

# A prefix that is computed in another group is also kept there, in place of somebody else's.
MOVING = 2  # times what it costs to compute it

_NOBODY: Set[int] = frozenset()

UNKNOWN_OUTPUT = 256  # output tokens that a request without max_tokens is taken to need


@dataclass(frozen=True)
class Report:
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


class Policy(Protocol):
    """Which of the groups that are up gets a request."""

    def choose(self, groups: Sequence[int], keys: list[bytes], length: int) -> int:
        """One of `groups`. `keys`: the prompt's chain (see prefixes.py), `length`: its tokens."""
        ...


class Groups:
    """What is known of all groups: who is up, how much each has to do, what each has cached."""

    def __init__(self, count: int) -> None:
        self.reports = [Report(up=True) for _ in range(count)]
        self.up_count = count  # of those that are up
        self.prefixes = [Prefixes() for _ in range(count)]
        # By the first key of a chain: of no other group is any of the prompt believed cached.
        self._holders: dict[bytes, set[int]] = {}
        self.sent = [0] * count  # tokens of requests sent from here that have not ended
        self.open = [0] * count  # the number of these requests
        self.ever = [0] * count  # of all requests sent from here
        self._foreign = [0] * count  # tokens that came from elsewhere, as of the last report

    def load(self, group: int) -> int:
        """Tokens that the group still has to compute, as far as is known here."""
        return self.sent[group] + self._foreign[group]

    def holders(self, keys: Sequence[bytes]) -> Set[int]:
        """The groups that are believed to have the first block of a prompt with the chain `keys`,
        or more of it."""
        return self._holders.get(keys[0], _NOBODY) if keys else _NOBODY

    def add(self, group: int, keys: Sequence[bytes]) -> None:
        """A prompt with the chain `keys` went to `group`."""
        if keys:
            self._holders.setdefault(keys[0], set()).add(group)
        self._forgot(group, self.prefixes[group].add(keys, self.reports[group].capacity))

    def _forgot(self, group: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            holders = self._holders.get(key)
            if holders is not None:
                holders.discard(group)
                if not holders:
                    del self._holders[key]

    def loads(self) -> list[int]:
        """load() of each group."""
        return [sent + foreign for sent, foreign in zip(self.sent, self._foreign, strict=True)]

    def report(self, group: int, report: Report) -> None:
        """Pages that were said to be evicted stay so: within an epoch they only become more."""
        before = self.reports[group]
        if report.epoch == before.epoch and report.evicted < before.evicted:
            report = replace(report, evicted=before.evicted)
        self.reports[group] = report
        self.up_count += report.up - before.up
        # By their number: of its own requests it is known here what they cost, and their tokens as
        # the group tells them would hide that behind prompts that are cached.
        foreign = max(report.requests - self.open[group], 0)
        self._foreign[group] = report.tokens * foreign // max(report.requests, 1)
        if report.epoch != before.epoch:
            self._forgot(group, self.prefixes[group].clear())
        elif report.evicted > before.evicted:
            gone = self.prefixes[group].evicted(report.evicted - before.evicted)
            self._forgot(group, gone)

    def up(self) -> list[int]:
        """Groups that may get requests; all of them if none is up, since one may come back."""
        up = [group for group, report in enumerate(self.reports) if report.up]
        return up or list(range(len(self.reports)))


class RoundRobin:
    """Each group in turn."""

    def __init__(self, groups: Groups) -> None:
        self._next = 0

    def choose(self, groups: Sequence[int], keys: list[bytes], length: int) -> int:
        chosen = min(groups, key=lambda group: (group < self._next, group))
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The group with the fewest tokens to compute."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def choose(self, groups: Sequence[int], keys: list[bytes], length: int) -> int:
        known = self._groups
        return min(groups, key=lambda group: (known.load(group), known.ever[group], group))


class LongestPrefix:
    """The group that has least to do with the request included: MOVING times what it has to compute
    of the prompt, and what it has to compute before. Among equals, the one that was given least.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def choose(self, groups: Sequence[int], keys: list[bytes], length: int) -> int:
        known = self._groups
        best, bound = (0, 0), 1 << 62  # (ever, group) of the best, and its cost
        loads, holders, nothing = known.loads(), known.holders(keys), MOVING * length
        least = MOVING * max(length - BLOCK * len(keys), 0)
        # From the least loaded on, so that of a thousand groups most are never looked at.
        for group in sorted(groups, key=loads.__getitem__):
            load = loads[group]
            if least + load > bound:
                break  # it has more to do even if it had the whole prompt cached, and so have all
            cost = nothing + load
            if group in holders:
                cost -= MOVING * known.prefixes[group].matched(keys)
            if cost < bound or (cost == bound and (known.ever[group], group) < best):
                best, bound = (known.ever[group], group), cost
        return best[1]


POLICIES: dict[str, Callable[[Groups], Policy]] = {
    "prefix": LongestPrefix,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}


class Router:
    """Chooses groups by a policy and keeps account of what it sent where."""

    def __init__(self, policy: str, groups: int) -> None:
        """ConfigurationError for a policy that there is not."""
        if policy not in POLICIES:
            raise ConfigurationError(f"--routing: {none_of(policy, POLICIES)}")
        self._groups = Groups(groups)
        self._policy = POLICIES[policy](self._groups)
        self._alone = groups == 1
        self._open: dict[str, tuple[int, int]] = {}  # request -> (group, tokens counted for it)

    def choose(
        self, request_id: str, prompt_ids: np.ndarray, max_tokens: int | None, cache_salt: str
    ) -> int:
        """The group for a request, which counts as sent there. `prompt_ids`: int32 [n]."""
        if self._alone:
            return 0
        self.ended(request_id)
        keys = chain(prompt_ids, cache_salt)
        group = self._policy.choose(self._groups.up(), keys, len(prompt_ids))
        self._send(request_id, group, keys, len(prompt_ids), max_tokens)
        return group

    def sent(
        self,
        group: int,
        request_id: str,
        prompt_ids: np.ndarray,
        max_tokens: int | None,
        cache_salt: str,
    ) -> int:
        """The request is with `group` already, which is returned: an earlier process sent it."""
        if not self._alone and request_id not in self._open:
            keys = chain(prompt_ids, cache_salt)
            self._send(request_id, group, keys, len(prompt_ids), max_tokens)
        return group

    def follows(self, request_id: str, group: int, max_tokens: int | None) -> None:
        """A request was sent to `group` behind another with the same prompt, which it finds there
        computed."""
        if not self._alone and request_id not in self._open:
            self._count(request_id, group, _outputs(max_tokens))

    def ended(self, request_id: str) -> None:
        """The request is over; unknown ones are fine."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            group, tokens = entry
            self._groups.sent[group] -= tokens
            self._groups.open[group] -= 1

    def report(self, group: int, report: Report) -> None:
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
        self, request_id: str, group: int, keys: list[bytes], length: int, max_tokens: int | None
    ) -> None:
        missing = length - self._groups.prefixes[group].matched(keys)
        self._count(request_id, group, missing + _outputs(max_tokens))
        self._groups.add(group, keys)

    def _count(self, request_id: str, group: int, tokens: int) -> None:
        groups = self._groups
        groups.sent[group] += tokens
        groups.open[group] += 1
        groups.ever[group] += tokens
        self._open[request_id] = (group, tokens)


def _outputs(max_tokens: int | None) -> int:
    return UNKNOWN_OUTPUT if max_tokens is None else max_tokens
