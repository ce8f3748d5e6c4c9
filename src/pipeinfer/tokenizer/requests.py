"""The tokenizer's unfinished requests, and the verdicts on their grammars.

- PendingPrompts: requests that are not encoded yet. A worker process encodes the prompt or
  validates the grammar meanwhile.
- RoutedRequests: requests that were sent to a group, until Done or Abort. A restarted scheduler
  gets its requests again from here.
- VerdictCache: grammars that have been validated, by digest.

Both tables of requests are bounded by the gateways' limit on waiting requests. Knows no bus.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec import structs

from pipeinfer.messages import Accepted, Adopt, Submit, Work
from pipeinfer.params import StructuredOutputs, choice_id, choice_ids

MAX_ORIGIN_BYTES = 2**20  # of a request, beside its prompt, in scheduler and detokenizer


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A request whose prompt is not encoded yet.

    submit: the request, with the choices that have not ended.
    in_one_group: see RoutedRequest. Decided on arrival: before all gateways have answered the roll
      call, the process before this one may have sent it to a group.
    grammar_to_validate: digest of its grammar while that is validated, else empty.
    refusal: why its first grammar is not served, if it goes on with the other one.
    """

    submit: Submit
    in_one_group: bool
    grammar_to_validate: bytes = b""
    refusal: str = ""

    def with_fallback_grammar(self, refusal: str) -> PendingPrompt:
        """This request with its second grammar, because the first one is refused."""
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

    abandoned: choices that ended before they were encoded.
    verdicts: on grammars.
    _prompts: by first choice.
    _first_choices: of each choice that has not ended, the first choice of its Submit.
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
    """What a gateway that is started again must know of a request whose answer is kept.

    submit: as it came, with all its choices. accepted: the answer to it. waited: as in Adopt.
    """

    submit: Submit
    accepted: Accepted
    waited: float = 0.0


def with_origin(work: Work, origin: Origin, stage: str) -> Work:
    """`work` of a request whose answer is kept, and with it what the tokenizer `stage` would tell a
    gateway that is started again, unless that is too large."""
    assert work.retention is not None
    adopt = Adopt(stage=stage, submit=origin.submit, accepted=origin.accepted)
    encoded = msgspec.msgpack.encode(adopt)
    if len(encoded) > MAX_ORIGIN_BYTES:
        return work
    return structs.replace(work, retention=structs.replace(work.retention, origin=encoded))


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that was sent to a group.

    work: what the scheduler got.
    group: its data-parallel group.
    group_certain: False if an earlier tokenizer may have sent it to another group.
    in_one_group: False if other groups may have the request, too.
    origin: of a request whose answer is kept; else None.
    """

    work: Work
    group: int
    group_certain: bool = True
    in_one_group: bool = True
    origin: Origin | None = None


class RoutedRequests:
    """Requests that were sent to a group, in order of arrival, by request id."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._entries: dict[str, RoutedRequest] = {}
        self._alone_since: dict[str, float] = {}  # of those that no client has come back for

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

    def of_group(self, group: int) -> Iterator[Work]:
        """The requests that the scheduler of `group` has or may have. It must get both: it aborts
        requests that are not among them, also while another group goes on with them."""
        return (e.work for e in self._entries.values() if e.group == group or not e.group_certain)

    def mark_leaving(self, group: int) -> list[Work]:
        """The requests of `group`, which is asked to hand them over: from now on they may be in
        several groups."""
        entries = [e for e in self._entries.values() if e.group == group]
        for entry in entries:
            self._entries[entry.work.request_id] = replace(entry, in_one_group=False)
        return [entry.work for entry in entries]

    def move(self, request_id: str, group: int, attempt: int) -> Work:
        """`group` goes on with an unfinished request, as this attempt; returns its work."""
        entry = self._entries[request_id]
        work = structs.replace(entry.work, attempt=attempt)
        self._entries[request_id] = replace(entry, work=work, group=group, in_one_group=False)
        return work

    def group_of_leader(self, entry: RoutedRequest) -> int | None:
        """The group that has the first choice of the same prompt; None if that is the same group,
        or if there is no other choice."""
        leader = self._entries.get(entry.work.group_leader, entry)
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

    def of_gateway(self, gateway: int) -> Iterable[Work]:
        """Requests of `gateway`, as a list: requests may be removed meanwhile."""
        return [e.work for e in self._entries.values() if e.work.gateway == gateway]


MAX_VERDICTS = 16_384  # that are kept
MAX_REFUSAL_LETTERS = 500  # letters of a refusal, which may quote a client


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
