"""Chooses the data-parallel group of a request: prefix-aware, by load, or in turn.

- GroupRouter: the choice by a RoutingPolicy, and the requests that were sent to each group.
- ApproximateCache: the expected content of a group's prefix cache, as hashes of token blocks. Made
  from the prompts that were sent there and the number of tokens that the group reports as evicted.
  If it is wrong, a prompt is computed again; no answer changes.
- GroupMonitor: which groups are up, from their schedulers' statuses and their silence.

Knows prompts as token ids. A choice depends on the calls alone, never on a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from typing import Protocol

import numpy as np

from pipeinfer.command_line import none_of
from pipeinfer.core import SuspendAwareClock, silence_limit
from pipeinfer.messages import Ended, GroupStatus
from pipeinfer.settings import ConfigurationError

BLOCK_TOKENS = 64  # tokens of a block, the unit of ApproximateCache
# Seconds without a status after which a scheduler counts as lost, or more (silence_limit).
MAX_SILENCE_SECONDS = 3.0
NO_INCARNATION = -1  # of a group without a status
# A token of a prompt counts as so many tokens of load: a prefix that is computed a second time, in
# another group, also takes memory there.
PREFILL_WEIGHT = 2

_NO_GROUPS: Set[int] = frozenset()

DEFAULT_OUTPUT_TOKENS = 256  # of a request without max_tokens, for the load of its group


@dataclass(frozen=True)
class GroupReport:
    """The state of a group.

    up: whether it can be sent requests.
    tokens: left to compute of its live requests; prompts count in full, cached or not.
    capacity: tokens that its KV pool holds; 0: unknown.
    evicted: tokens evicted from its prefix cache in this epoch.
    epoch: the number of its scheduler's epoch.
    requests: live ones.
    """

    up: bool
    tokens: int = 0
    capacity: int = 0
    evicted: int = 0
    epoch: int = 0
    requests: int = 0


class RoutingPolicy(Protocol):
    """Chooses among the groups that are up."""

    def choose(self, groups: Sequence[int], hashes: list[bytes], length: int) -> int:
        """One of `groups`. `hashes`: block_hashes of the prompt, `length`: its tokens."""
        ...


class GroupTable:
    """All groups: reports, load, cached prefixes. Lists are by group.

    reports: the last of each group.
    up_count: groups that are up.
    caches: prefixes that each group should have cached.
    sent_tokens: of requests that were sent from here and have not ended.
    open_requests: the number of these requests.
    total_sent_tokens: of all requests that were sent from here.
    _holders: first block hash of a prompt -> groups that have it. No other group has any of it.
    _elsewhere_tokens: of requests that came from elsewhere, as of the last report.
    _reported: requests from here, and all, summed over the reports: so much of a group is ours.
    """

    def __init__(self, count: int) -> None:
        self.reports = [GroupReport(up=True) for _ in range(count)]
        self.up_count = count
        self.caches = [ApproximateCache() for _ in range(count)]
        self._holders: dict[bytes, set[int]] = {}
        self.sent_tokens = [0] * count
        self.open_requests = [0] * count
        self.total_sent_tokens = [0] * count
        self._elsewhere_tokens = [0] * count
        self._reported = [(0, 0)] * count

    def load(self, group: int) -> int:
        """Tokens that the group still has to compute, as far as is known here."""
        return self.sent_tokens[group] + self._elsewhere_tokens[group]

    def holders(self, hashes: Sequence[bytes]) -> Set[int]:
        """The groups that should have the first block of a prompt with these block hashes cached,
        or more of it."""
        return self._holders.get(hashes[0], _NO_GROUPS) if hashes else _NO_GROUPS

    def add(self, group: int, hashes: Sequence[bytes]) -> None:
        """A prompt with these block hashes was sent to `group`."""
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
            sent + elsewhere
            for sent, elsewhere in zip(self.sent_tokens, self._elsewhere_tokens, strict=True)
        ]

    def on_report(self, group: int, report: GroupReport) -> None:
        """Takes a report. Within an epoch the number of evicted tokens only grows."""
        before = self.reports[group]
        if report.epoch == before.epoch and report.evicted < before.evicted:
            report = replace(report, evicted=before.evicted)
        self.reports[group] = report
        self.up_count += report.up - before.up
        self._elsewhere_tokens[group] = self._tokens_from_elsewhere(group, report)
        ours, all_requests = self._reported[group]
        ours += min(self.open_requests[group], report.requests)
        all_requests += report.requests
        self._reported[group] = ours, all_requests
        if report.epoch != before.epoch:
            self._on_evicted(group, self.caches[group].clear())
        elif report.evicted > before.evicted:
            # Of what other tokenizers sent there, as much was evicted in proportion.
            tokens = report.evicted - before.evicted
            if all_requests:
                tokens = tokens * ours // all_requests
            self._on_evicted(group, self.caches[group].evict(tokens))

    def _tokens_from_elsewhere(self, group: int, report: GroupReport) -> int:
        """Requests from other tokenizers count as those from here do on average: a group counts
        cached prompts in full until they have a slot, this process does not."""
        elsewhere = max(report.requests - self.open_requests[group], 0)
        here = sum(self.open_requests)
        if here:
            return elsewhere * sum(self.sent_tokens) // here
        return report.tokens * elsewhere // max(report.requests, 1)

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
        table = self._groups
        return min(
            groups, key=lambda group: (table.load(group), table.total_sent_tokens[group], group)
        )


class LongestPrefix:
    """The group with the least to compute, this request included: PREFILL_WEIGHT times the part of
    the prompt that is not cached there, plus its load. Among equals, the group that was sent the
    fewest tokens so far."""

    def __init__(self, groups: GroupTable) -> None:
        self._groups = groups

    def choose(self, groups: Sequence[int], hashes: list[bytes], length: int) -> int:
        table = self._groups
        best, bound = (0, 0), 1 << 62  # (total sent tokens, group) of the best, and its cost
        loads, holders = table.loads(), table.holders(hashes)
        uncached = PREFILL_WEIGHT * length  # cost of the prompt where nothing is cached
        least = PREFILL_WEIGHT * max(length - BLOCK_TOKENS * len(hashes), 0)
        # From the least loaded on, so that most of a thousand groups need not be compared.
        for group in sorted(groups, key=loads.__getitem__):
            load = loads[group]
            if least + load > bound:
                break  # it has more to do even if it had the whole prompt cached, and so have all
            cost = uncached + load
            if group in holders:
                cost -= PREFILL_WEIGHT * table.caches[group].matched_tokens(hashes)
            if cost < bound or (cost == bound and (table.total_sent_tokens[group], group) < best):
                best, bound = (table.total_sent_tokens[group], group), cost
        return best[1]


ROUTING_POLICIES: dict[str, Callable[[GroupTable], RoutingPolicy]] = {
    "prefix": LongestPrefix,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}


class GroupRouter:
    """Chooses groups by a policy, and counts the tokens that were sent to each."""

    def __init__(self, policy: str, groups: int) -> None:
        """Raises ConfigurationError for an unknown policy."""
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
        hashes = block_hashes(prompt_ids, cache_salt)
        group = self._policy.choose(self._groups.up(), hashes, len(prompt_ids))
        self._send(request_id, group, hashes, len(prompt_ids), max_tokens)
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
            hashes = block_hashes(prompt_ids, cache_salt)
            self._send(request_id, group, hashes, len(prompt_ids), max_tokens)
        return group

    def add_follower(self, request_id: str, group: int, max_tokens: int | None) -> None:
        """A request was sent to `group` behind another one with the same prompt, which is computed
        once."""
        if not self._one_group and request_id not in self._open:
            self._count(request_id, group, _output_tokens(max_tokens))

    def on_ended(self, request_id: str) -> None:
        """The request is over; unknown ones are fine."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            group, tokens = entry
            self._groups.sent_tokens[group] -= tokens
            self._groups.open_requests[group] -= 1

    def on_report(self, group: int, report: GroupReport) -> None:
        """Takes the report of a group."""
        self._groups.on_report(group, report)

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


def block_hashes(prompt_ids: np.ndarray, cache_salt: str) -> list[bytes]:
    """A hash for each whole block of `prompt_ids` int32 [n], which stands for the whole prefix up
    to the block's end.

    Hashes do not depend on the process, so that a recorded run routes the same way again.
    """
    key = blake2b(cache_salt.encode(), digest_size=8).digest()
    raw = np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes()
    hashes: list[bytes] = []
    for end in range(4 * BLOCK_TOKENS, len(raw) + 1, 4 * BLOCK_TOKENS):
        key = blake2b(key + raw[end - 4 * BLOCK_TOKENS : end], digest_size=8).digest()
        hashes.append(key)
    return hashes


class ApproximateCache:
    """The prefixes that one group should have cached, least recently used first.

    Methods that change it return the hashes of the blocks that are no longer in it.
    _blocks: block hashes in order of use.
    _evicted_remainder: tokens that the group evicted beyond whole blocks.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._evicted_remainder = 0

    def matched_tokens(self, hashes: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt with these block hashes that should be cached."""
        count = 0
        for key in hashes:
            if key not in self._blocks:
                break
            count += 1
        return count * BLOCK_TOKENS

    def add(self, hashes: Sequence[bytes], capacity: int) -> list[bytes]:
        """A prompt was sent there; the group's pool holds `capacity` tokens, 0: unknown."""
        # The prompt's last block first, so that its first block is evicted last.
        for key in reversed(hashes):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        blocks = max(capacity // BLOCK_TOKENS, 1)
        return self._evict_blocks(len(self._blocks) - blocks) if capacity else []

    def evict(self, tokens: int) -> list[bytes]:
        """The group evicted so many tokens: as many go here."""
        blocks, self._evicted_remainder = divmod(self._evicted_remainder + tokens, BLOCK_TOKENS)
        return self._evict_blocks(blocks)

    def clear(self) -> list[bytes]:
        """The group has begun another epoch: what its prefix cache holds now is not known."""
        self._evicted_remainder = 0
        return self._evict_blocks(len(self._blocks))

    def __len__(self) -> int:
        """Tokens that should be cached."""
        return len(self._blocks) * BLOCK_TOKENS

    def _evict_blocks(self, blocks: int) -> list[bytes]:
        count = min(max(blocks, 0), len(self._blocks))
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]


@dataclass
class _GroupState:
    """One group.

    status: the last of its scheduler.
    received_at: when it came, in seconds of the suspend-aware clock.
    lost: whether the scheduler is silent or has ended since.
    """

    status: GroupStatus
    received_at: float
    lost: bool = False

    @property
    def report(self) -> GroupReport:
        status = self.status
        up = status.readiness == "serves" and not self.lost
        return GroupReport(
            up, status.tokens, status.capacity, status.evicted, status.epoch, status.requests
        )

    @property
    def deserted(self) -> bool:
        return self.status.readiness == "deserted" and not self.lost


class GroupMonitor:
    """The last status of each group. A group without a status counts as up: it starts.

    groups: their numbers.
    host_loss: seconds of silence after which a group is given up; at least the time that many
      groups may take for one round of statuses. Seconds in which this stage was stopped do not
      count.
    """

    def __init__(self, groups: int = 1, host_loss: float = inf) -> None:
        self.groups = tuple(range(groups))
        self.host_loss = max(host_loss, silence_limit(groups, 0.0))
        self._max_silence = min(silence_limit(groups, MAX_SILENCE_SECONDS), self.host_loss)
        self._not_started = set(self.groups)
        self._suspend_aware_clock = SuspendAwareClock()
        self._groups: dict[int, _GroupState] = {}

    def on_status(self, status: GroupStatus, now: float) -> GroupReport | None:
        """The group's report; None for a status of an earlier scheduler or epoch. `now`: monotonic
        s."""
        state = self._groups.get(status.group)
        if state is not None and _epoch(status) < _epoch(state.status):
            return None
        self._not_started.discard(status.group)
        state = self._groups[status.group] = _GroupState(status, self._suspend_aware_clock.at(now))
        return state.report

    def on_ended(self, event: Ended) -> tuple[int, GroupReport | None]:
        """A stage has ended. If it is a scheduler, and its end was not known: the group's
        number and report; else (-1, None)."""
        name, _, number = event.stage.rpartition("-")
        if name != "scheduler" or not number.isdecimal():
            return -1, None
        state = self._groups.get(int(number))
        if (
            state is None
            or state.lost
            or not NO_INCARNATION < state.status.incarnation <= event.incarnation
        ):
            return -1, None
        state.lost = True
        return state.status.group, state.report

    def tick(self, now: float) -> None:
        """This stage's timer fired."""
        self._suspend_aware_clock.tick(now)

    def newly_silent(self, now: float) -> list[tuple[int, GroupReport]]:
        """Groups that are down from now on because their scheduler is silent."""
        now = self._suspend_aware_clock.at(now)
        self._expect_all(now)
        silent: list[tuple[int, GroupReport]] = []
        for number, state in self._groups.items():
            started = state.status.incarnation != NO_INCARNATION
            max_silence = self._max_silence if started else self.host_loss
            if now - state.received_at > max_silence and not state.lost:
                was, state.lost = state.report.up, True
                if was:
                    silent.append((number, state.report))
        return silent

    def lost(self, now: float) -> list[tuple[int, float]]:
        """Groups whose scheduler has been silent for `host_loss`, with the seconds of silence."""
        now = self._suspend_aware_clock.at(now)
        silences = [(number, now - state.received_at) for number, state in self._groups.items()]
        return [(number, seconds) for number, seconds in silences if seconds > self.host_loss]

    def is_deserted(self, group: int) -> bool:
        """Whether the scheduler of `group` has no engines and can hand its requests over."""
        return group in self._groups and self._groups[group].deserted

    def deserted(self) -> list[int]:
        """Groups for which is_deserted() holds."""
        return sorted(group for group, state in self._groups.items() if state.deserted)

    def _expect_all(self, now: float) -> None:
        """Silence of groups without a status counts from the first call on."""
        for group in self._not_started:
            status = GroupStatus(group=group, incarnation=NO_INCARNATION, readiness="serves")
            self._groups[group] = _GroupState(status, now)
        self._not_started.clear()


def _epoch(status: GroupStatus) -> tuple[int, int]:
    return status.incarnation, status.epoch
