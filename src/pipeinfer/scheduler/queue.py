"""Requests that wait: for a slot, for the prompt of another request, for their grammar or its
masks, or for their adapter.

WaitingQueue has the requests that may be admitted, in the order of admission: priority first (lower
is earlier, as in vLLM), then arrival. A preempted request keeps its arrival and so returns to the
head of its priority. Beside the queue, where they delay no other request, wait

- choices of one prompt (`n`) while another choice computes it: SamplingGroups,
- prompts with a prefix that another request computes: PrefixesInProgress,
- requests whose grammar engines have not compiled: GrammarQueue,
- requests whose adapter engines have not loaded: AdapterSlots (adapters.py),
- requests with costly masks while the mask budget is used up: MaskBudget.

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
from pipeinfer.messages import TOKEN_BYTES, CompileGrammar, GrammarCompiled
from pipeinfer.params import StructuredOutputs
from pipeinfer.scheduler.adapters import AdapterSlots
from pipeinfer.scheduler.engine_state import PlannedRow
from pipeinfer.scheduler.request import Request
from pipeinfer.step_cost import Prompt

AHEAD = 64  # prompts at the head of the queue that `prompts` lists one by one
# entries that `first` looks at for each request asked for: most may have ended
SCANNED_PER_ENTRY = 4
MIN_FINISHED_TO_SWEEP = 64


class WaitingQueue:
    """Requests that may be admitted, as a sorted list. Nearly all requests come at its end and
    leave at its front, which moves a short list of pointers. A request that has ended is removed
    when it comes to the front, or with all others that have ended when most have.

    Attributes:
    - tokens: tokens to compute of all requests in the queue, counted when each came
    - grammars, adapters: requests that wait for these before they come into the queue
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
        """Number of requests that wait, beside the queue, for the prompt of another, or its
        beginning."""
        return len(self._sampling_groups) + len(self._prefixes)

    def push(self, request: Request) -> None:
        """Takes `request`, which is to run: into the queue, or beside it if a grammar, an adapter
        or a prefix is missing."""
        if not self._parked(request) and not self._sampling_groups.park_if_blocked(request):
            self._push_unless_prefix_comes(request)

    def _parked(self, request: Request) -> bool:
        """Whether `request` waits for its grammar or its adapter."""
        return self.grammars.park_if_blocked(request) or self.adapters.park_if_blocked(request)

    def begin(self, processes: Sequence[int], block_size: int = 0) -> None:
        """An epoch begins, on engines of the incarnations `processes`: grammars that they have not
        compiled, and adapters that they have not loaded, are asked for.

        - block_size: see PrefixesInProgress.begin
        """
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
        """Moves requests into the queue that no longer wait for a prompt of `running`."""
        for request in self._sampling_groups.take_ready(running):
            self._push_unless_grammar_missing(request)
        for request in self._prefixes.take_ready():
            self._push_unless_grammar_missing(request)

    def on_finished(self, request: Request, ran: bool) -> None:
        """Moves the requests that waited for `request`, which has ended, into the queue.

        - ran: `request` ended in a slot
        """
        for one in self._sampling_groups.on_finished(request, ran):
            self._push_unless_grammar_missing(one)
        for one in self._prefixes.on_finished(request):
            self._push_unless_prefix_comes(one)

    def _push_unless_prefix_comes(self, request: Request) -> None:
        """Pushes `request`, whose prompt no other request of its SamplingGroups computes, unless
        one computes the prompt's beginning."""
        if not self._prefixes.park_if_blocked(request):
            self._push_unless_grammar_missing(request)

    def _push_unless_grammar_missing(self, request: Request) -> None:
        """Pushes `request`, which waited for a prompt, unless new engines lack its grammar or its
        adapter."""
        if not self._parked(request):
            self._put(request)

    def _put(self, request: Request) -> None:
        request.move("waiting")
        self.put_in(request)

    def put_in(self, request: Request) -> None:
        """Inserts `request`, which is in phase "waiting", by its priority and arrival."""
        request.queued_tokens = request.length - request.prefix_tokens
        self.tokens += request.queued_tokens
        insort(self._order, (request.work.priority, request.arrival, request))

    def take_out(self, request: Request) -> None:
        """Removes a queued request; ValueError if it is not queued."""
        self._order.remove((request.work.priority, request.arrival, request))
        self.tokens -= request.queued_tokens

    def head(self) -> Request | None:
        """The next request, which stays in the queue; None if there is none."""
        finished = 0
        while finished < len(self._order) and self._order[finished][2].phase == "finished":
            finished += 1
        if finished:
            del self._order[:finished]
            self._finished -= finished
        return self._order[0][2] if self._order else None

    def first(self, count: int) -> list[Request]:
        """The next requests, at most `count`; fewer also if most of the next entries have ended."""
        near = self._order[: count * SCANNED_PER_ENTRY]
        return [request for _, _, request in near if request.phase != "finished"][:count]

    def prompts(self, now: float) -> list[Prompt]:
        """All prompts in the queue, in its order; prompts far behind are given by their mean length
        alone, without an age.

        - now: seconds, by the clock of Request.arrived_at
        """
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
        """Notes that the queued `request` has ended; its entry leaves when it comes up, or with
        many others."""
        self.tokens -= request.queued_tokens
        self._finished += 1
        if self._finished > MIN_FINISHED_TO_SWEEP and self._finished > len(self._order) // 2:
            self._order = [one for one in self._order if one[2].phase != "finished"]
            self._finished = 0

    def __len__(self) -> int:
        return len(self._order) - self._finished


class SamplingGroups:
    """Parallel-sampling groups: requests that sample from one prompt, as the choices of `n`. One of
    them computes the prompt, and the others wait for its pages without a slot.

    Groups are named by `TokenizedRequest.sampling_group`. The leader, which computes the prompt,
    need not be the request of that id: it is the first of the group that wants to run, and the next
    one if the leader ends before its prompt is computed.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, Request] = {}
        self._waiting: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if another computes its prompt; True if it was taken,
        and waits here. Otherwise sets its `prefix_source` to the request in whose pages it will
        find its prompt, if there is one."""
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
        """Removes and returns requests that no longer wait, because a running request has completed
        their prompt."""
        if not self._waiting:
            return []
        sources = {
            r.work.sampling_group: r
            for r in running
            if r.work.sampling_group in self._waiting and r.provides_prefix
        }
        return [one for name, source in sources.items() for one in self._take_all(name, source)]

    def on_finished(self, request: Request, ran: bool) -> list[Request]:
        """Notes that `request` has ended. Returns the requests that no longer wait: all of its
        group if its prompt stays in the prefix cache, else the next one, which then leads.

        - ran: `request` ended in a slot
        """
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
    """Prompts with a common prefix: the first request that needs the prefix leads. It computes the
    prompt's beginning, and later requests with the same beginning wait until the steps for that are
    planned, not for the whole prompt.

    Beginnings are compared by blocks of tokens, which are whole pages. A request never waits for a
    less urgent one. Waiting cannot go in a circle: each request waits for one that came to an
    earlier block.
    """

    # Not in snapshots: a replay computes them again from the prompts, whose ids differ in a
    # redacted trace.
    __transient__ = ("_leaders", "_keys")

    def __init__(self) -> None:
        self._block_size = 0  # tokens: whole pages
        self._leaders: dict[bytes, Request] = {}  # by the key of a beginning
        # Keys of all beginnings of a request, by its id, shortest first.
        self._keys: dict[str, list[bytes]] = {}
        # By id: a request that leads, and the numbers of the blocks in which it leads.
        self._blocks_led: dict[str, tuple[Request, list[int]]] = {}
        self._waiting: dict[str, tuple[Request, list[Request]]] = {}  # by the lead's id

    def __len__(self) -> int:
        """Number of requests that wait."""
        return sum(len(waiting) for _, waiting in self._waiting.values())

    def begin(self, block_size: int) -> bool:
        """Compares prompts by blocks of `block_size` tokens from now on; 0: not at all. True if
        that is another size, so that all requests must be looked at again."""
        if block_size == self._block_size:
            return False
        self._block_size = block_size
        self._leaders.clear()
        self._keys.clear()
        self._blocks_led.clear()
        return True

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if another computes a beginning of its prompt; True if
        it was taken, and waits here. Otherwise, if a step that computes the beginning has been
        planned, `prefix_source` is the request that computes it, and `shared_len` the number of
        tokens shared."""
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
        """Removes and returns requests that no longer wait: their beginning has been planned, or
        the request that was to compute it will not run soon."""
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
        """Notes that `request` has ended. Returns the requests that waited for it, to be pushed
        again."""
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
        """The leading request by key of a beginning."""
        if self._blocks_led and not self._leaders:
            for request, blocks in self._blocks_led.values():
                keys = self._prefix_keys(request)
                self._leaders.update(dict.fromkeys([keys[at] for at in blocks], request))
        return self._leaders

    def _prefix_keys(self, request: Request) -> list[bytes]:
        """Keys of the beginnings, in whole blocks, that a cache may provide for the prompt of
        `request`: of all but the last token."""
        keys = self._keys.get(request.id)
        if keys is None:
            ids, work = TOKEN_BYTES * (request.prompt_len - 1), request.work
            keys = block_hashes(work.prompt_ids[:ids], self._block_size, work.cache_salt)
            self._keys[request.id] = keys
        return keys


def _provides(lead: Request, tokens: int) -> bool:
    """Whether `lead` shares its first `tokens` tokens with requests of the next plan: an earlier
    step computes them."""
    return lead.phase == "running" and lead.projected >= tokens


def _precedes(lead: Request, request: Request) -> bool:
    return lead.phase in COMING and lead.work.priority <= request.work.priority


# Seconds after which engines are asked for a grammar again: a subscription may have been late.
GRAMMAR_RETRY_SECONDS = 1.0
MAX_KNOWN = 128  # grammars that engines are assumed to have; engines keep twice as many
# The smallest grammar: compiled at once by an engine that has its vocabulary.
SMALLEST = StructuredOutputs(regex="")


def needed_grammar(request: Request) -> StructuredOutputs | None:
    """The grammar that engines must have compiled before they admit `request`; None: none. A
    reasoning budget without a grammar needs the vocabulary, which an engine may have to build
    first."""
    params = request.work.params
    if params.structured_outputs is None and params.thinking_token_budget is not None:
        return SMALLEST
    return params.structured_outputs


@dataclass(slots=True, eq=False)
class PendingGrammar:
    """A grammar that engines were asked for.

    Attributes:
    - message: the message to engines
    - waiting: requests that wait for the grammar
    - compiled_ranks: ranks that have compiled it
    - sent: when the message was sent last, in seconds
    """

    message: CompileGrammar
    waiting: list[Request] = field(default_factory=list[Request])
    compiled_ranks: set[int] = field(default_factory=set[int])
    sent: float = float("-inf")


class GrammarQueue:
    """Requests whose grammar the engines of one group of `tp` ranks have not compiled, and requests
    with costly masks for which the mask budget has no room.

    Engines would compile a grammar at the admission, too, but would delay all requests then.
    Grammars that take long are asked for one at a time, and clients take turns.

    Attributes:
    - mask_budget: what steps may spend on masks
    """

    def __init__(self, tp: int) -> None:
        self.mask_budget = MaskBudget()
        self._tp = tp
        self._processes: tuple[int, ...] = ()
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._pending: dict[str, PendingGrammar] = {}  # by the request that first wanted it
        # Ids of requests whose grammars take long, and were not asked for yet.
        self._slow: FairQueue[str] = FairQueue()
        self._current_slow = ""  # id of the request whose slow grammar was asked for

    def __len__(self) -> int:
        """Number of requests that wait."""
        waiting = sum(len(one.waiting) for one in self._pending.values())
        return waiting + len(self.mask_budget)

    def begin(self, processes: Sequence[int]) -> None:
        """An epoch begins, on engines of the incarnations `processes`; new processes have compiled
        no grammar."""
        if tuple(processes) == self._processes:
            return
        self._processes = tuple(processes)
        self._known.clear()
        for one in self._pending.values():
            one.compiled_ranks.clear()
            one.sent = float("-inf")

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to run, if its grammar is not compiled or the mask budget has
        no room for its masks; True if it was taken, and waits here."""
        if self.ensure_grammar(request) and not self.mask_budget.park_if_blocked(request):
            return False
        # it may have waited for the mask budget under earlier engines
        if request.phase != "waiting_for_grammar":
            request.move("waiting_for_grammar")
        return True

    def ensure_grammar(self, request: Request) -> bool:
        """True if engines have compiled the grammar of `request`, or it needs none. Otherwise
        engines are asked to, `request` is noted as waiting for it, and the result is False; its
        phase stays."""
        spec = needed_grammar(request)
        if spec is None:
            return True
        if spec in self._known:
            self._known.move_to_end(spec)
            return True
        for one in self._pending.values():
            if one.message.spec == spec:
                if request not in one.waiting:
                    one.waiting.append(request)
                return False
        slow = request.work.slow_grammar
        message = CompileGrammar(request_id=request.id, spec=spec, slow=slow)
        if slow:
            self._slow.put(request.work.client, 1, request.id)
        self._pending[request.id] = PendingGrammar(message, [request])
        return False

    def remove(self, request: Request) -> None:
        """Forgets `request`, which has ended; no-op if it does not wait here."""
        self.mask_budget.remove(request)
        for key, one in self._pending.items():
            if request in one.waiting:
                one.waiting.remove(request)
                if not one.waiting:
                    del self._pending[key]
                return

    def take_due(self, now: float) -> Iterator[CompileGrammar]:
        """Messages that are to be sent to engines at `now` (seconds)."""
        while self._current_slow not in self._pending and len(self._slow):
            self._current_slow = self._slow.take()
        for key, one in self._pending.items():
            if now - one.sent >= GRAMMAR_RETRY_SECONDS and (
                key == self._current_slow or not one.message.slow
            ):
                one.sent = now
                yield one.message

    def on_grammar_compiled(self, compiled: GrammarCompiled) -> list[Request]:
        """Takes a rank's answer. Returns the requests that no longer wait, because all ranks have
        the grammar or one cannot have it."""
        if (compiled.rank, compiled.incarnation) not in enumerate(self._processes):
            return []
        one = self._pending.get(compiled.request_id)
        if one is None:
            return []
        one.compiled_ranks.add(compiled.rank)
        if len(one.compiled_ranks) < self._tp and not compiled.error:
            return []
        del self._pending[compiled.request_id]
        if not compiled.error:
            self._known[one.message.spec] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return one.waiting


# Most that costly masks may cost in each step on average, in units of cost (grammars/compiling.py):
# UNITS_PER_STEP if other requests run, UNITS_PER_COSTLY_STEP if all that run have costly masks. For
# ambiguous rules UNITS_PER_STEP takes 0.3 to 2 ms of a step, for a lexer that is being built, which
# ends soon, about 60 ms.
UNITS_PER_STEP = 6_000
UNITS_PER_COSTLY_STEP = 60_000
REMEMBERED = 128  # grammars with costly masks whose cost is kept
MAX_DEBT_STEPS = 64  # most steps over which the cost of masks is spread
PAID = -1  # in place of a turn: the next mask is paid for


class MaskBudget:
    """The budget of costly masks in the steps of one group, and the requests that wait until the
    budget has room for a mask of theirs."""

    def __init__(self) -> None:
        # Units that the next step may spend; below 0: a debt that later steps pay off.
        self._remaining = UNITS_PER_STEP
        self._prices: OrderedDict[StructuredOutputs, int] = OrderedDict()  # of the costly
        self._waiting: deque[Request] = deque()
        self._last_turn = 0

    def __len__(self) -> int:
        """Number of requests that wait to begin."""
        return len(self._waiting)

    def park_if_blocked(self, request: Request) -> bool:
        """Takes `request`, which is to begin, if its masks are costly and its first mask is not
        paid for; True if it was taken, and waits here."""
        if request.mask_turn == PAID or not self._price(request):
            return False
        self._waiting.append(request)
        return True

    def remove(self, request: Request) -> None:
        """Forgets `request`, which has ended; no-op if it does not wait here."""
        if request in self._waiting:
            self._waiting.remove(request)

    def take_next(self, others: int) -> Request | None:
        """Removes and returns the next request whose masks the budget allows, and charges its first
        mask; None if there is none yet.

        - others: number of requests that run or wait in the queue. Without any, the next request
          begins even if the budget is used up
        """
        if not self._waiting or (others and self._remaining <= 0):
            return None
        request = self._waiting.popleft()
        self._remaining -= self._price(request)
        request.mask_turn = PAID
        return request

    def over_budget(self, running: Collection[Request]) -> list[Request]:
        """Requests of `running` that are left out of the next step, because the budget cannot pay
        for their masks."""
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
        """Charges the masks of a plan's (request, count) rows, and adds the budget of one step."""
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
        """Cost of one mask of `request` in units, as far as it is known; 0 if it is not high."""
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
