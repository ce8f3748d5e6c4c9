"""Requests that wait: for a slot, for the prompt of another request, for their grammar or its
masks, or for their adapter.

WaitingQueue has those that may be admitted, in the order of admission: priority first (lower is
earlier, as in vLLM), then arrival. A preempted request keeps its arrival and so returns to the head
of its priority. Beside the queue, where they delay no other request, wait
- choices of one prompt (`n`) while another choice computes it: SamplingGroups,
- prompts with a prefix that another request computes: PrefixesInProgress,
- requests whose grammar engines have not compiled: GrammarQueue,
- requests whose adapter engines have not loaded: AdapterSlots (adapters.py),
- requests whose masks cost much while others' masks are paid for: MaskBudget.

Knows requests, and the incarnations of engine processes; no page, no slot and no clock: times come
as arguments.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeinfer.core import FairQueue, block_hashes
from pipeinfer.grammars.bounds import COSTLY_MASK_UNITS
from pipeinfer.messages import CompileGrammar, GrammarCompiled
from pipeinfer.params import StructuredOutputs
from pipeinfer.scheduler.adapters import AdapterSlots
from pipeinfer.scheduler.engine_state import PlannedRow
from pipeinfer.scheduler.request import TOKEN_BYTES, Request
from pipeinfer.step_cost import Prompt

AHEAD = 64  # prompts that are looked at one by one
SCANNED_PER_ENTRY = 4  # entries for each that is asked for: most may be gone
MIN_FINISHED_TO_SWEEP = 64


class WaitingQueue:
    """A sorted list. Nearly all requests come at its end and leave at its front, which moves a
    short list of pointers. A request that has ended is removed when it comes to the front, or with
    all others that have ended when most have.

    tokens: to be computed of all requests in it, counted when each came. grammars, adapters: for
    which some wait before they come into the queue.
    """

    def __init__(self, tp: int = 1, max_loras: int = 0) -> None:
        self.tokens = 0
        self.grammars = GrammarQueue(tp)
        self.adapters = AdapterSlots(tp, max_loras)
        self._order: list[tuple[int, int, Request]] = []
        self._finished = 0
        self._sampling_groups = SamplingGroups()
        self._prefixes = PrefixesInProgress()

    @property
    def waiting_for_prefix(self) -> int:
        """Requests that wait for the prompt of another, or its beginning, beside the queue."""
        return len(self._sampling_groups) + len(self._prefixes)

    def push(self, request: Request) -> None:
        """Takes `request`, which is to run: it comes into the queue, or waits beside it for a
        grammar, an adapter or a prefix."""
        if not self._parked(request) and not self._sampling_groups.park_if_blocked(request):
            self._push_unless_prefix_comes(request)

    def _parked(self, request: Request) -> bool:
        """Whether it waits for its grammar or its adapter."""
        return self.grammars.park_if_blocked(request) or self.adapters.park_if_blocked(request)

    def begin(self, processes: Sequence[int], block_size: int = 0) -> None:
        """An epoch begins, on engines of these incarnations: grammars that they have not compiled,
        and adapters that they have not loaded, are asked for. block_size: see
        PrefixesInProgress.begin."""
        self.grammars.begin(processes)
        self.adapters.begin(processes)
        waiting = [one for _, _, one in self._order if one.phase == "waiting"]
        needing = [
            one
            for one in waiting
            if needed_grammar(one) is not None or one.work.adapter is not None
        ]
        blocked = [one for one in needing if self._parked(one)]
        if self._prefixes.begin(block_size):
            unblocked = [one for one in waiting if one.phase == "waiting"]
            blocked += [one for one in unblocked if self._prefixes.park_if_blocked(one)]
        if blocked:
            self.tokens -= sum(one.queued_tokens for one in blocked)
            self._order = [one for one in self._order if one[2].phase in ("waiting", "finished")]

    def requeue_unblocked(self, running: Iterable[Request]) -> None:
        """Puts those into the queue that need not wait any more for a prompt of `running`."""
        for request in self._sampling_groups.take_ready(running):
            self._push_unless_grammar_missing(request)
        for request in self._prefixes.take_ready():
            self._push_unless_grammar_missing(request)

    def on_finished(self, request: Request, ran: bool) -> None:
        """`request` has ended; `ran`: in a slot. Those that waited for it
        come into the queue."""
        for one in self._sampling_groups.on_finished(request, ran):
            self._push_unless_grammar_missing(one)
        for one in self._prefixes.on_finished(request):
            self._push_unless_prefix_comes(one)

    def _push_unless_prefix_comes(self, request: Request) -> None:
        """No other request of its SamplingGroups computes its prompt; perhaps one computes the
        beginning."""
        if not self._prefixes.park_if_blocked(request):
            self._push_unless_grammar_missing(request)

    def _push_unless_grammar_missing(self, request: Request) -> None:
        """It waited for a prompt; the engines may be others meanwhile, without its grammar or its
        adapter."""
        if not self._parked(request):
            self._put(request)

    def _put(self, request: Request) -> None:
        request.move("waiting")
        self.put_in(request)

    def put_in(self, request: Request) -> None:
        """`request`, which waits, stands in the queue by its priority and arrival."""
        request.queued_tokens = request.length - request.prefix_tokens
        self.tokens += request.queued_tokens
        insort(self._order, (request.work.priority, request.arrival, request))

    def take_out(self, request: Request) -> None:
        """`request`, which stands in the queue, does no more; ValueError if it does not."""
        self._order.remove((request.work.priority, request.arrival, request))
        self.tokens -= request.queued_tokens

    def head(self) -> Request | None:
        """The next request, still in the queue; None if there is none."""
        finished = 0
        while finished < len(self._order) and self._order[finished][2].phase == "finished":
            finished += 1
        if finished:
            del self._order[:finished]
            self._finished -= finished
        return self._order[0][2] if self._order else None

    def first(self, count: int) -> list[Request]:
        """At most `count` that come next; fewer also where most of the next are gone."""
        near = self._order[: count * SCANNED_PER_ENTRY]
        return [request for _, _, request in near if request.phase != "finished"][:count]

    def prompts(self, now: float) -> list[Prompt]:
        """All prompts in it, in their order; of those that are far behind only the mean length is
        known, and no age. now: seconds, by the clock of Request.arrived_at."""
        near = self.first(AHEAD)
        found = [
            Prompt(r.queued_tokens, r.length - r.queued_tokens, now - r.arrived_at) for r in near
        ]
        num_far, tokens = len(self) - len(near), self.tokens - sum(r.queued_tokens for r in near)
        if num_far > 0:
            mean, num_mean = max(tokens // num_far, 1), min(num_far, AHEAD)
            found += [Prompt(mean)] * num_mean
            found.append(Prompt(max(tokens - mean * num_mean, 0)))
        return found

    def pop(self) -> Request:
        """Removes and returns the head; IndexError if there is none."""
        request = self.head()
        if request is None:
            raise IndexError("pop from an empty queue")
        del self._order[0]
        self.tokens -= request.queued_tokens
        return request

    def remove(self, request: Request) -> None:
        """`request` waited here and has ended; it leaves when it comes up, or with many."""
        self.tokens -= request.queued_tokens
        self._finished += 1
        if self._finished > MIN_FINISHED_TO_SWEEP and self._finished > len(self._order) // 2:
            self._order = [one for one in self._order if one[2].phase != "finished"]
            self._finished = 0

    def __len__(self) -> int:
        return len(self._order) - self._finished


class SamplingGroups:
    """Requests that sample from one prompt, as the choices of `n`: one computes it, and the others
    wait for its pages without a slot.

    Groups go by the leader that `TokenizedRequest.sampling_group` names. The leader need not be
    that request: it is the first of the group that wants to run, and the next one if the leader
    ends before its prompt is computed.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, Request] = {}
        self._waiting: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if another computes its prompt; it waits here then.
        Else its `prefix_source` becomes the request in whose pages it will find its prompt, if
        there is one. True if it was taken."""
        name, request.prefix_source = request.work.sampling_group, None
        if not name:
            return False
        lead = self._leaders.setdefault(name, request)
        if lead is request:
            return False
        if lead.provides_prefix:
            request.prefix_source = lead
            return False
        request.move("waiting_for_prefix")
        self._waiting.setdefault(name, []).append(request)
        return True

    def take_ready(self, running: Iterable[Request]) -> list[Request]:
        """Requests that need not wait any more, because the prompt of one that runs is there."""
        if not self._waiting:
            return []
        sources = {
            r.work.sampling_group: r
            for r in running
            if r.work.sampling_group in self._waiting and r.provides_prefix
        }
        return [one for name, source in sources.items() for one in self._take_all(name, source)]

    def on_finished(self, request: Request, ran: bool) -> list[Request]:
        """`request` has ended; `ran`: in a slot. Returns those that need not wait any more: all if
        its prompt stays in the prefix cache, else the next one, which then leads."""
        name = request.work.sampling_group
        if not name:
            return []
        waiting = self._waiting.get(name, [])
        if self._leaders.get(name) is not request:
            if request in waiting:
                self._take(name, request)
            return []
        del self._leaders[name]
        if ran and request.sampled and not request.bad_logits:
            return self._take_all(name, None)
        if not waiting:
            return []
        self._leaders[name] = waiting[0]
        return [self._take(name, waiting[0])]

    def _take(self, name: str, request: Request) -> Request:
        self._waiting[name].remove(request)
        if not self._waiting[name]:
            del self._waiting[name]
        return request

    def _take_all(self, name: str, source: Request | None) -> list[Request]:
        ready = self._waiting.pop(name, [])
        for request in ready:
            request.prefix_source = source
        return ready


COMING = ("waiting", "running", "waiting_for_prefix")


class PrefixesInProgress:
    """Prompts with a common prefix: the first request to need the prefix leads. It computes the
    beginning, and requests that come with the same one wait until that is planned, not for the
    whole prompt.

    Beginnings are compared by blocks of tokens, which are whole pages. Nobody waits for a request
    that is less urgent. Waiting cannot go in a circle: each waits for one that came to an earlier
    block.
    """

    # Made of the prompts again where a recorded scheduler goes on: there are other ids in its
    # trace, if that was redacted.
    __transient__ = ("_leaders", "_keys")

    def __init__(self) -> None:
        self._block_size = 0  # tokens: whole pages
        self._leaders: dict[bytes, Request] = {}  # by the key of a beginning
        # Keys of all beginnings of a request, by its id, shortest first.
        self._keys: dict[str, list[bytes]] = {}
        # By id: a request that leads, and the numbers of its blocks that it leads in.
        self._blocks_led: dict[str, tuple[Request, list[int]]] = {}
        self._waiting: dict[str, tuple[Request, list[Request]]] = {}  # by the lead's id

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(waiting) for _, waiting in self._waiting.values())

    def begin(self, block_size: int) -> bool:
        """Prompts are compared by blocks of `block_size` tokens from now on; 0: not at all.
        True if that is another size, so that all requests must be looked at again."""
        if block_size == self._block_size:
            return False
        self._block_size = block_size
        self._leaders.clear()
        self._keys.clear()
        self._blocks_led.clear()
        return True

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if another computes a beginning of its prompt; it waits
        here then. Else it will find `shared_len` tokens in the pages of its `prefix_source`, if
        there is one: a step that computes them has been planned. True if it was taken."""
        request.shared_len = 0
        if not self._block_size or request.prefix_source is not None or request.prompt_logprob_size:
            return False
        keys, leads = self._prefix_keys(request), self._index()
        lead, blocks = None, 0
        for key in keys:
            leader = leads.get(key)
            if leader is None or leader is request or not _precedes(leader, request):
                break
            lead, blocks = leader, blocks + 1
        new = [at for at in range(blocks, len(keys)) if keys[at] not in leads]
        if new:
            leads.update(dict.fromkeys([keys[at] for at in new], request))
            self._blocks_led.setdefault(request.id, (request, []))[1].extend(new)
        if lead is None:
            return False
        request.prefix_source, request.shared_len = lead, blocks * self._block_size
        if _provides(lead, request.shared_len):
            return False
        if request.phase != "waiting_for_prefix":
            request.move("waiting_for_prefix")
        self._waiting.setdefault(lead.id, (lead, []))[1].append(request)
        return True

    def take_ready(self) -> list[Request]:
        """Requests that need not wait any more: their beginning has been planned, or the request
        that was to compute it will not run soon."""
        if not self._waiting:
            return []
        free: list[Request] = []
        for name, (lead, waiting) in list(self._waiting.items()):
            stays: list[Request] = []
            for request in waiting:
                if lead.phase not in COMING:
                    request.prefix_source, request.shared_len = None, 0
                    free.append(request)
                elif _provides(lead, request.shared_len):
                    free.append(request)
                else:
                    stays.append(request)
            self._set_waiting(name, lead, stays)
        return free

    def on_finished(self, request: Request) -> list[Request]:
        """`request` has ended. Returns those that waited for it, to be looked at anew."""
        if request.id in self._blocks_led:
            leads, keys = self._index(), self._prefix_keys(request)
            for at in self._blocks_led.pop(request.id)[1]:
                del leads[keys[at]]
        self._keys.pop(request.id, None)
        lead = request.prefix_source
        if lead is not None and lead.id in self._waiting:
            _, waiting = self._waiting[lead.id]
            self._set_waiting(lead.id, lead, [one for one in waiting if one is not request])
        _, free = self._waiting.pop(request.id, (request, []))
        for one in free:
            one.prefix_source, one.shared_len = None, 0
        return free

    def _set_waiting(self, name: str, lead: Request, waiting: list[Request]) -> None:
        if waiting:
            self._waiting[name] = lead, waiting
        else:
            self._waiting.pop(name, None)

    def _index(self) -> dict[bytes, Request]:
        """Who leads, by key."""
        if self._blocks_led and not self._leaders:
            for request, blocks in self._blocks_led.values():
                keys = self._prefix_keys(request)
                self._leaders.update(dict.fromkeys([keys[at] for at in blocks], request))
        return self._leaders

    def _prefix_keys(self, request: Request) -> list[bytes]:
        """A key for each beginning of whole blocks that a cache may give its prompt: all but the
        last token."""
        keys = self._keys.get(request.id)
        if keys is None:
            ids, work = TOKEN_BYTES * (request.prompt_len - 1), request.work
            keys = block_hashes(work.prompt_ids[:ids], self._block_size, work.cache_salt)
            self._keys[request.id] = keys
        return keys


def _provides(lead: Request, tokens: int) -> bool:
    """Whether the next plan may give others so many of its first tokens: a step before computes
    them."""
    return lead.phase == "running" and lead.projected >= tokens


def _precedes(lead: Request, request: Request) -> bool:
    return lead.phase in COMING and lead.work.priority <= request.work.priority


# Seconds after which engines are asked for a grammar again: a subscription may have been late.
GRAMMAR_RETRY_SECONDS = 1.0
MAX_KNOWN = 128  # grammars that engines are taken to have; they keep twice as many
# Compiled at once, by an engine that has its vocabulary.
SMALLEST = StructuredOutputs(regex="")


def needed_grammar(request: Request) -> StructuredOutputs | None:
    """What engines must have compiled before they admit `request`. A budget of thoughts without a
    grammar needs the vocabulary, which an engine may have to build first."""
    params = request.work.params
    if params.structured_outputs is None and params.thinking_token_budget is not None:
        return SMALLEST
    return params.structured_outputs


@dataclass(slots=True, eq=False)
class PendingGrammar:
    """A grammar that engines were asked for.

    prepare: the message. waiting: requests that wait for it. ranks_prepared: ranks that have
    compiled it.
    sent: when engines were asked last, in seconds.
    """

    prepare: CompileGrammar
    waiting: list[Request] = field(default_factory=list[Request])
    ranks_prepared: set[int] = field(default_factory=set[int])
    sent: float = float("-inf")


class GrammarQueue:
    """Requests whose grammar the engines of one group of `tp` ranks have not compiled, and those
    whose masks cost much, until there is room for them.

    Engines would compile a grammar at the admission, too, but keep everybody waiting then. Of
    grammars that take long they are asked for one at a time, and clients take turns. mask_budget:
    what steps may spend on masks.
    """

    def __init__(self, tp: int) -> None:
        self.mask_budget = MaskBudget()
        self._tp = tp
        self._processes: tuple[int, ...] = ()
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._pending: dict[str, PendingGrammar] = {}  # by the request that first wanted it
        # Those that take long, which engines were not asked for.
        self._slow: FairQueue[str] = FairQueue()
        self._current_slow = ""  # the one for which they were

    def __len__(self) -> int:
        """Requests that wait."""
        waiting = sum(len(one.waiting) for one in self._pending.values())
        return waiting + len(self.mask_budget)

    def begin(self, processes: Sequence[int]) -> None:
        """An epoch begins, on engines of these incarnations; new ones have compiled no grammar."""
        if tuple(processes) == self._processes:
            return
        self._processes = tuple(processes)
        self._known.clear()
        for one in self._pending.values():
            one.ranks_prepared.clear()
            one.sent = float("-inf")

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if its grammar is not compiled or its masks cannot be
        paid for; it waits here then. True if it was taken."""
        if self.ensure_grammar(request) and not self.mask_budget.park_if_blocked(request):
            return False
        if request.phase != "waiting_for_grammar":  # for its turn, when the engines were others
            request.move("waiting_for_grammar")
        return True

    def ensure_grammar(self, request: Request) -> bool:
        """True if engines have compiled the grammar of `request`, or it needs none. Else they are
        asked to, `request` is noted as waiting for it, and the answer is False; its phase stays."""
        spec = needed_grammar(request)
        if spec is None:
            return True
        if spec in self._known:
            self._known.move_to_end(spec)
            return True
        for one in self._pending.values():
            if one.prepare.spec == spec:
                if request not in one.waiting:
                    one.waiting.append(request)
                return False
        slow = request.work.slow_grammar
        prepare = CompileGrammar(request_id=request.id, spec=spec, slow=slow)
        if slow:
            self._slow.put(request.work.client, 1, request.id)
        self._pending[request.id] = PendingGrammar(prepare, [request])
        return False

    def remove(self, request: Request) -> None:
        """`request` has ended; unknown ones are fine."""
        self.mask_budget.remove(request)
        for key, one in self._pending.items():
            if request in one.waiting:
                one.waiting.remove(request)
                if not one.waiting:
                    del self._pending[key]
                return

    def take_due(self, now: float) -> Iterator[CompileGrammar]:
        """What engines are to be asked now."""
        while self._current_slow not in self._pending and len(self._slow):
            self._current_slow = self._slow.take()
        for key, one in self._pending.items():
            if now - one.sent >= GRAMMAR_RETRY_SECONDS and (
                key == self._current_slow or not one.prepare.slow
            ):
                one.sent = now
                yield one.prepare

    def on_grammar_compiled(self, prepared: GrammarCompiled) -> list[Request]:
        """A rank has it, or cannot have it: those that need not wait any more."""
        if (prepared.rank, prepared.incarnation) not in enumerate(self._processes):
            return []
        one = self._pending.get(prepared.request_id)
        if one is None:
            return []
        one.ranks_prepared.add(prepared.rank)
        if len(one.ranks_prepared) < self._tp and not prepared.error:
            return []
        del self._pending[prepared.request_id]
        if not prepared.error:
            self._known[one.prepare.spec] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return one.waiting


# What costly masks may cost in each step on average, where others run, and where nobody else does;
# in units of cost (grammars/compiling.py). Of ambiguous rules UNITS_PER_STEP takes 0.3 to 2 ms of a
# step, of a lexer that is being built, which ends soon, about 60 ms.
UNITS_PER_STEP = 6_000
UNITS_PER_COSTLY_STEP = 60_000
REMEMBERED = 128  # grammars with costly masks
MAX_DEBT_STEPS = 64  # steps that masks are paid for, at most
PAID = -1  # in place of a turn: the next mask is paid for


class MaskBudget:
    """What the steps of one group may spend on costly masks, and the requests that wait until a
    mask of theirs can be paid for."""

    def __init__(self) -> None:
        # What the next step may spend; below 0: what later ones pay for.
        self._remaining = UNITS_PER_STEP
        self._prices: OrderedDict[StructuredOutputs, int] = OrderedDict()  # of the costly
        self._waiting: deque[Request] = deque()
        self._last_turn = 0

    def __len__(self) -> int:
        """Requests that wait for room to begin."""
        return len(self._waiting)

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to begin, if its masks cost much and are not paid for; it waits
        here then. True if it was taken."""
        if request.mask_turn == PAID or not self._price(request):
            return False
        self._waiting.append(request)
        return True

    def remove(self, request: Request) -> None:
        """`request` has ended; unknown ones are fine."""
        if request in self._waiting:
            self._waiting.remove(request)

    def take_next(self, others: int) -> Request | None:
        """Removes and returns the next request whose masks the budget allows, and charges its first
        mask; None if there is none yet.

        others: requests that run or wait in the queue. Without any, the next request begins even if
            the budget is used up.
        """
        if not self._waiting or (others and self._remaining <= 0):
            return None
        request = self._waiting.popleft()
        self._remaining -= self._price(request)
        request.mask_turn = PAID
        return request

    def over_budget(self, running: Collection[Request]) -> list[Request]:
        """Those that have no part in the next step, because it cannot pay for their masks."""
        for request in [r for r in running if r.mask_units >= COSTLY_MASK_UNITS]:
            self._remember(request)
        if not self._prices:
            return []
        costly = [r for r in running if not r.prefilling and self._price(r)]
        costly.sort(key=lambda r: r.mask_turn)
        remaining, out = self._remaining, list[Request]()
        for at, request in enumerate(costly):
            if remaining <= 0 and (at or len(costly) < len(running)):
                out.append(request)
            else:
                remaining -= self._price(request)
        return out

    def spend(self, rows: Iterable[PlannedRow], running: Collection[Request]) -> None:
        """A plan was written with these (request, count) rows."""
        if not self._prices:
            return
        self._last_turn += 1
        costly = 0
        for request, _ in rows:
            price = 0 if request.prefilling else self._price(request)
            if price:
                costly += 1
                self._remaining -= price if request.mask_turn != PAID else 0
                request.mask_turn = self._last_turn
        per_step = (
            UNITS_PER_COSTLY_STEP if costly and all(map(self._price, running)) else UNITS_PER_STEP
        )
        self._remaining = max(
            min(self._remaining + per_step, per_step), -MAX_DEBT_STEPS * UNITS_PER_STEP
        )

    def _price(self, request: Request) -> int:
        """What a mask of it costs, as far as that is known; 0 if that is not much."""
        if request.mask_units >= 0:
            return request.mask_units if request.mask_units >= COSTLY_MASK_UNITS else 0
        spec = request.work.params.structured_outputs
        return 0 if spec is None or not self._prices else self._prices.get(spec, 0)

    def _remember(self, request: Request) -> None:
        spec = request.work.params.structured_outputs
        if spec is not None:
            self._prices[spec] = request.mask_units
            self._prices.move_to_end(spec)
            if len(self._prices) > REMEMBERED:
                self._prices.popitem(last=False)
