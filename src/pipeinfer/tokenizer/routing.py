"""The tokenizer's unfinished requests, and which data-parallel group each goes to: prefix-aware, by
load, or in turn.

- GroupRouter: the choice by a RoutingPolicy, and the requests that were sent to each group.
- ApproximateCache: the expected content of a group's prefix cache, as hashes of token blocks. Made
  from the prompts that were sent there and the number of tokens that the group reports as evicted.
  If it is wrong, a prompt is computed again; no answer changes.
- GroupMonitor: which groups are up, from their schedulers' statuses and their silence.
- PendingPrompts: requests that are not encoded yet. A worker process encodes the prompt or
  validates the grammar meanwhile.
- RoutedRequests: requests that were sent to a group, until Done or Abort. A restarted scheduler
  gets its requests again from here.
- VerdictCache: grammars that have been validated, by digest.

Both tables of requests are bounded by the gateways' limit on waiting requests. Prompts are token
ids. A choice depends on the calls alone, never on a clock. Knows no bus.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import structs

from pipeinfer.command_line import none_of
from pipeinfer.core import SuspendAwareClock, block_hashes, silence_limit, stage_number
from pipeinfer.messages import Accepted, Adopt, Ended, GroupStatus, Submit, TokenizedRequest
from pipeinfer.params import StructuredOutputs, choice_id, choice_ids
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import pack

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

    Attributes:
    - up: whether it can be sent requests
    - tokens: left to compute of its live requests; prompts count in full, cached or not
    - capacity: tokens that its KV pool holds; 0: unknown
    - evicted: tokens evicted from its prefix cache in this epoch
    - epoch: the number of its scheduler's epoch
    - requests: live ones
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
        """Returns one of `groups`. hashes: block_hashes of the prompt; length: its tokens."""
        ...


class GroupTable:
    """All groups: reports, load, cached prefixes. Lists are by group.

    Attributes:
    - reports: the last of each group
    - up_count: groups that are up
    - caches: prefixes that each group should have cached
    - sent_tokens: of requests that were sent from here and have not ended
    - open_requests: the number of these requests
    - total_sent_tokens: of all requests that were sent from here
    - _holders: first block hash of a prompt -> groups that have it. No other group has any of it.
    - _elsewhere_tokens: of requests that came from elsewhere, as of the last report
    - _reported: requests from here, and all, summed over the reports: so much of a group is ours
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
            # Evictions hit the prompts of all tokenizers, so in proportion those from here.
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
        hashes = block_hashes(pack(prompt_ids), BLOCK_TOKENS, cache_salt)
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
            hashes = block_hashes(pack(prompt_ids), BLOCK_TOKENS, cache_salt)
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
    """The last status of a group, and when it came.

    Attributes:
    - status: the last of its scheduler
    - received_at: when it came, in seconds of the suspend-aware clock
    - lost: whether the scheduler is silent or has ended since
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

    Attributes:
    - groups: their numbers
    - host_loss: seconds of silence after which a group is given up; at least the time that many
      groups may take for one round of statuses. Seconds in which this stage was stopped do not
      count
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
        group = stage_number(event.stage, "scheduler")
        if group is None:
            return -1, None
        state = self._groups.get(group)
        if (
            state is None
            or state.lost
            or not NO_INCARNATION < state.status.incarnation <= event.incarnation
        ):
            return -1, None
        state.lost = True
        return state.status.group, state.report

    def tick(self, now: float) -> None:
        """Advances the clock; to be called at each tick of this stage."""
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


MAX_ORIGIN_BYTES = 2**20  # of a request, beside its prompt, in scheduler and detokenizer


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A request whose prompt is not encoded yet.

    Attributes:
    - submit: the request, with the choices that have not ended
    - in_one_group: see RoutedRequest. Decided on arrival: before all gateways have answered the
      roll call, the process before this one may have sent it to a group.
    - grammar_to_validate: digest of its grammar while that is validated, else empty
    - refusal: why its first grammar is not served, if it goes on with the other one
    """

    submit: Submit
    in_one_group: bool
    grammar_to_validate: bytes = b""
    refusal: str = ""

    def with_fallback_grammar(self, refusal: str) -> PendingPrompt:
        """A copy with the request's second grammar, because the first one is refused."""
        fallback = self.submit.fallback_grammar
        params = structs.replace(self.submit.params, structured_outputs=fallback)
        submit = structs.replace(self.submit, params=params, fallback_grammar=None)
        return replace(self, submit=submit, refusal=refusal)


def first_choice(submit: Submit) -> str:
    """The request id of its first choice, the key of a pending prompt. There may be another Submit
    of the same request, with other choices."""
    return choice_id(submit.request_id, submit.choices[0])


def without_choice(submit: Submit, request_id: str) -> Submit | None:
    """`submit` without the choice `request_id`; None if there is no other choice."""
    name = submit.request_id
    choices = tuple(number for number in submit.choices if choice_id(name, number) != request_id)
    return structs.replace(submit, choices=choices) if choices else None


class PendingPrompts:
    """Requests whose prompts are not encoded yet, in order of arrival.

    Attributes:
    - abandoned: choices that ended before they were encoded
    - verdicts: on grammars
    - _prompts: by first choice
    - _first_choices: of each choice that has not ended, the first choice of its Submit
    """

    def __init__(self) -> None:
        self._prompts: dict[str, PendingPrompt] = {}
        self._first_choices: dict[str, str] = {}
        self.abandoned = 0
        self.verdicts = VerdictCache()

    def __len__(self) -> int:
        return len(self._prompts)

    def put(self, prompt: PendingPrompt) -> None:
        """Adds a request; a new attempt replaces an older one."""
        submit, name = prompt.submit, first_choice(prompt.submit)
        for choice in choice_ids(submit.request_id, submit.choices):
            self.discard(choice)
            self._first_choices[choice] = name
        self._prompts[name] = prompt

    def get(self, name: str, attempt: int) -> PendingPrompt | None:
        """The request with that first choice; None unless this attempt is pending."""
        prompt = self._prompts.get(name)
        return prompt if prompt is not None and prompt.submit.attempt == attempt else None

    def waiting_for_verdict(self, grammar: bytes) -> list[str]:
        """First choices of the requests that wait for a verdict on `grammar`."""
        return [
            name for name, prompt in self._prompts.items() if prompt.grammar_to_validate == grammar
        ]

    def end_validation(self, name: str) -> PendingPrompt:
        """There is a verdict on its grammar."""
        return self.replace(name, replace(self._prompts[name], grammar_to_validate=b""))

    def replace(self, name: str, prompt: PendingPrompt) -> PendingPrompt:
        """Puts `prompt` in the place of the request with first choice `name`."""
        self._prompts[name] = prompt
        return prompt

    def has(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of the request, or a later one, is pending."""
        prompt = self._prompts.get(self._first_choices.get(request_id, ""))
        return prompt is not None and prompt.submit.attempt >= attempt

    def may_be_elsewhere(self, request_id: str) -> bool:
        """Whether it is pending, and the process before this one may have sent it to a group."""
        prompt = self._prompts.get(self._first_choices.get(request_id, ""))
        return prompt is not None and not prompt.in_one_group

    def pop(self, name: str) -> None:
        """Removes a request that has been encoded or refused."""
        submit = self._prompts.pop(name).submit
        for choice in choice_ids(submit.request_id, submit.choices):
            del self._first_choices[choice]

    def discard(self, request_id: str) -> None:
        """Removes a choice that has ended, if it is pending."""
        name = self._first_choices.pop(request_id, None)
        if name is None:
            return
        self.abandoned += 1
        prompt = self._prompts[name]
        remaining = without_choice(prompt.submit, request_id)
        if remaining is None:
            del self._prompts[name]
        else:
            self._prompts[name] = replace(prompt, submit=remaining)

    def retained(self, gateway: int) -> list[Submit]:
        """The requests of a gateway whose answers are kept."""
        of_gateway = (p.submit for p in self._prompts.values() if p.submit.gateway == gateway)
        return [submit for submit in of_gateway if submit.retention is not None]

    def discard_unretained(self, gateway: int) -> None:
        """Removes the other requests of a gateway."""
        names = {
            name
            for name, prompt in self._prompts.items()
            if prompt.submit.gateway == gateway and prompt.submit.retention is None
        }
        for choice in [choice for choice, name in self._first_choices.items() if name in names]:
            self.discard(choice)

    def clear(self) -> None:
        """Removes all requests: another process goes on."""
        self._prompts.clear()
        self._first_choices.clear()


class Origin(NamedTuple):
    """The messages from which a restarted gateway makes a request whose answer is kept.

    Attributes:
    - submit: as it came, with all its choices
    - accepted: the answer to it
    - waited: as in Adopt
    """

    submit: Submit
    accepted: Accepted
    waited: float = 0.0


def with_origin(
    works: Sequence[TokenizedRequest], origin: Origin, stage: str
) -> list[TokenizedRequest]:
    """Copies of `works`, of a request whose answer is kept, each with how many bytes are kept of
    it; the first with the Adopt that the tokenizer `stage` would send to a restarted gateway,
    unless that is too large."""
    first, *others = works
    encoded = msgspec.msgpack.encode(
        Adopt(stage=stage, submit=origin.submit, accepted=origin.accepted)
    )
    each = len(first.prompt_ids) + len(msgspec.msgpack.encode(first.params))
    if len(encoded) > MAX_ORIGIN_BYTES:
        first = _retained(first, kept_bytes=each + len(encoded))
    else:
        first = _retained(first, kept_bytes=each, origin=encoded)
    return [first, *(_retained(work, kept_bytes=each) for work in others)]


def _retained(work: TokenizedRequest, kept_bytes: int, origin: bytes = b"") -> TokenizedRequest:
    assert work.retention is not None
    changed = structs.replace(work.retention, kept_bytes=kept_bytes, origin=origin)
    return structs.replace(work, retention=changed)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that was sent to a group.

    Attributes:
    - work: what the scheduler got
    - group: its data-parallel group
    - group_certain: False if an earlier tokenizer may have sent it to another group
    - in_one_group: False if other groups may have the request, too
    - origin: of a request whose answer is kept; else None
    """

    work: TokenizedRequest
    group: int
    group_certain: bool = True
    in_one_group: bool = True
    origin: Origin | None = None


class RoutedRequests:
    """Requests that were sent to a group, in order of arrival, by request id."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._entries: dict[str, RoutedRequest] = {}
        self._alone_since: dict[str, float] = {}  # seconds, of kept answers without reader

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: RoutedRequest) -> None:
        """Adds a request; a new attempt goes to the end."""
        self._entries.pop(entry.work.request_id, None)
        self._entries[entry.work.request_id] = entry

    def has(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of the request, or a later one, is here."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.work.attempt >= attempt

    def remove(self, request_id: str) -> tuple[int, ...] | None:
        """Removes a request; returns the groups that may have it, None if it is unknown."""
        entry = self._entries.pop(request_id, None)
        self._alone_since.pop(request_id, None)
        if entry is None:
            return None
        return (entry.group,) if entry.in_one_group else self._groups

    def of_group(self, group: int) -> Iterator[TokenizedRequest]:
        """The requests that the scheduler of `group` has or may have. It must get both: it aborts
        requests that are not among them, also while another group goes on with them."""
        return (e.work for e in self._entries.values() if e.group == group or not e.group_certain)

    def mark_leaving(self, group: int) -> list[TokenizedRequest]:
        """The requests of `group`, which is asked to hand them over: from now on they may be in
        several groups."""
        entries = [e for e in self._entries.values() if e.group == group]
        for entry in entries:
            self._entries[entry.work.request_id] = replace(entry, in_one_group=False)
        return [entry.work for entry in entries]

    def move(self, request_id: str, group: int, attempt: int) -> TokenizedRequest:
        """`group` goes on with an unfinished request, as this attempt; returns its work."""
        entry = self._entries[request_id]
        work = structs.replace(entry.work, attempt=attempt)
        self._entries[request_id] = replace(entry, work=work, group=group, in_one_group=False)
        return work

    def group_of_leader(self, entry: RoutedRequest) -> int | None:
        """The group that has the first choice of the same prompt; None if that is the same group,
        or if there is no other choice."""
        leader = self._entries.get(entry.work.sampling_group, entry)
        return leader.group if leader.group != entry.group else None

    def get(self, request_id: str) -> RoutedRequest | None:
        """The request, None if it is unknown."""
        return self._entries.get(request_id)

    def on_reattached(self, request_id: str) -> None:
        """A client reads its answer."""
        self._alone_since.pop(request_id, None)

    def retained(self, gateway: int, now: float) -> Iterator[Origin]:
        """The requests whose answers are kept, and whose gateway has died before `now` (seconds):
        one for each group and attempt that has choices of a Submit."""
        together: dict[tuple[str, int, int], tuple[Origin, list[int]]] = {}
        for entry in self._entries.values():
            work, origin = entry.work, entry.origin
            if origin is None or work.gateway != gateway:
                continue
            name = origin.submit.request_id
            names = choice_ids(name, origin.submit.choices)
            number = origin.submit.choices[names.index(work.request_id)]
            key = name, entry.group, work.attempt
            waited = now - self._alone_since.setdefault(work.request_id, now)
            together.setdefault(key, (origin._replace(waited=waited), []))[1].append(number)
        for (_, group, attempt), (origin, numbers) in together.items():
            changes = {"attempt": attempt, "choices": tuple(numbers)}
            submit = structs.replace(origin.submit, group=group, **changes)
            accepted = structs.replace(origin.accepted, group=group, **changes)
            yield Origin(submit, accepted, origin.waited)

    def of_gateway(self, gateway: int) -> Iterable[TokenizedRequest]:
        """Requests of `gateway`, as a list: requests may be removed meanwhile."""
        return [e.work for e in self._entries.values() if e.work.gateway == gateway]


MAX_VERDICTS = 16_384  # verdicts that are kept
MAX_REFUSAL_LETTERS = 500  # characters of a refusal, which may quote a client


def grammar_digest(spec: StructuredOutputs) -> bytes:
    """The key of a grammar, 16 bytes. So short keys allow many verdicts: one client's grammars must
    not push out others'."""
    return blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()


class Verdict(NamedTuple):
    """The verdict on a grammar.

    refusal: why it is refused, "" if it is served.
    slow: as in GrammarVerdict.
    """

    refusal: str = ""
    slow: bool = False


class VerdictCache:
    """Verdicts by digest; the least recently used one goes first."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, grammar: bytes) -> Verdict | None:
        """The verdict on the grammar with this digest, None if there is none."""
        if grammar in self._verdicts:
            self._verdicts.move_to_end(grammar)
        return self._verdicts.get(grammar)

    def put(self, grammar: bytes, verdict: Verdict) -> None:
        """Keeps a verdict, with at most MAX_REFUSAL_LETTERS of its refusal."""
        self._verdicts[grammar] = Verdict(verdict.refusal[:MAX_REFUSAL_LETTERS], verdict.slow)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
